"""Arrays of files as pieces of tensors: columns, in any nested order, and ties between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.foreign import Foreign, PieceTable, StoredArray
from shardwise.manifest.manifest import TensorEntry
from shardwise.manifest.table import Int, Pieces, check_width

MOST_PARTS = 4096
"""Pieces that an array is cut into whose elements share bytes, as `expand` makes them."""

_Row = tuple[int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def lay(arrays: Sequence[tuple[int, StoredArray]]) -> PieceTable:
    """Each array as all of a tensor, which is given by its number; empty ones have no piece.

    Raises:
        FormatError: the elements of an array share bytes too often, or the pieces have too many
            dimensions.
    """
    rows = [row for tensor, array in arrays for row in _rows(tensor, array)]
    dims = max((len(row[3]) for row in rows), default=0)
    check_width(len(rows), dims)
    places = np.array([row[:3] for row in rows], np.int64).reshape(len(rows), 3)
    offset, stride = (
        _column([row[3] for row in rows], dims),
        _column([row[5] for row in rows], dims),
    )
    shape = _column([row[4] for row in rows], dims, fill=1)
    return PieceTable(Pieces(places[:, 0], places[:, 1], places[:, 2], offset, shape), stride)


def lay_boxes(arrays: Sequence[tuple[int, tuple[int, ...], StoredArray]]) -> PieceTable:
    """Each array as the box at an offset of a tensor, which is given by its number.

    Raises:
        FormatError: the elements of an array share bytes too often.
    """
    arrays = [each for each in arrays if 0 not in each[2].shape]
    table = lay([(row, array) for row, (_, _, array) in enumerate(arrays)])
    pieces = table.pieces
    of = pieces.tensor
    offset = _column([offset for _, offset, _ in arrays], pieces.offset.shape[1])
    tensor = np.array([tensor for tensor, _, _ in arrays], np.int64)
    return replace(
        table, pieces=replace(pieces, tensor=tensor[of], offset=pieces.offset + offset[of])
    )


def joined(*tables: PieceTable) -> PieceTable:
    """The pieces of all."""
    if not tables:
        return PieceTable.nothing()
    dims = max(table.stride.shape[1] for table in tables)
    wide = [widened(table, dims) for table in tables]
    columns = [
        np.concatenate([getattr(table.pieces, name) for table in wide])
        for name in ("tensor", "file", "start", "offset", "shape")
    ]
    return PieceTable(Pieces(*columns), np.concatenate([table.stride for table in wide]))


def widened(table: PieceTable, dims: int) -> PieceTable:
    """The same, its columns padded to so many dimensions.

    Raises:
        FormatError: they have more.
    """
    pieces = table.pieces
    missing = dims - pieces.offset.shape[1]
    if missing < 0:
        raise FormatError(f"a piece has more dimensions than the {dims} of any tensor")
    if missing == 0:
        return table
    none = np.zeros((len(pieces.offset), missing), np.int64)
    offset, shape, stride = (
        np.concatenate((column, fill), axis=1)
        for column, fill in ((pieces.offset, none), (pieces.shape, none + 1), (table.stride, none))
    )
    return PieceTable(replace(pieces, offset=offset, shape=shape), stride)


def with_ties(foreign: Foreign) -> Foreign:
    """The same, where tensors that are one array of a file are tied to the first of them."""
    pieces, stride = foreign.table.pieces, foreign.table.stride
    first: dict[tuple[object, ...], int] = {}
    tied: dict[int, int] = {}
    alone = np.bincount(pieces.tensor, minlength=len(foreign.tensors)) == 1
    for row in _at_one_place(pieces):
        tensor = int(pieces.tensor[row])
        entry = foreign.tensors[tensor]
        if entry.same_as is None and alone[tensor]:
            place = int(pieces.file[row]), int(pieces.start[row]), tuple(stride[row].tolist())
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
    keep = ~np.isin(pieces.tensor, list(tied))
    kept = Pieces(
        pieces.tensor[keep],
        pieces.file[keep],
        pieces.start[keep],
        pieces.offset[keep],
        pieces.shape[keep],
    )
    return replace(foreign, tensors=tuple(tensors), table=PieceTable(kept, stride[keep]))


def _at_one_place(pieces: Pieces) -> Iterator[int]:
    """Rows that begin at the same byte as others do, by tensors."""
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
    shared = _shared(shape, stride)
    none = (0,) * len(shape)
    if not shared:
        yield tensor, array.file, array.start, none, shape, _normal(shape, stride)
        return
    if math.prod(shape[dim] for dim in shared) > MOST_PARTS:
        raise FormatError(
            f"an array of shape {list(shape)} has elements that share bytes: "
            "make it contiguous before it is saved"
        )
    part = tuple(1 if dim in shared else n for dim, n in enumerate(shape))
    ranges = [range(n if dim in shared else 1) for dim, n in enumerate(shape)]
    itemsize = array.itemsize
    for offset in product(*ranges):
        moved = sum(o * s for o, s in zip(offset, stride, strict=True)) * itemsize
        yield tensor, array.file, array.start + moved, offset, part, _normal(part, stride)


def _shared(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """The dimensions along which a step does not lead past all that smaller steps reach."""
    found = []
    reach = 0
    for step, dim in sorted((step, dim) for dim, step in enumerate(stride) if shape[dim] > 1):
        if step <= reach:
            found.append(dim)
        else:
            reach += (shape[dim] - 1) * step
    return found


def _normal(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    # Steps along a dimension of one element mean nothing, and may be anything.
    return tuple(0 if n == 1 else step for n, step in zip(shape, stride, strict=True))


def _column(rows: Sequence[tuple[int, ...]], dims: int, fill: int = 0) -> Int:
    padded = [(*row, *(fill,) * (dims - len(row))) for row in rows]
    return np.array(padded, np.int64).reshape(len(rows), dims)
