"""The parts of replicas that are compared: all of them in a round, the same on all, and few."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.divergence.replica_sets import (
    SHARE,
    ReplicaSet,
    choose_pieces,
    choose_ranges,
    leave_out_tensors,
    most_bytes_compared,
    replica_sets_of,
    saves_per_round,
)
from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES
from shardwise.plan.structure import Description
from tests.plan.test_save import described, plan_of, plans_of, worlds
from tests.tools.divisions import BoxesByRank, Tensor

ROUNDING = 64  # bytes of each range
MIB = 1 << 20


@given(st.integers(0, 1 << 40), st.integers(2, 4096), st.integers(0, 1 << 64))
def test_ranges_of_a_save_are_few_and_spread(nbytes: int, holders: int, position: int) -> None:
    ranges = choose_ranges(nbytes, holders, position)
    assert all(0 <= low < high <= nbytes for low, high in ranges)
    at_a_time = nbytes / saves_per_round(holders)
    compared = sum(high - low for low, high in ranges)
    assert compared <= at_a_time + ROUNDING * max(1, len(ranges))
    assert max((high - low for low, high in ranges), default=0) <= MIB + ROUNDING
    if at_a_time > 8 * MIB:
        assert len(ranges) >= 8 - 1
        assert ranges[-1][0] - ranges[0][0] > nbytes / 2


@given(
    st.one_of(st.integers(0, 5000), st.integers(0, 1 << 26)),
    st.integers(2, 5),
    st.integers(0, 1 << 64),
)
def test_the_ranges_of_a_round_cover_each_byte_once(nbytes: int, holders: int, first: int) -> None:
    saves = saves_per_round(holders)
    ranges = [each for i in range(saves) for each in choose_ranges(nbytes, holders, first + i)]
    position = 0
    for low, high in sorted(ranges):
        assert low == position
        position = high
    assert position == nbytes


def sets_of(descriptions: list[Description]) -> list[tuple[ReplicaSet, ...]]:
    return [replica_sets_of(plan) for plan in plans_of(descriptions)]


def compared_boxes(
    sets: tuple[ReplicaSet, ...], description: Description, position: int
) -> dict[int, list[tuple[str, Box]]]:
    """The boxes of each set that a rank compares, by the set's number."""
    pieces, limits = choose_pieces(sets, description, position)
    assert pieces.start[-1] <= sum(map(most_bytes_compared, sets))
    boxes = [(name, box) for name, _, _, box in pieces.describe_pieces(description)]
    return {
        each.number: boxes[limits[i] : limits[i + 1]]
        for i, each in enumerate(sets)
        if limits[i] < limits[i + 1]
    }


@given(worlds(), st.integers(0, 1 << 64))
def test_each_replicated_byte_of_each_rank_is_compared_within_a_round(
    case: tuple[list[Tensor], list[BoxesByRank], int], first: int
) -> None:
    """All holders compare the same boxes at the same save, and nobody compares anything else."""
    listed, held, world = case
    descriptions = [
        described([(t, list(boxes[rank])) for t, boxes in zip(listed, held, strict=True)])
        for rank in range(world)
    ]
    sets = sets_of(descriptions)
    holders = {
        (tensor.name, box): sum(box in own for own in boxes)
        for tensor, boxes in zip(listed, held, strict=True)
        for own in boxes
        for box in own
    }
    times = [{tensor.name: np.zeros(tensor.shape, int) for tensor in listed} for _ in range(world)]
    for i in range(saves_per_round(world)):
        found = [compared_boxes(*each, first + i) for each in zip(sets, descriptions, strict=True)]
        by_number: dict[int, list[list[tuple[str, Box]]]] = {}
        for rank, own in enumerate(found):
            for number, boxes in own.items():
                by_number.setdefault(number, []).append(boxes)
                for name, box in boxes:
                    times[rank][name][box.slices()] += 1
        counts = {each.number: each.holders for own in sets for each in own}
        for number, lists in by_number.items():
            assert len(lists) == counts[number]
            assert all(each == lists[0] for each in lists)
    for rank in range(world):
        for tensor, by_rank in zip(listed, held, strict=True):
            expected = np.zeros(tensor.shape, int)
            for box in by_rank[rank]:
                count = holders[tensor.name, box]
                if count > 1:
                    assert (times[rank][tensor.name][box.slices()] >= 1).all()
                    expected[box.slices()] = times[rank][tensor.name][box.slices()]
                    rounds = saves_per_round(world) / saves_per_round(count)
                    assert expected[box.slices()].max() <= math.ceil(rounds)
            assert (times[rank][tensor.name] == expected).all(), "compared without a replica"


@given(st.integers(2, 6), st.integers(0, 1000), st.data())
def test_all_ranks_together_compute_few_more_checksums(
    world: int, position: int, data: st.DataObject
) -> None:
    """At most a share of the bytes that the save writes, for large tensors of any holders."""
    held: list[list[tuple[Tensor, list[Box]]]] = [[] for _ in range(world)]
    for i in range(data.draw(st.integers(1, 4))):
        tensor = Tensor(f"t{i}", "float32", (data.draw(st.integers(1, 4000)), 1024))
        for rank in data.draw(st.sets(st.integers(0, world - 1), min_size=1)):
            held[rank].append((tensor, [Box.whole(tensor.shape)]))
    descriptions = [described(each) for each in held]
    compared = ranges = 0
    for sets, description in zip(sets_of(descriptions), descriptions, strict=True):
        compared += int(choose_pieces(sets, description, position)[0].start[-1])
        ranges += sum(len(choose_ranges(s.nbytes, s.holders, position)) + 1 for s in sets)
    stored = plan_of(descriptions).bytes_stored
    assert compared <= stored / SHARE + ROUNDING * ranges


def test_elements_are_not_cut_where_dtypes_are_mixed() -> None:
    """Wide types come first, whatever their order on a rank; holders agree in spite of it."""
    names = sorted(DTYPES)
    listed = [Tensor(name, name, (3 + i, 7)) for i, name in enumerate(names)]
    forward = [(tensor, [Box.whole(tensor.shape)]) for tensor in listed]
    descriptions = [described(forward), described(forward[::-1])]
    sets = sets_of(descriptions)
    times: Counter[str] = Counter()
    for position in range(saves_per_round(2)):
        first, second = (
            compared_boxes(*each, position) for each in zip(sets, descriptions, strict=True)
        )
        assert first == second
        for name, box in first.get(0, []):
            times[name] += box.size
    assert times == {tensor.name: math.prod(tensor.shape) for tensor in listed}


def test_tensors_are_left_out_on_all_holders_alike() -> None:
    listed = [Tensor(f"t{i}", "float32", (50, 50)) for i in range(3)]
    held = [(tensor, [Box.whole(tensor.shape)]) for tensor in listed]
    descriptions = [described(held), described(held[::-1])]
    found = []
    for (replicas,), description in zip(sets_of(descriptions), descriptions, strict=True):
        left = leave_out_tensors(
            replicas, [n == "t1" for n in description.structure.names], description
        )
        assert left.nbytes == 2 * 50 * 50 * 4
        found.append([compared_boxes((left,), description, i) for i in range(40)])
    assert found[0] == found[1]
    assert {name for each in found[0] for name, _ in each.get(0, [])} == {"t0", "t2"}


def test_a_box_that_a_rank_holds_twice_is_compared_once() -> None:
    tensor = Tensor("t", "float32", (4, 4))
    twice = described([(tensor, [Box.whole((4, 4)), Box.whole((4, 4))])])
    once = described([(tensor, [Box.whole((4, 4))])])
    for (replicas,) in sets_of([twice, once]):
        assert (replicas.holders, replicas.nbytes) == (2, 64)
    assert sets_of([twice]) == [()]
