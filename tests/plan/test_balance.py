"""Replicas divided among their holders: all of each, evenly, and by no other ranks."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.save import divide, fill_levels

WORLD = 6
Replica = tuple[int, tuple[int, ...], int]

replicas = st.lists(
    st.tuples(st.lists(st.integers(1, 40), max_size=3).map(tuple), st.sampled_from([1, 2, 4, 8])),
    min_size=1,
    max_size=8,
).map(lambda pairs: [(i, shape, itemsize) for i, (shape, itemsize) in enumerate(pairs)])
holder_sets = st.sets(st.integers(0, WORLD - 1), min_size=1).map(sorted)
starting_loads = st.lists(st.integers(0, 20_000), min_size=WORLD, max_size=WORLD)


@given(replicas, holder_sets, starting_loads, st.sampled_from([8, 64, 1024]))
def test_every_element_goes_to_one_holder(
    described: list[Replica], holders: list[int], start: list[int], grain: int
) -> None:
    loads = np.array(start, np.float64)
    times = [np.zeros(shape, int) for _, shape, _ in described]
    given_bytes = np.zeros(WORLD)
    for cut in divide(described, holders, loads, grain=grain):
        assert cut.rank in holders
        times[cut.replica][cut.box.slices()] += 1
        given_bytes[cut.rank] += cut.box.size * described[cut.replica][2]
    assert all((each == 1).all() for each in times)
    assert (loads == np.array(start) + given_bytes).all()


@given(replicas, holder_sets, starting_loads, st.sampled_from([8, 64, 1024]))
def test_loads_are_level_but_for_a_grain(
    described: list[Replica], holders: list[int], start: list[int], grain: int
) -> None:
    loads = np.array(start, np.float64)
    total = sum(math.prod(shape) * itemsize for _, shape, itemsize in described)
    before = loads[holders].copy()
    ideal = before + fill_levels(before, float(total))
    divide(described, holders, loads, grain=grain)
    assert (loads[holders] <= ideal + 2 * grain).all()


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(0, 5000))
def test_water_finds_its_level(start: list[int], amount: int) -> None:
    loads = np.array(start, np.float64)
    poured = fill_levels(loads, float(amount))
    assert (poured >= 0).all()
    assert math.isclose(poured.sum(), amount, abs_tol=1e-6)
    wet = poured > 1e-9
    after = loads + poured
    if wet.any():
        assert np.allclose(after[wet], after[wet][0])
        assert (after[~wet] >= after[wet][0] - 1e-6).all()
