"""The entries of tensors and their pieces in a manifest.

A manifest stores evenly spaced pieces of a tensor as a run: one entry for the first piece, and a
`repeat` with the differences between one piece and the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from shardwise.boxes import row_major_strides
from shardwise.boxes.box import (
    BoolArray,
    IntArray,
    Table,
    check_table_size,
    count_up,
    padded_rows,
)
from shardwise.decoding import prepare_decoding
from shardwise.errors import FormatError
from shardwise.manifest.layout import Pieces
from shardwise.manifest.manifest import Count, Dims, SignedCount, TensorEntry, decode_json

Row = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]
SHORTEST_RUN = 3


class Repeat(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Further pieces of the same shape, at constant distances.

    Attributes:
        count: the number of pieces, including the first.
        offset, file, start: the differences between one piece and the next.
    """

    count: Annotated[int, msgspec.Meta(ge=2, le=2**24)]
    offset: tuple[SignedCount, ...]
    file: SignedCount = 0
    start: SignedCount = 0


class PieceEntry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A box of a tensor, stored in row-major order.

    Attributes:
        file: the index of the file in the manifest.
        start: the first byte, counted from the start of the data section.
        offset, shape: the box.
        repeat: further pieces of the same shape, if there are any.
    """

    file: Count
    start: Count
    offset: Dims
    shape: Dims
    repeat: Repeat | None = None


@prepare_decoding
class TensorWithPieces(TensorEntry, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A global tensor in a manifest.

    Attributes:
        pieces: the boxes that cover the tensor.
    """

    pieces: tuple[PieceEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Runs(Table):
    """Runs of pieces in arithmetic progression, in columns of n rows.

    Attributes:
        tensor, file, start, offset, shape: the first piece of each run, as in `Pieces`; but `start`
            counts from the start of the file's data section. All pieces of a run have the same
            tensor and shape.
        count: the number of pieces of each run, `(n,)`.
        file_step, start_step, offset_step: the differences between one piece and the next, of
            shapes `(n,)`, `(n,)` and `(n, D)`.
    """

    tensor: IntArray
    file: IntArray
    start: IntArray
    offset: IntArray
    shape: IntArray
    count: IntArray
    file_step: IntArray
    start_step: IntArray
    offset_step: IntArray


def _find_runs(
    tensor: IntArray, positions: IntArray, shape: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    """Find the runs of pieces, which must be sorted by tensor.

    Args:
        tensor, shape: see `Runs`.
        positions: the file, start and offset of each piece, `(n, 2 + D)`.

    Returns:
        The first piece of each run, the number of its pieces, and the differences of positions
        between one piece and the next.
    """
    steps = np.diff(positions, axis=0)
    same_tensor_and_shape = (np.diff(tensor) == 0) & (np.diff(shape, axis=0) == 0).all(axis=1)
    continues = np.zeros(len(tensor), bool)
    continues[2:] = (
        same_tensor_and_shape[1:]
        & same_tensor_and_shape[:-1]
        & (steps[1:] == steps[:-1]).all(axis=1)
    )
    first_rows, counts = _split_runs(continues)
    step = np.zeros((len(first_rows), positions.shape[1]), np.int64)
    step[counts > 1] = steps[first_rows[counts > 1]]
    return first_rows, counts, step


def _split_runs(continues: BoolArray) -> tuple[IntArray, IntArray]:
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


def expand_runs(runs: Runs, data_at: IntArray) -> Pieces:
    """Return every piece of every run.

    Args:
        data_at: the start of the data section of each file.
    """
    rows, k = np.repeat(np.arange(len(runs)), runs.count), count_up(runs.count)
    each = runs.select(rows)
    file = each.file + k * each.file_step
    return Pieces(
        each.tensor,
        file,
        data_at[file] + each.start + k * each.start_step,
        each.offset + k[:, None] * each.offset_step,
        each.shape,
        row_major_strides(each.shape),
    )


def decode_tensors(encoded: msgspec.Raw) -> tuple[tuple[TensorEntry, ...], Runs]:
    """Return the tensors of a manifest, and their pieces as runs. The inverse of `encode_tensors`.

    Raises:
        FormatError: the tensors are malformed; a piece has more or fewer dimensions than its
            tensor; or there are too many pieces.
    """
    tensors = decode_json(encoded, tuple[TensorWithPieces, ...])
    entries = []
    rows = []
    tensor_of_row = []
    dims = count = 0
    for tensor in tensors:
        dims = max(dims, len(tensor.shape))
        count += max(1, len(tensor.pieces))
    check_table_size(count, dims)
    for index, tensor in enumerate(tensors):
        entries.append(TensorEntry(tensor.name, tensor.dtype, tensor.shape, tensor.same_as))
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
    file, start, count, file_step, start_step = table[:, :5].T
    offset_step, offset, shape = table[:, 5:].reshape(len(rows), 3, dims).transpose(1, 0, 2)
    owners = np.array(tensor_of_row, np.int64)
    runs = Runs(owners, file, start, offset, shape, count, file_step, start_step, offset_step)
    return tuple(entries), runs


def encode_tensors(
    tensors: Sequence[TensorEntry],
    tensor: IntArray,
    file: IntArray,
    start: IntArray,
    offset: IntArray,
    shape: IntArray,
) -> msgspec.Raw:
    """Return the list of tensors of a manifest as JSON, one tensor on each line.

    This is the slow part of encoding a manifest.

    Args:
        tensors: the tensors, in the order of the manifest.
        tensor, file, start, offset, shape: the pieces, sorted by tensor; see `Runs`.
    """
    pieces_of: dict[int, list[PieceEntry]] = {}
    positions = np.column_stack([file, start, offset])
    rows, counts, steps = _find_runs(tensor, positions, shape)
    columns = tensor[rows], positions[rows], shape[rows], counts, steps
    for index, position, extent, count, step in zip(*map(np.ndarray.tolist, columns), strict=True):
        n = len(tensors[index].shape)
        at, by = tuple(position[2 : 2 + n]), tuple(step[2 : 2 + n])
        repeat = Repeat(count, by, step[0], step[1]) if count > 1 else None
        entry = PieceEntry(position[0], position[1], at, tuple(extent[:n]), repeat)
        pieces_of.setdefault(index, []).append(entry)
    lines = []
    for i, each in enumerate(tensors):
        pieces = tuple(pieces_of.get(i, ()))
        listed = TensorWithPieces(each.name, each.dtype, each.shape, each.same_as, pieces)
        lines.append(b"\n" + msgspec.json.encode(listed))
    return msgspec.Raw(b"[" + b",".join(lines) + b"]")


def encode_tensors_with(tensors: Sequence[TensorEntry], rows: Iterable[Row]) -> msgspec.Raw:
    """Return the list of tensors of a manifest as JSON, with these pieces.

    Args:
        tensors: the tensors, in the order of the manifest.
        rows: the index of the tensor, the index of the file, the start, the offset and the shape of
            each piece. The pieces of a tensor stay in this order.
    """
    listed = sorted(rows, key=lambda row: row[0])
    dims = max((len(each.shape) for each in tensors), default=0)
    tensor, file, start = (np.array([row[i] for row in listed], np.int64) for i in range(3))
    offset = padded_rows([row[3] for row in listed], dims, 0)
    shape = padded_rows([row[4] for row in listed], dims, 1)
    return encode_tensors(tensors, tensor, file, start, offset, shape)


def count_tensors(encoded: msgspec.Raw) -> int:
    """Return the number of tensors in a manifest.

    Raises:
        FormatError: the tensors are not a list.
    """
    return len(decode_json(encoded, list[msgspec.Raw]))
