"""The two dimensions of a tensor that a picture of its boxes shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.layout.box import Box


@dataclass(frozen=True, slots=True)
class Plane:
    """The two dimensions of a tensor that are drawn, down and across, and the boxes seen there.

    `down` is None where there is nothing but a line to draw. `boxes` are rows of top, left,
    bottom, right, in elements; `owners` says which of the given boxes each is. `hidden` are the
    other dimensions that are split, of which only a part is seen.
    """

    down: int | None
    across: int
    height: int
    width: int
    boxes: tuple[tuple[int, int, int, int], ...]
    owners: tuple[int, ...]
    hidden: tuple[int, ...]


def plane(shape: Sequence[int], boxes: Sequence[Box]) -> Plane:
    """The plane to draw: along the first two dimensions that are split, then the first others.

    Where more are split, the boxes that lie at 0 of the other dimensions are those seen.
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
