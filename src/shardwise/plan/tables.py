"""Tables of a save: the fragments of one rank (`Description`), and its pieces (`PieceTable`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.decoding import prepare_decoding
from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Description:
    """The tensors of one rank and its n fragments, without any bytes.

    Attributes:
        names, dtypes, shapes: the name, dtype (torch's name) and global shape of each tensor.
        tensor: the index of each fragment's tensor, `(n,)`.
        offset, shape: the box of each fragment, `(n, D)`, padded on the right with 0 and 1.
        ties: for each tied tensor, its name, and the name in `names` of the tensor with its data.
        per_rank: the names of the per-rank values.
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
        """Return the description as bytes, for rank 0."""
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


@prepare_decoding
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
    """The n pieces in the data section of a rank's file, which follow each other without gaps.

    Most columns are lists, because the loop that copies pieces reads them one by one.

    Attributes:
        start: the offset of each piece in the data section, in bytes, followed by the end of the
            last piece, `(n + 1,)`.
        fragment: the index of the fragment that contains each piece.
        offset, shape: the box of each piece within its fragment, in elements.
        whole: whether each piece is its whole fragment.
    """

    start: Int
    fragment: list[int]
    offset: list[tuple[int, ...]]
    shape: list[tuple[int, ...]]
    whole: list[bool]

    def __len__(self) -> int:
        return len(self.fragment)

    def describe_pieces(
        self, description: Description
    ) -> Iterator[tuple[str, str, tuple[int, ...], Box]]:
        """Yield the name, dtype and global shape of each piece's tensor, and the piece's box."""
        tensors, origins = description.tensor.tolist(), description.offset.tolist()
        for fragment, offset, shape in zip(self.fragment, self.offset, self.shape, strict=True):
            tensor = tensors[fragment]
            start = tuple(o + w for o, w in zip(origins[fragment], offset, strict=False))
            yield (
                description.names[tensor],
                description.dtypes[tensor],
                description.shapes[tensor],
                Box(start, shape),
            )


def encode_pieces(fragment: Int, offset: Int, shape: Int) -> bytes:
    """Encode the list of pieces that rank 0 sends to a rank, in the order of the rank's file.

    Args:
        fragment: indices of fragments in the rank's description, `(n,)`.
        offset, shape: boxes of the global tensors, `(n, D)`.
    """
    encoded = [np.ascontiguousarray(column).tobytes() for column in (fragment, offset, shape)]
    return msgspec.msgpack.encode([offset.shape[1], encoded])


def decode_pieces(data: bytes, description: Description) -> PieceTable:
    """Decode the pieces that `encode_pieces` encoded.

    Args:
        data: the encoded pieces.
        description: the description of the rank that writes the pieces, or of a rank with equal
            fragments.
    """
    dims, columns = msgspec.msgpack.decode(data, type=tuple[int, tuple[bytes, bytes, bytes]])
    fragment, offset, shape = (np.frombuffer(column, np.int64) for column in columns)
    own_dims = description.shape.shape[1]  # other ranks may have tensors of more dimensions
    offset = offset.reshape(len(fragment), dims)[:, :own_dims]
    shape = shape.reshape(len(fragment), dims)[:, :own_dims]
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


def pad_columns(boxes: Int, dims: int, fill: int) -> Int:
    """Return an array `(n, D)` padded on the right to `(n, dims)`."""
    missing = dims - boxes.shape[1]
    return np.pad(boxes, ((0, 0), (0, missing)), constant_values=fill) if missing else boxes


def _without_padding(columns: Int, ndims: list[int]) -> list[tuple[int, ...]]:
    return [tuple(row[:n]) for row, n in zip(columns.tolist(), ndims, strict=True)]
