"""Byte ranges of files: unite them, cut them at each other's edges, and join them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.layout.columns import Bool, Int, Table, count_up
from shardwise.plan.load import longest_reads


@dataclass(frozen=True, slots=True)
class Ranges(Table):
    """Byte ranges of files, in columns of n rows: disjoint, and sorted by file and start.

    Attributes:
        file: the index of the file, `(n,)`.
        low, high: the byte range in the file, `(n,)`.
    """

    file: Int
    low: Int
    high: Int

    @property
    def nbytes(self) -> int:
        """The number of bytes in all ranges."""
        return int((self.high - self.low).sum())


def unite_ranges(ranges: Sequence[Ranges]) -> Ranges:
    """Return the bytes that are in any of these ranges, in as few ranges as possible."""
    united, _ = cut_at_edges(ranges)
    return join_adjacent(united, np.ones((len(united), 1), bool))[0]


def edges_of(ranges: Sequence[Ranges]) -> tuple[Int, int]:
    """Return all edges of ranges on one axis, sorted, and the length of a file on this axis."""
    width = max((int(each.high.max()) for each in ranges if len(each)), default=0) + 1
    edges = [each.file * width + end for each in ranges for end in (each.low, each.high)]
    return np.unique(np.concatenate([np.zeros(0, np.int64), *edges])), width


def covered_rows(keys: Int, width: int, ranges: Sequence[Ranges]) -> tuple[Int, Int]:
    """Return the index of each interval between edges, and of each list that covers it, sorted."""
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


def cut_at_edges(ranges: Sequence[Ranges]) -> tuple[Ranges, Bool]:
    """Cut ranges at the edges of all ranges. Return the parts, and which `ranges` cover each."""
    keys, width = edges_of(ranges)
    row, holder = covered_rows(keys, width, ranges)
    wanted = np.zeros((max(len(keys) - 1, 0), len(ranges)), bool)
    wanted[row, holder] = True
    used = np.flatnonzero(wanted.any(axis=1))
    low = keys[used]
    united = Ranges(low // width, low % width, low % width + keys[used + 1] - low)
    return united, wanted[used]


def join_adjacent(ranges: Ranges, label: npt.NDArray[np.generic]) -> tuple[Ranges, Int]:
    """Join adjacent ranges with equal rows of `label`; also return the first row of each."""
    begins = np.ones(len(ranges), bool)
    adjacent = (ranges.file[1:] == ranges.file[:-1]) & (ranges.low[1:] == ranges.high[:-1])
    begins[1:] = ~(adjacent & (label[1:] == label[:-1]).all(axis=1))
    heads = np.flatnonzero(begins)
    ends = np.concatenate([heads[1:], [len(ranges)]]) - 1 if len(heads) else heads
    return Ranges(ranges.file[heads], ranges.low[heads], ranges.high[ends]), heads


def cut_to_length(ranges: Ranges, rows: Int, largest_read: int | Int) -> tuple[Ranges, Int]:
    """Cut ranges that are too long for one read, and repeat their `rows`."""
    longest = longest_reads(largest_read, ranges.file)
    parts = -(-(ranges.high - ranges.low) // longest)
    of, k = np.repeat(np.arange(len(ranges)), parts), count_up(parts)
    low = ranges.low[of] + k * longest[of]
    high = np.minimum(low + longest[of], ranges.high[of])
    return Ranges(ranges.file[of], low, high), rows[of]


def overlaps_any(ranges: Ranges, other: Ranges) -> Bool:
    """Return whether each range has bytes in common with any of the other ranges."""
    width = max((int(each.high.max()) for each in (ranges, other) if len(each)), default=0) + 1
    starts, ends = other.file * width + other.low, other.file * width + other.high
    before = np.searchsorted(starts, ranges.file * width + ranges.high, side="left")
    past = np.searchsorted(ends, ranges.file * width + ranges.low, side="right")
    found: Bool = before > past
    return found
