"""Which rank reads which bytes, if several ranks or nodes want the same.

The ranks of a node divide what they want (`share_reads`). What several nodes want is divided among
these nodes first (`share_between_nodes`): one of them reads a byte range from storage, and sends it
to the next node that wants it, which sends it to the node after it, and so on. So each node
receives and sends each byte at most once, however many nodes there are.

All ranks compute the same division, from the same lists of byte ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt

from shardwise.kernel.boxes.box import BoolArray, IntArray, count_up
from shardwise.kernel.plan.load import Ranges

NO_RANK = -1


@dataclass(frozen=True, slots=True)
class Reads(Ranges):
    """The reads of a node, in the order in which all its ranks process them.

    For example, rank 5 reads bytes 0:64 for itself and for the other rank of its node, 4, and sends
    them to rank 6 of the next node. Bytes 64:128 come from rank 2:

        file low high  reader source target  wanted
        0    0   64    1      NO_RANK 6       [True, True]
        0    64  128   0      2      NO_RANK  [True, False]

    Attributes:
        reader: the index in the node of the rank that reads or receives the bytes, `(n,)`.
        source: the rank of another node that sends the bytes; `NO_RANK` if `reader` reads them from
            storage, `(n,)`.
        target: the rank of another node to which `reader` sends the bytes, or `NO_RANK`, `(n,)`.
        wanted: whether each rank of the node uses the bytes, `(n, ranks)`.
    """

    reader: IntArray
    source: IntArray
    target: IntArray
    wanted: BoolArray

    @property
    def cross_nodes(self) -> bool:
        """Whether bytes are received from other nodes, or sent to them."""
        return bool((self.source != NO_RANK).any() or (self.target != NO_RANK).any())

    def bytes_of(self, rank: int, *, received: bool) -> int:
        """Return how many bytes a rank of the node reads from storage.

        With `received`, return how many bytes the rank receives from other nodes.
        """
        return int(self.sizes[(self.reader == rank) & ((self.source != NO_RANK) == received)].sum())


def share_reads(
    wanted: Sequence[Ranges], *, largest_read: int | IntArray, between_nodes: Reads | None = None
) -> Reads:
    """Unite the byte ranges of the ranks of a node, and divide the reads evenly by bytes.

    Args:
        wanted: the byte ranges that each rank wants.
        largest_read: the greatest length of a read in bytes, a multiple of the block size: one
            number, or one for each file.
        between_nodes: the reads that the node shares with other nodes, which are divided already.
    """
    loads = np.zeros(len(wanted), np.int64)
    if between_nodes is None:
        united, users = _cut_at_edges(wanted)
    else:
        united, users = _cut_at_edges([*wanted, between_nodes])
        is_new = ~users[:, -1]
        united, users = united.select(is_new), users[is_new, :-1]
        is_read_here = between_nodes.source == NO_RANK
        np.add.at(loads, between_nodes.reader[is_read_here], between_nodes.sizes[is_read_here])
    united, rows = _cut_to_length(*_join_adjacent(united, users), largest_read)
    users = users[rows]
    reader = _assign_readers(united.sizes, users, loads)
    nobody = np.full(len(united), NO_RANK, np.int64)
    reads = Reads(united.file, united.low, united.high, reader, nobody, nobody, users)
    if between_nodes is not None:
        users = np.stack([_overlap(between_nodes, ranges) for ranges in wanted], axis=1)
        reads = Reads.join([reads, replace(between_nodes, wanted=users)])
    return reads.select(np.lexsort((reads.low, reads.file)))


def share_between_nodes(
    wanted: Sequence[Ranges],
    list_of_node: Sequence[int],
    ranks: Sequence[Sequence[int]],
    node: int,
    *,
    largest_read: int | IntArray,
) -> tuple[Reads, int]:
    """Divide the bytes that several nodes want evenly among these nodes.

    The nodes that want a range pass it on in a circle, from the node that reads it to the node
    before that one. For example, the nodes 0, 1 and 2 want a range that node 1 reads: node 1 sends
    it to node 2, and node 2 to node 0, which sends it to nobody.

    Args:
        wanted: the different lists of byte ranges that nodes want.
        list_of_node: the index in `wanted` of each node's list.
        ranks: the ranks of each node.
        node: the index of a node.
        largest_read: as for `share_reads`.

    Returns:
        The reads that this node shares with others, without the ranks that use them; and the
        number of bytes that all nodes together receive instead of reading them.
    """
    keys, width = _edges_of(wanted)
    row, holder = _covered_rows(keys, width, wanted)
    of_node = np.array(list_of_node, np.int64)
    users = np.zeros(max(len(keys) - 1, 0), np.int64)
    np.add.at(users, row, np.bincount(of_node, minlength=len(wanted))[holder])
    sizes = np.diff(keys)
    alone = np.zeros(len(wanted), np.int64)
    np.add.at(alone, holder[users[row] == 1], sizes[row[users[row] == 1]])
    is_shared = users[row] > 1
    group, lists = _number_distinct_sets(row[is_shared], holder[is_shared])
    groups = [np.flatnonzero(np.isin(of_node, each)).tolist() for each in lists]
    rows = np.flatnonzero(users > 1)
    ranges, kept = _join_adjacent(_ranges_at(keys, width, rows), group[:, None])
    ranges, kept = _cut_to_length(ranges, kept, largest_read)
    group = group[kept]
    reading, local_rank = _assign_nodes(ranges.sizes, group, groups, ranks, alone[of_node])
    receivers = np.array([len(each) - 1 for each in groups], np.int64)
    saved = int((ranges.sizes * receivers[group]).sum()) if len(ranges) else 0
    source, target = (np.full(len(ranges), NO_RANK, np.int64) for _ in range(2))
    is_own = np.zeros(len(ranges), bool)
    for index, members in enumerate(groups):
        if node in members:
            at = members.index(node)
            before, after = members[at - 1], members[(at + 1) % len(members)]
            rows = group == index
            is_own |= rows
            received, sent = rows & (reading != node), rows & (reading != after)
            source[received] = _rank_in(ranks[before], local_rank[received])
            target[sent] = _rank_in(ranks[after], local_rank[sent])
    reader = local_rank % len(ranks[node])
    nobody = np.zeros((len(ranges), 0), bool)
    reads = Reads(ranges.file, ranges.low, ranges.high, reader, source, target, nobody)
    return reads.select(is_own), saved


def _rank_in(ranks: Sequence[int], local_rank: IntArray) -> IntArray:
    """For each index, return this rank of the node. Past the last rank, count from 0 again."""
    return np.array(ranks)[local_rank % len(ranks)]


def unite_ranges(ranges: Sequence[Ranges]) -> Ranges:
    """Return the bytes that are in any of these ranges, in as few ranges as possible."""
    united, _ = _cut_at_edges(ranges)
    return _join_adjacent(united, np.ones((len(united), 1), bool))[0]


def _edges_of(ranges: Sequence[Ranges]) -> tuple[IntArray, int]:
    """Lay all files end to end on one axis. Return the edges of all ranges, and a file's length."""
    width = max((int(each.high.max()) for each in ranges if len(each)), default=0) + 1
    edges = [each.file * width + end for each in ranges for end in (each.low, each.high)]
    return np.unique(np.concatenate([np.zeros(0, np.int64), *edges])), width


def _ranges_at(keys: IntArray, width: int, rows: IntArray) -> Ranges:
    """Return some of the intervals between the edges of `_edges_of`."""
    low = keys[rows]
    return Ranges(low // width, low % width, low % width + keys[rows + 1] - low)


def _covered_rows(
    keys: IntArray, width: int, ranges: Sequence[Ranges]
) -> tuple[IntArray, IntArray]:
    """Return all pairs of an interval between edges and a list that covers it, as two columns."""
    rows, list_indices = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for index, each in enumerate(ranges):
        first = np.searchsorted(keys, each.file * width + each.low)
        counts = np.searchsorted(keys, each.file * width + each.high) - first
        within = count_up(counts)
        rows.append(np.repeat(first, counts) + within)
        list_indices.append(np.full(len(within), index, np.int64))
    row, list_index = np.concatenate(rows), np.concatenate(list_indices)
    order = np.argsort(row, kind="stable")
    return row[order], list_index[order]


def _cut_at_edges(ranges: Sequence[Ranges]) -> tuple[Ranges, BoolArray]:
    """Cut ranges at the edges of all ranges. Return the parts, and which `ranges` cover each."""
    keys, width = _edges_of(ranges)
    row, holder = _covered_rows(keys, width, ranges)
    users = np.zeros((max(len(keys) - 1, 0), len(ranges)), bool)
    users[row, holder] = True
    used = np.flatnonzero(users.any(axis=1))
    return _ranges_at(keys, width, used), users[used]


def _join_adjacent(ranges: Ranges, label: npt.NDArray[np.generic]) -> tuple[Ranges, IntArray]:
    """Join adjacent ranges with equal rows of `label`; also return the first row of each."""
    begins = np.ones(len(ranges), bool)
    adjacent = (ranges.file[1:] == ranges.file[:-1]) & (ranges.low[1:] == ranges.high[:-1])
    begins[1:] = ~(adjacent & (label[1:] == label[:-1]).all(axis=1))
    heads = np.flatnonzero(begins)
    ends = np.concatenate([heads[1:], [len(ranges)]]) - 1 if len(heads) else heads
    return Ranges(ranges.file[heads], ranges.low[heads], ranges.high[ends]), heads


def _cut_to_length(
    ranges: Ranges, rows: IntArray, largest_read: int | IntArray
) -> tuple[Ranges, IntArray]:
    """Cut ranges that are too long for one read, and repeat their `rows`."""
    limits = np.asarray(largest_read, np.int64)
    longest = limits[ranges.file] if limits.ndim else np.full(len(ranges), limits)
    parts = -(-ranges.sizes // longest)
    of, k = np.repeat(np.arange(len(ranges)), parts), count_up(parts)
    low = ranges.low[of] + k * longest[of]
    high = np.minimum(low + longest[of], ranges.high[of])
    return Ranges(ranges.file[of], low, high), rows[of]


def _overlap(ranges: Ranges, other: Ranges) -> BoolArray:
    """Return whether each range has bytes in common with any of the other ranges."""
    _, width = _edges_of([ranges, other])
    starts, ends = other.file * width + other.low, other.file * width + other.high
    before = np.searchsorted(starts, ranges.file * width + ranges.high, side="left")
    past = np.searchsorted(ends, ranges.file * width + ranges.low, side="right")
    found: BoolArray = before > past
    return found


def _assign_readers(sizes: IntArray, wanted: BoolArray, loads: IntArray) -> IntArray:
    """Assign each read to the rank with the fewest bytes to read so far, of those that use it.

    Args:
        sizes: the length of each read.
        wanted: whether each rank uses each read.
        loads: the number of bytes that each rank reads already.
    """
    readers = np.zeros(len(sizes), np.int64)
    loads = loads.astype(np.float64)
    alone = wanted.sum(axis=1) == 1
    readers[alone] = wanted[alone].argmax(axis=1)
    np.add.at(loads, readers[alone], sizes[alone])
    for i in np.flatnonzero(~alone).tolist():
        readers[i] = np.where(wanted[i], loads, np.inf).argmin()
        loads[readers[i]] += sizes[i]
    return readers


def _number_distinct_sets(row: IntArray, holder: IntArray) -> tuple[IntArray, list[list[int]]]:
    """Number the distinct sets of holders. Return the number of each row's set, and all sets."""
    first = np.flatnonzero(np.concatenate([[True], row[1:] != row[:-1]])) if len(row) else row
    ends = [*first[1:].tolist(), len(row)]
    numbers: dict[bytes, int] = {}
    found = [
        numbers.setdefault(holder[a:b].tobytes(), len(numbers))
        for a, b in zip(first.tolist(), ends, strict=False)
    ]
    return np.array(found, np.int64), [np.frombuffer(key, np.int64).tolist() for key in numbers]


def _assign_nodes(
    sizes: IntArray,
    group: IntArray,
    groups: Sequence[Sequence[int]],
    ranks: Sequence[Sequence[int]],
    alone: IntArray,
) -> tuple[IntArray, IntArray]:
    """Assign each read to the node, and there to the rank, with the fewest bytes so far.

    Args:
        sizes, group: the length of each read, and the group of nodes that want it.
        groups: the nodes of each group.
        ranks: the ranks of each node.
        alone: for each node, the number of bytes that no other node wants.

    Returns:
        The node of each read, and the index of the rank in this node.
    """
    loads = [int(n) // len(r) for n, r in zip(alone.tolist(), ranks, strict=True)]
    # For each node, a heap of the bytes that each of its ranks reads, and the rank.
    heaps = [[(load, i) for i in range(len(r))] for load, r in zip(loads, ranks, strict=True)]
    node, local_rank = (np.zeros(len(sizes), np.int64) for _ in range(2))
    # Assign the reads of small groups first. The reads of larger groups even out the differences.
    for index in sorted(range(len(groups)), key=lambda i: len(groups[i])):
        heap = [(heaps[each][0][0], each) for each in groups[index]]
        heapify(heap)
        for i in np.flatnonzero(group == index).tolist():
            chosen = heap[0][1]
            load, number = heaps[chosen][0]
            heapreplace(heaps[chosen], (load + int(sizes[i]), number))
            heapreplace(heap, (heaps[chosen][0][0], chosen))
            node[i], local_rank[i] = chosen, number
    return node, local_rank
