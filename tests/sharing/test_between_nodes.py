"""What several nodes want is read by one of them, evenly, and reaches each of them once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.plan.load import Ranges
from shardwise.parts.sharing.node_ranks import MOST_NODES, nodes_sharing_reads
from shardwise.parts.sharing.reads import (
    NO_RANK,
    Reads,
    share_between_nodes,
    share_reads,
    unite_ranges,
)

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


def divide(wanted: list[list[Blocks]], largest: int) -> tuple[list[Reads], int]:
    """The reads of each node, from the lists of all nodes, each different list once."""
    lists = [unite_ranges([ranges_of(rank) for rank in node]) for node in wanted]
    keys = [b"".join(c.tobytes() for c in (r.file, r.low, r.high)) for r in lists]
    distinct = list(dict.fromkeys(keys))
    arguments = (
        [lists[keys.index(key)] for key in distinct],
        [distinct.index(key) for key in keys],
        ranks_of(wanted),
    )
    divided = [
        share_between_nodes(*arguments, node, largest_read=largest * BLOCK)
        for node in range(len(wanted))
    ]
    assert len({saved for _, saved in divided}) == 1
    return [reads for reads, _ in divided], divided[0][1]


def ranks_of(wanted: list[list[Blocks]]) -> list[list[int]]:
    """Global ranks, in order of node."""
    numbers = iter(range(1000))
    return [[next(numbers) for _ in ranks] for ranks in wanted]


def rows_of(reads: Reads) -> list[list[int]]:
    """File, start, end, reader, source and target of each read."""
    columns = (reads.file, reads.low, reads.high, reads.reader, reads.source, reads.target)
    return [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


@given(nodes_and_ranks, st.integers(1, 8))
def test_each_byte_is_read_by_one_node_that_wants_it(
    wanted: list[list[Blocks]], largest: int
) -> None:
    reads, saved = divide(wanted, largest)
    of_nodes = [set().union(*node) for node in wanted]
    counts = {block: sum(block in each for each in of_nodes) for block in set().union(*of_nodes)}
    shared = {block for block, count in counts.items() if count > 1}
    read: list[tuple[int, int]] = []
    for node, part in enumerate(reads):
        blocks_of_node: Blocks = set()
        for file, low, high, _, source, _ in rows_of(part):
            assert high - low <= largest * BLOCK
            blocks_of_node |= blocks_of(file, low, high)
            read += blocks_of(file, low, high) if source == NO_RANK else ()
        assert blocks_of_node == of_nodes[node] & shared
    assert sorted(read) == sorted(shared)
    assert saved == BLOCK * sum(count - 1 for count in counts.values())


@given(nodes_and_ranks, st.integers(1, 8))
def test_each_read_reaches_each_node_once_and_in_order(
    wanted: list[list[Blocks]], largest: int
) -> None:
    reads, _ = divide(wanted, largest)
    sent: list[tuple[int, ...]] = []
    received: list[tuple[int, ...]] = []
    for part, ranks in zip(reads, ranks_of(wanted), strict=True):
        starts = [row[:2] for row in rows_of(part)]
        assert starts == sorted(starts)
        for *place, reader, source, target in rows_of(part):
            if source != NO_RANK:
                received.append((*place, source, ranks[reader]))
            if target != NO_RANK:
                sent.append((*place, ranks[reader], target))
    assert sorted(sent) == sorted(received)
    assert len({(*place, receiver) for *place, _, receiver in received}) == len(received)


@given(nodes_and_ranks, st.integers(1, 8))
def test_ranks_of_a_node_have_all_that_they_want(wanted: list[list[Blocks]], largest: int) -> None:
    reads, _ = divide(wanted, largest)
    for part, of_ranks in zip(reads, wanted, strict=True):
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


def bytes_read(reads: Reads, ranks: int) -> list[int]:
    return [reads.bytes_of(rank, received=False) for rank in range(ranks)]


@given(st.lists(st.integers(1, 4), min_size=2, max_size=6), st.integers(1, 60), st.integers(1, 5))
def test_replicas_are_divided_evenly_among_nodes_and_ranks(
    ranks: list[int], count: int, largest: int
) -> None:
    """Also if nodes have different numbers of ranks, and a read may be short."""
    wanted = [[{(b % 2, b) for b in range(count)}] * n for n in ranks]
    reads, _ = divide(wanted, largest)
    loads = np.concatenate([bytes_read(*each) for each in zip(reads, ranks, strict=True)])
    assert loads.sum() == count * BLOCK
    assert loads.max() - loads.min() <= largest * BLOCK


def test_a_node_with_more_of_its_own_reads_less_for_others() -> None:
    common = {(0, block) for block in range(40)}
    own = {(1, block) for block in range(10)}
    reads, _ = divide([[common | own], [common]], 1)
    assert [bytes_read(each, 1) for each in reads] == [[15 * BLOCK], [25 * BLOCK]]


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
    ranks = [list(range(8 * node, 8 * node + 8)) for node in range(nodes)]
    own, _ = share_between_nodes(lists, kinds, ranks, 17, largest_read=8 * BLOCK)
    assert len(own) == files * 64
    assert set(own.source[own.source != NO_RANK].tolist()) <= set(ranks[7])
    assert set(own.target[own.target != NO_RANK].tolist()) <= set(ranks[27])
    alone = own.source == NO_RANK
    assert own.sizes[alone].sum() <= files * 512 * BLOCK / replicas + 8 * 8 * BLOCK


@pytest.mark.parametrize("nodes", [1, 2, 63, 64, 65, 129, 1000, 16_384])
def test_circles_have_about_equal_sizes(nodes: int) -> None:
    circles = {nodes_sharing_reads(node, nodes) for node in range(nodes)}
    assert sorted(node for circle in circles for node in circle) == list(range(nodes))
    assert all(node in nodes_sharing_reads(node, nodes) for node in range(nodes))
    sizes = {len(circle) for circle in circles}
    assert max(sizes) <= MOST_NODES
    assert max(sizes) - min(sizes) <= 1
