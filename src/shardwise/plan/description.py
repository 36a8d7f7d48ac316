"""What one rank holds or wants: names, types, shapes and boxes, without any bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Description:
    """The tensors of one rank, and the fragments of them that it has.

    `names`, `dtypes` (torch's names) and `shapes` (global) are parallel. Fragment i is the box
    `offset[i]`, `shape[i]` (`(n, D)`, padded on the right with 0 and 1) of tensor `tensor[i]`.
    `ties` maps further names of a tensor to the one that is listed.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    tensor: Int
    offset: Int
    shape: Int
    ties: tuple[tuple[str, str], ...] = ()
    per_rank: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """As bytes, for the rank that plans."""
        columns = [self.tensor, self.offset, self.shape]
        return msgspec.msgpack.encode(
            [
                "\0".join(self.names),
                "\0".join(self.dtypes),
                self.shapes,
                self.offset.shape[1],
                [np.ascontiguousarray(column).tobytes() for column in columns],
                self.ties,
                self.per_rank,
            ]
        )


class _Wire(msgspec.Struct, array_like=True):
    names: str
    dtypes: str
    shapes: tuple[tuple[int, ...], ...]
    dims: int
    columns: tuple[bytes, bytes, bytes]
    ties: tuple[tuple[str, str], ...]
    per_rank: tuple[str, ...]


def decode_description(data: bytes) -> Description:
    """The inverse of `Description.encode`."""
    wire = msgspec.msgpack.decode(data, type=_Wire)
    tensor, offset, shape = (np.frombuffer(column, np.int64) for column in wire.columns)
    return Description(
        tuple(wire.names.split("\0")) if wire.names else (),
        tuple(wire.dtypes.split("\0")) if wire.dtypes else (),
        wire.shapes,
        tensor,
        offset.reshape(len(tensor), wire.dims),
        shape.reshape(len(tensor), wire.dims),
        wire.ties,
        wire.per_rank,
    )


def widened(boxes: Int, dims: int, fill: int) -> Int:
    """Columns padded on the right to `dims` dimensions."""
    missing = dims - boxes.shape[1]
    return np.pad(boxes, ((0, 0), (0, missing)), constant_values=fill) if missing else boxes


def columns_of(rows: list[Any], dims: int, fill: int) -> Int:
    """A list of tuples of up to `dims` integers as columns, padded on the right."""
    padded = [row + (fill,) * (dims - len(row)) for row in rows]
    return np.array(padded, np.int64).reshape(len(rows), dims)
