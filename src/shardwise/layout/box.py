"""Boxes: axis-aligned parts of global tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.errors import LayoutError


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Offset and shape of an axis-aligned part of a global tensor, in elements.

    A 0-d tensor is `Box((), ())`, which holds one element.

    >>> Box((2, 0), (3, 4)).intersect(Box((0, 1), (4, 2)))
    Box(offset=(2, 1), shape=(2, 2))
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise LayoutError(f"offset {self.offset} and shape {self.shape} differ in length")
        if min(self.offset, default=0) < 0 or min(self.shape, default=0) < 0:
            raise LayoutError(
                f"a box with negative numbers: offset {self.offset}, shape {self.shape}"
            )

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The end of the box in every dimension, exclusive."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common part, or None if there is none."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(a, b) - o for a, b, o in zip(self.stop, other.stop, offset, strict=True))
        return Box(offset, shape) if all(n > 0 for n in shape) else None

    def contains(self, other: Box) -> bool:
        """Return whether `other` lies inside."""
        return all(
            a <= c and d <= b
            for a, b, c, d in zip(self.offset, self.stop, other.offset, other.stop, strict=True)
        )

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """Return the box with its offset counted from `origin`."""
        return Box(tuple(o - p for o, p in zip(self.offset, origin, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Return the index of this box in an array of the whole tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def __str__(self) -> str:
        return (
            "["
            + ",".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape, strict=True))
            + "]"
        )


def boxes_of(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Yield boxes of at most `most` elements that cover a tensor, in row-major order."""
    if math.prod(shape) <= most:
        if 0 not in shape:
            yield Box.whole(shape)
        return
    row = math.prod(shape[1:])
    several = max(1, most // row)
    for low in range(0, shape[0], several):
        count = min(several, shape[0] - low)
        for below in boxes_of(shape[1:], max(most // count, 1)):
            yield Box((low, *below.offset), (count, *below.shape))


@dataclass(frozen=True, slots=True)
class Plane:
    """The two dimensions of a tensor that a picture shows, and the boxes in this plane.

    Attributes:
        down: dimension drawn downwards; None if the tensor is drawn as a line.
        across: dimension drawn from left to right.
        height, width: size of the plane, in elements.
        boxes: top, left, bottom, right of each box, in elements.
        owners: for each of these, the index of the given box.
        hidden: other dimensions that are split, of which the plane shows only the part at 0.
    """

    down: int | None
    across: int
    height: int
    width: int
    boxes: tuple[tuple[int, int, int, int], ...]
    owners: tuple[int, ...]
    hidden: tuple[int, ...]


def plane(shape: Sequence[int], boxes: Sequence[Box]) -> Plane:
    """Return the plane to draw: the first two split dimensions, or the first unsplit ones.

    If more dimensions are split, the plane shows the boxes at offset 0 in the others.
    """
    split = [d for d, n in enumerate(shape) if any(box.shape[d] != n for box in boxes)]
    order = split + [d for d in range(len(shape)) if d not in split]
    dims = sorted(order[:2])
    rest = [d for d in range(len(shape)) if d not in dims]
    seen = [i for i, box in enumerate(boxes) if all(box.offset[d] == 0 for d in rest)]
    across = dims[-1] if dims else 0
    down = dims[0] if len(dims) == 2 else None

    def extent(box: Box, dim: int | None) -> tuple[int, int]:
        return (0, 1) if dim is None or not dims else (box.offset[dim], box.stop[dim])

    corners = []
    for index in seen:
        (top, bottom), (left, right) = extent(boxes[index], down), extent(boxes[index], across)
        corners.append((top, left, bottom, right))
    height = 1 if down is None else shape[down]
    width = shape[across] if dims else 1
    hidden = tuple(d for d in rest if d in split)
    return Plane(down, across, height, width, tuple(corners), tuple(seen), hidden)
