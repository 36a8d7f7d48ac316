"""Boxes of strided arrays: which elements of one lie in a range of bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardwise.layout.box import Box

Int = npt.NDArray[np.int64]


def row_major(shape: Int) -> Int:
    """Strides, in elements, of row-major arrays of these shapes, `(n, D)`."""
    inner = np.ones_like(shape)
    if shape.shape[1] > 1:
        inner[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    return inner


def boxes_within(
    shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, low: int, high: int
) -> list[Box]:
    """The elements of an array that lie wholly in its bytes `low:high`, as few disjoint boxes.

    Args:
        strides: in bytes, of an array whose first element is its byte 0. They nest: a step along
            one dimension leads past all that the dimensions of smaller strides reach.

    >>> [str(box) for box in boxes_within((3, 4), (4, 1), 1, 2, 9)]
    ['[0:1,2:4]', '[1:2,0:4]', '[2:3,0:1]']
    """
    order = sorted((d for d, n in enumerate(shape) if n > 1), key=lambda d: -strides[d])
    found: list[Box] = []

    def add(ranges: dict[int, tuple[int, int]]) -> None:
        parts = [ranges.get(dim, (0, n)) for dim, n in enumerate(shape)]
        found.append(Box(tuple(o for o, _ in parts), tuple(n for _, n in parts)))

    def search(depth: int, base: int, outer: dict[int, tuple[int, int]]) -> None:
        rest = order[depth:]
        extent = itemsize + sum((shape[dim] - 1) * strides[dim] for dim in rest)
        if base >= high or base + extent <= low:
            return
        if low <= base and base + extent <= high:
            add(outer)
        elif rest:
            dim, count, step = rest[0], shape[rest[0]], strides[rest[0]]
            extent -= (count - 1) * step
            first = min(max(0, -(-(low - base) // step)), count)
            last = max(min(count, (high - extent - base) // step + 1), first)
            if first:
                search(depth + 1, base + (first - 1) * step, {**outer, dim: (first - 1, 1)})
            if first < last:
                add({**outer, dim: (first, last - first)})
            if last < count:
                search(depth + 1, base + last * step, {**outer, dim: (last, 1)})

    search(0, 0, {})
    return found
