"""Randomness goes on where it was saved, and no two ranks ever share a stream."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.testing.threads import ThreadGroup, run_ranks


def draw() -> tuple[float, float, float, float]:
    """A number of every generator; the normal ones keep a second number for the next call."""
    return random.gauss(0, 1), random.random(), float(np.random.normal()), float(torch.randn(()))


def test_every_generator_goes_on_bit_for_bit(tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()
    sw.save(tmp_path / "c", {"rng": sw.RngState()})
    expected = [draw() for _ in range(3)]
    sw.load(tmp_path / "c", {"rng": sw.RngState()})
    assert [draw() for _ in range(3)] == expected


def test_further_ranks_get_streams_of_their_own() -> None:
    rng = sw.RngState()
    torch.manual_seed(1)
    first = rng.capture()
    torch.manual_seed(2)
    second = rng.capture()
    streams = []
    for rank in range(5):
        rng.restore(rng.for_rank([first, second], rank, 5))
        streams.append(draw())
    assert len(set(streams)) == 5
    rng.restore(first)
    assert draw()[3] == streams[0][3]
    rng.restore(rng.for_rank([first, second], 4, 5))
    assert draw() == streams[4]


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(sw.StateError):
        sw.RngState().restore({"python": 1})


def test_each_rank_gets_its_own_value_back(tmp_path: Path) -> None:
    def save(group: ThreadGroup) -> None:
        sw.save(tmp_path / "c", {"mine": sw.PerRank({"rank": group.rank})}, group=group)

    def load(group: ThreadGroup) -> object:
        mine = sw.PerRank(None)
        sw.load(tmp_path / "c", {"mine": mine}, group=group)
        return mine.value

    run_ranks(3, save)
    assert run_ranks(3, load) == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    with pytest.raises(sw.StateError, match="resize"):
        run_ranks(2, load)


def test_another_world_size_is_resized_by_rule(tmp_path: Path) -> None:
    def save(group: ThreadGroup) -> None:
        sw.save(tmp_path / "c", {"mine": sw.PerRank([group.rank])}, group=group)

    def load(group: ThreadGroup) -> object:
        mine = sw.PerRank(
            None, resize=lambda values, rank, world: [x for v in values[rank::world] for x in v]
        )
        sw.load(tmp_path / "c", {"mine": mine}, group=group)
        return mine.value

    run_ranks(4, save)
    assert run_ranks(2, load) == [[0, 2], [1, 3]]
    assert run_ranks(1, load) == [[0, 1, 2, 3]]
