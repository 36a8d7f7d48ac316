"""Tables of integers in columns: select and join rows, and pad tuples of different lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.errors import FormatError

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Rows = TypeVar("Rows", bound="Table")

FILL = {"offset": 0, "shape": 1, "stride": 0, "offset_step": 0}
"""The columns `(n, D)`, and the number that they are padded with."""
MOST_INTEGERS = 2**25
"""The largest number of integers in a column of offsets or shapes: rows times dimensions."""


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
        none = np.zeros(0, np.int64)
        return cls(*(none.reshape(0, 0) if each.name in FILL else none for each in fields(cls)))

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


def row_major_strides(shape: IntArray) -> IntArray:
    """Return the strides, in elements, of row-major arrays of these shapes, `(n, D)`."""
    inner = np.ones_like(shape)
    if shape.shape[1] > 1:
        inner[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return inner
