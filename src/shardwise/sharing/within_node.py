"""Divide reads among the ranks of a node: one rank reads the bytes that several ranks want."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.layout.columns import Bool, Int
from shardwise.sharing.between_nodes import NOBODY, ReadsOfNode
from shardwise.sharing.ranges import (
    Ranges,
    cut_at_edges,
    cut_to_length,
    join_adjacent,
    overlaps_any,
)


@dataclass(frozen=True, slots=True)
class SharedReads:
    """Disjoint reads of the ranks of a node, in the order in which all ranks process them.

    Attributes:
        file: the index of the file, `(n,)`.
        low, high: the byte range in the file, `(n,)`.
        reader: the index of the rank that makes the read, or receives its bytes, `(n,)`.
        wanted: whether each rank uses the read, `(n, ranks)`.
        source: the rank of another node that sends the bytes; `NOBODY` if `reader` reads them from
            storage, `(n,)`.
        target: the rank of another node to which `reader` sends the bytes, or `NOBODY`, `(n,)`.
    """

    file: Int
    low: Int
    high: Int
    reader: Int
    wanted: Bool
    source: Int
    target: Int

    def __len__(self) -> int:
        return len(self.file)

    def columns(self) -> tuple[npt.NDArray[np.generic], ...]:
        """Return all columns."""
        return (
            *(self.file, self.low, self.high),
            *(self.reader, self.wanted, self.source, self.target),
        )

    @property
    def crosses_nodes(self) -> bool:
        """Whether bytes are received from other nodes, or sent to them."""
        return bool((self.source != NOBODY).any() or (self.target != NOBODY).any())

    @property
    def is_received(self) -> Bool:
        """Whether each read comes from another node, `(n,)`."""
        received: Bool = self.source != NOBODY
        return received

    def bytes_of(self, rank: int, *, received: bool) -> int:
        """Return how many bytes a rank of the node reads from storage, or else receives."""
        chosen = (self.reader == rank) & (self.is_received == received)
        return int((self.high - self.low)[chosen].sum())


def share_reads(
    ranges: Sequence[Ranges],
    *,
    largest_read: int | Int,
    between_nodes: ReadsOfNode | None = None,
) -> SharedReads:
    """Unite the byte ranges of the ranks of a node, and divide the reads evenly by bytes.

    Args:
        ranges: the byte ranges that each rank wants.
        largest_read: the greatest length of a read in bytes, a multiple of the block size: one
            number, or one for each file.
        between_nodes: the reads that the node shares with other nodes, which are divided already.
    """
    edges = [*ranges, between_nodes.ranges] if between_nodes is not None else ranges
    united, wanted = cut_at_edges(edges)
    loads = np.zeros(len(ranges), np.int64)
    if between_nodes is not None:
        is_unshared = wanted[:, :-1].any(axis=1) & ~wanted[:, -1]
        united, wanted = united.select(is_unshared), wanted[is_unshared, :-1]
        is_read_here = between_nodes.source == NOBODY
        sizes = between_nodes.ranges.high - between_nodes.ranges.low
        np.add.at(loads, between_nodes.reader[is_read_here], sizes[is_read_here])
    united, rows = cut_to_length(*join_adjacent(united, wanted), largest_read)
    wanted = wanted[rows]
    reader = _assign_readers(united.high - united.low, wanted, loads)
    nobody = np.full(len(united), NOBODY, np.int64)
    reads = SharedReads(united.file, united.low, united.high, reader, wanted, nobody, nobody)
    return reads if between_nodes is None else _merge_reads(reads, between_nodes, ranges)


def fraction_saved(ranges: Sequence[Ranges], shared: SharedReads) -> float:
    """Return the fraction of bytes that shared reads save, compared with separate reads."""
    alone = sum(each.nbytes for each in ranges)
    return 1 - int((shared.high - shared.low).sum()) / alone if alone else 0.0


def _assign_readers(sizes: Int, wanted: Bool, loads: Int) -> Int:
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


def _merge_reads(reads: SharedReads, between: ReadsOfNode, ranges: Sequence[Ranges]) -> SharedReads:
    """Join the reads of a node alone with the reads that it shares with other nodes, in order."""
    wanted = np.stack([overlaps_any(between.ranges, each) for each in ranges], axis=1)
    file = np.concatenate([reads.file, between.ranges.file])
    low = np.concatenate([reads.low, between.ranges.low])
    order = np.lexsort((low, file))
    return SharedReads(
        file[order],
        low[order],
        np.concatenate([reads.high, between.ranges.high])[order],
        np.concatenate([reads.reader, between.reader])[order],
        np.concatenate([reads.wanted, wanted])[order],
        np.concatenate([reads.source, between.source])[order],
        np.concatenate([reads.target, between.target])[order],
    )
