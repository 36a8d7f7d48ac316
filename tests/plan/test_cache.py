"""Plans used again: only for the same structure, on all ranks or on none, for today's memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.kernel.plan.save import PlanCache, plan_save
from shardwise.kernel.plan.structure import Description, RanksOfStructure, Structure
from shardwise.testing.thread_group import ThreadGroup, run_ranks

WORLD = 2
ROWS = 8
State = dict[str, object]
Make = Callable[[int, int], State]


def state_of(rank: int, seed: int, *, count: int = 40) -> State:
    """Sharded and replicated tensors whose values tell the save that they belong to."""
    half = ROWS // WORLD
    state: State = {}
    for i in range(count):
        values = torch.full((half, 4), float(1000 * seed + 10 * i + rank))
        part = sw.Box((rank * half, 0), (half, 4))
        state[f"layers.{i}.weight"] = sw.Shards((ROWS, 4), torch.float32, [(part, values)])
        state[f"layers.{i}.bias"] = torch.full((4,), float(1000 * seed + i))
    return state


def saved_twice(folder: Path, first: Make, second: Make) -> list[list[sw.SaveReport]]:
    """The reports of two saves that share plans, by rank; the second is loaded and compared."""

    def save(group: ThreadGroup) -> list[sw.SaveReport]:
        plans = PlanCache()
        return [
            sw.save(folder / f"{i}", make(group.rank, i), group=group, plan_cache=plans)
            for i, make in enumerate([first, second])
        ]

    reports = run_ranks(WORLD, save)
    for rank in range(WORLD):
        assert_holds(folder / "1", second(rank, 1))
    return reports


def assert_holds(place: Path, state: State) -> None:
    """The checkpoint has the values of this state."""
    checkpoint = sw.open(place)
    for name, value in state.items():
        saved = checkpoint[name]
        assert isinstance(saved, sw.SavedTensor)
        parts = value.fragments if isinstance(value, sw.Shards) else ()
        for part in parts:
            assert torch.equal(saved[part.box.slices()], part.data)
        if isinstance(value, torch.Tensor):
            assert torch.equal(saved[...], value)


def test_a_plan_is_used_again_and_moves_the_bytes_of_today(tmp_path: Path) -> None:
    reports = saved_twice(tmp_path, state_of, state_of)
    assert [[report.plan_cached for report in ranks] for ranks in reports] == [[False, True]] * 2


def test_a_cached_plan_needs_little_talk(tmp_path: Path) -> None:
    def large(rank: int, seed: int) -> State:
        return state_of(rank, seed, count=400)

    reports = saved_twice(tmp_path, large, large)
    missed, hit = (sum(ranks[i].bytes_communicated for ranks in reports) for i in range(2))
    assert 0 < hit <= 0.05 * missed


def renamed(rank: int, seed: int) -> State:
    state = state_of(rank, seed)
    state["other"] = state.pop("layers.7.bias")
    return state


def reshaped(rank: int, seed: int) -> State:
    return state_of(rank, seed) | {"layers.7.bias": torch.full((5,), float(seed))}


def retyped(rank: int, seed: int) -> State:
    return state_of(rank, seed) | {"layers.7.bias": torch.full((4,), seed, dtype=torch.int32)}


def resharded(rank: int, seed: int) -> State:
    """The same shards, but for one tensor, whose ranks have changed places."""
    state = state_of(rank, seed)
    state["layers.7.weight"] = state_of(1 - rank, seed)["layers.7.weight"]
    return state


def tied(rank: int, seed: int) -> State:
    state = state_of(rank, seed)
    return state | {"layers.7.bias": state["layers.6.bias"]}


def changed_on_one_rank(rank: int, seed: int) -> State:
    """Rank 1 no longer has its replica, and rank 0 describes what it did before."""
    state = state_of(rank, seed)
    if rank == 1:
        state["layers.7.bias"] = sw.Shards((4,), torch.float32, [])
    return state


@pytest.mark.parametrize(
    "second", [renamed, reshaped, retyped, resharded, tied, changed_on_one_rank]
)
def test_another_structure_is_planned_anew(tmp_path: Path, second: Make) -> None:
    reports = saved_twice(tmp_path, state_of, second)
    assert [[report.plan_cached for report in ranks] for ranks in reports] == [[False, False]] * 2


def test_structures_that_were_planned_apart_are_planned_together(tmp_path: Path) -> None:
    """Each rank has described this before, but never both of them at once."""

    def of_rank(rank: int, save: int) -> State:
        state = state_of(rank, save)
        if save in (1, 1 + rank):
            state[f"added.{rank}"] = torch.full((64,), float(save + rank))
        return state

    def save(group: ThreadGroup) -> list[bool]:
        plans = PlanCache()
        return [
            sw.save(
                tmp_path / f"{i}", of_rank(group.rank, i), group=group, plan_cache=plans
            ).plan_cached
            for i in range(3)
        ]

    assert run_ranks(WORLD, save) == [[False] * 3] * WORLD
    for rank in range(WORLD):
        assert_holds(tmp_path / "2", of_rank(rank, 2))


def test_memory_that_has_moved_is_read_where_it_lies_now(tmp_path: Path) -> None:
    def moving(rank: int, seed: int) -> State:
        """The same names and boxes; other memory, of other strides, of other values."""
        state = state_of(rank, seed)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = torch.stack([value, -value], dim=1)[:, 0] if seed else value
        return state

    reports = saved_twice(tmp_path, moving, moving)
    assert reports[0][1].plan_cached


def test_plain_values_of_a_cached_plan_are_those_of_today(tmp_path: Path) -> None:
    def counting(rank: int, seed: int) -> State:
        return {**state_of(rank, seed), "step": 100 + seed}

    def save(group: ThreadGroup) -> None:
        plans = PlanCache()
        for i in range(2):
            sw.save(tmp_path / f"{i}", counting(group.rank, i), group=group, plan_cache=plans)

    run_ranks(WORLD, save)
    assert [sw.open(tmp_path / f"{i}")["step"] for i in range(2)] == [100, 101]


def test_a_process_has_another_plan_as_another_rank(tmp_path: Path) -> None:
    """Two groups of the same processes in another order; all processes hold the same tensors."""
    plans = [PlanCache() for _ in range(WORLD)]
    state = {f"w{i}": torch.arange(i, i + 50) for i in range(6)}

    def save(place: Path, process_of_rank: list[int]) -> list[bool]:
        def save_rank(group: ThreadGroup) -> bool:
            cache = plans[process_of_rank[group.rank]]
            return sw.save(place, state, group=group, plan_cache=cache).plan_cached

        return run_ranks(WORLD, save_rank)

    found = [save(tmp_path / f"{i}", order) for i, order in enumerate([[0, 1], [1, 0], [1, 0]])]
    assert found == [[False] * 2, [False] * 2, [True] * 2]
    for i in range(3):
        assert_holds(tmp_path / f"{i}", dict(state))


def test_the_least_recently_used_plan_makes_room() -> None:
    structure = Structure((), (), (), (), ())
    none = np.zeros((0, 0), np.int64)
    description = Description(structure, (), np.zeros(0, np.int64), none, none)
    ranks = RanksOfStructure(structure, np.zeros(1, np.int64), np.zeros((1, 0), np.int64))
    plan = plan_save([ranks], 1, 0, description)
    cache = PlanCache(capacity=2)
    cache.put(b"a", 0, b"fingerprint", plan)
    cache.put(b"b", 0, b"fingerprint", plan)
    assert cache.get(b"a", 0) is plan
    cache.put(b"c", 0, b"fingerprint", plan)
    assert set(cache.plans_for(0, 1, b"fingerprint", ())) == {b"a", b"c"}
    assert not cache.plans_for(0, 2, b"fingerprint", ())
    assert not cache.plans_for(0, 1, b"another", ())


def test_different_structures_of_the_same_tensors_share_their_names(tmp_path: Path) -> None:
    names = [hashlib.sha256(bytes([i % 256, i // 256])).hexdigest() for i in range(600)]

    def save(group: ThreadGroup) -> int:
        state: State = {name: torch.ones(1) for name in names}
        part = sw.Box((group.rank, 0), (1, 4))
        state["rows"] = sw.Shards((WORLD, 4), torch.float32, [(part, torch.ones(1, 4))])
        return sw.save(tmp_path, state, group=group).bytes_communicated

    of_all, of_one = run_ranks(WORLD, save)
    assert of_one > sum(map(len, names)) / 2  # a hexadecimal digit is half a byte
    assert of_all < 1.2 * of_one
