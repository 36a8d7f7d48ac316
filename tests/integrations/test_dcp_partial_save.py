"""The save of the drop-in for DCP: each process writes a part, and one commits."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.integrations.dcp.partial_save import PartialSave, SavedPart


def rows(first: int, value: float) -> sw.Shards:
    """Return two rows of a tensor with six."""
    return sw.Shards(
        (6, 3), torch.float32, [(sw.Box((first, 0), (2, 3)), torch.full((2, 3), value))]
    )


def write(place: Path, rank: int) -> SavedPart:
    values = {"list": [torch.ones(2), 3]} if rank == 0 else {}
    part = PartialSave(place).write({"w": rows(2 * rank, float(rank))}, values, rank=rank)
    sent: SavedPart = pickle.loads(pickle.dumps(part))
    return sent


@pytest.fixture
def save(tmp_path: Path) -> PartialSave:
    save = PartialSave(tmp_path / "a", step=7, metrics={"loss": 0.5})
    save.begin(world_size=3)
    return save


def test_parts_become_a_checkpoint(save: PartialSave, tmp_path: Path) -> None:
    parts = [write(tmp_path / "a", rank) for rank in range(3)]
    with pytest.raises(sw.CheckpointNotFoundError):
        sw.open(tmp_path / "a")
    save.commit(parts, {"epoch": 3}, {"w": "model.w"})
    saved = sw.open(tmp_path / "a")
    assert (saved.step, saved.metrics, saved.world_size) == (7, {"loss": 0.5}, 3)
    assert saved["model.w"][:, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert (saved["epoch"], saved["list"][0].tolist(), saved["list"][1]) == (3, [1, 1], 3)
    assert saved.verify().files == 3
    assert len(list((tmp_path / "a").iterdir())) == 4  # no lock is left


def test_gaps_publish_nothing(save: PartialSave, tmp_path: Path) -> None:
    parts = [write(tmp_path / "a", rank) for rank in (0, 2)]
    with pytest.raises(sw.LayoutError, match="by exactly one process"):
        save.commit(parts)
    with pytest.raises(sw.CheckpointNotFoundError):
        sw.open(tmp_path / "a")


def test_parts_must_fit(save: PartialSave, tmp_path: Path) -> None:
    other = PartialSave(tmp_path / "a").write({"w": np.zeros(2)}, rank=1)
    with pytest.raises(sw.MismatchError, match=r"float64 \[2\] of rank 1, float32 \[6, 3\] before"):
        save.commit([write(tmp_path / "a", 0), other])


def test_different_values_with_one_name_are_refused(save: PartialSave, tmp_path: Path) -> None:
    parts = [
        PartialSave(tmp_path / "a").write(
            {"w": rows(2 * rank, 0.0)}, {"epoch": 3, "seed": rank}, rank=rank
        )
        for rank in range(3)
    ]
    with pytest.raises(sw.MismatchError) as caught:
        save.commit(parts)
    assert caught.value.problems == [f"seed: 0 on rank 0, {rank} on rank {rank}" for rank in (1, 2)]


def test_ranks_of_parts_are_checked(save: PartialSave, tmp_path: Path) -> None:
    part = write(tmp_path / "a", 0)
    with pytest.raises(sw.StateError, match="two parts have rank 0"):
        save.commit([part, part])
    late = PartialSave(tmp_path / "b")
    with pytest.raises(sw.StateError, match=r"call begin\(\) on this object before"):
        late.commit([write(tmp_path / "b", 0)])
    late.begin(world_size=1)
    with pytest.raises(sw.StateError, match="rank 1, but begin"):
        late.commit([write(tmp_path / "b", 1)])


def test_an_existing_checkpoint_is_refused_at_the_begin(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", {"w": torch.ones(1)})
    with pytest.raises(sw.CheckpointExistsError):
        PartialSave(tmp_path / "a").begin(world_size=1)


def test_a_save_that_is_dropped_leaves_no_lock(tmp_path: Path) -> None:
    save = PartialSave(tmp_path / "a")
    save.begin(world_size=1)
    del save
    assert not (tmp_path / "a").exists()


def test_a_shard_inside_a_value_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.StateError, match=r"v\.0: a Shards cannot be part of a plain value"):
        PartialSave(tmp_path / "a").write({}, {"v": [rows(0, 1.0)]}, rank=0)
