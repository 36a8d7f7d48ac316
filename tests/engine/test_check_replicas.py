"""`check_replicas=True`: what ranks send each other, and which differences they are told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw

RANKS, TENSORS = 8, 100


def state_of(rank: int, value: float = 1.0) -> dict[str, Any]:
    """Tensors of four shards, each of which two ranks hold."""
    box = sw.Box((rank // 2,), (1,))
    return {
        f"w{i}": sw.Shards((4,), torch.float32, [(box, torch.full((1,), i + value))])
        for i in range(TENSORS)
    }


def save_all(path: Path, states: list[dict[str, Any]], *, check: bool = True) -> list[Any]:
    """For each rank, its error, or the bytes that it received."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        try:
            with sw.TreeGroup(store, rank, len(states)) as group:
                sw.save(path, states[rank], group=group, check_replicas=check)
                return group.bytes_received
        except sw.ShardwiseError as error:
            return error

    with ThreadPoolExecutor(len(states)) as pool:
        return list(pool.map(run, range(len(states))))


def test_messages_do_not_grow_with_the_number_of_boxes(tmp_path: Path) -> None:
    states = [state_of(rank) for rank in range(RANKS)]
    without = save_all(tmp_path / "a", states, check=False)
    checked = save_all(tmp_path / "b", states)
    assert checked[0] - without[0] < 200 * RANKS


def test_boxes_of_a_bounded_number_of_sets_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.engine.save.MOST_DIFFERING", 1)
    states = [state_of(rank) for rank in range(RANKS)]
    for rank in (3, 5, 7):
        states[rank]["w7"] = state_of(rank, 2.0)["w7"]
    for error in save_all(tmp_path, states):
        assert isinstance(error, sw.MismatchError)
        assert len(error.problems) == 1
        assert error.problems[0].startswith("w7[1:2]: rank 2 has checksum ")
        assert ", rank 3 has checksum " in error.problems[0]
        assert "Boxes of 2 more sets of ranks differ, too" in str(error)


def test_two_copies_on_one_rank_are_compared(tmp_path: Path) -> None:
    box = sw.Box((0,), (2,))
    copies = [(box, torch.zeros(2)), (box, torch.ones(2))]
    state = {"w": sw.Shards((2,), torch.float32, copies)}
    with pytest.raises(sw.MismatchError, match=r"w\[0:2\]: this rank holds two copies"):
        sw.save(tmp_path, state, check_replicas=True)
