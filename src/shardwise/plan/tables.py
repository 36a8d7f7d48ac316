"""The table of the pieces in a rank's file (`PieceTable`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.layout import Box
from shardwise.layout.columns import Int
from shardwise.manifest.dtypes import DTYPES
from shardwise.plan.structure import Description


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
        structure = description.structure
        tensors, origins = description.tensor.tolist(), description.offset.tolist()
        for fragment, offset, shape in zip(self.fragment, self.offset, self.shape, strict=True):
            tensor = tensors[fragment]
            start = tuple(o + w for o, w in zip(origins[fragment], offset, strict=False))
            yield (
                structure.names[tensor],
                structure.dtypes[tensor],
                structure.shapes[tensor],
                Box(start, shape),
            )


def piece_table(description: Description, fragment: Int, offset: Int, shape: Int) -> PieceTable:
    """Return a table of pieces, in the order of the file.

    Args:
        description: the fragments that contain the pieces.
        fragment: the index of the fragment that contains each piece, `(n,)`.
        offset, shape: the pieces, as boxes of the global tensors, `(n, D)`.
    """
    structure, dims = description.structure, description.shape.shape[1]
    offset, shape = offset[:, :dims], shape[:, :dims]  # others may have tensors of more dimensions
    tensor = description.tensor[fragment]
    itemsize = np.array([DTYPES[dtype].itemsize for dtype in structure.dtypes], np.int64)
    nbytes = shape.prod(axis=1) * itemsize[tensor]
    ndims = [len(structure.shapes[i]) for i in tensor.tolist()]
    whole: npt.NDArray[np.bool_] = (shape == description.shape[fragment]).all(axis=1)
    return PieceTable(
        np.concatenate([[0], np.cumsum(nbytes)]),
        fragment.tolist(),
        _without_padding(offset - description.offset[fragment], ndims),
        _without_padding(shape, ndims),
        whole.tolist(),
    )


def _without_padding(columns: Int, ndims: list[int]) -> list[tuple[int, ...]]:
    return [tuple(row[:n]) for row, n in zip(columns.tolist(), ndims, strict=True)]
