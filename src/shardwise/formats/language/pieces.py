"""From axes to boxes: which boxes of a tensor an array holds, and at which strides."""

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


@dataclass(frozen=True, slots=True)
class Shares:
    """Columns of n rows: where each row's share begins, and the sum of all of its group.

    `unequal` and `missing` list groups whose rows disagree about a share, or lack one.
    """

    start: Int
    total: Int
    unequal: Int
    missing: Int


def shares(group: Int, position: Int, size: Int, positions: int, *, grows: bool = False) -> Shares:
    """Lay the shares of each group one after another, in the order of their positions.

    Args:
        group, position, size: columns: rows of one group and position have the same share.
        positions: how many there are.
        grows: the share is the largest size that any of its rows has.
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
class Part:
    """Arrays of one rule and of the same sizes, and the tensors that they are of.

    Attributes:
        rows: of the catalogue; more than once if an array is of several tensors.
        positions: along the indexed axes, a column each.
        own: how their dimensions become those of the tensor.
        sizes: of all axes.
        strides: of the arrays, in elements.
        tensor: which tensor each is of.
    """

    rows: Int
    positions: Positions
    own: Structure
    sizes: Sizes
    strides: tuple[int, ...]
    tensor: Int

    def taken(self, which: Int, sizes: Sizes | None = None) -> Part:
        """Some of the arrays."""
        positions = {axis: column[which] for axis, column in self.positions.items()}
        taken = replace(self, rows=self.rows[which], positions=positions, tensor=self.tensor[which])
        return taken if sizes is None else replace(taken, sizes=sizes)


def cases(catalogue: Catalogue, rows: Int) -> Iterator[Int]:
    """Which of the rows have the same shape and strides, as indices into them."""
    columns = np.column_stack([catalogue.ndim[rows], catalogue.shape[rows], catalogue.stride[rows]])
    if not len(rows):
        return
    if (columns == columns[0]).all():
        yield np.arange(len(rows))
        return
    _, inverse, count = np.unique(columns, axis=0, return_inverse=True, return_counts=True)
    yield from np.split(np.argsort(inverse.ravel(), kind="stable"), np.cumsum(count)[:-1])


def sized(
    spec: Spec, rule: Rule, target: Target, array: tuple[int, ...], declared: Mapping[str, Value]
) -> tuple[Structure, dict[str, int]]:
    """The sizes of all axes of an array of a shape.

    Raises:
        LayoutError: the array cannot be of that shape, or sizes are left open.
    """
    own = structure(spec, rule, target, unfolding(spec, rule, target, len(array)))
    known = {name: size for name, size in declared.items() if isinstance(size, int)}
    return own, solve(list(zip(own.stored, array, strict=True)), known)


def listed(part: Part) -> Part:
    """Each array as often as there are tensors that its axes tell apart."""
    for axis in part.own.listed:
        size = sizes_of(axis, part.sizes)
        rows = np.repeat(np.arange(len(part.rows)), size)
        index = np.tile(np.arange(size), len(part.rows))
        part = part.taken(rows)
        part = replace(part, positions={**part.positions, axis: index})
    return part


def with_ragged(
    parts: Sequence[Part],
    lists: Mapping[str, tuple[int, ...]],
    complain: Callable[[int, str], None],
) -> list[Part]:
    """Find out where the shares of ragged axes begin, and divide parts by the sums of these.

    Args:
        lists: declared shares, by axis.
        complain: called with a tensor and what is wrong with it.
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
            complain(bad, f"ranks disagree about their share of {axis}")
        for bad in share.missing.tolist():
            complain(bad, f"some ranks' shares of {axis} are nowhere")
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
                parts.append(part.taken(which, {**part.sizes, found.start: sum_}))
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


def _position_along(axes: Sequence[str], part: Part) -> Int:
    at = np.zeros(len(part.rows), np.int64)
    for axis in axes:
        at = at * part.sizes[axis] + part.positions[axis]
    return at


def tensor_shape(
    dims: Sequence[Dim], sizes: Sizes, known: Known, given: tuple[int, ...] | None
) -> tuple[int, ...]:
    """The shape of a tensor.

    Args:
        given: what the caller knows of it; limits of which nothing else says anything follow it.

    Raises:
        LayoutError: a limit is not known, or there are not so many elements.
    """
    found = []
    with_sizes = Known(known.values, {**known.sizes, **sizes}, {**sizes, **known.constants})
    for i, dim in enumerate(dims):
        size = size_of(dim.node, sizes)
        if size is None:
            names = ", ".join(a.name for a in axes_of(dim.node) if a.name not in sizes)
            raise LayoutError(f"nothing says how many {names} there are")
        if dim.limit is not None:
            try:
                limit = evaluate(dim.limit, with_sizes)
            except LayoutError:
                if given is None or i >= len(given):
                    raise
                limit = given[i]
            if not 0 <= limit <= size:
                has = f"and {size} are stored"
                raise LayoutError(f"dimension {i} should have {limit} elements, {has}")
            size = limit
        found.append(size)
    if math.prod(size for size in found if size) > LARGEST:
        raise LayoutError(f"the tensor would be absurdly large: {found}")
    return tuple(found)
