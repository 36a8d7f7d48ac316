"""ByteCheckpoint: a checkpoint that it made, and what it restored of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.formats.comparing import assert_same
from tests.formats.foreign_goldens import opened, unpacked, values_of
from tests.formats.reference import read_tensors


def test_it_reads_what_bytecheckpoint_restores(tmp_path: Path) -> None:
    """Of FSDP2 on two ranks."""
    place = unpacked("bytecheckpoint", tmp_path) / "global_step_3"
    foreign = opened(place)
    read, expected = read_tensors(place, foreign), torch.load(tmp_path / "expected.pt")
    assert sorted(read) == sorted(expected)
    for key, value in expected.items():
        assert_same(read[key], value)
    assert foreign.world_size == 2


def test_bytecheckpoint_has_groups_step_and_extra_state(tmp_path: Path) -> None:
    place = unpacked("bytecheckpoint", tmp_path) / "global_step_3"
    foreign, values = sw.open(place), values_of(place)
    (group,) = values["optimizer.param_groups"]
    assert group["members"] == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    assert group["value"]["lr"] == 0.01
    assert values["extra_state"] == {"epoch": 2}
    assert foreign.step == 3
    assert foreign.left_out == ("extra_state of 1 ranks: only that of rank 0 is read",)


@pytest.mark.parametrize("whole", [True, False])
def test_bytecheckpoint_without_its_optimizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, whole: bool
) -> None:
    place = unpacked("bytecheckpoint", tmp_path) / "global_step_3"
    (place / "optimizer" / ".metadata").unlink()
    if whole:
        shutil.rmtree(place / "optimizer")
    with caplog.at_level("WARNING", logger="shardwise"):
        found = sw.open(place)
    assert "optimizer/.metadata is missing, so optimizer cannot be loaded" in caplog.text
    assert "optimizer: optimizer/.metadata is missing" in found.left_out
    shapes = {name: tensor.shape for name, tensor in found.tensors().items()}
    state = {name.removeprefix("model."): torch.zeros(shape) for name, shape in shapes.items()}
    moments = {"0.weight": {"exp_avg": torch.zeros(shapes["model.0.weight"])}}
    with pytest.raises(sw.MismatchError, match=r"optimizer/\.metadata is missing, which would"):
        sw.load(place, {"model": state, "optimizer": moments})
    sw.load(place, {"model": state})
