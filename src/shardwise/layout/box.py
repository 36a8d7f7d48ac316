"""The box: an axis-aligned part of a global tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
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
            raise LayoutError(f"a box has no negative numbers: {self.offset}, {self.shape}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box that is all of a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The offset just past the box, in every dimension."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None where no element is common."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(a, b) - o for a, b, o in zip(self.stop, other.stop, offset, strict=True))
        return Box(offset, shape) if all(n > 0 for n in shape) else None

    def contains(self, other: Box) -> bool:
        """Whether all of `other` lies inside."""
        return all(
            a <= c and d <= b
            for a, b, c, d in zip(self.offset, self.stop, other.offset, other.stop, strict=True)
        )

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """The same box, counted from `origin`."""
        return Box(tuple(o - p for o, p in zip(self.offset, origin, strict=True)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """The index that selects this box from an array of the whole."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def __str__(self) -> str:
        return (
            "["
            + ",".join(f"{o}:{o + n}" for o, n in zip(self.offset, self.shape, strict=True))
            + "]"
        )


def boxes_of(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Boxes of at most `most` elements that make up a tensor, in order; none if it is empty."""
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
