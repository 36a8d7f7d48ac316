"""What lies in the files of a foreign checkpoint, before anything says what it means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shardwise.formats.foreign import ForeignFile
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.table import Int, check_width


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file, as a reader of the file finds it; no byte of it was read.

    `start` is the byte of its first element from the start of the file, `stride` in elements, as
    torch counts; `dtype` is torch's name.
    """

    file: int
    start: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All arrays of all rank files, in columns of n rows.

    Attributes:
        files: what `file` counts.
        axes: the axes of the ranks that wrote them, and their sizes: `{"tp": 2, "pp": 4}`.
        names: distinct names; `name` counts them.
        dtypes: distinct dtypes, by torch's names; `dtype` counts them.
        name, dtype, file, start, ndim: `(n,)`; `start` in bytes.
        shape, stride: `(n, D)`, padded on the right with 1 and 0; strides in elements.
        coordinate: `(n, len(axes))`: which rank an array is of.
    """

    files: tuple[ForeignFile, ...]
    axes: Mapping[str, int]
    names: Sequence[str]
    dtypes: Sequence[str]
    name: Int
    dtype: Int
    file: Int
    start: Int
    ndim: Int
    shape: Int
    stride: Int
    coordinate: Int

    def __len__(self) -> int:
        return len(self.name)


Row: TypeAlias = tuple[str, StoredArray, tuple[int, ...]]
"""The name of an array, the array, and the coordinate of the rank that has it."""


def catalogued(
    files: Sequence[ForeignFile], axes: Mapping[str, int], rows: Iterable[Row]
) -> Catalogue:
    """Arrays that were found one by one, in columns.

    Raises:
        FormatError: they have too many dimensions for so many arrays.
    """
    rows = list(rows)
    arrays = [array for _, array, _ in rows]
    names = list(dict.fromkeys(name for name, _, _ in rows))
    dtypes = list(dict.fromkeys(array.dtype for array in arrays))
    number = {name: i for i, name in enumerate(names)}
    dims = max((len(array.shape) for array in arrays), default=0)
    check_width(len(rows), dims)

    def column(values: Iterable[int]) -> Int:
        return np.array(list(values), np.int64)

    def padded(values: Sequence[tuple[int, ...]], fill: int) -> Int:
        wide = [(*each, *(fill,) * (dims - len(each))) for each in values]
        return np.array(wide, np.int64).reshape(len(values), dims)

    return Catalogue(
        files=tuple(files),
        axes=axes,
        names=names,
        dtypes=dtypes,
        name=column(number[name] for name, _, _ in rows),
        dtype=column(dtypes.index(array.dtype) for array in arrays),
        file=column(array.file for array in arrays),
        start=column(array.start for array in arrays),
        ndim=column(len(array.shape) for array in arrays),
        shape=padded([array.shape for array in arrays], 1),
        stride=padded([array.stride for array in arrays], 0),
        coordinate=np.array([at for _, _, at in rows], np.int64).reshape(len(rows), len(axes)),
    )
