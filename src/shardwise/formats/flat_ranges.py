"""Ranges of flattened tensors, as FSDP1 and ZeRO divide them, become pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from shardwise.layout import Box, boxes_of_ranges, find_overlaps, row_major
from shardwise.layout.columns import Int, padded_rows
from shardwise.manifest.layout import Pieces

Block: TypeAlias = tuple[int, tuple[int, ...], tuple[tuple[Box, tuple[int, ...]], ...]]
"""What was flattened: the index of the tensor, the shape of the flattened part, and the boxes of
that part with their offsets in the tensor; no boxes if the part is a box at offset 0."""


def pieces_of_ranges(
    blocks: Sequence[Block], block: Int, start: Int, stop: Int, file: Int, position: Int, size: int
) -> Pieces:
    """Return the pieces of elements `start:stop` of blocks.

    Args:
        blocks: the blocks; `block` is an index into them.
        file: the index of the file of each range.
        position: the first byte of each range in the file.
        size: the size of an element in bytes.
    """
    dims = max(len(shape) for _, shape, _ in blocks)
    shapes = padded_rows([shape for _, shape, _ in blocks], dims, 1)
    parts = [
        (index, box.offset, box.shape, offset)
        for index, (_, shape, own) in enumerate(blocks)
        for box, offset in own or ((Box.whole(shape), (0,) * len(shape)),)
    ]
    offsets = padded_rows([offset for _, offset, _, _ in parts], dims, 0)
    part_shapes = padded_rows([shape for _, _, shape, _ in parts], dims, 1)
    shift = padded_rows([offset for *_, offset in parts], dims, 0) - offsets
    boxes = boxes_of_ranges(shapes[block], start, stop)
    row = boxes.range_index
    cut = find_overlaps(
        (block[row], boxes.offset, boxes.shape),
        (np.array([index for index, *_ in parts], np.int64), offsets, part_shapes),
    )
    row, first = row[cut.left], boxes.first[cut.left]
    stride = row_major(shapes)[block[row]]
    first = first + ((cut.offset - boxes.offset[cut.left]) * stride).sum(axis=1)
    return Pieces(
        np.array([tensor for tensor, _, _ in blocks], np.int64)[block[row]],
        file[row],
        position[row] + (first - start[row]) * size,
        cut.offset + shift[cut.right],
        cut.shape,
        np.where(cut.shape > 1, stride, 0),
    )
