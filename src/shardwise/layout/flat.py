"""Flattened ranges: what FSDP1 and ZeRO shard, as boxes."""

from __future__ import annotations

import math

from shardwise.errors import LayoutError
from shardwise.layout.box import Box


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Decompose elements `start:stop` of a row-major tensor into boxes, in their order.

    At most `2 * ndim - 1` boxes come out, each contiguous in row-major order, so that laid end to
    end they are the range again. This is the decomposition of irregular tensors of ByteCheckpoint
    (arXiv 2407.20143): local arithmetic where others gather the tensor.

    >>> [str(box) for box in boxes_of_range((3, 4), 2, 9)]
    ['[0:1,2:4]', '[1:2,0:4]', '[2:3,0:1]']

    Raises:
        LayoutError: the range does not lie inside the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise LayoutError(f"range {start}:{stop} is not inside a tensor of shape {shape}")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:
        return _within_row(first, shape, head, tail)
    boxes: list[Box] = []
    if head:
        boxes += _within_row(first, shape, head, row)
        first += 1
    if first < last:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if tail:
        boxes += _within_row(last, shape, 0, tail)
    return boxes


def _within_row(index: int, shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    inner = boxes_of_range(shape[1:], start, stop)
    return [Box((index, *box.offset), (1, *box.shape)) for box in inner]
