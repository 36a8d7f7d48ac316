"""Which parts of replicas are compared, what is said of those that differ, and what is done."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations
from random import Random
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.boxes import Box
from shardwise.divergence import replica_sets
from shardwise.divergence.comparison import ReplicaComparison
from shardwise.divergence.differences import (
    Divergence,
    DivergencePolicy,
    SampleDetails,
    SetDigest,
    combine_digests,
    combine_sums,
    encode_sum,
    find_differing_sets,
    find_divergences,
    group_ranks,
    has_difference,
    keep_differing,
)
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
from shardwise.events import Recorder
from shardwise.manifest.dtypes import DTYPES
from shardwise.plan.structure import Description
from shardwise.state.local_state import Fragment
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.breadth import examples
from tests.plan.test_save import described, plan_of, plans_of, worlds
from tests.tools.divisions import BoxesByRank, Tensor

# The parts of replicas that are compared: all of them in a round, the same on all, and few.

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
        each.set_id: boxes[limits[i] : limits[i + 1]]
        for i, each in enumerate(sets)
        if limits[i] < limits[i + 1]
    }


@given(worlds(), st.integers(0, 1 << 64))
def test_each_replicated_byte_of_each_rank_is_compared_within_a_round(
    case: tuple[list[Tensor], list[BoxesByRank], int], first: int
) -> None:
    """All owners compare the same boxes at the same save, and nobody compares anything else."""
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
        counts = {each.set_id: each.owner_count for own in sets for each in own}
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
        ranges += sum(len(choose_ranges(s.nbytes, s.owner_count, position)) + 1 for s in sets)
    stored = plan_of(descriptions).bytes_stored
    assert compared <= stored / SHARE + ROUNDING * ranges


def test_elements_are_not_cut_where_dtypes_are_mixed() -> None:
    """Wide types come first, whatever their order on a rank; owners agree in spite of it."""
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


def test_tensors_are_left_out_on_all_owners_alike() -> None:
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
        assert (replicas.owner_count, replicas.nbytes) == (2, 64)
    assert sets_of([twice]) == [()]


# What is said of replicas that differ, and what is done about them.


def divergence(*groups: tuple[int, ...], boxes: int = 1, equal_at: int | None = None) -> Divergence:
    own = tuple(Box((i, 0), (1, 8)) for i in range(boxes))
    return Divergence(step=7, equal_at=equal_at, tensor="w", boxes=own, groups=groups)


@pytest.mark.parametrize(
    ("groups", "minority", "text"),
    [
        (((0,), (1,)), (), "w[0:1,0:8]: rank 0 and rank 1 differ"),
        (((0, 2), (1,)), (1,), "w[0:1,0:8]: rank 1 differs from ranks 0, 2"),
        (((1, 2, 3), (0,), (4,)), (0, 4), "w[0:1,0:8]: ranks 0, 4 differ from ranks 1-3"),
        (((0, 1), (2, 3)), (), "w[0:1,0:8]: ranks 0, 1 and ranks 2, 3 differ"),
        (((0, 1), (2,), (3,)), (), "w[0:1,0:8]: ranks 0, 1 and rank 2 and rank 3 differ"),
    ],
)
def test_who_is_alone_is_named_if_more_than_half_agree(
    groups: tuple[tuple[int, ...], ...], minority: tuple[int, ...], text: str
) -> None:
    found = divergence(*groups)
    assert found.minority == minority
    assert str(found) == text


def test_long_lists_are_shortened() -> None:
    found = divergence(tuple(range(1, 100)), (0,), boxes=5, equal_at=3)
    assert str(found) == (
        "w[0:1,0:8], [1:2,0:8], [2:3,0:8] and 2 more boxes: rank 0 differs from "
        "ranks 1-99 (equal at step 3)"
    )


def test_ranks_are_grouped_by_what_they_hold() -> None:
    assert group_ranks([0, 3, 4, 9], [5, 6, 6, 5]) == ((0, 9), (3, 4))
    assert group_ranks([0, 1, 2], [1, 2, 2]) == ((1, 2), (0,))


def test_only_digests_of_the_same_set_and_save_are_compared() -> None:
    def message(rank: int, save_id: str, digests: dict[int, bytes], position: int = 3) -> bytes:
        of_set = {number: SetDigest(digest, rank) for number, digest in digests.items()}
        return msgspec.msgpack.encode({f"{save_id} {position}": of_set})

    messages = [
        b"",
        message(1, "a", {0: b"x", 1: b"x", 2: b"x"}),
        message(2, "a", {0: b"x", 1: b"y"}),
        message(3, "b", {0: b"y", 1: b"z", 2: b"x"}),
        message(4, "a", {0: b"z"}, position=4),
        message(5, "a", {1: b"x"}),
    ]
    for order in permutations(messages):
        combined = combine_digests(
            [combine_digests(order[:2]), *order[2:4], combine_digests(order[4:])]
        )
        assert find_differing_sets(combined) == {1: 1}
        assert find_differing_sets(keep_differing(combined)) == {1: 1}
    assert find_differing_sets(combine_digests([b"", b""])) == {}


@given(
    st.lists(st.tuples(st.integers(2, 5), st.integers(0, 6)), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_sums_tell_whether_all_digests_of_a_set_are_equal(
    sets: list[tuple[int, int]], random: Random
) -> None:
    """Of each set with m holders, one holder has another digest, if its index is below m."""
    for changed in (False, True):
        of_rank: dict[int, dict[int, tuple[bytes, int, bool]]] = {}
        for number, (holders, odd) in enumerate(sets):
            for i in range(holders):
                digest = b"other" if changed and i == odd else b"digest"
                of_rank.setdefault(i, {})[number] = digest, holders, i == 0
        messages = [b"", *(encode_sum("save 1", each) for each in of_rank.values())]
        random.shuffle(messages)
        combined = combine_sums([combine_sums(messages[:2]), *messages[2:]])
        assert has_difference(combined) == (changed and any(odd < m for m, odd in sets))
        assert has_difference(combine_sums([combined, encode_sum("save 1", {9: (b"d", 2, True)})]))
    assert not has_difference(b"")


def test_boxes_of_a_tensor_that_differ_on_the_same_ranks_are_reported_together() -> None:
    boxes = [("a", (0,), (4,)), ("a", (4,), (4,)), ("a", (8,), (4,)), ("b", (), ())]

    def details(rank: int, *checksums: int) -> SampleDetails:
        table = {5: np.array(checksums, np.uint32).tobytes()}
        is_first = rank == 1
        return SampleDetails(9, table, {5: boxes} if is_first else {}, {5: 3} if is_first else {})

    of_ranks = {3: details(3, 1, 2, 3, 4), 1: details(1, 1, 2, 3, 4), 2: details(2, 7, 2, 7, 7)}
    first, second = find_divergences(of_ranks, {5: 1})
    assert (first.tensor, first.boxes) == ("a", (Box((0,), (4,)), Box((8,), (4,))))
    assert (second.tensor, second.boxes) == ("b", (Box((), ()),))
    assert {each.minority for each in (first, second)} == {(2,)}
    assert {(each.step, each.equal_at) for each in (first, second)} == {(9, 3)}


def test_the_first_pattern_that_matches_decides() -> None:
    policy = DivergencePolicy.from_option({"*.running_*": "ignore", "model.*": "raise"})
    assert policy.reaction_to("model.bn.running_mean") == "ignore"
    assert policy.reaction_to("model.weight") == "raise"
    assert policy.reaction_to("optimizer.step") == "warn"
    assert not policy.ignores_all
    assert DivergencePolicy.from_option("ignore").ignores_all


@pytest.mark.parametrize(
    ("option", "error"),
    [
        (None, TypeError),
        (3, TypeError),
        ({3: "warn"}, TypeError),
        ("loud", ValueError),
        ({"*": "loud"}, ValueError),
        ({"*": None}, ValueError),
    ],
)
def test_unknown_reactions_are_refused(option: object, error: type[Exception]) -> None:
    with pytest.raises(error, match="on_divergence="):
        DivergencePolicy.from_option(option)


# Comparisons of replicas of random layouts: a flipped bit is found, and nothing else is.

World = tuple[list[Tensor], list[BoxesByRank], int]
Flip = tuple[int, int, int, int]
"""A rank, and which of its fragments, elements and bits to flip; modulo their numbers."""


def fragments_of(case: World, rank: int) -> list[tuple[Tensor, Fragment]]:
    """The fragments of a rank. Every tensor holds random bytes: also NaNs, and odd booleans."""
    listed, held, _ = case
    found = []
    for i, (tensor, boxes) in enumerate(zip(listed, held, strict=True)):
        itemsize = DTYPES[tensor.dtype].itemsize
        random = np.random.default_rng(i).integers(0, 256, (*tensor.shape, itemsize), np.uint8)
        for box in boxes[rank]:
            part = np.ascontiguousarray(random[box.slices()])
            data = torch.from_numpy(part).view(getattr(torch, tensor.dtype)).reshape(box.shape)
            found.append((tensor, Fragment(box, data)))
    return found


def compare_for_a_round(case: World, flip: Flip | None) -> list[tuple[tuple[Divergence, ...], int]]:
    """Compare until a difference is found, or for a round; what each rank found, and when."""
    listed, held, world = case
    descriptions = [
        described([(t, list(boxes[rank])) for t, boxes in zip(listed, held, strict=True)])
        for rank in range(world)
    ]
    plans = plans_of(descriptions)

    def run(group: ThreadGroup) -> tuple[tuple[Divergence, ...], int]:
        fragments = [each for _, each in fragments_of(case, group.rank)]
        if flip is not None and flip[0] == group.rank:
            data = fragments[flip[1]].data.view(-1).view(torch.uint8)
            data[flip[2]] ^= 1 << flip[3]
        plan = plans[group.rank]
        comparison = ReplicaComparison(DivergencePolicy((("*", "warn"),)))
        for step in range(saves_per_round(world)):
            save_id = f"{0xFFFFFFFE:x}{step:08x}"
            sample = comparison.begin(save_id, step, plan, fragments)
            if sample is not None:
                sample.checksum_state()
            comparison.compare_last(group, Recorder())
            if comparison.divergences:
                return comparison.divergences, step
        return (), -1

    with mock.patch.object(replica_sets, "SHARE", 2):
        return run_ranks(world, run)


@examples(25)
@given(worlds())
def test_equal_replicas_are_never_reported(case: World) -> None:
    assert compare_for_a_round(case, None) == [((), -1)] * case[2]


@examples(40)
@given(worlds(), st.data())
def test_a_flipped_bit_is_found_within_a_round_and_named(case: World, data: st.DataObject) -> None:
    listed, held, world = case
    rank = data.draw(st.integers(0, world - 1))
    fragments = fragments_of(case, rank)
    if not fragments:
        return
    index = data.draw(st.integers(0, len(fragments) - 1))
    tensor, fragment = fragments[index]
    itemsize = DTYPES[tensor.dtype].itemsize
    byte = data.draw(st.integers(0, fragment.box.size * itemsize - 1))
    flip = rank, index, byte, data.draw(st.integers(0, 7))
    boxes = next(own for t, own in zip(listed, held, strict=True) if t == tensor)
    holders = [r for r in range(world) if fragment.box in boxes[r]]
    found = compare_for_a_round(case, flip)
    assert found == [found[0]] * world
    if len(holders) == 1:
        assert found[0] == ((), -1), "nobody else holds it"
        return
    ((divergence,), step) = found[0]
    with mock.patch.object(replica_sets, "SHARE", 2):
        assert step < saves_per_round(len(holders))
    assert divergence.tensor == tensor.name
    assert sorted(r for group in divergence.groups for r in group) == holders
    assert divergence.minority == ((rank,) if len(holders) > 2 else ())
    element = np.unravel_index(byte // itemsize, fragment.box.shape)
    position = tuple(o + int(i) for o, i in zip(fragment.box.offset, element, strict=True))
    (box,) = divergence.boxes
    assert box.contains(Box(position, (1,) * len(position)))
    assert box.size * itemsize <= max(64, math.prod(fragment.box.shape) * itemsize)
