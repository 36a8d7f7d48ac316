"""Randomness goes on where it was saved, and no two ranks ever share a stream."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks


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


def test_seeds_differ_even_where_a_generator_takes_32_bits_of_them() -> None:
    rng = sw.RngState()
    state = rng.capture()
    seeds = [rng.for_rank([state], rank, 100) for rank in range(1, 100)]
    low = [seed % 2**32 for seed in seeds if isinstance(seed, int)]
    assert [(b - a) % 2**32 for a, b in itertools.pairwise(low)] == [1] * 98
    assert len({seed >> 32 for seed in seeds if isinstance(seed, int)}) == 99
    random.random()
    assert rng.for_rank([rng.capture()], 1, 100) != seeds[0]


def test_what_is_no_state_is_refused_and_sets_no_generator() -> None:
    rng = sw.RngState()
    before = rng.state_dict()
    expected = draw()
    random.seed(5)
    other = rng.state_dict()
    for key, wrong in [("python", 1), ("numpy", [1]), ("torch", "x"), ("torch", torch.zeros(3))]:
        rng.load_state_dict(before)
        for bad in ({**other, key: wrong}, {k: v for k, v in other.items() if k != key}):
            with pytest.raises(sw.StateError, match="invalid state of random"):
                rng.restore(bad)
        assert draw() == expected


class FakeAccelerator:
    """Two devices, of which each has one byte of state."""

    def __init__(self, *states: int) -> None:
        self.states = list(states)

    def device_count(self) -> int:
        return len(self.states)

    def get_rng_state(self, device: int) -> torch.Tensor:
        return torch.tensor([self.states[device]], dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: int) -> None:
        self.states[device] = int(state)


def test_every_device_of_the_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = FakeAccelerator(1, 2)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: devices)
    rng = sw.RngState()
    saved = rng.capture()
    for now, then in [([7, 8], [1, 2]), ([7], [1]), ([7, 8, 9], [1, 2, 9])]:
        devices.states = now
        rng.restore(saved)
        assert devices.states == then


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_an_accelerator_goes_on_bit_for_bit() -> None:
    rng = sw.RngState()
    saved = rng.capture()
    device = torch.accelerator.current_accelerator()
    expected = torch.randn(8, device=device)
    rng.restore(saved)
    assert torch.equal(torch.randn(8, device=device), expected)


class Loader:
    """What saves and restores itself."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def test_a_per_rank_value_that_saves_itself_restores_itself() -> None:
    loader = Loader(3)
    mine = sw.PerRank(loader)
    assert mine.capture() == {"at": 3}
    mine.restore({"at": 5})
    assert mine.value is loader
    assert loader.at == 5


def test_what_only_saves_itself_is_a_plain_value() -> None:
    class Half:
        def state_dict(self) -> dict[str, int]:
            return {}

    half = Half()
    assert sw.PerRank(half).capture() is half


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
