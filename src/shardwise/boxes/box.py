"""Boxes: axis-aligned parts of global tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from shardwise.errors import LayoutError

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """An axis-aligned part of a global tensor.

    `Box((), ())` is the only box of a 0-d tensor, and contains one element.

    Attributes:
        offset, shape: the offset and shape of the part, in elements.

    Raises:
        LayoutError: `offset` and `shape` differ in length, or have negative numbers.

    >>> Box((2, 0), (3, 4)).intersect(Box((0, 1), (4, 2)))
    Box(offset=(2, 1), shape=(2, 2))
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise LayoutError(
                f"Box: offset {self.offset} and shape {self.shape} differ in length: pass one "
                "number for each dimension"
            )
        if min(self.offset, default=0) < 0 or min(self.shape, default=0) < 0:
            raise LayoutError(
                f"Box: offset {self.offset} and shape {self.shape} must not have negative numbers: "
                "pass numbers of at least 0"
            )

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def stop(self) -> tuple[int, ...]:
        """The end of the box in every dimension, exclusive."""
        return tuple(o + n for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common part of two boxes; None if they have no common element."""
        offset = tuple(map(max, self.offset, other.offset))
        shape = tuple(min(a, b) - o for a, b, o in zip(self.stop, other.stop, offset, strict=True))
        return Box(offset, shape) if all(n > 0 for n in shape) else None

    def contains(self, other: Box) -> bool:
        """Return whether `other` lies inside of this box."""
        return all(
            a <= c and d <= b
            for a, b, c, d in zip(self.offset, self.stop, other.offset, other.stop, strict=True)
        )

    def relative_to(self, origin: tuple[int, ...]) -> Box:
        """Return the same box with the offset counted from `origin`."""
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


def split_into_boxes(shape: tuple[int, ...], max_size: int) -> Iterator[Box]:
    """Yield boxes of at most `max_size` elements that cover a tensor, in row-major order."""
    if math.prod(shape) <= max_size:
        if 0 not in shape:
            yield Box.whole(shape)
        return
    row = math.prod(shape[1:])
    rows = max(1, max_size // row)
    for low in range(0, shape[0], rows):
        count = min(rows, shape[0] - low)
        for below in split_into_boxes(shape[1:], max(max_size // count, 1)):
            yield Box((low, *below.offset), (count, *below.shape))


def batch_boxes(
    arrays: Iterable[tuple[Key, Box, int]], max_bytes: int
) -> Iterator[list[tuple[Key, Box]]]:
    """Cut boxes into smaller ones, and yield lists of these of at most `max_bytes` bytes in all.

    Args:
        arrays: a key, the box to cut, and the size of an element in bytes.
        max_bytes: the limit on the size of a list. A list has at least one box.
    """
    batch: list[tuple[Key, Box]] = []
    remaining = max_bytes
    for key, whole, itemsize in arrays:
        for part in split_into_boxes(whole.shape, max(1, max_bytes // itemsize)):
            nbytes = part.size * itemsize
            if batch and nbytes > remaining:
                yield batch
                batch, remaining = [], max_bytes
            offset = tuple(a + b for a, b in zip(whole.offset, part.offset, strict=True))
            batch.append((key, Box(offset, part.shape)))
            remaining -= nbytes
    if batch:
        yield batch
