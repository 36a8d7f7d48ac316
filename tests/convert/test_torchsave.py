"""One file of torch.save: torch loads it without trust, into modules and optimizers."""

from __future__ import annotations

import enum
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from tests.formats.comparing import assert_same

FILE_NAME = "checkpoint.pt"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)))


class Kind(enum.Enum):
    LARGE = 1


VALUES = {
    "none": None,
    "numbers": (1, 2.5, True, 10**30, float("inf"), 1j),
    "bytes": [b"x", bytearray(b"y")],
    "dicts": [{1: OrderedDict({(1, 2): 3})}, Counter("abc")],
    "of_torch": [torch.Size((1, 2)), torch.bfloat16, torch.device("cpu")],
}


def training(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Tied()
    norms = {"params": model.norm.parameters(), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([{"params": [model.embed.weight]}, norms], lr=0.1 * seed)
    model(torch.arange(9)).square().sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("torch")
    numpy = {"scalar": np.float32(2.5), "array": np.arange(4)}
    noise = {"inline": [torch.arange(3), {"x": torch.ones(2)}]}
    rest = {"epoch": 3, "values": VALUES, "numpy": numpy, "noise": noise}
    state = {**training(1), **rest, "kind": {"none": Kind.LARGE}}
    sw.save(root / "source", state, step=2)
    report = sw.export(root / "source", root / "new", to="torch")
    assert report.left_out == (
        "kind.none: torch.load reads a Kind only with weights_only=False: save it as plain values, "
        "or leave it out with skip=",
    )
    return root / "new" / FILE_NAME


@pytest.mark.parametrize("mmap", [False, True])
def test_a_training_goes_on_from_it(exported: Path, mmap: bool) -> None:
    loaded = torch.load(exported, weights_only=True, mmap=mmap)
    before, after = training(1), training(2)
    after["model"].load_state_dict(loaded["model"], strict=True)
    after["optimizer"].load_state_dict(loaded["optimizer"])
    after["scheduler"].load_state_dict(loaded["scheduler"])
    assert_same(dict(after["model"].state_dict()), dict(before["model"].state_dict()))
    saved = before["optimizer"].state_dict()
    assert_same(after["optimizer"].state_dict()["state"], saved["state"])
    for group, other in zip(
        saved["param_groups"], loaded["optimizer"]["param_groups"], strict=True
    ):
        names = other.pop("param_names")
        assert other == group
        assert len(names) == len(group["params"])
    assert after["scheduler"].state_dict() == before["scheduler"].state_dict()
    tied = [loaded["model"][name].data_ptr() for name in ("embed.weight", "head.weight")]
    assert tied[0] == tied[1]


def test_values_are_those_that_were_saved(exported: Path) -> None:
    loaded = torch.load(exported, weights_only=True)
    assert_same(loaded["values"], VALUES)
    assert loaded["epoch"] == 3
    assert loaded["numpy"]["scalar"] == 2.5
    assert_same(loaded["numpy"]["array"], torch.arange(4))
    assert_same(loaded["noise"]["inline"], [torch.arange(3), {"x": torch.ones(2)}])


def test_the_archive_is_sound_and_read_in_place(exported: Path) -> None:
    archive = zipfile.ZipFile(exported)
    assert archive.testzip() is None
    with open(exported, "rb") as file:
        for entry in archive.infolist():
            file.seek(entry.header_offset + 26)
            name, extra = np.frombuffer(file.read(4), "<u2").tolist()
            assert (entry.header_offset + 30 + name + extra) % 64 == 0
    loaded = torch.load(exported, weights_only=True)
    checkpoint = sw.open(exported)
    for name, tensor in loaded["model"].items():
        assert_same(checkpoint[f"model.{name}"][...], tensor)
    assert checkpoint["optimizer.norm.weight.exp_avg"][...].shape == (5,)
    assert not checkpoint.left_out


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype(tmp_path: Path) -> None:
    raw = torch.arange(32, dtype=torch.uint8)
    wanted = {}
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}:
        name = str(dtype).removeprefix("torch.")
        try:
            sw.save(tmp_path / name, {"t": raw.view(dtype)})
            torch.save(raw.view(dtype), tmp_path / "x")
        except (sw.StateError, RuntimeError, KeyError, AttributeError, TypeError):
            continue  # one that torch itself does not save, or only with its quantizer
        wanted[name] = raw.view(dtype)
    sw.save(tmp_path / "source", {"tensors": wanted})
    sw.export(tmp_path / "source", tmp_path / "new", to="torch")
    loaded = torch.load(tmp_path / "new" / FILE_NAME, weights_only=True)["tensors"]
    assert len(loaded) == len(wanted) > 20
    for name, tensor in wanted.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].view(torch.uint8), tensor.view(torch.uint8))


def test_a_name_that_is_a_value_and_more_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    sw.save(source, {"a.b": torch.ones(2), "a": 3})
    with pytest.raises(ValueError, match="a: both a value and the beginning of other names"):
        sw.export(source, tmp_path / "new", to="torch")
    sw.export(source, tmp_path / "new", to="torch", skip=["a"])
    loaded = torch.load(tmp_path / "new" / FILE_NAME, weights_only=True)
    assert_same(loaded, {"a": {"b": torch.ones(2)}})
