"""What several nodes want is read by one of them, evenly, and reaches each of them once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.sharing.between_nodes import (
    NOBODY,
    NodeRates,
    ReadsBetweenNodes,
    is_sharing_faster,
    reads_of_node,
    share_between_nodes,
)
from shardwise.sharing.ranges import Ranges, unite_ranges
from shardwise.sharing.within_node import share_reads

BLOCK = 64
Blocks = set[tuple[int, int]]
blocks = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 20)), max_size=30)
nodes_and_ranks = st.lists(st.lists(blocks, min_size=1, max_size=3), min_size=2, max_size=5)


def ranges_of(wanted: Blocks) -> Ranges:
    rows = sorted(wanted)
    file = np.array([f for f, _ in rows], np.int64)
    low = np.array([b * BLOCK for _, b in rows], np.int64)
    return Ranges(file, low, low + BLOCK)


def blocks_of(file: int, low: int, high: int) -> Blocks:
    assert low % BLOCK == high % BLOCK == 0
    assert low < high
    return {(file, block) for block in range(low // BLOCK, high // BLOCK)}


def divide(wanted: list[list[Blocks]], largest: int) -> tuple[ReadsBetweenNodes, list[Ranges]]:
    """Divide as rank 0 does, with each different list once."""
    lists = [unite_ranges([ranges_of(rank) for rank in node]) for node in wanted]
    keys = [b"".join(c.tobytes() for c in (r.file, r.low, r.high)) for r in lists]
    distinct = list(dict.fromkeys(keys))
    reads = share_between_nodes(
        [lists[keys.index(key)] for key in distinct],
        [distinct.index(key) for key in keys],
        [len(node) for node in wanted],
        largest_read=largest * BLOCK,
    )
    return reads, lists


def ranks_of(wanted: list[list[Blocks]]) -> dict[int, list[int]]:
    """Global ranks, in order of node."""
    numbers = iter(range(1000))
    return {node: [next(numbers) for _ in ranks] for node, ranks in enumerate(wanted)}


@given(nodes_and_ranks, st.integers(1, 8))
def test_each_byte_is_read_by_one_node_that_wants_it(
    wanted: list[list[Blocks]], largest: int
) -> None:
    reads, _ = divide(wanted, largest)
    of_nodes = [set().union(*node) for node in wanted]
    read: Blocks = set()
    columns = (reads.ranges.file, reads.ranges.low, reads.ranges.high, reads.node, reads.group)
    for file, low, high, node, group in zip(*(c.tolist() for c in columns), strict=True):
        assert high - low <= largest * BLOCK
        assert node in reads.groups[group]
        for block in blocks_of(file, low, high):
            assert block not in read
            read.add(block)
            users = tuple(n for n, each in enumerate(of_nodes) if block in each)
            assert users == reads.groups[group]
    counts = {block: sum(block in each for each in of_nodes) for block in set().union(*of_nodes)}
    assert read == {block for block, count in counts.items() if count > 1}
    assert reads.bytes_saved == BLOCK * sum(count - 1 for count in counts.values())


@given(nodes_and_ranks, st.integers(1, 8))
def test_each_read_reaches_each_node_once_and_in_order(
    wanted: list[list[Blocks]], largest: int
) -> None:
    """By what each node computes from its own reads and the ranks of its neighbours."""
    reads, _ = divide(wanted, largest)
    ranks = ranks_of(wanted)
    holders: dict[tuple[int, int], set[int]] = {}
    sent: list[tuple[int, int, int, int]] = []
    received: list[tuple[int, int, int, int]] = []
    for node in ranks:
        own = reads.restrict_to_node(node)
        near = {each: ranks[each] for each in {node, *reads.neighbours(node)}}
        part = reads_of_node(own, node, near)
        assert sum((part.ranges.high - part.ranges.low)[part.source != NOBODY]) == (
            reads.bytes_received(node)
        )
        starts = list(zip(part.ranges.file.tolist(), part.ranges.low.tolist(), strict=True))
        assert starts == sorted(starts)
        for start, reader, source, target in zip(
            starts, part.reader.tolist(), part.source.tolist(), part.target.tolist(), strict=True
        ):
            rank = ranks[node][reader]
            if source != NOBODY:
                received.append((*start, source, rank))
            if target != NOBODY:
                sent.append((*start, rank, target))
            holders.setdefault(start, set()).add(node)
    assert sorted(sent) == sorted(received)
    starts_of_all = zip(reads.ranges.file.tolist(), reads.ranges.low.tolist(), strict=True)
    groups = [set(reads.groups[group]) for group in reads.group.tolist()]
    assert holders == dict(zip(starts_of_all, groups, strict=True))
    assert len(sent) == sum(len(group) - 1 for group in groups)


@given(nodes_and_ranks, st.integers(1, 8))
def test_ranks_of_a_node_have_all_that_they_want(wanted: list[list[Blocks]], largest: int) -> None:
    reads, _ = divide(wanted, largest)
    ranks = ranks_of(wanted)
    for node, of_ranks in enumerate(wanted):
        part = reads_of_node(reads.restrict_to_node(node), node, ranks)
        shared = share_reads(
            [ranges_of(each) for each in of_ranks],
            largest_read=largest * BLOCK,
            between_nodes=part,
        )
        read: dict[tuple[int, int], int] = {}
        columns = (shared.file, shared.low, shared.high)
        for i, place in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            assert shared.wanted[i].any()
            for block in blocks_of(*place):
                assert block not in read
                read[block] = i
        for index, each in enumerate(of_ranks):
            assert all(shared.wanted[read[block], index] for block in each)
        assert set(read) == set().union(*of_ranks)
        order = list(zip(shared.file.tolist(), shared.low.tolist(), strict=True))
        assert order == sorted(order)


def in_bytes(reads: ReadsBetweenNodes, ranks: list[int]) -> list[npt.NDArray[np.float64]]:
    sizes = reads.ranges.high - reads.ranges.low
    return [
        np.bincount(reads.lane[reads.node == n], sizes[reads.node == n], minlength=count)
        for n, count in enumerate(ranks)
    ]


@given(st.lists(st.integers(1, 4), min_size=2, max_size=6), st.integers(1, 60), st.integers(1, 5))
def test_replicas_are_divided_evenly_among_nodes_and_ranks(
    ranks: list[int], count: int, largest: int
) -> None:
    """Also if nodes have different numbers of ranks, and a read may be short."""
    wanted = [[{(b % 2, b) for b in range(count)}] * n for n in ranks]
    reads, _ = divide(wanted, largest)
    loads = np.concatenate(in_bytes(reads, ranks))
    assert loads.sum() == count * BLOCK
    assert loads.max() - loads.min() <= largest * BLOCK


def test_a_node_with_more_of_its_own_reads_less_for_others() -> None:
    common = {(0, block) for block in range(40)}
    own = {(1, block) for block in range(10)}
    reads, _ = divide([[common | own], [common]], 1)
    assert [each.sum() for each in in_bytes(reads, [1, 1])] == [15 * BLOCK, 25 * BLOCK]


def test_a_node_gets_only_its_own_reads_of_thousands() -> None:
    """Ten thousand ranks, in groups of replicas."""
    nodes, replicas, files = 1250, 125, 40
    lists = [
        Ranges(
            np.arange(kind * files, (kind + 1) * files),
            np.zeros(files, np.int64),
            np.full(files, 512 * BLOCK, np.int64),
        )
        for kind in range(nodes // replicas)
    ]
    kinds = [node % len(lists) for node in range(nodes)]
    reads = share_between_nodes(lists, kinds, [8] * nodes, largest_read=8 * BLOCK)
    own = reads.restrict_to_node(17)
    assert len(own) == files * 64
    assert len(own.groups) == 1
    assert own.neighbours(17) == {7, 27}
    loads = [each.sum() for each in in_bytes(own, [8] * nodes)]
    assert max(loads) - min(loads[7::10]) <= 8 * 8 * BLOCK


@pytest.mark.parametrize(
    ("store", "network", "faster"),
    [(200e6, 1e9, True), (200e6, 10e6, False), (5e9, 1e9, False), (0.0, 1e9, False)],
)
def test_the_slower_of_storage_and_network_decides(
    store: float, network: float, faster: bool
) -> None:
    nodes = [NodeRates(store, network, 1000, 250, 750)] * 4
    assert is_sharing_faster(nodes) == faster


def test_a_node_without_a_rate_of_the_network_reads_alone() -> None:
    nodes = [NodeRates(1e9, 0.0, 1000, 500, 500), NodeRates(1e9, 1e9, 1000, 500, 500)]
    assert not is_sharing_faster(nodes)
    idle = NodeRates(0.0, 0.0, 0, 0, 0)
    assert is_sharing_faster([idle, *[NodeRates(1e6, 1e9, 1000, 500, 500)] * 2])
