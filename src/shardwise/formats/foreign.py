"""A foreign checkpoint: the result of every reader, and catalogues of arrays in files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import ObjectEntry, TensorEntry
from shardwise.manifest.table import Int, Pieces, check_width, padded_rows


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """A file of a foreign checkpoint.

    Attributes:
        name: the path below the checkpoint's directory, with `/`.
        size: the size in bytes.
        content: the bytes, if there is no file: for example a step count in a pickle that is loaded
            as a tensor.
    """

    name: str
    size: int
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Boxes of global tensors, and where their bytes are in files.

    Attributes:
        pieces: the boxes; `pieces.start` is the offset of the first element in its file, in bytes.
        stride: `(n, D)`, strides in elements; 0 in padded dimensions. Pieces that are not row-major
            are transposed, or parts of larger arrays.
    """

    pieces: Pieces
    stride: Int

    def __len__(self) -> int:
        return len(self.pieces)

    @classmethod
    def nothing(cls) -> PieceTable:
        """Return an empty table."""
        none, flat = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
        return cls(Pieces(none, none, none, flat, flat), flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A foreign checkpoint: global tensors, plain values, and where their bytes are.

    Names are those that `shardwise.save` gives a state with the keys `model` and `optimizer`:
    `model.<parameter or buffer>`, `optimizer.<parameter>.<key>` and `optimizer.param_groups`.
    Other nested names are kept.

    Attributes:
        format: the name of the format, for people.
        files: the files; `table.pieces.file` is an index into them.
        tensors: the tensors without pieces; tied ones have `same_as`.
        table: the pieces of all stored tensors; they cover each element exactly once.
        replicas: further pieces, which must have the same bytes as those in `table`.
        replica_names: the name of the stored array of each replica; empty if all have the names of
            their tensors.
        averages: for each tensor that is a mean, the names of its terms. These are in `tensors`,
            hidden from users.
        objects: plain values, encoded by `shardwise.state.objects`.
        step: the training step, if known.
        world_size: the number of ranks that wrote the checkpoint, as far as known.
        left_out: a line for each thing that was not read, with the reason.
        absent: files that such a checkpoint usually has but this one lacks, by the name of their
            content in the state: `{"optimizer": "optimizer.pt"}`.
    """

    format: str
    files: tuple[ForeignFile, ...]
    tensors: tuple[TensorEntry, ...]
    table: PieceTable
    replicas: PieceTable = field(default_factory=PieceTable.nothing)
    replica_names: tuple[str, ...] = ()
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    objects: tuple[ObjectEntry, ...] = ()
    step: int | None = None
    world_size: int = 1
    left_out: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file, whose bytes were not read.

    Attributes:
        file: the number of the file.
        start: the offset of the first element in the file, in bytes.
        dtype: torch's name.
        shape: the shape.
        stride: the strides in elements.
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


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous row-major array, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The n arrays in the files of all ranks, in columns.

    Attributes:
        files: the files; `file` is an index into them.
        axes: the axes of the ranks and their sizes: `{"tp": 2, "pp": 4}`.
        names: distinct names of arrays; `name` is an index into them.
        dtypes: distinct dtypes, by torch's names; `dtype` is an index into them.
        name, dtype, file, start, ndim: `(n,)`; `start` in bytes.
        shape, stride: `(n, D)`, padded on the right with 1 and 0; strides in elements.
        coordinate: `(n, len(axes))`, the coordinate of the rank.
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
"""The name of an array, the array, and the coordinate of its rank."""


def catalogued(
    files: Sequence[ForeignFile], axes: Mapping[str, int], rows: Iterable[Row]
) -> Catalogue:
    """Return a catalogue of arrays.

    Raises:
        FormatError: the table of so many arrays and dimensions would be too large.
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
        shape=padded_rows((array.shape for array in arrays), dims, 1),
        stride=padded_rows((array.stride for array in arrays), dims, 0),
        coordinate=np.array([at for _, _, at in rows], np.int64).reshape(len(rows), len(axes)),
    )
