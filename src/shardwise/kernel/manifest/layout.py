"""`Layout`: the tensors and plain values of a checkpoint of any format, and where its bytes are."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import overload

import msgspec
import numpy as np

from shardwise.kernel.boxes.box import IntArray, padded_rows
from shardwise.kernel.boxes.grids import find_in_grids, grid_bounds
from shardwise.kernel.manifest.data_files import FileTable
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.manifest import FROZEN, FileEntry, ObjectEntry, TensorEntry
from shardwise.kernel.manifest.pieces import Pieces, Runs


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
        files: the files; `runs.file` is an index into them.
        tensors: the tensors. A tied tensor has `same_as`, and no pieces.
        runs: the pieces of all stored tensors, which cover each element exactly once, by rule.
        replicas: further copies of tensors, whose bytes must equal those of `pieces`.
        terms: some specifications average the copies of a tensor that ranks saved. Such a tensor
            has no pieces. Instead, its copies are stored tensors, the *terms* of the mean.
            `runs.tensor` counts them after the tensors: with ten tensors, `terms=(3, 3)` says
            that the stored tensors 10 and 11 are the terms of tensor 3.
        objects: the plain values that all ranks share, encoded by
            `shardwise.kernel.state.plain_values`.
        per_rank: the names of the per-rank values.
        step: the training step; None if it is unknown.
        world_size: the number of ranks that saved; 1 if it is unknown.
        save_id, created, metrics: see `Manifest`; empty for a foreign checkpoint.
        left_out: a line for each thing that is not loaded, with the reason.
        missing_files: files that this format usually has but this checkpoint lacks. The key is the
            name of the file's content in the state: `{"optimizer": "optimizer.pt"}`.
        as_saved: the layout before a specification gave its tensors other names and shapes, which
            is the one that the headers of the files describe; None if that is this layout.
    """

    format: str
    files: Sequence[StoredFile]
    tensors: tuple[TensorEntry, ...]
    runs: Runs
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
    as_saved: Layout | None = None

    @cached_property
    def frozen(self) -> Mapping[str, tuple[str, ...]]:
        """For each module of which only the trained part is stored, its frozen tensors.

        The key is the module's name, and the names of the tensors are relative to it.
        """
        found: dict[str, dict[str, None]] = {}
        for entry in self.objects:
            module, is_frozen, element = entry.name.partition(f".{FROZEN}.elements.")
            if is_frozen:
                found.setdefault(module, {})[element.rpartition("[")[0]] = None
        return {module: tuple(names) for module, names in found.items()}

    @cached_property
    def tensor_of(self) -> IntArray:
        """For each index in `runs.tensor`, the index of the tensor in `tensors`."""
        return np.array([*range(len(self.tensors)), *self.terms], np.int64)

    @cached_property
    def itemsizes(self) -> IntArray:
        """For each index in `runs.tensor`, the size of an element in bytes."""
        sizes = np.array([DTYPES[t.dtype].itemsize for t in self.tensors], np.int64)
        return sizes[self.tensor_of]

    @cached_property
    def shapes(self) -> IntArray:
        """For each index in `runs.tensor`, the shape of the tensor, padded with 1."""
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
        """For the index of each mean, the indices of its terms in `runs.tensor`."""
        found: dict[int, list[int]] = {}
        for index, mean in enumerate(self.terms, len(self.tensors)):
            found.setdefault(mean, []).append(index)
        return found

    @property
    def nbytes(self) -> int:
        """The size of all files, in bytes."""
        if isinstance(self.files, StoredFiles):
            return self.files.table.nbytes
        return sum(file.size for file in self.files)

    def file_of(self, rank: int) -> StoredFile:
        """Return the file of a rank that wrote one; in a foreign checkpoint, that of an index."""
        return self.file_of_rank(rank) or self.files[rank]

    def file_of_rank(self, rank: int) -> StoredFile | None:
        """Return the data file of a rank; None if there is none."""
        if not isinstance(self.files, StoredFiles):
            found = (each for each in self.files if each.entry and each.entry.rank == rank)
            return next(found, None)
        index = self.files.table.index_of_rank(rank)
        return None if index is None else self.files[index]

    @cached_property
    def pieces(self) -> Pieces:
        """All pieces, one by one.

        Raises:
            FormatError: there are too many. Use `runs`.
        """
        return self.runs.expand()

    @cached_property
    def run_bounds(self) -> tuple[IntArray, IntArray]:
        """The low and the high corner of the box around the pieces of each run, `(n, D)`."""
        runs = self.runs
        return grid_bounds(runs.offset, runs.shape, runs.count, runs.offset_step)

    @cached_property
    def piece_counts(self) -> IntArray:
        """For each index in `runs.tensor`, the number of pieces of the stored tensor."""
        counts = np.zeros(len(self.tensor_of), np.int64)
        np.add.at(counts, self.runs.tensor, self.runs.sizes)
        return counts

    def pieces_of(self, tensor: int) -> Pieces:
        """Return the pieces of a stored tensor, given by its index in `runs.tensor`."""
        return self.runs.select(np.flatnonzero(self.runs.tensor == tensor)).expand()

    def pieces_in(self, file: int) -> Pieces:
        """Return the pieces in a file, given by its index."""
        low, high = self._files_of_runs
        runs = self.runs.select((low <= file) & (file < high))
        wanted = np.full((len(runs), 1), file)
        table = runs.file[:, None], np.ones_like(wanted), runs.count, runs.file_step[:, :, None]
        return runs.at(*find_in_grids(np.arange(len(runs)), wanted, wanted + 1, table))

    @cached_property
    def _files_of_runs(self) -> tuple[IntArray, IntArray]:
        """The first file of each run, and the one after the last."""
        runs = self.runs
        first, one = runs.file[:, None], np.ones((len(runs), 1), np.int64)
        low, high = grid_bounds(first, one, runs.count, runs.file_step[:, :, None])
        return low[:, 0], high[:, 0]

    def byte_ranges(self, pieces: Pieces) -> tuple[IntArray, IntArray]:
        """Return the start and the end of the bytes of each piece in its file."""
        elements = ((pieces.shape - 1) * pieces.stride).sum(axis=1) + 1
        start = self.file_bounds[pieces.file, 0] + pieces.start
        ends: IntArray = start + elements * self.itemsizes[pieces.tensor]
        return start, ends

    def tensors_in(self, file: int, start: int, stop: int) -> list[str]:
        """Return the names of the tensors that have bytes in a range of a file.

        Args:
            file: the index of the file.
            start, stop: the range, in bytes.
        """
        pieces = self.pieces_in(file)
        low, high = self.byte_ranges(pieces)
        found = pieces.tensor[(low < stop) & (high > start)]
        stored = {self.tensors[i].name for i in set(self.tensor_of[found].tolist())}
        return [t.name for t in self.tensors if t.name in stored or t.same_as in stored]


def _encode_column(column: object) -> tuple[tuple[int, ...], bytes] | list[StoredFile]:
    """Return the shape of a column of integers, and the compressed differences of its rows.

    The files of a checkpoint of shardwise are a table, and become a list.
    """
    if isinstance(column, StoredFiles):
        return [*column]
    if not isinstance(column, np.ndarray):
        raise NotImplementedError
    rows = column.reshape(len(column), -1).T if column.size else column.reshape(0, 0)
    differences = np.diff(rows, axis=1, prepend=0)
    return column.shape, zlib.compress(differences.tobytes(), 1)


def _decode_column(_: object, encoded: tuple[list[int], bytes]) -> IntArray:
    shape, data = encoded
    differences = np.frombuffer(zlib.decompress(data), np.int64)
    if not len(differences):
        return np.zeros(shape, np.int64)
    rows = differences.reshape(-1, shape[0]).cumsum(axis=1)
    return np.ascontiguousarray(rows.T).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_encode_column)
_DECODER = msgspec.msgpack.Decoder(Layout, dec_hook=_decode_column)
"""Made at import, because msgspec 0.22 crashes if two threads prepare a type at the same time."""


def encode_layout(layout: Layout) -> bytes:
    """Encode a layout as bytes."""
    return _ENCODER.encode(layout)


def decode_layout(data: bytes) -> Layout:
    """Decode the result of `encode_layout`."""
    return _DECODER.decode(data)
