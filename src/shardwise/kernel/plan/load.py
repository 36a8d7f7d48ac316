"""Plan a load: find which pieces hold the wanted boxes, and merge their bytes into spans.

Example: a rank needs column 1 of a weight of shape `(6, 4)`, the box `[0:6,1:2]`. It overlaps the
pieces `[0:2,0:4]`, `[2:4,0:4]` and `[4:6,0:4]`, which lie in three files, so there are three spans.
Each is the data of a whole file, 32 bytes, because checksums belong to blocks of 64 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from shardwise.kernel.boxes import find_overlaps
from shardwise.kernel.boxes.box import IntArray, Table, count_up
from shardwise.kernel.boxes.grids import find_in_grids
from shardwise.kernel.manifest.checksums import BLOCK
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.pieces import Pieces


@dataclass(frozen=True, slots=True)
class Transfers(Table):
    """Boxes to copy from pieces to fragments, in columns of n rows.

    Attributes:
        run: the index of the run that has the piece, `(n,)`.
        fragment: the index of the wanted fragment, `(n,)`.
        offset, shape: the box in the global tensor, `(n, D)`.
        file: the index of the file, `(n,)`.
        low, high: the range of the file that contains the bytes of the box, `(n,)`.
    """

    run: IntArray
    fragment: IntArray
    offset: IntArray
    shape: IntArray
    file: IntArray
    low: IntArray
    high: IntArray


@dataclass(frozen=True, slots=True)
class Ranges(Table):
    """Byte ranges of files, in columns of n rows: disjoint, and sorted by file and start.

    Attributes:
        file: the index of the file, `(n,)`.
        low, high: the byte range in the file, `(n,)`.
    """

    file: IntArray
    low: IntArray
    high: IntArray

    @property
    def sizes(self) -> IntArray:
        """The number of bytes in each range."""
        return self.high - self.low

    @property
    def nbytes(self) -> int:
        """The number of bytes in all ranges."""
        return int(self.sizes.sum())


def plan_load(
    layout: Layout,
    wanted: tuple[IntArray, IntArray, IntArray],
    *,
    largest_read: int | IntArray,
    largest_gap: int = 0,
    block: int = BLOCK,
) -> tuple[Transfers, Ranges]:
    """Intersect wanted boxes with pieces, and choose what to read.

    Args:
        layout: the checkpoint.
        wanted: columns `(tensor, offset, shape)` of the wanted fragments, of shapes `(n,)`,
            `(n, D)` and `(n, D)`. `tensor` has indices of stored tensors, as `Layout.runs.tensor`.
        largest_read: the greatest length of a span in bytes: one number, or one for each file.
        largest_gap: a span may include gaps of at most this many bytes between two wanted blocks.
        block: the number of bytes that one checksum covers.

    Returns:
        The boxes to copy, sorted by file and start; and the *spans*: byte ranges of whole checksum
        blocks, each of which one request reads.
    """
    fragment, run, part_of = _find_pieces(layout, wanted)
    offset = np.maximum(wanted[1][fragment], part_of.offset)
    stop = np.minimum((wanted[1] + wanted[2])[fragment], part_of.offset + part_of.shape)
    shape = stop - offset
    itemsize = layout.itemsizes[part_of.tensor]
    elements = ((offset - part_of.offset) * part_of.stride).sum(axis=1)
    extent = ((shape - 1) * part_of.stride).sum(axis=1) + 1
    low = layout.file_bounds[part_of.file, 0] + part_of.start + elements * itemsize
    high = low + extent * itemsize
    transfers = Transfers(run, fragment, offset, shape, part_of.file, low, high)
    transfers = _cut_at_gaps(layout, transfers, max(block, largest_gap))
    transfers = transfers.select(np.lexsort((transfers.low, transfers.file)))
    limits = np.broadcast_to(largest_read, len(layout.files))
    gap = largest_gap // block
    return transfers, _choose_spans(transfers, layout.file_bounds[:, 2], limits, gap, block)


def _find_pieces(
    layout: Layout, wanted: tuple[IntArray, IntArray, IntArray]
) -> tuple[IntArray, IntArray, Pieces]:
    """Return the pieces that overlap wanted boxes: the box, the run, and the piece of each overlap.

    First find the runs whose pieces may overlap a box, then, along their axes, the pieces.
    """
    runs, (low, high) = layout.runs, layout.run_bounds
    box, run, *_ = find_overlaps(wanted, (runs.tensor, low, high - low))
    if not runs.count.shape[1]:
        return box, run, runs.select(run).expand()
    _, offset, shape = wanted
    table = runs.offset, runs.shape, runs.count, runs.offset_step
    found, k = find_in_grids(run, offset[box], (offset + shape)[box], table)
    return box[found], run[found], runs.at(run[found], k)


def _cut_at_gaps(layout: Layout, transfers: Transfers, gap: int) -> Transfers:
    """Cut transfers along a dimension if at least `gap` unneeded bytes lie between two parts."""
    runs = layout.runs
    for dim in range(transfers.shape.shape[1]):
        itemsize = layout.itemsizes[runs.tensor[transfers.run]]
        stride = runs.stride[transfers.run, dim] * itemsize
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
) -> Ranges:
    """Unite the blocks that transfers touch, and cut the union into spans.

    Args:
        transfers: sorted by file and start.
        read_end, largest_read: for each file, the end of the bytes to read, and the greatest length
            of a span, in bytes.
        gap: a span may include up to this many unneeded blocks between needed ones.
    """
    file, low, high = transfers.file, transfers.low // block, -(-transfers.high // block)
    if not len(file):
        return Ranges.empty()
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
    low = (span_low - file * width) * block
    return Ranges(file, low, np.minimum((span_high - file * width) * block, read_end[file]))


def assign_transfers(transfers: Transfers, ranges: Ranges) -> tuple[IntArray, IntArray]:
    """Find the transfers that need bytes of each range. A transfer may need several ranges.

    Args:
        transfers: the transfers, sorted by file and start.
        ranges: the byte ranges.

    Returns:
        Two columns `first` and `rows`. Range i serves `rows[first[i]:first[i + 1]]`.
    """
    file, low, high = ranges.file, ranges.low, ranges.high
    # Give the bytes of all files consecutive numbers, so that one search finds file and offset.
    width = int(max(high.max(initial=0), transfers.high.max(initial=0))) + 1
    base = transfers.file * width
    from_range = np.searchsorted(file * width + high, base + transfers.low, side="right")
    to_range = np.searchsorted(file * width + low, base + transfers.high, side="left")
    served = np.maximum(to_range - from_range, 0)
    transfer = np.repeat(np.arange(len(transfers)), served)
    of_range = from_range[transfer] + count_up(served)
    order = np.argsort(of_range, kind="stable")
    first = np.searchsorted(of_range[order], np.arange(len(file) + 1))
    return first, transfer[order]
