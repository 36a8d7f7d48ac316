"""From axes to boxes: which boxes of a tensor an array holds, and at which strides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.errors import LayoutError
from shardwise.formats.language.axes import Sizes, Term, terms
from shardwise.formats.language.structure import Structure
from shardwise.manifest.table import Int

MOST_PIECES = 2**26


@dataclass(frozen=True, slots=True)
class Stencil:
    """The boxes of any array of some sizes: K of them, where all indexed axes are at 0.

    Attributes:
        start: `(K,)`: elements from the array's first to the box's.
        offset: `(K, D)`: of the boxes in the tensor.
        shape: `(D,)`: of each box.
        stride: `(D,)`: elements of the array between neighbours in a box.
        steps: how far each indexed axis moves the boxes: `(elements of the array, dimension of
            the tensor, elements of the tensor)`.
    """

    start: Int
    offset: Int
    shape: Int
    stride: Int
    steps: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Block:
    """Boxes of tensors in arrays: rows of `tensor`, `row`, `start` in elements, and `(n, D)`."""

    tensor: Int
    row: Int
    start: Int
    offset: Int
    shape: Int
    stride: Int


@dataclass(slots=True)
class _Line:
    """One dimension of a box, while axes are joined to it from the innermost outwards."""

    size: int = 1
    stride: int = 0


def stencils(own: Structure, sizes: Sizes, strides: Sequence[int]) -> list[Stencil]:
    """One for each part of the stored array that the tensor takes.

    Args:
        sizes: of all axes; of ragged ones their share, and the sum of all shares under `~name`.
        strides: of the stored array, in elements.
    """
    by_axes = {frozenset(term.steps): term for term in terms(own.stored, sizes)}
    found = []
    for whole in terms([dim.node for dim in own.whole], sizes):
        local = {a for a in whole.steps if a not in own.indexed and not a.startswith("~")}
        stored = by_axes[frozenset(local | set(own.listed))]
        if all(sizes_of(axis, sizes) for axis in local):
            found.append(_stencil(own, whole, stored, sizes, strides))
    return found


def sizes_of(axis: str, sizes: Sizes) -> int:
    """The size of an axis, literals included."""
    head, literal, _ = axis.partition("'")
    return int(head) if literal and head.isdigit() else sizes[axis]


def _stencil(
    own: Structure, whole: Term, stored: Term, sizes: Sizes, strides: Sequence[int]
) -> Stencil:
    step = {axis: at * strides[dim] for axis, (dim, at) in stored.steps.items()}
    lines = [_Line() for _ in own.whole]
    start = np.array([sum(a * b for a, b in zip(stored.start, strides, strict=True))], np.int64)
    offset = np.array([whole.start], np.int64).reshape(1, len(lines))
    broken = [False] * len(lines)
    # Of axes of one dimension the innermost come first.
    for axis, (dim, at) in sorted(whole.steps.items(), key=lambda item: item[1][1]):
        if axis in own.indexed or axis.startswith("~"):
            continue
        size, line = sizes_of(axis, sizes), lines[dim]
        if size == 1:
            continue
        joins = at == line.size and (line.size == 1 or step[axis] == line.size * line.stride)
        if joins and not broken[dim]:
            line.stride = step[axis] if line.size == 1 else line.stride
            line.size *= size
            continue
        broken[dim] = True
        if len(start) * size > MOST_PIECES:
            raise LayoutError("the array holds the tensor element by element: too many pieces")
        count = np.arange(size)
        start = (start[:, None] + count * step[axis]).ravel()
        offset = np.repeat(offset, size, axis=0)
        offset[:, dim] += np.tile(count * at, len(offset) // size)
    steps = {
        axis: (0, dim, at)
        for axis, (dim, at) in whole.steps.items()
        if axis in own.indexed or axis.startswith("~")
    }
    steps |= {axis: (step[axis], 0, 0) for axis in own.listed}
    return Stencil(
        start,
        offset,
        np.array([line.size for line in lines], np.int64),
        np.array([line.stride for line in lines], np.int64),
        steps,
    )


def spread(
    stencil: Stencil, rows: Int, tensor: Int, positions: Mapping[str, Int], limits: Int
) -> Block:
    """The boxes of many arrays.

    Args:
        rows, tensor: of each array: its row in the catalogue, and which tensor it is of.
        positions: along the indexed axes, a column each.
        limits: `(D,)`: the tensor's shape; what lies beyond is padding, and left out.
    """
    count, dims = len(stencil.start), stencil.offset.shape[1]
    if len(rows) * count > MOST_PIECES:
        raise LayoutError("the arrays hold the tensor element by element: too many pieces")
    start, offset = np.zeros(len(rows), np.int64), np.zeros((len(rows), dims), np.int64)
    for axis, (elements, dim, at) in stencil.steps.items():
        start += elements * positions[axis]
        if at:
            offset[:, dim] += at * positions[axis]
    starts = (start[:, None] + stencil.start).ravel()
    offsets = (offset[:, None, :] + stencil.offset).reshape(len(starts), dims)
    shape = np.minimum(stencil.shape, limits - offsets)
    kept = (shape > 0).all(axis=1)
    return Block(
        np.repeat(tensor, count)[kept],
        np.repeat(rows, count)[kept],
        starts[kept],
        offsets[kept],
        shape[kept],
        np.broadcast_to(stencil.stride, shape.shape)[kept],
    )
