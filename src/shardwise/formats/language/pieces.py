"""From stored arrays to boxes: which boxes of a tensor an array holds, and at which strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.errors import LayoutError
from shardwise.formats.foreign import Catalogue
from shardwise.formats.language.axes import Dim, Sizes, Term, axes_of, size_of, solve, terms
from shardwise.formats.language.expressions import Known, Value, evaluate
from shardwise.formats.language.rules import Rule, Spec, Target
from shardwise.formats.language.structure import Structure, structure, unfolding
from shardwise.manifest.manifest import LARGEST
from shardwise.manifest.table import Int

MOST_PIECES = 2**26


@dataclass(frozen=True, slots=True)
class Stencil:
    """The K boxes that every array of the same sizes holds, relative to position 0 of its axes.

    Attributes:
        start: `(K,)`, elements from the start of the array to the start of the box.
        offset: `(K, D)`, offsets of the boxes in the tensor.
        shape: `(D,)`, the shape of each box.
        stride: `(D,)`, strides in the array, in elements.
        steps: how far one step along an indexed axis moves the boxes: `(elements of the array,
            dimension of the tensor, elements of the tensor)`.
    """

    start: Int
    offset: Int
    shape: Int
    stride: Int
    steps: Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Boxes:
    """A table of boxes: tensor, row of the catalogue, start in elements; `(n, D)` for the rest."""

    tensor: Int
    row: Int
    start: Int
    offset: Int
    shape: Int
    stride: Int


@dataclass(slots=True)
class _Line:
    """A dimension of a box, while axes are merged into it from the innermost outwards."""

    size: int = 1
    stride: int = 0


def stencils(own: Structure, sizes: Sizes, strides: Sequence[int]) -> list[Stencil]:
    """Return a stencil for each part of the stored array that the tensor takes.

    Args:
        sizes: the sizes of all axes; for a ragged axis its share, and under `~name` the sum.
        strides: the strides of the stored array, in elements.
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
    """Return the size of an axis or literal."""
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
    # The innermost axes of each dimension come first.
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
            raise LayoutError(f"the layout cuts the array into more than {MOST_PIECES} pieces")
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


def boxes_of(
    stencil: Stencil, rows: Int, tensor: Int, positions: Mapping[str, Int], limits: Int
) -> Boxes:
    """Return the boxes of many arrays.

    Args:
        rows, tensor: for each array, its row in the catalogue and its tensor.
        positions: for each array, the position along each indexed axis.
        limits: `(D,)`, the shape of the tensor; padding beyond it is left out.
    """
    count, dims = len(stencil.start), stencil.offset.shape[1]
    if len(rows) * count > MOST_PIECES:
        raise LayoutError(f"the layout cuts the arrays into more than {MOST_PIECES} pieces")
    start, offset = np.zeros(len(rows), np.int64), np.zeros((len(rows), dims), np.int64)
    for axis, (elements, dim, at) in stencil.steps.items():
        start += elements * positions[axis]
        if at:
            offset[:, dim] += at * positions[axis]
    starts = (start[:, None] + stencil.start).ravel()
    offsets = (offset[:, None, :] + stencil.offset).reshape(len(starts), dims)
    shape = np.minimum(stencil.shape, limits - offsets)
    kept = (shape > 0).all(axis=1)
    return Boxes(
        np.repeat(tensor, count)[kept],
        np.repeat(rows, count)[kept],
        starts[kept],
        offsets[kept],
        shape[kept],
        np.broadcast_to(stencil.stride, shape.shape)[kept],
    )


@dataclass(frozen=True, slots=True)
class Shares:
    """For each row, the start of its share and the sum of all shares of its group.

    `unequal` lists groups whose rows disagree about a share, `missing` groups that lack one.
    """

    start: Int
    total: Int
    unequal: Int
    missing: Int


def shares(group: Int, position: Int, size: Int, positions: int, *, grows: bool = False) -> Shares:
    """Find where each share begins if the shares of a group follow one after another.

    Args:
        group, position, size: columns; rows with the same group and position have one share.
        positions: the number of positions in a group.
        grows: take the largest size of its rows as the share, instead of requiring equal sizes.
    """
    groups, row = np.unique(group, return_inverse=True)
    table = np.full((len(groups), positions), -1, np.int64)
    np.maximum.at(table, (row, position), size)
    unequal = np.zeros(len(groups), bool)
    if not grows:
        np.logical_or.at(unequal, row, table[row, position] != size)
    missing = (table < 0).any(axis=1)
    ends = np.cumsum(np.maximum(table, 0), axis=1)
    start = (ends - np.maximum(table, 0))[row, position]
    return Shares(start, ends[row, -1], groups[unequal], groups[missing])


Positions = Mapping[str, Int]


@dataclass(frozen=True, slots=True)
class ArrayGroup:
    """Arrays that match the same target of a rule and have the same sizes.

    Attributes:
        rows: rows of the catalogue; repeated for an array that is part of several tensors.
        positions: the position of each array along each indexed axis.
        own: the structure of the target.
        sizes: the sizes of all axes.
        strides: the strides of the arrays, in elements.
        tensor: the tensor of each array.
    """

    rows: Int
    positions: Positions
    own: Structure
    sizes: Sizes
    strides: tuple[int, ...]
    tensor: Int

    def select(self, which: Int, sizes: Sizes | None = None) -> ArrayGroup:
        """Return a part with some of the arrays."""
        positions = {axis: column[which] for axis, column in self.positions.items()}
        taken = replace(self, rows=self.rows[which], positions=positions, tensor=self.tensor[which])
        return taken if sizes is None else replace(taken, sizes=sizes)


def group_by_shape(catalogue: Catalogue, rows: Int) -> Iterator[Int]:
    """Group rows by shape and strides; yield the indices of each group."""
    columns = np.column_stack([catalogue.ndim[rows], catalogue.shape[rows], catalogue.stride[rows]])
    if not len(rows):
        return
    if (columns == columns[0]).all():
        yield np.arange(len(rows))
        return
    _, inverse, count = np.unique(columns, axis=0, return_inverse=True, return_counts=True)
    yield from np.split(np.argsort(inverse.ravel(), kind="stable"), np.cumsum(count)[:-1])


def solve_sizes(
    spec: Spec, rule: Rule, target: Target, array: tuple[int, ...], declared: Mapping[str, Value]
) -> tuple[Structure, dict[str, int]]:
    """Return the structure of a target and the sizes of all axes, given the array's shape.

    Raises:
        LayoutError: the shape does not fit the rule, or does not determine all sizes.
    """
    own = structure(spec, rule, target, unfolding(spec, rule, target, len(array)))
    known = {name: size for name, size in declared.items() if isinstance(size, int)}
    return own, solve(list(zip(own.stored, array, strict=True)), known)


def repeat_listed(part: ArrayGroup) -> ArrayGroup:
    """Repeat each array for each tensor that its listed axes make of it."""
    for axis in part.own.listed:
        size = sizes_of(axis, part.sizes)
        rows = np.repeat(np.arange(len(part.rows)), size)
        index = np.tile(np.arange(size), len(part.rows))
        part = part.select(rows)
        part = replace(part, positions={**part.positions, axis: index})
    return part


def split_by_shares(
    parts: Sequence[ArrayGroup],
    lists: Mapping[str, tuple[int, ...]],
    complain: Callable[[int, str], None],
) -> list[ArrayGroup]:
    """Find where shares of ragged axes begin, and split parts by the sums of the shares.

    Args:
        lists: declared shares, by axis.
        complain: called with a tensor and a description of its problem.
    """
    axes = {found.axis: found for part in parts for found in part.own.ragged}
    for axis, found in axes.items():
        with_axis = [part for part in parts if found in part.own.ragged]
        sizes = [dict(part.sizes) for part in with_axis]
        outer = [_position_along(found.axes, part) for part in with_axis]
        grows = axis in with_axis[0].positions
        size = [
            part.positions[axis] + 1 if grows else np.full(len(part.rows), own[axis])
            for part, own in zip(with_axis, sizes, strict=True)
        ]
        count = int(np.prod([sizes[0][name] for name in found.axes]))
        tensor = np.concatenate([part.tensor for part in with_axis])
        position = np.concatenate(outer)
        share = shares(tensor, position, np.concatenate(size), count, grows=grows)
        for bad in share.unequal.tolist():
            complain(bad, f"ranks have different shares of {axis} where they should have the same")
        for bad in share.missing.tolist():
            complain(bad, f"the shares of {axis} of some ranks are missing")
        if axis in lists:
            _compare(lists[axis], tensor, position, np.concatenate(size), axis, complain)
        parts = [part for part in parts if found not in part.own.ragged]
        begin = 0
        for part in with_axis:
            end = begin + len(part.rows)
            start, total = share.start[begin:end], share.total[begin:end]
            part = replace(part, positions={**part.positions, found.start: start})
            for sum_ in np.unique(total).tolist():
                which = np.flatnonzero(total == sum_)
                parts.append(part.select(which, {**part.sizes, found.start: sum_}))
            begin = end
    return list(parts)


def _compare(
    declared: tuple[int, ...],
    tensor: Int,
    position: Int,
    size: Int,
    axis: str,
    complain: Callable[[int, str], None],
) -> None:
    most = max(int(position.max(initial=0)) + 1, len(declared))
    wanted = np.full(most, -1, np.int64)
    wanted[: len(declared)] = declared
    for bad in np.unique(tensor[wanted[position] != size]).tolist():
        complain(bad, f"the shares of {axis} are not {list(declared)}, as declared")


def _position_along(axes: Sequence[str], part: ArrayGroup) -> Int:
    at = np.zeros(len(part.rows), np.int64)
    for axis in axes:
        at = at * part.sizes[axis] + part.positions[axis]
    return at


def tensor_shape(dims: Sequence[Dim], sizes: Sizes, known: Known) -> tuple[int, ...]:
    """Return the shape of a tensor.

    Raises:
        LayoutError: a limit is unknown, or larger than the dimension.
    """
    found = []
    with_sizes = Known(known.values, {**known.sizes, **sizes}, {**sizes, **known.constants})
    for i, dim in enumerate(dims):
        size = size_of(dim.node, sizes)
        if size is None:
            names = ", ".join(a.name for a in axes_of(dim.node) if a.name not in sizes)
            raise LayoutError(f"nothing says how many {names} there are")
        if dim.limit is not None:
            limit = evaluate(dim.limit, with_sizes)
            if not 0 <= limit <= size:
                raise LayoutError(f"dimension {i} is cut at {limit}, but has {size} elements")
            size = limit
        found.append(size)
    if math.prod(size for size in found if size) > LARGEST:
        raise LayoutError(f"the tensor would be absurdly large: {found}")
    return tuple(found)
