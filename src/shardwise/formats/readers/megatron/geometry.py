"""How Megatron-Core lays tensors: layers stacked into one, shards flattened, and both undone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.errors import FormatError, LayoutError
from shardwise.formats.foreign import PieceTable
from shardwise.formats.readers.dcp.metadata import Metadata
from shardwise.formats.readers.dcp.stored import Stored
from shardwise.layout import boxes_of_range, row_major
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.table import Int, Pieces

STACKED = re.compile(r"((?:.*\.)?layers)\.(?!\d+(?:\.|$))(.+)")
"""Names of what is one tensor for all layers."""
_FLATTENED = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True, slots=True)
class _Row:
    """A piece of a tensor."""

    tensor: int
    file: int
    start: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


def unflattened(stored: Stored, metadata: Metadata) -> Stored:
    """Undo the flattening of shards: pieces of ranges become boxes.

    Raises:
        FormatError: they do not make up the tensor that was flattened.
    """
    known = metadata.more.get("mcore_data") or {}
    original = {
        name: tuple(each[_FLATTENED])
        for name, each in (known.items() if isinstance(known, dict) else ())
        if isinstance(each, dict) and _FLATTENED in each
    }
    flat = {i: original[name] for i, name in enumerate(stored.names) if name in original}
    if not flat:
        return stored
    pieces = stored.table.pieces
    is_flat = np.isin(pieces.tensor, list(flat))
    rows: list[_Row] = []
    for row in np.flatnonzero(is_flat).tolist():
        tensor = int(pieces.tensor[row])
        try:
            rows += _boxes(stored, row, tensor, flat[tensor])
        except (LayoutError, TypeError, ValueError, ZeroDivisionError) as error:
            raise FormatError(f"{stored.names[tensor]}: it was flattened: {error}") from error
    shapes = tuple(flat.get(i, shape) for i, shape in enumerate(stored.shapes))
    dims = max(len(shape) for shape in shapes)
    kept = _rows(stored.table, ~is_flat, max(dims, pieces.offset.shape[1]))
    width = kept.stride.shape[1]
    shape = _padded([row.shape for row in rows], width, 1)
    made = Pieces(
        np.array([row.tensor for row in rows], np.int64),
        np.array([row.file for row in rows], np.int64),
        np.array([row.start for row in rows], np.int64),
        _padded([row.offset for row in rows], width, 0),
        shape,
    )
    table = PieceTable(
        _concatenated(kept.pieces, made), np.concatenate([kept.stride, row_major(shape)])
    )
    return replace(stored, shapes=shapes, table=table)


def _boxes(stored: Stored, row: int, tensor: int, shape: tuple[int, ...]) -> Iterator[_Row]:
    """The boxes of a piece of a tensor `[X/x, Y/y, x*y]`, which was `[X, Y]` of shards `[x, y]`."""
    pieces = stored.table.pieces
    counts = stored.shapes[tensor][:-1]
    if len(counts) != len(shape) or any(n % count for n, count in zip(shape, counts, strict=True)):
        raise ValueError(f"shards {list(counts)} do not divide {list(shape)}")
    local = tuple(n // count for n, count in zip(shape, counts, strict=True))
    at = pieces.offset[row][: len(shape) + 1].tolist()
    size = int(pieces.shape[row][len(shape)])
    if pieces.shape[row][: len(shape)].tolist() != [1] * len(shape):
        raise ValueError("a piece is of several shards")
    start = int(pieces.start[row])
    itemsize = DTYPES[stored.dtypes[tensor]].itemsize
    for box in boxes_of_range(local, at[-1], at[-1] + size):
        offset = tuple(i * n + o for i, n, o in zip(at, local, box.offset, strict=False))
        yield _Row(tensor, int(pieces.file[row]), start, offset, box.shape)
        start += box.size * itemsize


def unstacked(stored: Stored) -> Stored:
    """Give each layer of tensors that stack them a name of its own.

    Raises:
        FormatError: a tensor claims more layers than there are pieces.
    """
    pieces = stored.table.pieces
    single = np.ones(len(stored.names), bool)
    if pieces.offset.shape[1]:
        single[pieces.tensor[pieces.shape[:, 0] != 1]] = False
    names: list[str] = []
    dtypes: list[str] = []
    shapes: list[tuple[int, ...]] = []
    first = np.zeros(len(stored.names), np.int64)
    stacked = np.zeros(len(stored.names), bool)
    for i, (name, dtype, shape) in enumerate(
        zip(stored.names, stored.dtypes, stored.shapes, strict=True)
    ):
        match = STACKED.fullmatch(name)
        first[i], stacked[i] = len(names), match is not None and len(shape) > 0 and single[i]
        count = shape[0] if stacked[i] else 1
        if count > max(1, len(pieces)):
            raise FormatError(f"{name}: it has {count} layers, and pieces of fewer")
        names += [
            f"{match[1]}.{layer}.{match[2]}" if match and stacked[i] else name
            for layer in range(count)
        ]
        dtypes += [dtype] * count
        shapes += [shape[1:] if stacked[i] else shape] * count
    rows = stacked[pieces.tensor]
    layer = pieces.offset[:, 0] if pieces.offset.shape[1] else 0 * pieces.tensor

    dims = max(map(len, shapes), default=0)

    def shifted(column: Int, fill: int) -> Int:
        moved = np.pad(column[:, 1:], ((0, 0), (0, 1)), constant_values=fill)
        return np.where(rows[:, None], moved, column)[:, :dims]

    table = PieceTable(
        Pieces(
            first[pieces.tensor] + np.where(rows, layer, 0),
            pieces.file,
            pieces.start,
            shifted(pieces.offset, 0),
            shifted(pieces.shape, 1),
        ),
        shifted(stored.table.stride, 0),
    )
    return replace(
        stored, names=tuple(names), dtypes=tuple(dtypes), shapes=tuple(shapes), table=table
    )


def _rows(table: PieceTable, chosen: Any, dims: int) -> PieceTable:
    """Some of the pieces, in columns of so many dimensions."""
    pieces = table.pieces
    by = ((0, 0), (0, dims - pieces.offset.shape[1]))
    return PieceTable(
        Pieces(
            pieces.tensor[chosen],
            pieces.file[chosen],
            pieces.start[chosen],
            np.pad(pieces.offset[chosen], by),
            np.pad(pieces.shape[chosen], by, constant_values=1),
        ),
        np.pad(table.stride[chosen], by),
    )


def _concatenated(first: Pieces, second: Pieces) -> Pieces:
    names = ("tensor", "file", "start", "offset", "shape")
    return Pieces(*(np.concatenate([getattr(first, n), getattr(second, n)]) for n in names))


def _padded(rows: Sequence[tuple[int, ...]], dims: int, fill: int) -> Int:
    padded = [(*row, *(fill,) * (dims - len(row))) for row in rows]
    return np.array(padded, np.int64).reshape(len(rows), dims)
