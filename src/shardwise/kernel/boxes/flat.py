"""Convert flattened ranges (shards of FSDP1 and ZeRO) and byte ranges of arrays to boxes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from shardwise.kernel.boxes.box import Box, IntArray
from shardwise.kernel.errors import LayoutError


@dataclass(frozen=True, slots=True)
class RangeBoxes:
    """Boxes of ranges, in columns of n rows.

    Attributes:
        range_index: the index of the range that contains each box, `(n,)`.
        first: the first element of each box, counted from the start of the tensor, `(n,)`.
        offset, shape: the boxes, `(n, D)`.
    """

    range_index: IntArray
    first: IntArray
    offset: IntArray
    shape: IntArray


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Return elements `start:stop` of a row-major tensor as boxes, in order.

    There are at most `2 * ndim - 1` boxes. Each box is contiguous in row-major order, and the boxes
    follow each other without gaps. ByteCheckpoint (arXiv 2407.20143) decomposes irregular tensors
    in the same way, which needs no communication. For many ranges, `boxes_of_ranges` is faster; for
    one, this function is.

    >>> [str(box) for box in boxes_of_range((3, 4), 2, 9)]
    ['[0:1,2:4]', '[1:2,0:4]', '[2:3,0:1]']

    Raises:
        LayoutError: the range is not inside the tensor.
    """
    size = math.prod(shape)
    if not 0 <= start <= stop <= size:
        raise LayoutError(
            f"the range {start}:{stop} is not inside of a tensor of shape {list(shape)}"
        )
    if start == stop:
        return []
    if stop - start == size:
        return [Box((0,) * len(shape), shape)]
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return boxes_within(shape, strides, 1, start, stop)


def boxes_of_ranges(shapes: IntArray, starts: IntArray, stops: IntArray) -> RangeBoxes:
    """Return the boxes of many ranges. Empty ranges have no boxes.

    Args:
        shapes: the shape of each range's tensor, `(n, D)`, padded on the right with 1.
        starts, stops: the first element of each range, and the end of the range, `(n,)`.

    Returns:
        The boxes, ordered by range, then by element.

    Raises:
        LayoutError: a range is not inside its tensor.
    """
    sizes = shapes.prod(axis=1, dtype=np.int64)
    if not ((starts >= 0) & (starts <= stops) & (stops <= sizes)).all():
        row = int(np.argmin((starts >= 0) & (starts <= stops) & (stops <= sizes)))
        raise LayoutError(
            f"the range {int(starts[row])}:{int(stops[row])} is not inside of its tensor, which "
            f"has shape {shapes[row].tolist()}"
        )
    rows = np.flatnonzero(starts < stops)
    shape, position, stop = shapes[rows], starts[rows].copy(), stops[rows]
    row_sizes = np.ones((len(rows), shape.shape[1] + 1), np.int64)
    row_sizes[:, :-1] = np.cumprod(shape[:, ::-1], axis=1)[:, ::-1]
    # Elements 2:9 of shape (3, 4): 2:4 finish a row, 4:8 are whole rows, and 8:9 begin a row. In
    # general, rows of more and more dimensions follow each other, then rows of fewer and fewer.
    dims = shape.shape[1]
    steps = [(d, True) for d in range(dims - 1, 0, -1)] + [(d, False) for d in range(dims)]
    found = []
    for dim, grows in steps:
        row_size, parent_size = row_sizes[:, dim + 1], row_sizes[:, dim]
        end = stop - stop % row_size
        if grows:
            end = np.minimum(end, -(-position // parent_size) * parent_size)
        advances = np.flatnonzero((position % row_size == 0) & (end > position))
        found.append((advances, position[advances], end[advances], np.full(len(advances), dim)))
        position[advances] = end[advances]
    if dims == 0:
        found.append((np.arange(len(rows)), position, stop, np.zeros(len(rows), np.int64)))
    range_index, first, end, dims_of = (
        np.concatenate(column) for column in zip(*found, strict=True)
    )
    order = np.lexsort((first, range_index))
    range_index, first, end = range_index[order], first[order], end[order]
    boxes = _boxes_of_elements(
        shape[range_index], row_sizes[range_index], first, end, dims_of[order]
    )
    return RangeBoxes(rows[range_index], first, *boxes)


def _boxes_of_elements(
    shape: IntArray, row_sizes: IntArray, first: IntArray, end: IntArray, dim: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the box of each range `first:end`.

    The range covers whole rows of the dimensions after `dim`, so it is one box.
    """
    is_inner_dim = np.arange(shape.shape[1]) > dim[:, None]
    is_dim = np.arange(shape.shape[1]) == dim[:, None]
    offset = np.where(is_inner_dim, 0, first[:, None] // row_sizes[:, 1:] % np.maximum(shape, 1))
    length = (end - first)[:, None] // row_sizes[:, 1:]
    return offset, np.where(is_inner_dim, shape, np.where(is_dim, length, 1))


def boxes_within(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, low: int, high: int
) -> list[Box]:
    """Return the boxes of those elements of an array whose bytes all lie in `low:high`.

    Args:
        shape: the shape of the array.
        strides: the strides of the array, in bytes. They are nested: one step along a dimension
            passes all elements along the dimensions with smaller strides.
        itemsize: the size of an element, in bytes.
        low, high: the byte range, relative to the first element.

    >>> [str(box) for box in boxes_within((3, 4), (4, 1), 1, 2, 9)]
    ['[0:1,2:4]', '[1:2,0:4]', '[2:3,0:1]']
    """
    order = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: -strides[d])
    found: list[Box] = []

    def add(ranges: dict[int, tuple[int, int]]) -> None:
        parts = [ranges.get(dim, (0, n)) for dim, n in enumerate(shape)]
        found.append(Box(tuple(o for o, _ in parts), tuple(n for _, n in parts)))

    def search(depth: int, base: int, outer: dict[int, tuple[int, int]]) -> None:
        rest = order[depth:]
        # The elements with these outer indices lie in the bytes base:base + extent.
        extent = itemsize + sum((shape[dim] - 1) * strides[dim] for dim in rest)
        if base >= high or base + extent <= low:
            return
        if low <= base and base + extent <= high:
            add(outer)
        elif rest:
            dim, count, step = rest[0], shape[rest[0]], strides[rest[0]]
            row_extent = extent - (count - 1) * step
            # The rows first:last along dim lie entirely in low:high. Their neighbours may lie
            # partly in it.
            first = min(max(0, -(-(low - base) // step)), count)
            last = max(min(count, (high - row_extent - base) // step + 1), first)
            if first:
                search(depth + 1, base + (first - 1) * step, {**outer, dim: (first - 1, 1)})
            if first < last:
                add({**outer, dim: (first, last - first)})
            if last < count:
                search(depth + 1, base + last * step, {**outer, dim: (last, 1)})

    search(0, 0, {})
    return found
