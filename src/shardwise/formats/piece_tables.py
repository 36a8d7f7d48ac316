"""Make piece tables of arrays and boxes; join, select and pad them; tie equal arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt

from shardwise.errors import FormatError
from shardwise.formats.foreign import Foreign, PieceTable, StoredArray
from shardwise.manifest.manifest import TensorEntry
from shardwise.manifest.pieces import Pieces, check_table_size, padded_rows

MOST_PIECES_OF_ARRAY = 4096
"""The most pieces that an array is cut into. Arrays are cut if elements share bytes (`expand`)."""

_Row = tuple[int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A piece: tensor, file, start, offset, shape, stride."""


def table_of_arrays(
    arrays: Sequence[tuple[int, StoredArray]], name_of: Callable[[int], str] | None = None
) -> PieceTable:
    """Return a table in which each array is a whole tensor. Empty arrays have no piece.

    Args:
        arrays: the index of the tensor, and the array.
        name_of: returns the name of a tensor by its index, for messages.

    Raises:
        FormatError: the elements of an array share bytes too often, or the pieces have too many
            dimensions.
    """
    name_of = name_of or "tensor {}".format
    rows = [row for tensor, array in arrays for row in _rows_of_array(tensor, array, name_of)]
    max_ndim = max((len(row[3]) for row in rows), default=0)
    check_table_size(len(rows), max_ndim)
    columns = np.array([row[:3] for row in rows], np.int64).reshape(len(rows), 3)
    offset = padded_rows([row[3] for row in rows], max_ndim, 0)
    shape = padded_rows([row[4] for row in rows], max_ndim, 1)
    stride = padded_rows([row[5] for row in rows], max_ndim, 0)
    return PieceTable(Pieces(columns[:, 0], columns[:, 1], columns[:, 2], offset, shape), stride)


def table_of_boxes(
    boxes: Sequence[tuple[int, tuple[int, ...], StoredArray]],
    name_of: Callable[[int], str] | None = None,
) -> PieceTable:
    """Return a table in which each array is the box at an offset of a tensor.

    Args:
        boxes: the index of the tensor, the offset of the box, and the array.
        name_of: returns the name of a tensor by its index, for messages.

    Raises:
        FormatError: the elements of an array share bytes too often.
    """
    boxes = [item for item in boxes if 0 not in item[2].shape]
    tensor_name = name_of or "tensor {}".format
    table = table_of_arrays(
        [(row, array) for row, (_, _, array) in enumerate(boxes)],
        lambda row: tensor_name(boxes[row][0]),
    )
    pieces = table.pieces
    box_index = pieces.tensor
    offset = padded_rows([offset for _, offset, _ in boxes], pieces.offset.shape[1], 0)
    tensor = np.array([tensor for tensor, _, _ in boxes], np.int64)
    return replace(
        table,
        pieces=replace(pieces, tensor=tensor[box_index], offset=pieces.offset + offset[box_index]),
    )


def join_tables(*tables: PieceTable) -> PieceTable:
    """Return one table with the pieces of all tables."""
    if not tables:
        return PieceTable.empty()
    max_ndim = max(table.stride.shape[1] for table in tables)
    padded = [pad_table(table, max_ndim) for table in tables]
    columns = [
        np.concatenate([getattr(table.pieces, name) for table in padded])
        for name in ("tensor", "file", "start", "offset", "shape")
    ]
    return PieceTable(Pieces(*columns), np.concatenate([table.stride for table in padded]))


def select_rows(table: PieceTable, is_kept: npt.NDArray[np.bool_]) -> PieceTable:
    """Return a table of the rows where `is_kept` is true."""
    pieces = table.pieces
    columns = pieces.tensor, pieces.file, pieces.start, pieces.offset, pieces.shape
    return PieceTable(Pieces(*(column[is_kept] for column in columns)), table.stride[is_kept])


def pad_table(table: PieceTable, dims: int) -> PieceTable:
    """Return the table with its columns padded to `dims` dimensions.

    Raises:
        FormatError: a piece has more dimensions.
    """
    pieces = table.pieces
    missing_dims = dims - pieces.offset.shape[1]
    if missing_dims < 0:
        raise FormatError(
            f"a piece has {pieces.offset.shape[1]} dimensions, but no tensor has more than {dims}: "
            "copy the checkpoint again from an intact source"
        )
    if missing_dims == 0:
        return table
    zeros = np.zeros((len(pieces.offset), missing_dims), np.int64)
    offset, shape, stride = (
        np.concatenate((column, fill), axis=1)
        for column, fill in (
            (pieces.offset, zeros),
            (pieces.shape, zeros + 1),
            (table.stride, zeros),
        )
    )
    return PieceTable(replace(pieces, offset=offset, shape=shape), stride)


def tie_equal_arrays(foreign: Foreign) -> Foreign:
    """Tie tensors that are the same array in a file: all but the first get `same_as`."""
    table = foreign.table
    pieces = table.pieces
    first_tensor: dict[tuple[object, ...], int] = {}
    owner_of: dict[int, int] = {}
    has_one_piece = np.bincount(pieces.tensor, minlength=len(foreign.tensors)) == 1
    for row in _rows_with_shared_start(pieces):
        tensor = int(pieces.tensor[row])
        entry = foreign.tensors[tensor]
        if entry.same_as is None and has_one_piece[tensor]:
            location = (
                int(pieces.file[row]),
                int(pieces.start[row]),
                tuple(table.stride[row].tolist()),
            )
            owner = first_tensor.setdefault((*location, entry.dtype, entry.shape), tensor)
            if owner != tensor:
                owner_of[tensor] = owner
    if not owner_of:
        return foreign
    tensors = [
        TensorEntry(entry.name, entry.dtype, entry.shape, same_as=foreign.tensors[owner_of[i]].name)
        if i in owner_of
        else entry
        for i, entry in enumerate(foreign.tensors)
    ]
    kept = select_rows(table, ~np.isin(pieces.tensor, list(owner_of)))
    return replace(foreign, tensors=tuple(tensors), table=kept)


def _rows_with_shared_start(pieces: Pieces) -> Iterator[int]:
    """Yield the rows that start where another row starts, ordered by tensor."""
    order = np.lexsort((pieces.start, pieces.file))
    is_same = (np.diff(pieces.file[order]) == 0) & (np.diff(pieces.start[order]) == 0)
    is_shared = np.zeros(len(order), bool)
    is_shared[1:] |= is_same
    is_shared[:-1] |= is_same
    rows = order[is_shared]
    yield from rows[np.argsort(pieces.tensor[rows], kind="stable")].tolist()


def _rows_of_array(
    tensor: int, array: StoredArray, name_of: Callable[[int], str]
) -> Iterator[_Row]:
    shape, stride = array.shape, array.stride
    if 0 in shape:
        return
    shared_dims = _dims_with_shared_bytes(shape, stride)
    if not shared_dims:
        zeros = (0,) * len(shape)
        yield tensor, array.file, array.start, zeros, shape, _normalize_stride(shape, stride)
        return
    if math.prod(shape[dim] for dim in shared_dims) > MOST_PIECES_OF_ARRAY:
        raise FormatError(
            f"{name_of(tensor)}: an array of shape {list(shape)} and strides {list(stride)} "
            "has too many elements that share bytes: make it contiguous before saving it"
        )
    piece_shape = tuple(1 if dim in shared_dims else n for dim, n in enumerate(shape))
    ranges = [range(n if dim in shared_dims else 1) for dim, n in enumerate(shape)]
    for offset in product(*ranges):
        elements = sum(o * s for o, s in zip(offset, stride, strict=True)) * array.itemsize
        yield (
            tensor,
            array.file,
            array.start + elements,
            offset,
            piece_shape,
            _normalize_stride(piece_shape, stride),
        )


def _dims_with_shared_bytes(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Return the dimensions along which elements share bytes with other elements."""
    shared_dims = []
    extent = 0  # elements from the first to the last, along the dimensions so far
    for step, dim in sorted((step, dim) for dim, step in enumerate(stride) if shape[dim] > 1):
        if step <= extent:
            shared_dims.append(dim)
        else:
            extent += (shape[dim] - 1) * step
    return shared_dims


def _normalize_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    # The stride of a dimension with one element has no meaning, and may have any value.
    return tuple(0 if n == 1 else step for n, step in zip(shape, stride, strict=True))
