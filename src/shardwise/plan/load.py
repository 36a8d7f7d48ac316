"""Plan a load: find which pieces hold the wanted boxes, and merge their bytes into spans."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardwise.boxes import find_overlaps
from shardwise.boxes.table import IntArray, Table, count_up
from shardwise.manifest.checksums import BLOCK
from shardwise.manifest.layout import Layout


@dataclass(frozen=True, slots=True)
class Transfers(Table):
    """Boxes to copy from pieces to fragments, in columns of n rows.

    Attributes:
        piece: the index of the piece, `(n,)`.
        fragment: the index of the wanted fragment, `(n,)`.
        offset, shape: the box in the global tensor, `(n, D)`.
        file: the index of the file, `(n,)`.
        low, high: the range of the file that contains the bytes of the box, `(n,)`.
    """

    piece: IntArray
    fragment: IntArray
    offset: IntArray
    shape: IntArray
    file: IntArray
    low: IntArray
    high: IntArray


@dataclass(frozen=True, slots=True)
class Spans:
    """Byte ranges, each read by one request, as columns of n rows.

    Spans consist of whole checksum blocks, are disjoint, and are sorted by file and start. A
    transfer may need several spans.

    Attributes:
        file: the index of the file, `(n,)`.
        low, high: the byte range in the file, `(n,)`.
        first, rows: the transfers with bytes in span i are `rows[first[i]:first[i + 1]]`.
    """

    file: IntArray
    low: IntArray
    high: IntArray
    first: IntArray
    rows: IntArray


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The reads and copies of one rank.

    Attributes:
        transfers: the boxes to copy.
        spans: the byte ranges to read.
        bytes_needed: the size of the wanted elements in bytes.
    """

    transfers: Transfers
    spans: Spans
    bytes_needed: int


def plan_load(
    layout: Layout,
    wanted: tuple[IntArray, IntArray, IntArray],
    *,
    largest_read: int | IntArray,
    largest_gap: int = 0,
    block: int = BLOCK,
) -> LoadPlan:
    """Intersect wanted boxes with pieces, and choose what to read.

    Args:
        layout: the checkpoint.
        wanted: columns `(tensor, offset, shape)` of the wanted fragments, of shapes `(n,)`,
            `(n, D)` and `(n, D)`. `tensor` has indices of stored tensors, as `Pieces.tensor`.
        largest_read: the greatest length of a span in bytes: one number, or one for each file.
        largest_gap: a span may include gaps of at most this many bytes between two wanted blocks.
        block: the number of bytes that one checksum covers.
    """
    pieces = layout.pieces
    found = find_overlaps(wanted, (pieces.tensor, pieces.offset, pieces.shape))
    part_of = pieces.select(found.right)
    itemsize = layout.itemsizes[part_of.tensor]
    elements = ((found.offset - part_of.offset) * part_of.stride).sum(axis=1)
    extent = ((found.shape - 1) * part_of.stride).sum(axis=1) + 1
    low = part_of.start + elements * itemsize
    high = low + extent * itemsize
    transfers = Transfers(
        found.right, found.left, found.offset, found.shape, part_of.file, low, high
    )
    bytes_needed = int((found.shape.prod(axis=1) * itemsize).sum())
    transfers = _cut_at_gaps(layout, transfers, max(block, largest_gap))
    transfers = transfers.select(np.lexsort((transfers.low, transfers.file)))
    limits = np.broadcast_to(largest_read, len(layout.files))
    gap = largest_gap // block
    spans = _choose_spans(transfers, layout.file_bounds[:, 2], limits, gap, block)
    return LoadPlan(transfers, spans, bytes_needed)


def _cut_at_gaps(layout: Layout, transfers: Transfers, gap: int) -> Transfers:
    """Cut transfers along a dimension if at least `gap` unneeded bytes lie between two parts."""
    pieces = layout.pieces
    for dim in range(transfers.shape.shape[1]):
        itemsize = layout.itemsizes[pieces.tensor[transfers.piece]]
        stride = pieces.stride[transfers.piece, dim] * itemsize
        count = transfers.shape[:, dim]
        extent = (transfers.high - transfers.low) - (count - 1) * stride
        apart = (count > 1) & (stride - extent >= gap)
        if apart.any():
            cut = _cut_along(transfers.select(apart), dim, stride[apart], extent[apart])
            transfers = Transfers.join([transfers.select(~apart), cut])
    return transfers


def _cut_along(transfers: Transfers, dim: int, stride: IntArray, extent: IntArray) -> Transfers:
    count = transfers.shape[:, dim]
    rows, k = np.repeat(np.arange(len(count)), count), count_up(count)
    single = transfers.select(rows)
    offset, shape = single.offset.copy(), single.shape.copy()
    offset[:, dim] += k
    shape[:, dim] = 1
    low = single.low + k * stride[rows]
    return replace(single, offset=offset, shape=shape, low=low, high=low + extent[rows])


def _choose_spans(
    transfers: Transfers, read_end: IntArray, largest_read: IntArray, gap: int, block: int
) -> Spans:
    """Unite the blocks that transfers touch, and cut the union into spans.

    Args:
        transfers: sorted by file and start.
        read_end, largest_read: for each file, the end of the bytes to read, and the greatest length
            of a span, in bytes.
        gap: a span may include up to this many unneeded blocks between needed ones.
    """
    file, low, high = transfers.file, transfers.low // block, -(-transfers.high // block)
    if not len(file):
        none = np.zeros(0, np.int64)
        return Spans(none, none, none, np.zeros(1, np.int64), none)
    # Give the blocks of all files consecutive numbers, with a gap after each file. A running
    # maximum of the block ends then shows where a sequence of needed blocks ends.
    width = int(high.max()) + 2 + gap
    a, b = file * width + low, file * width + high
    reach = np.maximum.accumulate(b)
    begins = np.concatenate([[True], a[1:] > reach[:-1] + gap])
    heads = np.flatnonzero(begins)
    first, last = a[heads], reach[np.concatenate([heads[1:], [len(a)]]) - 1]
    steps = np.maximum(largest_read[first // width] // block, 1)
    cuts = -(-(last - first) // steps)
    rows = np.repeat(np.arange(len(heads)), cuts)
    span_low = first[rows] + count_up(cuts) * steps[rows]
    span_high = np.minimum(span_low + steps[rows], last[rows])
    file = span_low // width
    spans = (
        file,
        (span_low - file * width) * block,
        np.minimum((span_high - file * width) * block, read_end[file]),
    )
    return assign_transfers(transfers, *spans)


def assign_transfers(transfers: Transfers, file: IntArray, low: IntArray, high: IntArray) -> Spans:
    """Return spans, each with the transfers that need its bytes.

    Args:
        transfers: the transfers, sorted by file and start.
        file, low, high: columns of the spans, which are disjoint, and sorted by file and start.
    """
    if not len(transfers):
        return Spans(file, low, high, np.zeros(len(file) + 1, np.int64), np.zeros(0, np.int64))
    # Give the bytes of all files consecutive numbers, so that one search finds file and offset.
    width = int(max(high.max(initial=0), transfers.high.max())) + 1
    base = transfers.file * width
    from_span = np.searchsorted(file * width + high, base + transfers.low, side="right")
    to_span = np.searchsorted(file * width + low, base + transfers.high, side="left")
    served = np.maximum(to_span - from_span, 0)
    transfer = np.repeat(np.arange(len(transfers)), served)
    span = from_span[transfer] + count_up(served)
    order = np.argsort(span, kind="stable")
    first = np.searchsorted(span[order], np.arange(len(file) + 1))
    return Spans(file, low, high, first, transfer[order])
