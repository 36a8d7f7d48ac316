"""Ranks that pass different paths to the drop-in for torch.distributed.checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

import shardwise as sw
from shardwise.integrations import dcp
from tests.integrations.test_dcp import error_in, sharded
from tests.tools.gang import Gang

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::UserWarning")]


def save_to_two_places(root: str) -> None:
    warnings.simplefilter("ignore")
    dcp.save(sharded(1.0), checkpoint_id=f"{root}/before")
    with pytest.raises(CheckpointException) as raised:
        dcp.save(sharded(2.0), checkpoint_id=f"{root}/{dist.get_rank()}")
    error = error_in(raised)
    assert isinstance(error, sw.MismatchError)
    assert f"parts were not written to {root}/0, where this process commits" in str(error)
    assert error.problems == [f"rank 1: {root}/1"]


def test_ranks_that_save_to_different_places(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_to_two_places, str(tmp_path), world=2)
    assert sw.open(tmp_path / "before")["n"] == 1.0
    for rank in (0, 1):
        with pytest.raises(sw.CheckpointNotFoundError):
            sw.open(tmp_path / str(rank))


def load_two_steps(root: str) -> None:
    """Rank 1 opens the root after another process has saved the next step."""
    warnings.simplefilter("ignore")
    for number in (1.0, 2.0):
        dcp.save(sharded(number), checkpoint_id=f"{root}/step-0000000{number:.0f}")
    place = f"{root}/step-00000001" if dist.get_rank() == 0 else root
    with pytest.raises(CheckpointException) as raised:
        dcp.load(sharded(0.0), checkpoint_id=place)
    error = error_in(raised)
    assert isinstance(error, sw.MismatchError)
    assert "ranks do not load the same checkpoint" in str(error)
    target = sharded(0.0)
    dcp.load(target, checkpoint_id=root)
    assert target["w"].to_local().unique().tolist() == [2.0]


def test_ranks_that_load_different_steps(gang: Gang, tmp_path: Path) -> None:
    gang.run(load_two_steps, str(tmp_path), world=2)


def load_what_one_rank_lacks(root: str) -> None:
    """Each rank has the reason why it refuses, and knows which ranks failed."""
    warnings.simplefilter("ignore")
    dcp.save(sharded(1.0), checkpoint_id=f"{root}/here")
    for lacking in ([1], [0, 1]):
        place = f"{root}/{'lacking' if dist.get_rank() in lacking else 'here'}"
        reader = dcp.StorageReader(place)
        with pytest.raises(dcp.CheckpointError) as raised:
            dcp.load(sharded(0.0), storage_reader=reader)
        assert [*raised.value.failures] == lacking
        if dist.get_rank() in lacking:
            error, stack = raised.value.failures[dist.get_rank()]
            assert isinstance(error, sw.CheckpointNotFoundError)
            assert stack
        assert reader.take_refusal() is None  # it would hold the state


def test_each_rank_says_why_it_refuses_a_checkpoint(gang: Gang, tmp_path: Path) -> None:
    gang.run(load_what_one_rank_lacks, str(tmp_path), world=2)


def test_a_copy_at_another_place_is_the_same_checkpoint(tmp_path: Path) -> None:
    """Each node may read a copy of its own."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "a")
    (tmp_path / "b").symlink_to("a")
    plans = []
    for name in "ab":
        reader = dcp.StorageReader(tmp_path / name)
        reader.read_metadata()
        plans.append(reader.prepare_local_plan(torch.distributed.checkpoint.LoadPlan([])))
    assert reader.prepare_global_plan(plans) == plans
