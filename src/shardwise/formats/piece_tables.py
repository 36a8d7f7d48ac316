"""Piece tables: made of arrays and boxes, joined, padded, and with ties between tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt

from shardwise.errors import FormatError
from shardwise.formats.foreign import Foreign, PieceTable, StoredArray
from shardwise.manifest.manifest import TensorEntry
from shardwise.manifest.table import Pieces, check_width, padded_rows

MOST_PARTS = 4096
"""The most pieces that an array is cut into if its elements share bytes, as `expand` makes them."""

_Row = tuple[int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def table_of_arrays(arrays: Sequence[tuple[int, StoredArray]]) -> PieceTable:
    """Return a table in which each array is all of a tensor, given by its number.

    Empty arrays have no piece.

    Raises:
        FormatError: the elements of an array share bytes too often, or the pieces have too many
            dimensions.
    """
    rows = [row for tensor, array in arrays for row in _rows(tensor, array)]
    dims = max((len(row[3]) for row in rows), default=0)
    check_width(len(rows), dims)
    places = np.array([row[:3] for row in rows], np.int64).reshape(len(rows), 3)
    offset = padded_rows([row[3] for row in rows], dims, 0)
    shape = padded_rows([row[4] for row in rows], dims, 1)
    stride = padded_rows([row[5] for row in rows], dims, 0)
    return PieceTable(Pieces(places[:, 0], places[:, 1], places[:, 2], offset, shape), stride)


def table_of_boxes(boxes: Sequence[tuple[int, tuple[int, ...], StoredArray]]) -> PieceTable:
    """Return a table in which each array is the box at an offset of a tensor.

    Args:
        boxes: the number of the tensor, the box's offset, and the array.

    Raises:
        FormatError: the elements of an array share bytes too often.
    """
    boxes = [each for each in boxes if 0 not in each[2].shape]
    table = table_of_arrays([(row, array) for row, (_, _, array) in enumerate(boxes)])
    pieces = table.pieces
    box = pieces.tensor
    offset = padded_rows([offset for _, offset, _ in boxes], pieces.offset.shape[1], 0)
    tensor = np.array([tensor for tensor, _, _ in boxes], np.int64)
    return replace(
        table, pieces=replace(pieces, tensor=tensor[box], offset=pieces.offset + offset[box])
    )


def joined(*tables: PieceTable) -> PieceTable:
    """Return one table with the pieces of all."""
    if not tables:
        return PieceTable.nothing()
    dims = max(table.stride.shape[1] for table in tables)
    wide = [widened(table, dims) for table in tables]
    columns = [
        np.concatenate([getattr(table.pieces, name) for table in wide])
        for name in ("tensor", "file", "start", "offset", "shape")
    ]
    return PieceTable(Pieces(*columns), np.concatenate([table.stride for table in wide]))


def rows_of(table: PieceTable, keep: npt.NDArray[np.bool_]) -> PieceTable:
    """Return a table of the rows where `keep` is true."""
    pieces = table.pieces
    columns = pieces.tensor, pieces.file, pieces.start, pieces.offset, pieces.shape
    return PieceTable(Pieces(*(column[keep] for column in columns)), table.stride[keep])


def widened(table: PieceTable, dims: int) -> PieceTable:
    """Return the table with its columns padded to `dims` dimensions.

    Raises:
        FormatError: a piece has more dimensions.
    """
    pieces = table.pieces
    missing = dims - pieces.offset.shape[1]
    if missing < 0:
        raise FormatError(f"a piece has more dimensions than the {dims} of any tensor")
    if missing == 0:
        return table
    zeros = np.zeros((len(pieces.offset), missing), np.int64)
    offset, shape, stride = (
        np.concatenate((column, fill), axis=1)
        for column, fill in (
            (pieces.offset, zeros),
            (pieces.shape, zeros + 1),
            (table.stride, zeros),
        )
    )
    return PieceTable(replace(pieces, offset=offset, shape=shape), stride)


def with_ties(foreign: Foreign) -> Foreign:
    """Tie tensors that are the same array of a file to the first of them."""
    table = foreign.table
    pieces = table.pieces
    first: dict[tuple[object, ...], int] = {}
    tied: dict[int, int] = {}
    alone = np.bincount(pieces.tensor, minlength=len(foreign.tensors)) == 1
    for row in _at_one_place(pieces):
        tensor = int(pieces.tensor[row])
        entry = foreign.tensors[tensor]
        if entry.same_as is None and alone[tensor]:
            place = int(pieces.file[row]), int(pieces.start[row]), tuple(table.stride[row].tolist())
            known = first.setdefault((*place, entry.dtype, entry.shape), tensor)
            if known != tensor:
                tied[tensor] = known
    if not tied:
        return foreign
    tensors = [
        TensorEntry(entry.name, entry.dtype, entry.shape, same_as=foreign.tensors[tied[i]].name)
        if i in tied
        else entry
        for i, entry in enumerate(foreign.tensors)
    ]
    kept = rows_of(table, ~np.isin(pieces.tensor, list(tied)))
    return replace(foreign, tensors=tuple(tensors), table=kept)


def _at_one_place(pieces: Pieces) -> Iterator[int]:
    """Yield the rows that begin at the same byte as another row, ordered by tensor."""
    order = np.lexsort((pieces.start, pieces.file))
    same = (np.diff(pieces.file[order]) == 0) & (np.diff(pieces.start[order]) == 0)
    shared = np.zeros(len(order), bool)
    shared[1:] |= same
    shared[:-1] |= same
    rows = order[shared]
    yield from rows[np.argsort(pieces.tensor[rows], kind="stable")].tolist()


def _rows(tensor: int, array: StoredArray) -> Iterator[_Row]:
    shape, stride = array.shape, array.stride
    if 0 in shape:
        return
    shared = _shared_dims(shape, stride)
    if not shared:
        zeros = (0,) * len(shape)
        yield tensor, array.file, array.start, zeros, shape, _normal(shape, stride)
        return
    if math.prod(shape[dim] for dim in shared) > MOST_PARTS:
        raise FormatError(
            f"an array of shape {list(shape)} has elements that share bytes: "
            "make it contiguous before saving it"
        )
    part = tuple(1 if dim in shared else n for dim, n in enumerate(shape))
    ranges = [range(n if dim in shared else 1) for dim, n in enumerate(shape)]
    for offset in product(*ranges):
        moved = sum(o * s for o, s in zip(offset, stride, strict=True)) * array.itemsize
        yield tensor, array.file, array.start + moved, offset, part, _normal(part, stride)


def _shared_dims(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Return the dimensions along which a step stays within the reach of smaller steps."""
    found = []
    reach = 0
    for step, dim in sorted((step, dim) for dim, step in enumerate(stride) if shape[dim] > 1):
        if step <= reach:
            found.append(dim)
        else:
            reach += (shape[dim] - 1) * step
    return found


def _normal(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    # The stride of a dimension with one element has no meaning and can be anything.
    return tuple(0 if n == 1 else step for n, step in zip(shape, stride, strict=True))
