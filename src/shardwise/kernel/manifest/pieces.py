"""The entries of tensors and their pieces in a manifest.

A manifest stores evenly spaced pieces of a tensor as one entry for the first piece, with a
`repeat`: the differences between one piece and the next, along one or more axes. This module calls
such pieces a run, and the documentation calls them a grid. For example, the ranks 0, 1 and 2 wrote
two rows each of a weight of shape [6, 4]:

    {"file":0,"start":0,"offset":[0,0],"shape":[2,4],
     "repeat":[{"count":3,"offset":[2,0],"file":1}]}

The piece of index k is the box at row 2k, in file k, from byte 0 of its data on. Files are numbered
by their ranks. Fewer than three pieces are listed one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Annotated

import msgspec
import numpy as np

from shardwise.kernel.boxes import row_major_strides
from shardwise.kernel.boxes.box import BoolArray, IntArray, Table, check_table_size, padded_rows
from shardwise.kernel.boxes.grids import advance, count_boxes, expand_grids, split_runs
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.errors import FormatError
from shardwise.kernel.manifest.manifest import Count, Dims, SignedCount, TensorEntry, decode_json

Row = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]
SHORTEST_RUN = 3
MOST_AXES = 8


class Axis(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """Further pieces of the same shape, at constant distances.

    Attributes:
        count: the number of pieces, including the first.
        offset, file, start: the differences between one piece and the next.
    """

    count: Annotated[int, msgspec.Meta(ge=2, le=2**24)]
    offset: tuple[SignedCount, ...]
    file: SignedCount = 0
    start: SignedCount = 0


class PieceEntry(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """A box of a tensor, stored in row-major order.

    Attributes:
        file: the index of the file in the manifest.
        start: the first byte, counted from the start of the data section.
        offset, shape: the box.
        repeat: further pieces of the same shape, along one or more axes, the outermost first.
            Version 1 of the format has one axis, without a list.
    """

    file: Count
    start: Count
    offset: Dims
    shape: Dims
    repeat: Annotated[tuple[Axis, ...], msgspec.Meta(max_length=MOST_AXES)] | Axis = ()


@prepare_decoding
class TensorWithPieces(
    TensorEntry, frozen=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """A global tensor in a manifest.

    Attributes:
        pieces: the boxes that cover the tensor.
    """

    pieces: tuple[PieceEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Pieces(Table):
    """Boxes of tensors, and the bytes of each box in a file, in columns of n rows.

    For example, the rows of a float32 tensor of shape `[4, 6]`, which two ranks saved:

        tensor  file  start  offset  shape   stride
        0       0     0      [0, 0]  [2, 6]  [6, 1]
        0       1     0      [2, 0]  [2, 6]  [6, 1]

    Attributes:
        tensor, file: indices of the tensor and of the file in the `Layout`, `(n,)`.
        start: the offset of the first element in bytes, `(n,)`. It counts from the start of the
            file's data section, which is the start of the file in a foreign checkpoint.
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
class Runs(Table):
    """Runs of pieces at constant distances along A axes, in columns of n rows.

    For example, 4 ranks hold 8 columns of a matrix of 16 rows, 2 columns each, and each of these is
    split by rows over 8 further ranks: one run of 4 times 8 pieces. `shardwise.kernel.boxes.grids`
    says more about axes.

    Attributes:
        tensor, file, start, offset, shape: the first piece of each run, as in `Pieces`. All pieces
            of a run have the same tensor and shape.
        count: the number of pieces along each axis, the outermost axis first, `(n, A)`; 1 for an
            axis without effect.
        file_step, start_step, offset_step: the differences between one piece and the next along
            each axis, of shapes `(n, A)`, `(n, A)` and `(n, A, D)`.
        stride: the strides of each run's pieces, as in `Pieces`, `(n, D)`.
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
    stride: IntArray

    @classmethod
    def of_rows(
        cls,
        tensor: IntArray,
        file: IntArray,
        start: IntArray,
        offset: IntArray,
        shape: IntArray,
        stride: IntArray | None = None,
    ) -> Runs:
        """Return runs without axes, of one piece each. By default, pieces are row-major."""
        n, dims = offset.shape
        none, no_steps = np.zeros((n, 0), np.int64), np.zeros((n, 0, dims), np.int64)
        return cls(
            *(tensor, file, start, offset, shape, none, none, none, no_steps),
            row_major_strides(shape) if stride is None else stride,
        )

    @classmethod
    def of_pieces(cls, pieces: Pieces) -> Runs:
        """Return runs without axes, of one piece each."""
        return cls.of_rows(*(getattr(pieces, each.name) for each in fields(Pieces)))

    @property
    def sizes(self) -> IntArray:
        """The number of pieces of each run, `(n,)`."""
        return count_boxes(self.count)

    def at(self, rows: IntArray, k: IntArray) -> Pieces:
        """Return the piece with the indices k, `(m, A)`, of each of some runs, `(m,)`."""
        return Pieces(
            self.tensor[rows],
            advance(self.file[rows], k, self.file_step[rows]),
            advance(self.start[rows], k, self.start_step[rows]),
            advance(self.offset[rows], k, self.offset_step[rows]),
            self.shape[rows],
            self.stride[rows],
        )

    def expand(self) -> Pieces:
        """Return every piece of every run.

        Raises:
            FormatError: there are too many.
        """
        if self.count.shape[1] == 0:
            return Pieces(*(getattr(self, each.name) for each in fields(Pieces)))
        total = int(self.count.prod(axis=1, dtype=np.float64).sum())
        check_table_size(total, max(2, self.offset.shape[1]))
        return self.at(*expand_grids(self.count))


def join_runs(tables: Sequence[Runs]) -> Runs:
    """Return the runs of all tables, which may have different numbers of axes."""
    axes = max(runs.count.shape[1] for runs in tables)
    columns: list[IntArray] = []
    for each in fields(Runs):
        parts = [getattr(runs, each.name) for runs in tables]
        if each.name in ("count", "file_step", "start_step", "offset_step"):
            fill = int(each.name == "count")
            ends = np.cumsum([*map(len, parts)]).tolist()
            padded = np.full((ends[-1], axes, *parts[0].shape[2:]), fill, np.int64)
            for part, end in zip(parts, ends, strict=True):
                padded[end - len(part) : end, axes - part.shape[1] :] = part
            columns.append(padded)
        else:
            columns.append(np.concatenate(parts))
    return Runs(*columns)


def find_runs(runs: Runs) -> Runs:
    """Find longer runs in pieces or runs, which must be sorted by tensor; see `Runs`.

    Runs that follow each other at equal distances become one run of one more axis. This is repeated
    as long as it finds any. For example, the 16 rows of a matrix are each cut in two: the 32 pieces
    become 16 pairs, and these one run of two axes.
    """
    if int(np.bincount(runs.tensor).max(initial=0)) < SHORTEST_RUN:
        return runs
    while runs.count.shape[1] < MOST_AXES - 1:
        folded = _fold(runs)
        if len(folded) == len(runs):
            folded = _fold(_pair(runs))
        if len(folded) == len(runs):
            break
        runs = folded
    return runs


def _fold(runs: Runs) -> Runs:
    """Return runs of these runs, with one more axis, which is the outermost.

    For example, three pieces at the offsets 0, 4 and 8 become one run with an axis of count 3 and
    step 4. Two pieces, at 0 and 4, stay apart.
    """
    positions, alike = _compare_neighbours(runs)
    steps = np.diff(positions, axis=0)
    continues = np.zeros(len(runs), bool)
    continues[2:] = alike[1:] & alike[:-1] & (steps[1:] == steps[:-1]).all(axis=1)
    first, counts = split_runs(continues, SHORTEST_RUN)
    step = np.zeros((len(first), positions.shape[1]), np.int64)
    step[counts > 1] = steps[first[counts > 1]]
    return _add_axis(runs.select(first), counts, step)


def _pair(runs: Runs) -> Runs:
    """Join neighbours to pairs, with one more axis, where the pairs are at equal distances.

    For example, the pieces of three rows, each cut in two, are at (0, 0), (0, 3), (4, 0), (4, 3),
    (8, 0) and (8, 3). They become three runs, which begin at (0, 0), (4, 0) and (8, 0), each with
    an axis of count 2 and step (0, 3).
    """
    positions, alike = _compare_neighbours(runs)
    distances = positions[2:] - positions[:-2]
    continues = np.zeros(len(distances), bool)
    continues[1:] = (distances[1:] == distances[:-1]).all(axis=1)
    continues &= alike[1:] & alike[:-1]
    rows = np.flatnonzero(continues)
    starts = rows[np.flatnonzero(np.diff(rows, prepend=-2) != 1)] - 1
    stops = rows[np.flatnonzero(np.diff(rows, append=-2) != 1)] + 3
    is_first = np.zeros(len(runs), bool)
    free = 0
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        start = max(start, free)
        free = start + (stop - start) // 2 * 2
        if free - start >= 2 * SHORTEST_RUN:
            is_first[start:free:2] = True
        else:
            free = start
    kept = np.ones(len(runs), bool)
    kept[1:] = ~is_first[:-1]
    step = np.zeros_like(positions)
    step[is_first] = positions[1:][is_first[:-1]] - positions[is_first]
    return _add_axis(runs.select(kept), 1 + is_first[kept], step[kept])


def _compare_neighbours(runs: Runs) -> tuple[IntArray, BoolArray]:
    """Return the file, start and offset of each run, `(n, 2 + D)`; and whether each run and the
    next one have the same tensor, shape and axes, `(n - 1,)`."""
    n, dims = runs.offset.shape
    moves = runs.offset_step.reshape(n, runs.offset_step.shape[1] * dims)
    keys = np.column_stack(
        [runs.tensor, runs.shape, runs.count, runs.file_step, runs.start_step, moves]
    )
    positions = np.column_stack([runs.file, runs.start, runs.offset])
    return positions, (np.diff(keys, axis=0) == 0).all(axis=1)


def _add_axis(runs: Runs, count: IntArray, step: IntArray) -> Runs:
    """Return the runs with a further axis, which is the outermost.

    Args:
        count: the number of pieces along this axis, `(n,)`.
        step: the differences of file, start and offset, `(n, 2 + D)`.
    """
    return replace(
        runs,
        count=np.column_stack([count, runs.count]),
        file_step=np.column_stack([step[:, 0], runs.file_step]),
        start_step=np.column_stack([step[:, 1], runs.start_step]),
        offset_step=np.concatenate([step[:, None, 2:], runs.offset_step], axis=1),
    )


def decode_tensors(encoded: msgspec.Raw) -> tuple[tuple[TensorEntry, ...], Runs]:
    """Return the tensors of a manifest, and their pieces as runs. The inverse of `encode_tensors`.

    Raises:
        FormatError: the tensors are malformed; a piece has more or fewer dimensions than its
            tensor; or there are too many pieces.
    """
    tensors = decode_json(encoded, tuple[TensorWithPieces, ...])
    pieces = [piece for tensor in tensors for piece in tensor.pieces]
    ndims = [len(tensor.shape) for tensor in tensors]
    dims = max(ndims, default=0)
    check_table_size(len(tensors) + len(pieces), dims)
    owner = np.repeat(np.arange(len(tensors)), [len(tensor.pieces) for tensor in tensors])
    ndim = np.array(ndims, np.int64)[owner]
    shape = _padded([piece.shape for piece in pieces], ndim, dims, 1)
    runs = Runs(
        owner,
        np.array([piece.file for piece in pieces], np.int64),
        np.array([piece.start for piece in pieces], np.int64),
        _padded([piece.offset for piece in pieces], ndim, dims, 0),
        shape,
        *_decode_axes(pieces, ndim, dims),
        row_major_strides(shape),
    )
    return tuple(TensorEntry(t.name, t.dtype, t.shape, t.same_as) for t in tensors), runs


def _padded(rows: Sequence[tuple[int, ...]], ndim: IntArray, dims: int, fill: int) -> IntArray:
    """Return offsets, shapes or steps as an array `(n, dims)`, padded on the right.

    Args:
        ndim: the number of dimensions that each row must have.
    """
    wrong = np.fromiter(map(len, rows), np.int64, len(rows)) != ndim
    if wrong.any():
        row = int(np.argmax(wrong))
        raise FormatError(
            f"a piece has the offset, shape or step {list(rows[row])}, but its tensor has "
            f"{ndim[row]} dimensions"
        )
    found = np.full((len(rows), dims), fill, np.int64)
    numbers = np.fromiter(chain.from_iterable(rows), np.int64, int(ndim.sum()))
    found[np.arange(dims) < ndim[:, None]] = numbers
    return found


def _decode_axes(
    pieces: Sequence[PieceEntry], ndim: IntArray, dims: int
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return the columns `count`, `file_step`, `start_step` and `offset_step` of `Runs`."""
    repeats = [(row, piece.repeat) for row, piece in enumerate(pieces) if piece.repeat]
    listed = [
        (row, number, axis)
        for row, repeat in repeats
        for number, axis in enumerate((repeat,) if isinstance(repeat, Axis) else repeat)
    ]
    table = np.array([(r, a, axis.count, axis.file, axis.start) for r, a, axis in listed], np.int64)
    row, number, count, file_step, start_step = table.reshape(-1, 5).T
    n, axes = len(pieces), int(number.max(initial=-1)) + 1
    check_table_size(n * axes, dims)
    offset_step = _padded([axis.offset for _, _, axis in listed], ndim[row], dims, 0)
    columns = (
        np.ones((n, axes), np.int64),
        np.zeros((n, axes), np.int64),
        np.zeros((n, axes), np.int64),
        np.zeros((n, axes, dims), np.int64),
    )
    for column, values in zip(columns, (count, file_step, start_step, offset_step), strict=True):
        column[row, number] = values
    return columns


def encode_tensors(tensors: Sequence[TensorEntry], runs: Runs) -> msgspec.Raw:
    """Return the list of tensors of a manifest as JSON, one tensor on each line.

    This is the slow part of encoding a manifest.

    Args:
        tensors: the tensors, in the order of the manifest.
        runs: their pieces, sorted by tensor.
    """
    pieces_of: dict[int, list[PieceEntry]] = {}
    axes_of = _axes_of_rows(tensors, runs)
    columns = runs.tensor, runs.file, runs.start, runs.offset, runs.shape
    for row, (index, file, start, offset, shape) in enumerate(
        zip(*map(np.ndarray.tolist, columns), strict=True)
    ):
        n = len(tensors[index].shape)
        axes = tuple(axes_of.get(row, ()))
        entry = PieceEntry(file, start, tuple(offset[:n]), tuple(shape[:n]), axes)
        pieces_of.setdefault(index, []).append(entry)
    lines = []
    for i, each in enumerate(tensors):
        pieces = tuple(pieces_of.get(i, ()))
        listed = TensorWithPieces(each.name, each.dtype, each.shape, each.same_as, pieces)
        lines.append(b"\n" + msgspec.json.encode(listed))
    return msgspec.Raw(b"[" + b",".join(lines) + b"]")


def _axes_of_rows(tensors: Sequence[TensorEntry], runs: Runs) -> dict[int, list[Axis]]:
    """Return the axes of each run that has any, without those of count 1."""
    axes_of: dict[int, list[Axis]] = {}
    rows, axes = np.nonzero(runs.count > 1)
    columns = (
        rows,
        runs.tensor[rows],
        runs.count[rows, axes],
        runs.offset_step[rows, axes],
        runs.file_step[rows, axes],
        runs.start_step[rows, axes],
    )
    for row, index, count, offset, file, start in zip(
        *map(np.ndarray.tolist, columns), strict=True
    ):
        axis = Axis(count, tuple(offset[: len(tensors[index].shape)]), file, start)
        axes_of.setdefault(row, []).append(axis)
    return axes_of


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
    rows_of_pieces = Runs.of_rows(tensor, file, start, offset, shape)
    return encode_tensors(tensors, find_runs(rows_of_pieces))


def count_tensors(encoded: msgspec.Raw) -> int:
    """Return the number of tensors in a manifest.

    Raises:
        FormatError: the tensors are not a list.
    """
    return len(decode_json(encoded, list[msgspec.Raw]))
