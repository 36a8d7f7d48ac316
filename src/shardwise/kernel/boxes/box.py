"""Boxes: axis-aligned parts of global tensors, one by one and in tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.kernel.errors import FormatError, LayoutError

Key = TypeVar("Key")
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Rows = TypeVar("Rows", bound="Table")

FILL = {"offset": 0, "shape": 1, "stride": 0, "offset_step": 0}
"""The columns `(n, D)`, and the number that they are padded with."""
MOST_INTEGERS = 2**25
"""The largest number of integers in a column of offsets or shapes: rows times dimensions."""
PAIRS_AT_ONCE = 1 << 20
_LARGEST_KEY = 2**62


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """An axis-aligned part of a global tensor.

    `Box((), ())` is the only box of a 0-d tensor, and contains one element.

    Attributes:
        offset, shape: the offset and shape of the part, in elements.

    Raises:
        LayoutError: `offset` and `shape` differ in length, or have negative numbers.

    >>> Box((2, 0), (3, 4)).intersect(Box((0, 1), (4, 2)))
    Box(offset=(2, 1), shape=(2, 2))
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise LayoutError(
                f"Box: offset {self.offset} and shape {self.shape} differ in length: pass one "
                "number for each dimension"
            )
        if min(self.offset, default=0) < 0 or min(self.shape, default=0) < 0:
            raise LayoutError(
                f"Box: offset {self.offset} and shape {self.shape} must not have negative numbers: "
                "pass numbers of at least 0"
            )

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The end of the box in every dimension, exclusive."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common part of two boxes; None if they have no common element."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(a, b) - o for a, b, o in zip(self.stop, other.stop, offset, strict=True))
        return Box(offset, shape) if all(n > 0 for n in shape) else None

    def contains(self, other: Box) -> bool:
        """Return whether `other` lies inside of this box."""
        return all(
            a <= c and d <= b
            for a, b, c, d in zip(self.offset, self.stop, other.offset, other.stop, strict=True)
        )

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """Return the same box with the offset counted from `origin`."""
        return Box(tuple(o - p for o, p in zip(self.offset, origin, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the index of this box in an array of the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def __str__(self) -> str:
        return (
            "["
            + ",".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape, strict=True))
            + "]"
        )


def split_into_boxes(shape: tuple[int, ...], max_size: int) -> Iterator[Box]:
    """Yield boxes of at most `max_size` elements that cover a tensor, in row-major order."""
    if math.prod(shape) <= max_size:
        if 0 not in shape:
            yield Box.whole(shape)
        return
    row = math.prod(shape[1:])
    rows = max(1, max_size // row)
    for low in range(0, shape[0], rows):
        count = min(rows, shape[0] - low)
        for below in split_into_boxes(shape[1:], max(max_size // count, 1)):
            yield Box((low, *below.offset), (count, *below.shape))


def batch_boxes(
    arrays: Iterable[tuple[Key, Box, int]], max_bytes: int
) -> Iterator[list[tuple[Key, Box]]]:
    """Cut boxes into smaller ones, and yield lists of these of at most `max_bytes` bytes in all.

    Args:
        arrays: a key, the box to cut, and the size of an element in bytes.
        max_bytes: the limit on the size of a list. A list has at least one box.
    """
    batch: list[tuple[Key, Box]] = []
    remaining = max_bytes
    for key, whole, itemsize in arrays:
        for part in split_into_boxes(whole.shape, max(1, max_bytes // itemsize)):
            nbytes = part.size * itemsize
            if batch and nbytes > remaining:
                yield batch
                batch, remaining = [], max_bytes
            offset = tuple(a + b for a, b in zip(whole.offset, part.offset, strict=True))
            batch.append((key, Box(offset, part.shape)))
            remaining -= nbytes
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class Table:
    """A table of n rows. Each field is a column: an array `(n,)` or, if in `FILL`, `(n, D)`.

    Rows of fewer than D dimensions are padded on the right: a shape with 1, an offset or stride
    with 0.
    """

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    @classmethod
    def empty(cls: type[Rows]) -> Rows:
        """Return a table without rows, of 0 dimensions."""
        columns = []
        for each in fields(cls):
            shape = (0, 0) if each.name in FILL else (0,)
            columns.append(np.zeros(shape, np.int64))
        return cls(*columns)

    @classmethod
    def join(cls: type[Rows], tables: Sequence[Rows], dims: int = 0) -> Rows:
        """Return the rows of all tables, padded to `dims` dimensions or the widest table."""
        columns = []
        for each in fields(cls):
            parts = [getattr(table, each.name) for table in tables or [cls.empty()]]
            if each.name in FILL:
                dims = max([dims, *(part.shape[1] for part in parts)])
                parts = [pad_columns(part, dims, FILL[each.name]) for part in parts]
            columns.append(np.concatenate(parts) if len(parts) > 1 else parts[0])
        return cls(*columns)

    def select(self: Rows, rows: IntArray | BoolArray) -> Rows:
        """Return some of the rows, given by their indices or by a mask."""
        return type(self)(*(getattr(self, each.name)[rows] for each in fields(self)))

    def padded(self: Rows, dims: int) -> Rows:
        """Return the table with at least `dims` columns in each array `(n, D)`."""
        return self.join([self], dims)


def check_table_size(rows: int, dims: int) -> None:
    """Refuse a table that would take gigabytes, before it is allocated.

    Each row has as many columns as the largest number of dimensions of any tensor.

    Raises:
        FormatError: rows times dimensions exceed `MOST_INTEGERS`.
    """
    if rows * dims > MOST_INTEGERS:
        raise FormatError(
            f"the checkpoint has {rows:,} pieces or tensors of up to {dims} dimensions, but at "
            f"most {MOST_INTEGERS // dims:,} are supported: save from fewer ranks, or as several "
            "checkpoints"
        )


def padded_rows(rows: Iterable[tuple[int, ...]], dims: int, fill: int) -> IntArray:
    """Return tuples of up to `dims` integers as an array `(n, dims)`, padded on the right.

    Raises:
        FormatError: the array would be too large; see `check_table_size`.
    """
    listed = list(rows)
    check_table_size(len(listed), dims)
    padded = [row + (fill,) * (dims - len(row)) for row in listed]
    return np.array(padded, np.int64).reshape(len(padded), dims)


def pad_columns(columns: IntArray, dims: int, fill: int) -> IntArray:
    """Return an array `(n, D)` padded on the right to `(n, dims)`.

    Raises:
        FormatError: the array would be too large; see `check_table_size`.
    """
    check_table_size(len(columns), dims)
    missing = dims - columns.shape[1]
    return np.pad(columns, ((0, 0), (0, missing)), constant_values=fill) if missing else columns


def count_up(counts: IntArray) -> IntArray:
    """Return 0, 1, …, count - 1 for each count, one after another.

    >>> count_up(np.array([2, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def distinct_rows(table: IntArray) -> tuple[IntArray, IntArray]:
    """Find the distinct rows of a table, `(n, k)`, like `np.unique`, but faster if they are few.

    Returns:
        The first index of each distinct row, in the order of the rows' values; and for each row,
        its position in this list.

    >>> first, kind = distinct_rows(np.array([[2, 7], [2, 7], [1, 9], [2, 7]]))
    >>> first.tolist(), kind.tolist()
    ([2, 0], [1, 1, 0, 1])
    """
    key, size = np.zeros(len(table), np.int64), 1
    if len(table) <= 1:
        return key, key
    for column in table.T:
        low = int(column.min())
        span = int(column.max()) - low + 1
        if span == 1:
            continue
        if size * span > _LARGEST_KEY:  # each of both then has at most n values
            (key, size), (column, span), low = (
                _renumber(key, size),
                _renumber(column - low, span),
                0,
            )
        key, size = key * span + (column - low), size * span
    kind, count = _renumber(key, size)
    first = np.zeros(count, np.int64)
    first[kind[::-1]] = np.arange(len(kind))[::-1]  # the last assignment counts
    return first, kind


def _renumber(values: IntArray, size: int) -> tuple[IntArray, int]:
    """Replace values in `0:size` by their positions among the distinct values, and count these."""
    if size > 4 * len(values) + 1024:
        found = np.unique(values)
        return np.searchsorted(found, values), len(found)
    occurs = np.zeros(size, bool)
    occurs[values] = True
    number = np.cumsum(occurs) - 1
    return number[values], int(occurs.sum())


def row_major_strides(shape: IntArray) -> IntArray:
    """Return the strides, in elements, of row-major arrays of these shapes, `(n, D)`."""
    inner = np.ones_like(shape)
    if shape.shape[1] > 1:
        inner[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return inner


def find_overlaps(
    left: tuple[IntArray, IntArray, IntArray],
    right: tuple[IntArray, IntArray, IntArray],
    *,
    pairs_at_once: int = PAIRS_AT_ONCE,
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Intersect each left box with all right boxes of the same tensor.

    Args:
        left, right: columns `(tensor, offset, shape)`, of shapes `(n,)`, `(n, D)` and `(n, D)`;
            boxes of fewer than D dimensions are padded with offset 0 and shape 1.
        pairs_at_once: the approximate number of pairs to compare at a time.

    Returns:
        All common parts with at least one element, ordered by the left index, then by the right.
        Columns `(left, right, offset, shape)`, of shapes `(n,)`, `(n,)`, `(n, D)` and `(n, D)`:
        the indices in the two lists, and the common box.

    Raises:
        FormatError: there are too many parts; see `check_table_size`.
    """
    order = np.argsort(right[0], kind="stable")
    tensors = right[0][order]
    low = np.searchsorted(tensors, left[0], side="left")
    counts = np.searchsorted(tensors, left[0], side="right") - low
    ends = np.cumsum(counts)
    left_stop, right_stop = left[1] + left[2], right[1] + right[2]
    found_left, found_right = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    begin = total = 0
    while begin < len(counts):
        pairs_before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, pairs_before + pairs_at_once, side="right")))
        count = counts[begin:end]
        left_rows = np.repeat(np.arange(begin, end), count)
        right_rows = order[np.repeat(low[begin:end], count) + count_up(count)]
        offset = np.maximum(left[1][left_rows], right[1][right_rows])
        shape = np.minimum(left_stop[left_rows], right_stop[right_rows]) - offset
        overlap = (shape > 0).all(axis=1)
        found_left.append(left_rows[overlap])
        found_right.append(right_rows[overlap])
        total += len(found_left[-1])
        check_table_size(total, shape.shape[1])
        begin = end
    left_rows, right_rows = np.concatenate(found_left), np.concatenate(found_right)
    offset = np.maximum(left[1][left_rows], right[1][right_rows])
    shape = np.minimum(left_stop[left_rows], right_stop[right_rows]) - offset
    return left_rows, right_rows, offset, shape
