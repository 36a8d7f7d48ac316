"""Which box of an inner tensor belongs to a box of the outer tensor."""

from __future__ import annotations

from shardwise.kernel.boxes import Box, boxes_of_range
from shardwise.ports.tensor_classes import Axis, Flat, Layout, Shape


def inner_shape(layout: Layout, outer: Shape, inner: Shape) -> Shape:
    """Return the shape of the inner tensor of an outer tensor.

    Args:
        layout: how it follows the outer tensor.
        outer: the shape of the outer tensor.
        inner: the shape of the inner tensor of another shard, or of the whole. It has the sizes of
            the dimensions that follow none.
    """
    if isinstance(layout, Flat):
        return (-(-Box.whole(outer).size // layout.block),)
    return tuple(
        n if axis.dim is None else -(-outer[axis.dim] // axis.block)
        for axis, n in zip(layout, inner, strict=True)
    )


def inner_box(layout: Layout, box: Box, outer: Shape, inner: Shape) -> Box | None:
    """Return the box of an inner tensor that belongs to a box of the outer tensor.

    Args:
        layout: how the inner tensor follows the outer one.
        box: the box of the outer tensor.
        outer, inner: the shapes of both.

    Returns:
        The box; None if its borders would cut a block, or if it is split along a dimension that the
        inner tensor does not follow.
    """
    if isinstance(layout, Flat):
        start = _start_in_flat(box, outer)
        if start is None:
            return None
        ranges = [(start, box.size, Box.whole(outer).size, Axis(0, layout.block))]
    else:
        followed = {axis.dim for axis in layout}
        is_split = (n != whole for n, whole in zip(box.shape, outer, strict=True))
        if None not in followed and {d for d, split in enumerate(is_split) if split} - followed:
            return None
        ranges = [
            (0, n, n, Axis(None))
            if axis.dim is None
            else (box.offset[axis.dim], box.shape[axis.dim], outer[axis.dim], axis)
            for axis, n in zip(layout, inner, strict=True)
        ]
    offset, shape = [], []
    for first, count, whole, axis in ranges:
        last = first + count
        align = max(axis.block, axis.align)
        if first % align or (last % align and last != whole):
            return None
        offset.append(first // axis.block)
        shape.append(-(-last // axis.block) - first // axis.block)
    return Box(tuple(offset), tuple(shape))


def _start_in_flat(box: Box, outer: Shape) -> int | None:
    """Return where a box begins in the flattened tensor; None if it is not one range there."""
    start = 0
    for first, n in zip(box.offset, outer, strict=True):
        start = start * n + first
    stop = start + box.size
    is_inside = stop <= Box.whole(outer).size
    return start if is_inside and boxes_of_range(outer, start, stop) == [box] else None
