"""Ranges of flattened tensors, as FSDP1 and ZeRO divide them, become pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from shardwise.layout import Box, boxes_of_ranges, find_overlaps, row_major_strides
from shardwise.layout.columns import Int, padded_rows
from shardwise.manifest.layout import Pieces

Block: TypeAlias = tuple[int, tuple[int, ...], tuple[tuple[Box, tuple[int, ...]], ...]]
"""What was flattened: the index of the tensor, the shape of the flattened part, and the boxes of
that part with their offsets in the tensor; no boxes if the part is a box at offset 0."""


class FlatRanges:
    """Collects ranges, and converts all of them to pieces at once."""

    def __init__(self) -> None:
        self._blocks: dict[Block, int] = {}
        self._columns: list[tuple[Int, ...]] = []

    def add(
        self,
        blocks: Sequence[Block],
        block: Int,
        start: Int,
        stop: Int,
        file: Int,
        position: Int,
        itemsize: int,
    ) -> None:
        """Add elements `start:stop` of blocks.

        Args:
            blocks: the blocks; `block` is an index into them.
            file: the index of the file of each range.
            position: the first byte of each range in the file.
            itemsize: the size of an element in bytes.
        """
        index = np.array([self._blocks.setdefault(b, len(self._blocks)) for b in blocks], np.int64)
        sizes = np.full(len(block), itemsize)
        self._columns.append((index[block], start, stop, file, position, sizes))

    def to_pieces(self) -> Pieces:
        """Return the pieces of all ranges."""
        if not self._columns:
            return Pieces.empty()
        block, start, stop, file, position, itemsize = (
            np.concatenate(columns) for columns in zip(*self._columns, strict=True)
        )
        dims = max(len(shape) for _, shape, _ in self._blocks)
        shapes = padded_rows([shape for _, shape, _ in self._blocks], dims, 1)
        boxes = boxes_of_ranges(shapes[block], start, stop)
        row, strides = boxes.range_index, row_major_strides(shapes)
        parts = _Parts(list(self._blocks), shapes)
        cut = find_overlaps((block[row], boxes.offset, boxes.shape), parts.columns)
        row, first = row[cut.left], boxes.first[cut.left]
        stride = strides[block[row]]
        first = first + ((cut.offset - boxes.offset[cut.left]) * stride).sum(axis=1)
        tensor = np.array([tensor for tensor, _, _ in self._blocks], np.int64)
        return Pieces(
            tensor[block[row]],
            file[row],
            position[row] + (first - start[row]) * itemsize[row],
            cut.offset + parts.shift[cut.right],
            cut.shape,
            np.where(cut.shape > 1, stride, 0),
        )


class _Parts:
    """The boxes of all blocks.

    Attributes:
        columns: the index of each box's block, the offset of the box in the block, and its shape.
        shift: what to add to the offset of a box to get its offset in the tensor.
    """

    def __init__(self, blocks: Sequence[Block], shapes: Int) -> None:
        rows = [
            (index, box.offset, box.shape, offset)
            for index, (_, shape, parts) in enumerate(blocks)
            for box, offset in parts or ((Box.whole(shape), (0,) * len(shape)),)
        ]
        dims = shapes.shape[1]
        index = np.array([row[0] for row in rows], np.int64)
        local = padded_rows([row[1] for row in rows], dims, 0)
        self.columns = index, local, padded_rows([row[2] for row in rows], dims, 1)
        self.shift = padded_rows([row[3] for row in rows], dims, 0) - local
