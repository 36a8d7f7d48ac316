"""Tables of a save: what one rank has (`Description`), and what it writes (`PieceTable`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Description:
    """The tensors of one rank, and its fragments of them, without any bytes.

    `names`, `dtypes` (torch's names) and `shapes` (global) are parallel. Fragment i is the box
    `offset[i]`, `shape[i]` (`(n, D)`, padded on the right with 0 and 1) of tensor `tensor[i]`.
    `ties` maps further names of a tensor to the name that is listed. `per_rank` names the values
    that differ by rank.
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
        """Return the description as bytes, for the rank that plans."""
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


class _EncodedDescription(msgspec.Struct, array_like=True):
    names: str
    dtypes: str
    shapes: tuple[tuple[int, ...], ...]
    dims: int
    columns: tuple[bytes, bytes, bytes]
    ties: tuple[tuple[str, str], ...]
    per_rank: tuple[str, ...]


def decode_description(data: bytes) -> Description:
    """Return the description that `Description.encode` encoded."""
    encoded = msgspec.msgpack.decode(data, type=_EncodedDescription)
    tensor, offset, shape = (np.frombuffer(column, np.int64) for column in encoded.columns)
    return Description(
        tuple(encoded.names.split("\0")) if encoded.names else (),
        tuple(encoded.dtypes.split("\0")) if encoded.dtypes else (),
        encoded.shapes,
        tensor,
        offset.reshape(len(tensor), encoded.dims),
        shape.reshape(len(tensor), encoded.dims),
        encoded.ties,
        encoded.per_rank,
    )


@dataclass(frozen=True, slots=True)
class PieceTable:
    """The pieces in the data section of a rank's file, end to end; a row for each piece.

    The columns are lists where the loop that copies pieces reads them one by one.

    Attributes:
        start: the byte of the section at which each piece begins, and the end of the last.
        fragment: the number of the fragment that the piece is part of, in the description.
        offset, shape: the box of the piece within the fragment, in elements.
        whole: whether the piece is all of the fragment.
    """

    start: Int
    fragment: list[int]
    offset: list[tuple[int, ...]]
    shape: list[tuple[int, ...]]
    whole: list[bool]

    def __len__(self) -> int:
        return len(self.fragment)

    def listed(self, description: Description) -> Iterator[tuple[str, str, tuple[int, ...], Box]]:
        """Yield the name, dtype and global shape of each piece's tensor, and the piece's box."""
        tensors, origins = description.tensor.tolist(), description.offset.tolist()
        for fragment, offset, shape in zip(self.fragment, self.offset, self.shape, strict=True):
            tensor = tensors[fragment]
            at = tuple(o + w for o, w in zip(origins[fragment], offset, strict=False))
            yield (
                description.names[tensor],
                description.dtypes[tensor],
                description.shapes[tensor],
                Box(at, shape),
            )


def encode_pieces(fragment: Int, offset: Int, shape: Int) -> bytes:
    """Encode the pieces that a rank writes, in the order of its file, for that rank.

    Args:
        fragment: numbers of fragments in the rank's description.
        offset, shape: boxes of the global tensors, `(n, D)`.
    """
    encoded = [np.ascontiguousarray(column).tobytes() for column in (fragment, offset, shape)]
    return msgspec.msgpack.encode([offset.shape[1], encoded])


def decode_pieces(data: bytes, description: Description) -> PieceTable:
    """Return the table of encoded pieces.

    Args:
        description: of the rank that writes them, or of a rank with equal fragments.
    """
    dims, columns = msgspec.msgpack.decode(data, type=tuple[int, tuple[bytes, bytes, bytes]])
    fragment, offset, shape = (np.frombuffer(column, np.int64) for column in columns)
    known = description.shape.shape[1]  # other ranks may have tensors of more dimensions
    offset = offset.reshape(len(fragment), dims)[:, :known]
    shape = shape.reshape(len(fragment), dims)[:, :known]
    tensor = description.tensor[fragment]
    itemsize = np.array([DTYPES[dtype].itemsize for dtype in description.dtypes], np.int64)
    nbytes = shape.prod(axis=1) * itemsize[tensor]
    ndims = [len(description.shapes[i]) for i in tensor.tolist()]
    whole: npt.NDArray[np.bool_] = (shape == description.shape[fragment]).all(axis=1)
    return PieceTable(
        np.concatenate([[0], np.cumsum(nbytes)]),
        fragment.tolist(),
        _without_padding(offset - description.offset[fragment], ndims),
        _without_padding(shape, ndims),
        whole.tolist(),
    )


def widened(boxes: Int, dims: int, fill: int) -> Int:
    """Return columns padded on the right to `dims` dimensions."""
    missing = dims - boxes.shape[1]
    return np.pad(boxes, ((0, 0), (0, missing)), constant_values=fill) if missing else boxes


def _without_padding(columns: Int, ndims: list[int]) -> list[tuple[int, ...]]:
    return [tuple(row[:n]) for row, n in zip(columns.tolist(), ndims, strict=True)]
