"""Reads shared by the ranks of one node: what several want is read by one of them, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.plan.load import Spans, longest_reads

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SharedReads:
    """Disjoint reads, in the order in which all ranks take them.

    Read i is `[low[i], high[i])` of file `file[i]`; rank `reader[i]` makes it, and ranks r with
    `wanted[i, r]` use it.
    """

    file: Int
    low: Int
    high: Int
    reader: Int
    wanted: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.file)


def share_reads(spans: Sequence[Spans], *, largest_read: int | Int) -> SharedReads:
    """Unite what each of some ranks would read, and divide it among them by bytes.

    Args:
        spans: of each rank, as `plan_load` made them.
        largest_read: no read is longer, in bytes, a multiple of the block size: one number, or one
            for each file.
    """
    marks = [
        np.stack([np.concatenate([s.file, s.file]), np.concatenate([s.low, s.high])]) for s in spans
    ]
    cuts = np.unique(np.concatenate(marks, axis=1), axis=1)
    file, low, high = cuts[0, :-1], cuts[1, :-1], cuts[1, 1:]
    inside = file == cuts[0, 1:]
    file, low, high = file[inside], low[inside], high[inside]
    wanted = np.stack([_covers(each, file, low) for each in spans], axis=1)
    used = wanted.any(axis=1)
    file, low, high, wanted = file[used], low[used], high[used], wanted[used]
    file, low, high, wanted = _joined(file, low, high, wanted)
    longest = longest_reads(largest_read, file)
    parts = -(-(high - low) // longest)
    rows = np.repeat(np.arange(len(file)), parts)
    k = np.arange(len(rows)) - np.repeat(np.cumsum(parts) - parts, parts)
    start = low[rows] + k * longest[rows]
    stop = np.minimum(start + longest[rows], high[rows])
    return SharedReads(file[rows], start, stop, _readers(stop - start, wanted[rows]), wanted[rows])


def bytes_saved(spans: Sequence[Spans], shared: SharedReads) -> float:
    """Which part of the bytes that all would read alone is not read when they share."""
    alone = sum(int((each.high - each.low).sum()) for each in spans)
    return 1 - int((shared.high - shared.low).sum()) / alone if alone else 0.0


def _covers(spans: Spans, file: Int, low: Int) -> npt.NDArray[np.bool_]:
    """Whether a rank's spans cover the intervals that begin here."""
    if not len(spans):
        return np.zeros(len(file), bool)
    width = int(max(spans.high.max(), low.max(initial=0))) + 1
    at = np.searchsorted(spans.file * width + spans.low, file * width + low, side="right") - 1
    found = np.maximum(at, 0)
    covered: npt.NDArray[np.bool_] = (spans.file[found] == file) & (low < spans.high[found])
    return covered & (at >= 0)


def _joined(
    file: Int, low: Int, high: Int, wanted: npt.NDArray[np.bool_]
) -> tuple[Int, Int, Int, npt.NDArray[np.bool_]]:
    """Neighbouring intervals that the same ranks want, as one."""
    begins = np.ones(len(file), bool)
    same = (file[1:] == file[:-1]) & (low[1:] == high[:-1])
    begins[1:] = ~(same & (wanted[1:] == wanted[:-1]).all(axis=1))
    heads = np.flatnonzero(begins)
    ends = np.concatenate([heads[1:], [len(file)]]) - 1 if len(heads) else heads
    return file[heads], low[heads], high[ends], wanted[heads]


def _readers(sizes: Int, wanted: npt.NDArray[np.bool_]) -> Int:
    """Give each read to that of its users who has the fewest bytes to read so far."""
    readers = np.zeros(len(sizes), np.int64)
    loads = np.zeros(wanted.shape[1])
    alone = wanted.sum(axis=1) == 1
    readers[alone] = wanted[alone].argmax(axis=1)
    np.add.at(loads, readers[alone], sizes[alone])
    for i in np.flatnonzero(~alone).tolist():
        readers[i] = np.where(wanted[i], loads, np.inf).argmin()
        loads[readers[i]] += sizes[i]
    return readers
