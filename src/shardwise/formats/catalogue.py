"""What lies in the files of a foreign checkpoint, before anything says what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.formats.foreign import ForeignFile
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.table import Int


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
