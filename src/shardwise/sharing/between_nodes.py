"""Divide reads among nodes: one node reads bytes that several nodes want, and passes them on.

Each byte range that several nodes want is assigned to one of them, its reader. The reader sends the
bytes to the next node that wants them, which sends them to the node after it, and so on. So each
node receives and sends each byte at most once, however many nodes there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from shardwise.layout.columns import Int
from shardwise.sharing.ranges import Ranges, covered_rows, cut_to_length, edges_of, join_adjacent

NOBODY = -1
MARGIN = 0.8
"""Nodes share reads only if this takes less than this fraction of the time of separate reads.
Measured rates are uncertain, and shared reads need more processor time."""


@dataclass(frozen=True, slots=True)
class ReadsBetweenNodes:
    """Reads that several nodes want, in the order in which all nodes process them.

    The nodes of a group pass each read on in a circle, in ascending order.

    Attributes:
        ranges: the byte range of each read.
        node: the index of the node that reads it from storage, `(n,)`.
        lane: which rank of a node reads or receives it, `(n,)`: the rank with index `lane % r` on
            a node with r ranks.
        group: the index in `groups` of the nodes that want it, `(n,)`.
        groups: the indices of nodes, ascending; at least two in each group.
    """

    ranges: Ranges
    node: Int
    lane: Int
    group: Int
    groups: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.ranges)

    @property
    def bytes_saved(self) -> int:
        """The number of bytes that nodes receive instead of reading them."""
        receivers = np.array([len(group) - 1 for group in self.groups], np.int64)
        sizes = self.ranges.high - self.ranges.low
        return int((sizes * receivers[self.group]).sum()) if len(self) else 0

    def bytes_received(self, node: int) -> int:
        """Return the number of bytes that a node receives from other nodes."""
        is_member = np.array([node in group for group in self.groups], bool)
        sizes = self.ranges.high - self.ranges.low
        return int(sizes[is_member[self.group] & (self.node != node)].sum()) if len(self) else 0

    def restrict_to_node(self, node: int) -> ReadsBetweenNodes:
        """Return the reads that a node wants, and the groups that it belongs to."""
        kept = [index for index, group in enumerate(self.groups) if node in group]
        new_index = np.full(len(self.groups), NOBODY, np.int64)
        new_index[kept] = np.arange(len(kept))
        rows = np.isin(self.group, kept)
        return ReadsBetweenNodes(
            self.ranges.select(rows),
            self.node[rows],
            self.lane[rows],
            new_index[self.group[rows]],
            tuple(self.groups[index] for index in kept),
        )

    def neighbours(self, node: int) -> set[int]:
        """Return the nodes from which a node receives, and to which it sends."""
        groups = [group for group in self.groups if node in group]
        return {each for group in groups for each in _neighbours(group, node)}


@dataclass(frozen=True, slots=True)
class ReadsOfNode:
    """The reads that a node shares with other nodes.

    Attributes:
        ranges: the byte range of each read.
        reader: the index in the node of the rank that reads or receives it, `(n,)`.
        source: the rank of another node that sends it; `NOBODY` if this node reads it, `(n,)`.
        target: the rank of another node to send it to; `NOBODY` if there is none, `(n,)`.
    """

    ranges: Ranges
    reader: Int
    source: Int
    target: Int

    def __len__(self) -> int:
        return len(self.ranges)

    def read_by(self, rank: int) -> Ranges:
        """Return the reads from storage of the rank with this index in the node."""
        return self.ranges.select((self.reader == rank) & (self.source == NOBODY))


@dataclass(frozen=True, slots=True)
class NodeRates:
    """What a node measured before it reads, and how many bytes it would move.

    Attributes:
        store, network: bytes per second of all its ranks together, from storage and from other
            nodes; 0 if unknown.
        wanted: the number of bytes that the node needs. Without sharing, it reads all of them.
        read, received: the numbers of bytes that it reads and receives if nodes share reads.
    """

    store: float
    network: float
    wanted: int
    read: int
    received: int


def is_sharing_faster(nodes: Sequence[NodeRates]) -> bool:
    """Return whether nodes load clearly faster if they share their reads than if they do not."""
    if any(each.wanted and not each.store for each in nodes):
        return False
    if any(each.received and not each.network for each in nodes):
        return False
    alone = max((each.wanted / each.store for each in nodes if each.wanted), default=0.0)
    shared = max(
        (
            max(each.read / each.store, each.received / each.network if each.received else 0.0)
            for each in nodes
            if each.wanted
        ),
        default=0.0,
    )
    return shared < MARGIN * alone


def share_between_nodes(
    wanted: Sequence[Ranges],
    list_of_node: Sequence[int],
    ranks: Sequence[int],
    *,
    largest_read: int | Int,
) -> ReadsBetweenNodes:
    """Divide the bytes that several nodes want evenly among these nodes.

    Args:
        wanted: the different lists of byte ranges that nodes want.
        list_of_node: the index in `wanted` of each node's list.
        ranks: the number of ranks of each node.
        largest_read: as for `share_reads`.
    """
    keys, width = edges_of(wanted)
    row, holder = covered_rows(keys, width, wanted)
    nodes_of_list = np.bincount(np.array(list_of_node, np.int64), minlength=len(wanted))
    users = np.zeros(max(len(keys) - 1, 0), np.int64)
    np.add.at(users, row, nodes_of_list[holder])
    sizes = np.diff(keys)
    alone = np.zeros(len(wanted), np.int64)
    np.add.at(alone, holder[users[row] == 1], sizes[row[users[row] == 1]])
    is_shared = users[row] > 1
    group_of_row, lists = _number_distinct_sets(row[is_shared], holder[is_shared])
    rows = np.flatnonzero(users > 1)
    ranges = Ranges(keys[rows] // width, keys[rows] % width, keys[rows] % width + sizes[rows])
    ranges, kept = cut_to_length(*join_adjacent(ranges, group_of_row[:, None]), largest_read)
    group = group_of_row[kept]
    groups = tuple(
        tuple(node for node, each in enumerate(list_of_node) if each in members)
        for members in map(set, lists)
    )
    node, lane = _assign_nodes(
        ranges.high - ranges.low, group, groups, ranks, alone[np.array(list_of_node, np.int64)]
    )
    return ReadsBetweenNodes(ranges, node, lane, group, groups)


def reads_of_node(
    reads: ReadsBetweenNodes, node: int, ranks: Mapping[int, Sequence[int]]
) -> ReadsOfNode:
    """Return what a node reads, receives and sends.

    Args:
        reads: the reads that this node shares with others.
        node: the index of the node.
        ranks: the ranks of this node and of its `neighbours`.
    """
    reader = reads.lane % len(ranks[node])
    source, target = (np.full(len(reads), NOBODY, np.int64) for _ in range(2))
    for index, group in enumerate(reads.groups):
        if node not in group:
            continue
        before, after = _neighbours(group, node)
        rows = reads.group == index
        receives, sends = rows & (reads.node != node), rows & (reads.node != after)
        source[receives] = np.array(ranks[before], np.int64)[
            reads.lane[receives] % len(ranks[before])
        ]
        target[sends] = np.array(ranks[after], np.int64)[reads.lane[sends] % len(ranks[after])]
    return ReadsOfNode(reads.ranges, reader, source, target)


def _neighbours(group: Sequence[int], node: int) -> tuple[int, int]:
    """Return the nodes before and after a node in the circle of a group."""
    at = group.index(node)
    return group[at - 1], group[(at + 1) % len(group)]


def _number_distinct_sets(row: Int, holder: Int) -> tuple[Int, list[list[int]]]:
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
    sizes: Int, group: Int, groups: Sequence[Sequence[int]], ranks: Sequence[int], alone: Int
) -> tuple[Int, Int]:
    """Assign each read to the node, and there to the rank, with the fewest bytes so far.

    Args:
        sizes, group: the length of each read, and the group of nodes that want it.
        groups: the nodes of each group.
        ranks: the number of ranks of each node.
        alone: for each node, the number of bytes that no other node wants.

    Returns:
        The node of each read, and the index of the rank in this node.
    """
    loads = [int(n) // r for n, r in zip(alone.tolist(), ranks, strict=True)]
    lanes = [[(load, lane) for lane in range(r)] for load, r in zip(loads, ranks, strict=True)]
    node, lane = (np.zeros(len(sizes), np.int64) for _ in range(2))
    # Assign the reads of small groups first. The reads of larger groups even out the differences.
    for index in sorted(range(len(groups)), key=lambda i: len(groups[i])):
        heap = [(lanes[each][0][0], each) for each in groups[index]]
        heapify(heap)
        for i in np.flatnonzero(group == index).tolist():
            chosen = heap[0][1]
            load, number = lanes[chosen][0]
            heapreplace(lanes[chosen], (load + int(sizes[i]), number))
            heapreplace(heap, (lanes[chosen][0][0], chosen))
            node[i], lane[i] = chosen, number
    return node, lane
