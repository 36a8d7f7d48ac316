"""The description of a foreign checkpoint, which every reader returns; catalogues of arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import ObjectEntry, TensorEntry
from shardwise.manifest.pieces import Int, Pieces, check_table_size, padded_rows

INDEX_MAGIC = b"shardwise-index-2\n"
"""The first bytes of an encoded description, see `index.py`."""


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """A file of a foreign checkpoint.

    Attributes:
        name: the path below the checkpoint's directory, with `/`.
        size: the size in bytes.
        content: the bytes, if no file stores them as an array. For example, a step count in a
            pickle becomes a tensor, and `content` has its bytes.
    """

    name: str
    size: int
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Pieces: boxes of global tensors, and the offsets of their bytes in files.

    Attributes:
        pieces: the boxes, their files, and the offset of the first element of each, in bytes.
        stride: `(n, D)`, strides in elements; 0 in padded dimensions. They are not row-major if an
            array is transposed, or if the piece is a part of an array.
    """

    pieces: Pieces
    stride: Int

    def __len__(self) -> int:
        return len(self.pieces)

    @classmethod
    def empty(cls) -> PieceTable:
        """Return an empty table."""
        column, table = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
        return cls(Pieces(column, column, column, table, table), table)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A foreign checkpoint: global tensors, plain values, and the places of their bytes.

    Names are like those of `shardwise.save` for a state with the keys `model` and `optimizer`:
    `model.<parameter or buffer>`, `optimizer.<parameter>.<key>` and `optimizer.param_groups`.
    Other nested names are kept.

    Attributes:
        format: the name of the format, for people.
        files: the files; `table.pieces.file` is an index into them.
        tensors: the entries of the tensors, which contain no pieces. The entry of a tied tensor has
            `same_as`.
        table: the pieces of all stored tensors; they cover each element exactly once.
        replicas: further copies of pieces. Their bytes must equal the bytes of the pieces in
            `table`.
        replica_names: the name of the stored array of each replica; empty if each array has the
            name of its tensor.
        averages: for each tensor that is a mean, the names of its terms. The terms are also entries
            of `tensors`, but users do not see them.
        objects: plain values, encoded by `shardwise.state.plain_values`.
        step: the training step, if known.
        world_size: the number of ranks that wrote the checkpoint; 1 if unknown.
        left_out: a line for each thing that was not read, with the reason.
        missing_files: files that this format usually has but this checkpoint lacks. The key is the
            name of the file's content in the state: `{"optimizer": "optimizer.pt"}`.
    """

    format: str
    files: tuple[ForeignFile, ...]
    tensors: tuple[TensorEntry, ...]
    table: PieceTable
    replicas: PieceTable = field(default_factory=PieceTable.empty)
    replica_names: tuple[str, ...] = ()
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    objects: tuple[ObjectEntry, ...] = ()
    step: int | None = None
    world_size: int = 1
    left_out: tuple[str, ...] = ()
    missing_files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in a file. Its bytes were not read.

    Attributes:
        file: the name of the file.
        start: the offset of the first element in the file, in bytes.
        dtype: torch's name.
        shape: the shape.
        stride: the strides in elements.
    """

    file: str
    start: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """The size of an element in bytes."""
        return DTYPES[self.dtype].itemsize


Placed: TypeAlias = tuple[tuple[int, ...], StoredArray]
"""The offset of a box in a tensor, and the array with its elements."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor whose boxes are arrays in files. Their bytes were not read.

    Attributes:
        dtype: torch's name.
        shape: the shape.
        boxes: the boxes, which cover each element exactly once.
        replicas: further copies of boxes.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[Placed, ...]
    replicas: tuple[Placed, ...] = field(default=(), compare=False)


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous row-major array, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The n arrays in the files of all ranks, as a table.

    Attributes:
        files: the files; `file` is an index into them.
        axes: the axes of the ranks and their sizes: `{"tp": 2, "pp": 4}`.
        names: the distinct names of arrays; `name` is an index into them.
        dtypes: the distinct dtypes, by torch's names; `dtype` is an index into them.
        name, dtype, file: `(n,)`, indices.
        start: `(n,)`, the offset of the first element in the file, in bytes.
        ndim: `(n,)`, the number of dimensions.
        shape, stride: `(n, D)`, padded on the right with 1 and 0; strides in elements.
        coordinate: `(n, len(axes))`, the coordinate of the rank along each axis.
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


CatalogueRow: TypeAlias = tuple[str, StoredArray, tuple[int, ...]]
"""The name of an array, the array, and the coordinate of its rank along each axis."""


def build_catalogue(
    files: Sequence[ForeignFile], axes: Mapping[str, int], rows: Iterable[CatalogueRow]
) -> Catalogue:
    """Return a catalogue of arrays.

    Raises:
        FormatError: there are too many arrays of too many dimensions for a table.
    """
    rows = list(rows)
    arrays = [array for _, array, _ in rows]
    names = list(dict.fromkeys(name for name, _, _ in rows))
    dtypes = list(dict.fromkeys(array.dtype for array in arrays))
    name_index = {name: i for i, name in enumerate(names)}
    file_index = {file.name: i for i, file in enumerate(files)}
    max_ndim = max((len(array.shape) for array in arrays), default=0)
    check_table_size(len(rows), max_ndim)

    def column(values: Iterable[int]) -> Int:
        return np.array(list(values), np.int64)

    return Catalogue(
        files=tuple(files),
        axes=axes,
        names=names,
        dtypes=dtypes,
        name=column(name_index[name] for name, _, _ in rows),
        dtype=column(dtypes.index(array.dtype) for array in arrays),
        file=column(file_index[array.file] for array in arrays),
        start=column(array.start for array in arrays),
        ndim=column(len(array.shape) for array in arrays),
        shape=padded_rows((array.shape for array in arrays), max_ndim, 1),
        stride=padded_rows((array.stride for array in arrays), max_ndim, 0),
        coordinate=np.array([coordinate for _, _, coordinate in rows], np.int64).reshape(
            len(rows), len(axes)
        ),
    )
