"""From wanted boxes and a manifest's pieces to the bytes to read, each once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from shardwise.layout import find_overlaps
from shardwise.manifest.checksums import BLOCK
from shardwise.manifest.table import Pieces

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Transfers:
    """Boxes to copy out of files, in columns.

    Row i copies the box `offset[i]`, `shape[i]` (global coordinates) of piece `piece[i]` into
    wanted fragment `fragment[i]`; its bytes lie in `[low[i], high[i])` of file `file[i]`.
    """

    piece: Int
    fragment: Int
    offset: Int
    shape: Int
    file: Int
    low: Int
    high: Int

    def __len__(self) -> int:
        return len(self.piece)

    def take(self, rows: Int) -> Transfers:
        """Return some of the rows."""
        return Transfers(
            self.piece[rows],
            self.fragment[rows],
            self.offset[rows],
            self.shape[rows],
            self.file[rows],
            self.low[rows],
            self.high[rows],
        )


@dataclass(frozen=True, slots=True)
class Spans:
    """Byte ranges to read, each in one piece: `[low[i], high[i])` of file `file[i]`.

    They are whole checksum blocks, disjoint, and ordered. Span i serves the transfers
    `rows[first[i]:first[i + 1]]`; a transfer may need several spans.
    """

    file: Int
    low: Int
    high: Int
    first: Int
    rows: Int

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What one rank reads, and where it copies it; `bytes_needed` counts the wanted elements."""

    transfers: Transfers
    spans: Spans
    bytes_needed: int

    @property
    def bytes_read(self) -> int:
        """The bytes that are read from files."""
        return int((self.spans.high - self.spans.low).sum())


@dataclass(frozen=True, slots=True)
class Source:
    """A manifest's pieces, and where their bytes are.

    `stride` is by piece, `(n, D)`, in elements: in files of our own, that of row-major boxes.
    `itemsize` is by tensor; `data_at` and `covered` (the end of what may be read) by file.
    """

    pieces: Pieces
    stride: Int
    itemsize: Int
    data_at: Int
    covered: Int


def plan_load(
    source: Source, wanted: tuple[Int, Int, Int], *, largest_read: int | Int, block: int = BLOCK
) -> LoadPlan:
    """Intersect wanted boxes with pieces, and choose what to read.

    Args:
        source: where the pieces lie.
        wanted: columns `(tensor, offset, shape)` of the wanted fragments; `tensor` counts as the
            manifest does.
        largest_read: no span is longer, in bytes: one number, or one for each file.
        block: what one checksum covers, in bytes.
    """
    pieces = source.pieces
    found = find_overlaps(wanted, (pieces.tensor, pieces.offset, pieces.shape))
    transfers = _locate(source, found.right, found.left, found.offset, found.shape)
    needed = found.shape.prod(axis=1) * source.itemsize[pieces.tensor[found.right]]
    transfers = _without_gaps(source, transfers, block)
    order = np.lexsort((transfers.low, transfers.file))
    transfers = transfers.take(order)
    spans = _choose_spans(transfers, source.covered, largest_read, block)
    return LoadPlan(transfers, spans, int(needed.sum()))


def _locate(source: Source, piece: Int, fragment: Int, offset: Int, shape: Int) -> Transfers:
    pieces = source.pieces
    itemsize = source.itemsize[pieces.tensor[piece]]
    stride = source.stride[piece]
    within = offset - pieces.offset[piece]
    start = source.data_at[pieces.file[piece]] + pieces.start[piece]
    low = start + (within * stride).sum(axis=1) * itemsize
    high = start + (((within + shape - 1) * stride).sum(axis=1) + 1) * itemsize
    return Transfers(piece, fragment, offset, shape, pieces.file[piece], low, high)


def _without_gaps(source: Source, transfers: Transfers, block: int) -> Transfers:
    """Cut transfers whose rows are so far apart that whole blocks between them are not needed."""
    pieces = source.pieces
    for dim in range(transfers.shape.shape[1]):
        stride = source.stride[transfers.piece, dim]
        itemsize = source.itemsize[pieces.tensor[transfers.piece]]
        count = transfers.shape[:, dim]
        extent = (transfers.high - transfers.low) - (count - 1) * stride * itemsize
        apart = (count > 1) & (stride * itemsize - extent >= block)
        if not apart.any():
            continue
        near, far = np.flatnonzero(~apart), np.flatnonzero(apart)
        cut = _single_rows(transfers.take(far), dim, (stride * itemsize)[far], extent[far])
        kept = transfers.take(near)
        transfers = Transfers(
            *(
                np.concatenate([getattr(kept, name), getattr(cut, name)])
                for name in Transfers.__slots__
            )
        )
    return transfers


def _single_rows(transfers: Transfers, dim: int, stride: Int, extent: Int) -> Transfers:
    count = transfers.shape[:, dim]
    rows = np.repeat(np.arange(len(count)), count)
    k = _count_up(count)
    single = transfers.take(rows)
    offset, shape = single.offset.copy(), single.shape.copy()
    offset[:, dim] += k
    shape[:, dim] = 1
    low = single.low + k * stride[rows]
    return replace(single, offset=offset, shape=shape, low=low, high=low + extent[rows])


def _choose_spans(transfers: Transfers, covered: Int, largest_read: int | Int, block: int) -> Spans:
    """Unite the blocks that transfers touch, and cut the union; transfers are in file order."""
    file, low, high = transfers.file, transfers.low // block, -(-transfers.high // block)
    if not len(file):
        none = np.zeros(0, np.int64)
        return Spans(none, none, none, np.zeros(1, np.int64), none)
    # Blocks of all files on one axis, a gap between files: a running maximum then finds the ends.
    width = int(high.max()) + 2
    a, b = file * width + low, file * width + high
    reach = np.maximum.accumulate(b)
    begins = np.concatenate([[True], a[1:] > reach[:-1]])
    heads = np.flatnonzero(begins)
    first, last = a[heads], reach[np.concatenate([heads[1:], [len(a)]]) - 1]
    steps = np.maximum(longest_reads(largest_read, first // width) // block, 1)
    cuts = -(-(last - first) // steps)
    rows = np.repeat(np.arange(len(heads)), cuts)
    span_low = first[rows] + _count_up(cuts) * steps[rows]
    span_high = np.minimum(span_low + steps[rows], last[rows])
    file = span_low // width
    spans = (
        file,
        (span_low - file * width) * block,
        np.minimum((span_high - file * width) * block, covered[file]),
    )
    return assign_transfers(transfers, *spans)


def longest_reads(largest_read: int | Int, file: Int) -> Int:
    """Return the longest read of each of these files, given one number or one for each file."""
    given = np.asarray(largest_read, np.int64)
    return given[file] if given.ndim else np.full(len(file), given)


def assign_transfers(transfers: Transfers, file: Int, low: Int, high: Int) -> Spans:
    """Return spans with the transfers that each of them serves.

    Args:
        transfers: ordered by file and start.
        file, low, high: of the spans, disjoint and ordered by file and start.
    """
    if not len(transfers):
        return Spans(file, low, high, np.zeros(len(file) + 1, np.int64), np.zeros(0, np.int64))
    # Bytes of all files on one axis, so that one search finds both file and position.
    width = int(max(high.max(initial=0), transfers.high.max())) + 1
    base = transfers.file * width
    from_span = np.searchsorted(file * width + high, base + transfers.low, side="right")
    to_span = np.searchsorted(file * width + low, base + transfers.high, side="left")
    served = np.maximum(to_span - from_span, 0)
    transfer = np.repeat(np.arange(len(transfers)), served)
    span = from_span[transfer] + _count_up(served)
    order = np.argsort(span, kind="stable")
    first = np.searchsorted(span[order], np.arange(len(file) + 1))
    return Spans(file, low, high, first, transfer[order])


def _count_up(counts: Int) -> Int:
    """Return 0, 1, … for each count, one after another."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def wanted_columns(
    tensor: Sequence[int], offset: Int, shape: Int, dims: int
) -> tuple[Int, Int, Int]:
    """Return columns of wanted boxes, cut or padded to the dimensions of a manifest's pieces."""
    missing = dims - offset.shape[1]
    if missing > 0:
        offset = np.pad(offset, ((0, 0), (0, missing)))
        shape = np.pad(shape, ((0, 0), (0, missing)), constant_values=1)
    return np.asarray(tensor, np.int64), offset[:, :dims], shape[:, :dims]


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
    """Return the fraction of bytes that sharing saves, of those that all ranks would read alone."""
    alone = sum(int((each.high - each.low).sum()) for each in spans)
    return 1 - int((shared.high - shared.low).sum()) / alone if alone else 0.0


def _covers(spans: Spans, file: Int, low: Int) -> npt.NDArray[np.bool_]:
    """Return whether a rank's spans cover the intervals that begin here."""
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
    """Join neighbouring intervals that the same ranks want."""
    begins = np.ones(len(file), bool)
    same = (file[1:] == file[:-1]) & (low[1:] == high[:-1])
    begins[1:] = ~(same & (wanted[1:] == wanted[:-1]).all(axis=1))
    heads = np.flatnonzero(begins)
    ends = np.concatenate([heads[1:], [len(file)]]) - 1 if len(heads) else heads
    return file[heads], low[heads], high[ends], wanted[heads]


def _readers(sizes: Int, wanted: npt.NDArray[np.bool_]) -> Int:
    """Assign each read to the rank among its users with the fewest bytes so far."""
    readers = np.zeros(len(sizes), np.int64)
    loads = np.zeros(wanted.shape[1])
    alone = wanted.sum(axis=1) == 1
    readers[alone] = wanted[alone].argmax(axis=1)
    np.add.at(loads, readers[alone], sizes[alone])
    for i in np.flatnonzero(~alone).tolist():
        readers[i] = np.where(wanted[i], loads, np.inf).argmin()
        loads[readers[i]] += sizes[i]
    return readers
