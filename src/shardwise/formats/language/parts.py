"""A rule's arrays, sorted by their sizes: what is the same for all of them is worked out once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.errors import LayoutError
from shardwise.formats.foreign import Catalogue
from shardwise.formats.language.axes import Dim, Sizes, axes_of, size_of, solve
from shardwise.formats.language.numbers import Known, Value, evaluate
from shardwise.formats.language.pieces import sizes_of
from shardwise.formats.language.ragged import shares
from shardwise.formats.language.rules import Rule, Spec, Target
from shardwise.formats.language.structure import Structure, structure, unfolding
from shardwise.manifest.manifest import LARGEST
from shardwise.manifest.table import Int

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
        outer = [_position(found.axes, part) for part in with_axis]
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


def _position(axes: Sequence[str], part: Part) -> Int:
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
