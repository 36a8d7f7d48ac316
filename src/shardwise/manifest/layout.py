"""`Layout`: the tensors and plain values of a checkpoint of any format, and where its bytes are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import numpy as np

from shardwise.boxes.box import IntArray, Table, padded_rows
from shardwise.manifest.data_files import FileTable
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import FileEntry, ObjectEntry, TensorEntry


@dataclass(frozen=True, slots=True)
class Pieces(Table):
    """Boxes of tensors, and the bytes of each box in a file, in columns of n rows.

    For example, the rows of a float32 tensor of shape `[4, 6]`, which two ranks saved after a
    header of 4096 bytes:

        tensor  file  start  offset  shape   stride
        0       0     4096   [0, 0]  [2, 6]  [6, 1]
        0       1     4096   [2, 0]  [2, 6]  [6, 1]

    Attributes:
        tensor, file: indices of the tensor and of the file in the `Layout`, `(n,)`.
        start: the offset of the first element in the file, in bytes, `(n,)`.
        offset, shape: the box, `(n, D)`, padded on the right with 0 and 1.
        stride: the strides in the file, in elements, `(n, D)`; 0 in padded dimensions. They are not
            row-major if an array is transposed, or if the box is a part of an array.
    """

    tensor: IntArray
    file: IntArray
    start: IntArray
    offset: IntArray
    shape: IntArray
    stride: IntArray


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint.

    Attributes:
        name: the name of a data file, or the path below the directory of a foreign checkpoint,
            with `/`.
        size: the size in bytes.
        content: the bytes themselves, if they lie in no file as an array. For example, a step count
            in a pickle becomes a tensor, and `content` has its bytes.
        entry: the file's entry in a manifest of shardwise, with the place of its checksums; None
            for a file of another format.
    """

    name: str
    size: int
    content: bytes | None = None
    entry: FileEntry | None = None


class StoredFiles(Sequence[StoredFile]):
    """The data files of a checkpoint of shardwise, made on demand from a table.

    Args:
        table: the files.
    """

    def __init__(self, table: FileTable) -> None:
        self.table = table

    @overload
    def __getitem__(self, index: int) -> StoredFile: ...
    @overload
    def __getitem__(self, index: slice) -> list[StoredFile]: ...
    def __getitem__(self, index: int | slice) -> StoredFile | list[StoredFile]:
        """Return the file with this index."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        entry = self.table[index]
        return StoredFile(entry.name, entry.size, entry=entry)

    def __len__(self) -> int:
        return len(self.table)

    def __iter__(self) -> Iterator[StoredFile]:
        return (StoredFile(entry.name, entry.size, entry=entry) for entry in self.table)


@dataclass(frozen=True, kw_only=True, eq=False)
class Layout:
    """The tensors and plain values of a checkpoint, and where its bytes are.

    Names are those that `shardwise.save` gives to a state with the keys `model` and `optimizer`:
    `model.<parameter or buffer>`, `optimizer.<parameter>.<key>` and `optimizer.param_groups`.
    Other nested names of foreign checkpoints are kept.

    Attributes:
        format: `shardwise`, or the name of a foreign format, for people.
        files: the files; `pieces.file` is an index into them.
        tensors: the tensors. A tied tensor has `same_as`, and no pieces.
        pieces: the pieces of all stored tensors, which cover each element exactly once.
        replicas: further copies of tensors, whose bytes must equal those of `pieces`.
        terms: some specifications average the copies of a tensor that ranks saved. Such a tensor
            has no pieces. Instead, its copies are stored tensors, the *terms* of the mean.
            `pieces.tensor` counts them after the tensors: with ten tensors, `terms=(3, 3)` says
            that the stored tensors 10 and 11 are the terms of tensor 3.
        objects: the plain values that all ranks share, encoded by `shardwise.state.plain_values`.
        per_rank: the names of the per-rank values.
        step: the training step; None if it is unknown.
        world_size: the number of ranks that saved; 1 if it is unknown.
        save_id, created, metrics: see `Manifest`; empty for a foreign checkpoint.
        left_out: a line for each thing that is not loaded, with the reason.
        missing_files: files that this format usually has but this checkpoint lacks. The key is the
            name of the file's content in the state: `{"optimizer": "optimizer.pt"}`.
    """

    format: str
    files: Sequence[StoredFile]
    tensors: tuple[TensorEntry, ...]
    pieces: Pieces
    replicas: Pieces = field(default_factory=Pieces.empty)
    terms: tuple[int, ...] = ()
    objects: tuple[ObjectEntry, ...] = ()
    per_rank: tuple[str, ...] = ()
    step: int | None = None
    world_size: int = 1
    save_id: str = ""
    created: str = ""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    missing_files: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def tensor_of(self) -> IntArray:
        """For each index in `pieces.tensor`, the index of the tensor in `tensors`."""
        return np.array([*range(len(self.tensors)), *self.terms], np.int64)

    @cached_property
    def itemsizes(self) -> IntArray:
        """For each index in `pieces.tensor`, the size of an element in bytes."""
        sizes = np.array([DTYPES[t.dtype].itemsize for t in self.tensors], np.int64)
        return sizes[self.tensor_of]

    @cached_property
    def shapes(self) -> IntArray:
        """For each index in `pieces.tensor`, the shape of the tensor, padded with 1."""
        shapes = [t.shape for t in self.tensors]
        return padded_rows(shapes, max(map(len, shapes), default=0), 1)[self.tensor_of]

    @property
    def dims(self) -> int:
        """The largest number of dimensions of any tensor."""
        return int(self.shapes.shape[1])

    @cached_property
    def file_bounds(self) -> IntArray:
        """For each file, the start and end of the bytes for pieces, and where reads must end."""
        if isinstance(self.files, StoredFiles):
            return self.files.table.numbers[:, 2:5]
        bounds = []
        for file in self.files:
            entry, size = file.entry, file.size
            if entry is None:
                bounds.append((0, size, size))
            else:
                bounds.append((entry.data_at, entry.objects_at, entry.checksums_at))
        return np.array(bounds, np.int64).reshape(-1, 3)

    @cached_property
    def terms_of(self) -> Mapping[int, Sequence[int]]:
        """For the index of each mean, the indices of its terms in `pieces.tensor`."""
        found: dict[int, list[int]] = {}
        for index, mean in enumerate(self.terms, len(self.tensors)):
            found.setdefault(mean, []).append(index)
        return found

    def piece_ends(self, pieces: Pieces) -> IntArray:
        """Return the end of the bytes of each piece in its file."""
        elements = ((pieces.shape - 1) * pieces.stride).sum(axis=1) + 1
        ends: IntArray = pieces.start + elements * self.itemsizes[pieces.tensor]
        return ends

    def tensors_in(self, file: int, start: int, stop: int) -> list[str]:
        """Return the names of the tensors that have bytes in a range of a file.

        Args:
            file: the index of the file.
            start, stop: the range, in bytes.
        """
        pieces = self.pieces
        found = (pieces.file == file) & (pieces.start < stop) & (self.piece_ends(pieces) > start)
        stored = {self.tensors[i].name for i in set(self.tensor_of[pieces.tensor[found]].tolist())}
        return [t.name for t in self.tensors if t.name in stored or t.same_as in stored]
