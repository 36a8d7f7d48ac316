"""Make pieces of boxes that are arrays, and of ranges of flattened tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import TypeAlias

import numpy as np

from shardwise.boxes import Box, boxes_of_ranges, find_overlaps, row_major_strides
from shardwise.boxes.table import IntArray, padded_rows
from shardwise.errors import FormatError
from shardwise.formats.foreign import StoredArray
from shardwise.manifest.layout import Pieces

MOST_PIECES_OF_ARRAY = 4096
"""The most pieces that an array is cut into. Arrays are cut if elements share bytes (`expand`)."""

_Row = tuple[int, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A piece: tensor, file, start, offset, shape, stride."""

Block: TypeAlias = tuple[int, tuple[int, ...], tuple[tuple[Box, tuple[int, ...]], ...]]
"""What was flattened: the index of the tensor, the shape of the flattened part, and the boxes of
that part with their offsets in the tensor; no boxes if the part is a box at offset 0."""


def pieces_of_boxes(
    boxes: Sequence[tuple[int, int, tuple[int, ...], StoredArray]],
    name_of: Callable[[int], str] = "tensor {}".format,
) -> Pieces:
    """Return the pieces of boxes, each an array. Empty arrays have no piece.

    Args:
        boxes: the index of the tensor, the index of the file, the offset of the box, and the array.
        name_of: returns the name of a tensor by its index, for messages.

    Raises:
        FormatError: an array has to be cut into too many pieces, because its elements share bytes,
            as after `expand`; or the pieces have too many dimensions.
    """
    rows: list[_Row] = []
    for tensor, file, offset, array in boxes:
        shared_dims, shape, stride = _split_off_shared_dims(array.shape, array.stride)
        if not shared_dims:
            if 0 not in shape:
                rows.append((tensor, file, array.start, offset, shape, stride))
            continue
        if math.prod(array.shape[dim] for dim in shared_dims) > MOST_PIECES_OF_ARRAY:
            raise FormatError(
                f"{name_of(tensor)}: an array of shape {list(array.shape)} and strides "
                f"{list(array.stride)} has too many elements that share bytes: make it contiguous "
                "before saving it"
            )
        counts = (n if dim in shared_dims else 1 for dim, n in enumerate(array.shape))
        for inner in product(*map(range, counts)) if 0 not in shape else ():
            elements = sum(i * step for i, step in zip(inner, array.stride, strict=True))
            place = tuple(map(sum, zip(offset, inner, strict=True)))
            start = array.start + elements * array.itemsize
            rows.append((tensor, file, start, place, shape, stride))
    max_ndim = max((len(row[3]) for row in rows), default=0)
    columns = np.array([row[:3] for row in rows], np.int64).reshape(len(rows), 3)
    offsets = padded_rows([row[3] for row in rows], max_ndim, 0)
    shapes = padded_rows([row[4] for row in rows], max_ndim, 1)
    strides = padded_rows([row[5] for row in rows], max_ndim, 0)
    return Pieces(columns[:, 0], columns[:, 1], columns[:, 2], offsets, shapes, strides)


@lru_cache(4096)
def _split_off_shared_dims(
    shape: tuple[int, ...], stride: tuple[int, ...]
) -> tuple[list[int], tuple[int, ...], tuple[int, ...]]:
    """Return the dimensions whose elements share bytes, and the shape and strides of the parts."""
    shared_dims = []
    extent = 0  # elements from the first to the last, along the dimensions so far
    for step, dim in sorted((step, dim) for dim, step in enumerate(stride) if shape[dim] > 1):
        if step <= extent:
            shared_dims.append(dim)
        else:
            extent += (shape[dim] - 1) * step
    part_shape = tuple(1 if dim in shared_dims else n for dim, n in enumerate(shape))
    # The stride of a dimension with one element has no meaning, and may have any value.
    strides = tuple(0 if n == 1 else step for n, step in zip(part_shape, stride, strict=True))
    return shared_dims, part_shape, strides


def pieces_of_ranges(
    blocks: Sequence[Block],
    block: IntArray,
    start: IntArray,
    stop: IntArray,
    file: IntArray,
    position: IntArray,
    size: IntArray,
) -> Pieces:
    """Return the pieces of elements `start:stop` of blocks.

    Args:
        blocks: the blocks; `block` is an index into them.
        file: the index of the file of each range.
        position: the first byte of each range in the file.
        size: the size of an element of each range in bytes.
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
    stride = row_major_strides(shapes)[block[row]]
    first = first + ((cut.offset - boxes.offset[cut.left]) * stride).sum(axis=1)
    return Pieces(
        np.array([tensor for tensor, _, _ in blocks], np.int64)[block[row]],
        file[row],
        position[row] + (first - start[row]) * size[row],
        cut.offset + shift[cut.right],
        cut.shape,
        np.where(cut.shape > 1, stride, 0),
    )
