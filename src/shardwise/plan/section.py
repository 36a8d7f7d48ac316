"""A share as it lies in a file: its pieces end to end, and which part of what each of them is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES
from shardwise.plan.description import Description
from shardwise.plan.save import Share

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Section:
    """The data section of a rank's file; its lists are parallel, with an entry for each piece.

    Attributes:
        start: at which bytes of the section each piece begins, and where the last one ends.
        fragment: the fragment that it is part of; counts those of the description.
        offset, shape: which box of the fragment it is, in elements.
        whole: whether it is all of the fragment.
    """

    start: Int
    fragment: list[int]
    offset: list[tuple[int, ...]]
    shape: list[tuple[int, ...]]
    whole: list[bool]

    def __len__(self) -> int:
        return len(self.fragment)


def section_of(share: Share, description: Description) -> Section:
    """Lay a share out.

    Args:
        share: of the rank that is described, or of one that describes what it holds alike.
    """
    rows = share.fragment
    tensor = description.tensor[rows]
    itemsize = np.array([DTYPES[dtype].itemsize for dtype in description.dtypes], np.int64)
    nbytes = share.shape.prod(axis=1) * itemsize[tensor]
    dims = [len(description.shapes[i]) for i in tensor.tolist()]
    known = description.shape.shape[1]  # others may hold tensors of more dimensions
    whole: npt.NDArray[np.bool_] = (share.shape[:, :known] == description.shape[rows]).all(axis=1)
    return Section(
        np.concatenate([[0], np.cumsum(nbytes)]),
        rows.tolist(),
        _cut(share.offset[:, :known] - description.offset[rows], dims),
        _cut(share.shape, dims),
        whole.tolist(),
    )


def named_pieces(
    share: Share, description: Description
) -> Iterator[tuple[str, str, tuple[int, ...], Box]]:
    """The name, dtype and global shape of the tensor that each piece of a share is part of, and
    which box of it."""
    rows = zip(share.fragment.tolist(), share.offset.tolist(), share.shape.tolist(), strict=True)
    for fragment, offset, shape in rows:
        tensor = int(description.tensor[fragment])
        whole = description.shapes[tensor]
        box = Box(tuple(offset[: len(whole)]), tuple(shape[: len(whole)]))
        yield description.names[tensor], description.dtypes[tensor], whole, box


def _cut(columns: Int, dims: list[int]) -> list[tuple[int, ...]]:
    """Rows without what they were padded with."""
    return [tuple(row[:n]) for row, n in zip(columns.tolist(), dims, strict=True)]
