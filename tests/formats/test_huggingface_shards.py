"""Shards that torch's HuggingFaceStorageWriter leaves; of ranks, see the matrix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

import shardwise as sw

WHOLE = torch.arange(35.0).reshape(7, 5)
Shards = dict[str, tuple[tuple[int, ...], torch.Tensor]]


def write(folder: Path, rank: int, shards: Shards, index: int = 1, count: int = 1) -> Path:
    """A file as torch 2.13 writes it: what it has of each tensor, and where that begins."""
    places = {name: {"saved_offsets": list(offset)} for name, (offset, _) in shards.items()}
    notes = {"DCP_VERSION": "1.0", "format": "pt", "DCP_SHARDING_INFO": json.dumps(places)}
    path = folder / f"shard-{rank:05}-model-{index:05}-of-{count:05}.safetensors"
    safetensors.torch.save_file({n: t.contiguous() for n, (_, t) in shards.items()}, path, notes)
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """One tensor in rows, one in columns, one that only one rank wrote."""
    bias = torch.arange(6.0).bfloat16()
    write(tmp_path, 1, {"w": ((0, 0), WHOLE[:4]), "c": ((0, 0), WHOLE[:, :3])})
    write(tmp_path, 2, {"w": ((4, 0), WHOLE[4:]), "c": ((0, 3), WHOLE[:, 3:]), "b": ((0,), bias)})
    return tmp_path


def test_shards_are_one_tensor(place: Path) -> None:
    found = sw.open(place)
    assert set(found) == {"model.w", "model.c", "model.b"}
    for name in ("w", "c"):
        assert torch.equal(found.tensors()[f"model.{name}"][...], WHOLE)
    assert torch.equal(found.tensors()["model.w"][3:6, 1:2], WHOLE[3:6, 1:2])
    assert found.tensors()["model.b"].dtype == torch.bfloat16


def test_one_of_several_is_not_taken_for_all(place: Path) -> None:
    with pytest.raises(sw.CheckpointNotFoundError, match=f"one of several shards: open {place}$"):
        sw.open(next(place.iterdir()))


@pytest.mark.parametrize(
    ("rank", "index", "says"),
    [(4, 1, "the file shard-00003 of 4 is missing"), (1, 3, "model-00002")],
)
def test_a_file_that_is_missing_is_told(place: Path, rank: int, index: int, says: str) -> None:
    write(place, rank, {"x": ((0,), torch.ones(2))}, index, 3 if index > 1 else 1)
    with pytest.raises(sw.FormatError, match=says):
        sw.open(place)


@pytest.mark.parametrize(
    ("shards", "says"),
    [
        ({"w": ((9, 0), WHOLE[:4])}, r"leave gaps: model\.w"),
        ({"w": ((3, 0), WHOLE[:4])}, r"overlap or .*model\.w"),
        ({"w": ((7, 0), WHOLE[:1].double())}, "differ in dtype"),
        ({"w": ((7,), WHOLE[:1])}, "w: DCP_SHARDING_INFO has no offset of 2 dimensions"),
        ({"w": ((-1, 0), WHOLE[:1])}, r"w: the box at \[-1, 0\]"),
    ],
)
def test_shards_that_lie_are_refused(place: Path, shards: Shards, says: str) -> None:
    write(place, 3, shards)
    with pytest.raises(sw.FormatError, match=says):
        sw.open(place)
