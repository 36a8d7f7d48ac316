"""Modules, views, values: whatever hangs in the state comes back as it was."""

from __future__ import annotations

import enum
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise as sw


class Mode(enum.Enum):
    FAST = "fast"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.frozen = nn.Parameter(torch.randn(2), requires_grad=False)


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert torch.equal(x, y), name


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    saved, loaded = Tied(), Tied()
    report = sw.save(tmp_path, {"model": saved})
    expected = sum(t.nbytes for n, t in saved.state_dict().items() if n != "head.weight")
    assert report.bytes_total == expected
    sw.load(tmp_path, {"model": loaded})
    assert_equal(saved, loaded)
    assert loaded.head.weight is loaded.embed.weight
    assert "model.cache" not in sw.open(tmp_path)


def test_tied_weights_load_where_they_are_not_tied(tmp_path: Path) -> None:
    saved, loaded = Tied(), Tied()
    loaded.head.weight = nn.Parameter(torch.zeros(5, 4))
    sw.save(tmp_path / "tied", {"model": saved})
    sw.load(tmp_path / "tied", {"model": loaded})
    assert_equal(saved, loaded)
    sw.save(tmp_path / "equal", {"model": loaded})
    sw.load(tmp_path / "equal", {"model": Tied()})
    with torch.no_grad():
        loaded.head.weight.add_(1)
    sw.save(tmp_path / "different", {"model": loaded})
    with pytest.raises(sw.MismatchError, match="names that share memory in the target"):
        sw.load(tmp_path / "different", {"model": Tied()})


def test_one_name_of_a_tied_weight_is_enough(tmp_path: Path) -> None:
    saved, loaded = Tied(), Tied()
    kept = {name: each for name, each in saved.state_dict().items() if name != "head.weight"}
    sw.save(tmp_path / "one", {"model": kept})
    report = sw.load(tmp_path / "one", {"model": loaded})
    assert report.missing == ()
    assert_equal(saved, loaded)
    separate = {name: p.detach().clone() for name, p in loaded.state_dict().items()}
    with pytest.raises(sw.MismatchError, match="not in the checkpoint"):
        sw.load(tmp_path / "one", {"model": separate})


def test_meta_modules_get_memory_and_stay_tied(tmp_path: Path) -> None:
    saved = Tied()
    sw.save(tmp_path, {"model": saved})
    with torch.device("meta"):
        loaded = Tied()
    optimizer = torch.optim.AdamW(loaded.parameters())
    with pytest.raises(sw.StateError, match="cache"):
        sw.load(tmp_path, {"model": loaded})
    loaded.cache = torch.ones(2)
    sw.load(tmp_path, {"model": loaded})
    assert_equal(saved, loaded)
    assert loaded.head.weight is loaded.embed.weight
    assert optimizer.param_groups[0]["params"][0] is loaded.frozen or any(
        p is loaded.embed.weight for p in optimizer.param_groups[0]["params"]
    )
    assert not loaded.frozen.requires_grad


def test_wrappers_leave_no_traces_in_names(tmp_path: Path) -> None:
    module = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.Linear(2, 2))
    compiled = torch.compile(module)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    sw.save(tmp_path, {"model": compiled, "optimizer": optimizer})
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sw.load(tmp_path, {"model": plain, "optimizer": torch.optim.SGD(plain.parameters(), lr=1)})
    assert set(plain.state_dict()) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert torch.equal(plain[1].weight, module[1].weight)
    assert torch.equal(plain[0].weight, module[0]._checkpoint_wrapped_module.weight)


class Hooked(nn.Module):
    """Keeps its weight halved, and extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.extra: Any = None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.weight.data.copy_(state[prefix + "weight"] / 2)

    def get_extra_state(self) -> Any:
        return {"calls": [1, (2, None)]}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_modules_that_make_their_own_state_dict_load_it_themselves(tmp_path: Path) -> None:
    saved, loaded = Hooked(), Hooked()
    with torch.no_grad():
        saved.weight.copy_(torch.arange(3.0))
    sw.save(tmp_path, {"model": saved})
    sw.load(tmp_path, {"model": loaded})
    assert torch.equal(loaded.weight, torch.arange(3.0))


class WithExtra(nn.Linear):
    got: Any = None

    def get_extra_state(self) -> Any:
        return {"calls": [1, (2, None)]}

    def set_extra_state(self, state: Any) -> None:
        self.got = state


def test_extra_state_comes_back(tmp_path: Path) -> None:
    sw.save(tmp_path, {"model": nn.Sequential(WithExtra(2, 2))})
    loaded = nn.Sequential(WithExtra(2, 2))
    sw.load(tmp_path, {"model": loaded})
    assert loaded[0].got == {"calls": [1, (2, None)]}


class WithoutExtra(WithExtra):
    def get_extra_state(self) -> Any:
        return None


def test_extra_state_that_is_none_need_not_be_there(tmp_path: Path) -> None:
    """As of Megatron's modules, whose checkpoints leave it out; where there is one it is set."""
    weight = torch.arange(4.0).reshape(2, 2)
    sw.save(tmp_path / "without", {"model": {"weight": weight, "bias": torch.ones(2)}})
    loaded = WithoutExtra(2, 2)
    sw.load(tmp_path / "without", {"model": loaded})
    assert torch.equal(loaded.weight, weight)
    with pytest.raises(sw.MismatchError, match=r"model\._extra_state: not in"):
        sw.load(tmp_path / "without", {"model": WithExtra(2, 2)})
    sw.save(tmp_path / "with", {"model": WithExtra(2, 2)})
    sw.load(tmp_path / "with", {"model": loaded})
    assert loaded.got == {"calls": [1, (2, None)]}


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "transposed": base.t(),
        "strided": base[::2, 1:4],
        "overlapping": base[1:3],
        "expanded": torch.arange(3.0).unsqueeze(1).expand(3, 4),
        "sliding": torch.arange(6.0).as_strided((4, 3), (1, 1)),
        "conjugated": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(5),
    }


def test_views_of_any_strides_are_filled_where_they_lie(tmp_path: Path) -> None:
    sw.save(tmp_path, dict(views()))
    targets = views()
    for name, target in targets.items():
        if name == "expanded":
            target[:, 0].zero_()
        elif name == "sliding":
            target.as_strided((6,), (1,)).zero_()
        else:
            target.zero_()
    sw.load(tmp_path, dict(targets))
    for name, expected in views().items():
        assert torch.equal(targets[name], expected), name


def test_values_that_an_overlapping_target_cannot_hold_are_refused(tmp_path: Path) -> None:
    sw.save(tmp_path, {"t": torch.arange(6.0).reshape(2, 3)})
    with pytest.raises(sw.StateError, match="overlaps itself"):
        sw.load(tmp_path, {"t": torch.zeros(2, 1).expand(2, 3)})


def test_shards_whose_memory_overlaps_are_refused_if_their_values_differ(tmp_path: Path) -> None:
    sw.save(tmp_path, {"t": torch.arange(6.0)})
    memory = torch.zeros(5)
    parts = [(sw.Box((0,), (3,)), memory[:3]), (sw.Box((3,), (3,)), memory[2:])]
    with pytest.raises(sw.StateError, match="overlaps itself"):
        sw.load(tmp_path, {"t": sw.Shards((6,), torch.float32, parts)})


def test_shards_that_alternate_in_memory_are_filled(tmp_path: Path) -> None:
    sw.save(tmp_path, {"t": torch.arange(6.0)})
    memory = torch.zeros(6)
    parts = [(sw.Box((0,), (3,)), memory[::2]), (sw.Box((3,), (3,)), memory[1::2])]
    sw.load(tmp_path, {"t": sw.Shards((6,), torch.float32, parts)})
    assert memory.tolist() == [0, 3, 1, 4, 2, 5]


class Loader:
    """Something with a state of its own, tensors in it among others."""

    def __init__(self, value: float) -> None:
        self.state: Any = {"buffer": torch.full((3,), value), "at": value, "deep": [{"x": (1, 2)}]}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_values_come_back_by_kind(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    state = {
        "n": None, "nan": math.nan, "list": [1, "a", None], "dict": {1: "x"}, "pair": (1, 2),
        "mode": Mode.FAST, "array": np.arange(4, dtype=np.uint16), "scalar": np.float32(0.1),
        "loader": Loader(2.0), "deep": {"er": {"t": torch.arange(3)}}, "ema": average,
        "scaler": torch.amp.GradScaler("cpu"), "by_value": model.state_dict(),
    }  # fmt: skip
    sw.save(tmp_path, state)
    buffer = torch.zeros(3)
    loader = Loader(0.0)
    loader.state["buffer"] = buffer
    array = np.zeros(4, np.uint16)
    other = nn.Linear(2, 2)
    target: dict[str, Any] = {
        "n": 1, "nan": 0.0, "list": None, "dict": {}, "pair": None, "mode": None, "array": array,
        "scalar": None, "loader": loader, "deep": {"er": {"t": torch.zeros(3, dtype=torch.int64)}},
        "ema": torch.optim.swa_utils.AveragedModel(other), "scaler": torch.amp.GradScaler("cpu"),
        "by_value": other.state_dict(),
    }  # fmt: skip
    sw.load(tmp_path, target)
    assert target["n"] is None
    assert math.isnan(target["nan"])
    assert (target["list"], target["dict"], target["pair"]) == ([1, "a", None], {1: "x"}, (1, 2))
    assert target["mode"] is Mode.FAST
    assert array.tolist() == [0, 1, 2, 3]
    assert type(target["scalar"]) is np.float32
    assert loader.state["at"] == 2.0
    assert loader.state["buffer"] is buffer
    assert buffer.tolist() == [2.0] * 3
    assert loader.state["deep"] == [{"x": (1, 2)}]
    assert target["deep"]["er"]["t"].tolist() == [0, 1, 2]
    assert torch.equal(other.weight, model.weight)


def test_all_that_does_not_fit_is_listed_and_nothing_is_written(tmp_path: Path) -> None:
    sw.save(tmp_path, {"a": torch.ones(2), "b": torch.ones(2), "c": {"d": 1, "e": 2}})
    a, b = torch.zeros(2, dtype=torch.float16), torch.zeros(3)
    good: dict[str, Any] = {"d": 0, "f": 5}
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(tmp_path, {"a": a, "b": b, "c": good, "g": torch.zeros(1)})
    said = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 5
    for name in ("a: float32", "b: shape [2]", "c.f: not in", "c.e: in the checkpoint", "g: not"):
        assert name in said
    assert (a.sum(), b.sum(), good) == (0, 0, {"d": 0, "f": 5})
    report = sw.load(tmp_path, {"c": good}, strict=False)
    assert (report.missing, report.unexpected, good["d"]) == (("c.f",), ("c.e",), 1)


def test_a_part_of_the_state_reads_only_its_bytes(tmp_path: Path) -> None:
    state = {"model": torch.randn(500, 1000), "optimizer": torch.randn(1000, 1000)}
    sw.save(tmp_path, state)
    report = sw.load(tmp_path, {"model": torch.zeros(500, 1000)})
    assert report.bytes_needed == 2_000_000
    assert report.bytes_read <= 1.07 * report.bytes_needed


def test_names_are_chosen_and_mapped(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    sw.save(tmp_path, {"model": saved})
    loaded = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = loaded[1].weight.detach().clone()
    sw.load(tmp_path, {"model": loaded}, skip=["model.1.*"])
    assert torch.equal(loaded[0].weight, saved[0].weight)
    assert torch.equal(loaded[1].weight, before)
    sw.load(tmp_path, {"model": loaded}, only=["*.bias", "model.1.weight"])
    assert torch.equal(loaded[1].weight, saved[1].weight)
    part = nn.Linear(2, 2)
    sw.load(tmp_path, {"part": part}, rename={"part": "model.1"})
    assert torch.equal(part.weight, saved[1].weight)
    sw.load(tmp_path, {"part": part}, rename=lambda name: name.replace("part", "model.0"))
    assert torch.equal(part.weight, saved[0].weight)


def test_dtypes_are_converted_on_request(tmp_path: Path) -> None:
    values = torch.randn(1000)
    sw.save(tmp_path, {"t": values})
    half = torch.zeros(1000, dtype=torch.bfloat16)
    sw.load(tmp_path, {"t": half}, cast=True)
    assert torch.equal(half, values.to(torch.bfloat16))
