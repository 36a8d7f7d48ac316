"""Checkpoints with objects of classes that no reader knows: never called damaged."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.testing._internal.two_tensor import TwoTensor

import shardwise as sw
from tests.breadth import mostly_long
from tests.compat.foreign.contents import CONTENTS
from tests.formats.foreign_goldens import unpacked

TWO_TENSOR = "torch.testing._internal.two_tensor.TwoTensor"
_PACKAGES = rb"_codecs|argparse|collections|deepspeed|megatron|numpy|torch"
_GLOBAL = re.compile(rb"c((?:%s)(?:\.\w+)*)\n([A-Za-z_][\w.]{1,60})\n" % _PACKAGES)
PICKLED = [name for name in CONTENTS if name != "torchao"]


def two_tensor() -> TwoTensor:
    return TwoTensor(torch.ones(4, 3), torch.zeros(4, 3))


def test_dcp_with_tensors_of_another_class(tmp_path: Path) -> None:
    model = {"w": two_tensor(), "b": torch.arange(3.0)}
    state = {"model": model, "list": [two_tensor(), 3, torch.ones(2)], "step": 7}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(sw.FormatError, match=rf"(model\.w|list\.0): .*{TWO_TENSOR};.*skip_unknown"):
        sw.open(tmp_path / "dcp")
    found = sw.open(tmp_path / "dcp", skip_unknown=True)
    assert sorted(found) == ["list.1", "list.2", "model.b", "step"]
    assert torch.equal(found.tensors()["model.b"][...], torch.arange(3.0))
    assert (found["list.1"], found["step"]) == (3, 7)
    assert [line.partition(": ")[0] for line in found.left_out] == ["model.w", "list.0"]
    assert all(TWO_TENSOR in line for line in found.left_out)


@pytest.mark.parametrize(("kind", "name"), [("int8", "Int8Tensor"), ("float8", "Float8Tensor")])
def test_dcp_with_weights_of_torchao(tmp_path: Path, kind: str, name: str) -> None:
    """They are read by their rules. Files of an older run of make_torchao.py stay readable."""
    place = unpacked("torchao", tmp_path) / "torchao" / kind
    found = sw.open(place)
    parts = ["qdata", "scale"] + ["zero_point"] * (kind == "int8")
    weight = [f"model.0.weight{part}" for part in ("", *(f".{part}" for part in parts))]
    assert sorted(found) == [
        "model.0.bias",
        *weight,
        "model.1.bias",
        "model.1.weight",
        "step",
    ]
    assert not found.left_out
    assert found.tensors()["model.0.weight.qdata"].shape == (16, 16)
    assert type(found["model.0.weight"]).__name__ == name


def test_files_of_torch_and_hugging_face(tmp_path: Path) -> None:
    torch.save({"w": two_tensor(), "b": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    for place in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(sw.FormatError, match=rf"read: {TWO_TENSOR} \(at w\); .*skip_unknown"):
            sw.open(place)
        found = sw.open(place, skip_unknown=True)
        assert list(found) == ["model.b"]
        assert TWO_TENSOR in str(found.left_out)


def told(place: Path, **options: bool) -> str:
    """Return what an open says: its error, or what was left out."""
    try:
        return str(sw.open(place, **options).left_out)
    except sw.FormatError as error:
        return str(error)


def checkpoint_below(place: Path) -> Path:
    """Return a checkpoint with pickles below a directory."""
    below = sorted(path for path in place.iterdir() if path.suffix == ".ckpt" or path.is_dir())
    for path in (place, *reversed(below)):
        with suppress(sw.CheckpointNotFoundError):
            sw.open(path)
            return path
    return checkpoint_below(below[-1])


@pytest.mark.parametrize(
    "golden", mostly_long(PICKLED, ["deepspeed", "megatron_legacy", "lightning"])
)
def test_each_unknown_name_in_a_checkpoint_is_told(golden: str, tmp_path: Path) -> None:
    require_that_unknown_names_are_told(unpacked(golden, tmp_path))


def require_that_unknown_names_are_told(folder: Path) -> None:
    """Rename each class or function that the files use in turn; change nothing else."""
    place = checkpoint_below(folder)
    content = {path: path.read_bytes() for path in [place, *place.rglob("*")] if path.is_file()}
    used = {match[0] for data in content.values() for match in _GLOBAL.finditer(data)}
    assert used
    for name in sorted(used - {b"cnumpy\nndarray\n"}):  # the class itself does not matter
        for path, data in content.items():
            path.write_bytes(data.replace(name, name[:-2] + b"Z\n"))
        unknown = name[1:-2].replace(b"\n", b".").decode() + "Z"
        assert unknown in told(place)
        assert unknown in (said := told(place, skip_unknown=True)) or "damaged" not in said
    for path, data in content.items():
        path.write_bytes(data)
    sw.open(place)
