"""What every reader of a foreign format returns: a manifest laid over existing files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import ObjectEntry, TensorEntry
from shardwise.manifest.table import Int, Pieces, check_width, padded_rows


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """A file of a foreign checkpoint: a path below its directory, by `/`, and its size in bytes.

    `content` is given for bytes that lie in no file (a step that is a number in a pickle, which a
    target wants as a tensor): they are read from here.
    """

    name: str
    size: int
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Boxes of global tensors over bytes of files.

    `pieces.start` is the byte of a piece's first element, from the start of its file; `stride`
    (`(n, D)`, in elements, 0 where a dimension is padding) says where the others are. A row-major
    piece has its shape's own strides; a transposed one, or a part of a larger array, has others.
    """

    pieces: Pieces
    stride: Int

    def __len__(self) -> int:
        return len(self.pieces)

    @classmethod
    def nothing(cls) -> PieceTable:
        """No piece."""
        none, flat = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
        return cls(Pieces(none, none, none, flat, flat), flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A foreign checkpoint: global tensors and plain values, and where their bytes lie.

    Names are those under which `shardwise.save` would have written a state with the keys `model`
    and `optimizer`: `model.<parameter or buffer>`, `optimizer.<parameter>.<key>`, and
    `optimizer.param_groups`; formats that nest names of their own keep these.

    Attributes:
        format: what it is, in words.
        files: what `table` counts.
        tensors: without pieces; those tied to others have `same_as`.
        table: covers each element of each stored tensor exactly once.
        replicas: further places that must hold the same bytes as `table` has.
        replica_names: for each row of `replicas` the name of the stored array that it is part of;
            or empty, if all have the names of their tensors.
        averages: by name, the tensors whose mean it is; these are in `tensors`, hidden from users.
        objects: plain values, encoded by `shardwise.state.objects`.
        left_out: what there is beside, and why it was not taken; one line each.
        absent: files that such a checkpoint usually has, and this one lacks: by the name that what
            is in them would have, as `{"optimizer": "optimizer.pt"}`.
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
