"""The pieces of all tensors in columns, and their entries in a manifest.

A manifest stores evenly spaced pieces of a tensor as a run: one entry for the first piece, and a
`repeat` with the differences between one piece and the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.errors import FormatError
from shardwise.manifest.manifest import Manifest, PieceEntry, Repeat

Int = npt.NDArray[np.int64]
SHORTEST_RUN = 3
MOST_INTEGERS = 2**25
"""The largest number of integers in a column of offsets or shapes: rows times dimensions."""


def check_table_size(rows: int, dims: int) -> None:
    """Refuse a table that would take gigabytes. Call this function before allocating the table.

    Each row has as many columns as the largest number of dimensions of any tensor.

    Raises:
        FormatError: rows times dimensions exceed `MOST_INTEGERS`.
    """
    if rows * dims > MOST_INTEGERS:
        raise FormatError(
            f"the checkpoint has {rows} pieces or tensors of up to {dims} dimensions, but their "
            f"number times the dimensions may be at most {MOST_INTEGERS}: save fewer tensors or "
            "pieces in one checkpoint"
        )


def padded_rows(rows: Iterable[tuple[int, ...]], dims: int, fill: int) -> Int:
    """Return tuples of up to `dims` integers as an array `(n, dims)`, padded on the right."""
    padded = [row + (fill,) * (dims - len(row)) for row in rows]
    return np.array(padded, np.int64).reshape(len(padded), dims)


@dataclass(frozen=True, slots=True)
class Pieces:
    """All pieces of a checkpoint, in columns of n rows.

    Attributes:
        tensor, file: indices into the manifest's lists, `(n,)`.
        start: the first byte of each piece, counted from the start of the file's data section,
            `(n,)`.
        offset, shape: the box of each piece, `(n, D)`, padded on the right with 0 and 1. D is the
            largest number of dimensions of any tensor.
    """

    tensor: Int
    file: Int
    start: Int
    offset: Int
    shape: Int

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of pieces in arithmetic progression, in columns of n rows.

    Attributes:
        first: the first piece of each run. All pieces of a run have its `tensor` and `shape`.
        count: the number of pieces of each run, `(n,)`.
        file_step, start_step, offset_step: the differences between one piece and the next, of
            shapes `(n,)`, `(n,)` and `(n, D)`.
    """

    first: Pieces
    count: Int
    file_step: Int
    start_step: Int
    offset_step: Int


def find_runs(pieces: Pieces) -> Runs:
    """Return the runs of pieces, which must be sorted by tensor. The inverse of `expand_runs`."""
    n = len(pieces)
    positions = np.column_stack([pieces.file, pieces.start, pieces.offset])
    steps = np.diff(positions, axis=0)
    same_tensor_and_shape = (np.diff(pieces.tensor) == 0) & (
        np.diff(pieces.shape, axis=0) == 0
    ).all(axis=1)
    continues = np.zeros(n, bool)
    if n > 2:
        continues[2:] = (
            same_tensor_and_shape[1:]
            & same_tensor_and_shape[:-1]
            & (steps[1:] == steps[:-1]).all(axis=1)
        )
    first_rows, counts = _split_runs(continues)
    step = np.zeros((len(first_rows), positions.shape[1]), np.int64)
    step[counts > 1] = steps[first_rows[counts > 1]]
    first = Pieces(*(column[first_rows] for column in _columns(pieces)))
    dims = pieces.offset.shape[1]
    return Runs(first, counts, step[:, 0], step[:, 1], step[:, 2 : 2 + dims])


def _split_runs(continues: npt.NDArray[np.bool_]) -> tuple[Int, Int]:
    """Cut rows into runs. Return the first row and the number of rows of each run.

    Args:
        continues: whether a row continues with the same step as the two rows before it, `(n,)`.
    """
    first_rows: list[int] = []
    counts: list[int] = []
    n = len(continues)
    continued = np.flatnonzero(continues)
    starts = continued[np.flatnonzero(np.diff(continued, prepend=-2) != 1)]
    stops = continued[np.flatnonzero(np.diff(continued, append=n + 2) != 1)] + 1
    row = 0  # the first row that is in no run yet
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        head = max(start - 2, row)
        if stop - head < SHORTEST_RUN:
            continue
        first_rows.extend(range(row, head + 1))
        counts.extend([1] * (head - row))
        counts.append(stop - head)
        row = stop
    first_rows.extend(range(row, n))
    counts.extend([1] * (n - row))
    return np.array(first_rows, np.int64), np.array(counts, np.int64)


def expand_runs(runs: Runs) -> Pieces:
    """Return every piece of every run."""
    rows = np.repeat(np.arange(len(runs.count)), runs.count)
    k = np.arange(len(rows)) - np.repeat(np.cumsum(runs.count) - runs.count, runs.count)
    first = runs.first
    return Pieces(
        first.tensor[rows],
        first.file[rows] + k * runs.file_step[rows],
        first.start[rows] + k * runs.start_step[rows],
        first.offset[rows] + k[:, None] * runs.offset_step[rows],
        first.shape[rows],
    )


def _columns(pieces: Pieces) -> tuple[Int, ...]:
    return pieces.tensor, pieces.file, pieces.start, pieces.offset, pieces.shape


def runs_of_manifest(manifest: Manifest) -> Runs:
    """Return the pieces of a manifest in columns, as runs.

    Raises:
        FormatError: a piece has more or fewer dimensions than its tensor, or the manifest has too
            many pieces.
    """
    rows = []
    tensor_of_row = []
    dims = max((len(tensor.shape) for tensor in manifest.tensors), default=0)
    check_table_size(sum(max(1, len(tensor.pieces)) for tensor in manifest.tensors), dims)
    for index, tensor in enumerate(manifest.tensors):
        ndim = len(tensor.shape)
        zeros = (0,) * (dims - ndim)
        ones = (1,) * (dims - ndim)
        for piece in tensor.pieces:
            if len(piece.offset) != ndim or len(piece.shape) != ndim:
                raise FormatError(
                    f"{tensor.name}: a piece has offset {list(piece.offset)} and shape "
                    f"{list(piece.shape)}, but the tensor has {ndim} dimensions"
                )
            repeat = piece.repeat
            if repeat is None:
                row = (piece.file, piece.start, 1, 0, 0, *(0,) * ndim)
            elif len(repeat.offset) != ndim:
                raise FormatError(
                    f"{tensor.name}: a repeated piece moves by {list(repeat.offset)}, but the "
                    f"tensor has {ndim} dimensions"
                )
            else:
                row = (
                    piece.file,
                    piece.start,
                    repeat.count,
                    repeat.file,
                    repeat.start,
                    *repeat.offset,
                )
            rows.append((*row, *zeros, *piece.offset, *zeros, *piece.shape, *ones))
            tensor_of_row.append(index)
    table = np.array(rows, np.int64).reshape(len(rows), 5 + 3 * dims)
    first = Pieces(
        np.array(tensor_of_row, np.int64),
        table[:, 0],
        table[:, 1],
        table[:, 5 + dims : 5 + 2 * dims],
        table[:, 5 + 2 * dims :],
    )
    return Runs(first, table[:, 2], table[:, 3], table[:, 4], table[:, 5 : 5 + dims])


def entries_of_runs(runs: Runs, ndims: Sequence[int]) -> list[list[PieceEntry]]:
    """Return the entries of each tensor's pieces. This is the inverse of `runs_of_manifest`.

    Args:
        runs: the pieces.
        ndims: the number of dimensions of each tensor.
    """
    entries: list[list[PieceEntry]] = [[] for _ in ndims]
    first = runs.first
    columns = zip(
        first.tensor.tolist(),
        first.file.tolist(),
        first.start.tolist(),
        first.offset.tolist(),
        first.shape.tolist(),
        runs.count.tolist(),
        runs.file_step.tolist(),
        runs.start_step.tolist(),
        runs.offset_step.tolist(),
        strict=True,
    )
    for tensor, file, start, offset, shape, count, file_step, start_step, offset_step in columns:
        n = ndims[tensor]
        repeat = Repeat(count, tuple(offset_step[:n]), file_step, start_step) if count > 1 else None
        entry = PieceEntry(file, start, tuple(offset[:n]), tuple(shape[:n]), repeat)
        entries[tensor].append(entry)
    return entries
