"""Groups stored arrays by shape, and finds the sizes of their axes.

An axis is ragged if ranks have shares of different sizes. This module also finds where each share
begins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.errors import LayoutError
from shardwise.formats.foreign import Catalogue
from shardwise.formats.language.arithmetic import Environment, NumberOrList, evaluate
from shardwise.formats.language.rules import (
    DimensionMap,
    Rule,
    Spec,
    Target,
    count_ellipsis_dims,
    map_dimensions,
)
from shardwise.formats.language.shapes import (
    ShapeDim,
    Sizes,
    axes_in,
    size_of,
    size_of_axis,
    solve_sizes,
)
from shardwise.layout.columns import Int
from shardwise.manifest.manifest import LARGEST_INTEGER


@dataclass(frozen=True, slots=True)
class Shares:
    """Where the shares of ranks begin, if the shares of each group follow one another.

    Attributes:
        start: for each row, the start of its share.
        total: for each row, the sum of all shares of its group.
        unequal_groups: groups in which rows with the same position have shares of different sizes.
        incomplete_groups: groups that lack a share.
    """

    start: Int
    total: Int
    unequal_groups: Int
    incomplete_groups: Int


def locate_shares(
    group: Int, position: Int, size: Int, positions: int, *, allow_unequal_sizes: bool = False
) -> Shares:
    """Find where each share begins if the shares of a group follow one another.

    Args:
        group, position, size: columns with an entry for each row. Rows with the same group and
            position hold the same share.
        positions: the number of positions in a group.
        allow_unequal_sizes: use the largest size if the rows of a share differ in size. By default,
            the group is reported in `unequal_groups`.
    """
    groups, group_index = np.unique(group, return_inverse=True)
    table = np.full((len(groups), positions), -1, np.int64)
    np.maximum.at(table, (group_index, position), size)
    is_unequal = np.zeros(len(groups), bool)
    if not allow_unequal_sizes:
        np.logical_or.at(is_unequal, group_index, table[group_index, position] != size)
    is_incomplete = (table < 0).any(axis=1)
    ends = np.cumsum(np.maximum(table, 0), axis=1)
    start = (ends - np.maximum(table, 0))[group_index, position]
    return Shares(start, ends[group_index, -1], groups[is_unequal], groups[is_incomplete])


@dataclass(frozen=True, slots=True)
class ArrayGroup:
    """Arrays that match the same target of a rule and have the same sizes.

    Attributes:
        rows: rows of the catalogue; repeated for an array that is part of several tensors.
        positions: the position of each array along each indexed axis.
        dimension_map: the map from dimensions of the arrays to dimensions of the tensor.
        sizes: the sizes of all axes.
        strides: the strides of the arrays, in elements.
        tensor: the index of each array's tensor.
    """

    rows: Int
    positions: Mapping[str, Int]
    dimension_map: DimensionMap
    sizes: Sizes
    strides: tuple[int, ...]
    tensor: Int

    def select(self, indices: Int, sizes: Sizes | None = None) -> ArrayGroup:
        """Return a group of some of the arrays, with other sizes if given."""
        return replace(
            self,
            rows=self.rows[indices],
            positions={axis: column[indices] for axis, column in self.positions.items()},
            tensor=self.tensor[indices],
            sizes=self.sizes if sizes is None else sizes,
        )


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


def map_array(
    spec: Spec,
    rule: Rule,
    target: Target,
    array_shape: tuple[int, ...],
    declared_sizes: Mapping[str, NumberOrList],
) -> tuple[DimensionMap, dict[str, int]]:
    """Return how an array of a given shape becomes part of a target, and the sizes of all axes.

    Raises:
        LayoutError: the shape does not fit the rule, or does not determine all sizes.
    """
    ellipsis_dims = count_ellipsis_dims(spec, rule, target, len(array_shape))
    dimension_map = map_dimensions(spec, rule, target, ellipsis_dims)
    known_sizes = {name: size for name, size in declared_sizes.items() if isinstance(size, int)}
    equations = list(zip(dimension_map.array_dims, array_shape, strict=True))
    return dimension_map, solve_sizes(equations, known_sizes)


def repeat_split_arrays(group: ArrayGroup) -> ArrayGroup:
    """Repeat each array once for each tensor that it is split into."""
    for axis in group.dimension_map.split_axes:
        size = size_of_axis(axis, group.sizes)
        index = np.tile(np.arange(size), len(group.rows))
        group = group.select(np.repeat(np.arange(len(group.rows)), size))
        group = replace(group, positions={**group.positions, axis: index})
    return group


def resolve_ragged_axes(
    groups: Sequence[ArrayGroup],
    declared_shares: Mapping[str, tuple[int, ...]],
    report: Callable[[int, str], None],
) -> list[ArrayGroup]:
    """Find where shares of ragged axes begin. Split each group by the sums of its shares.

    Args:
        declared_shares: for each axis, the shares that the rule declares.
        report: a function of the index of a tensor, and a description of its problem.
    """
    axes = {axis.name: axis for group in groups for axis in group.dimension_map.ragged_axes}
    for name, axis in axes.items():
        ragged_groups = [group for group in groups if axis in group.dimension_map.ragged_axes]
        outer_positions = [_position_along(axis.outer_axes, group) for group in ragged_groups]
        is_captured = name in ragged_groups[0].positions
        sizes = [
            group.positions[name] + 1
            if is_captured
            else np.full(len(group.rows), group.sizes[name])
            for group in ragged_groups
        ]
        tensor = np.concatenate([group.tensor for group in ragged_groups])
        position, size = np.concatenate(outer_positions), np.concatenate(sizes)
        count = int(np.prod([ragged_groups[0].sizes[outer] for outer in axis.outer_axes]))
        shares = locate_shares(tensor, position, size, count, allow_unequal_sizes=is_captured)
        for wrong_tensor in shares.unequal_groups.tolist():
            report(
                wrong_tensor, f"ranks have different shares of {name} where they must have the same"
            )
        for wrong_tensor in shares.incomplete_groups.tolist():
            report(wrong_tensor, f"the shares of {name} of some ranks are missing; copy all files")
        if name in declared_shares:
            _compare_shares(declared_shares[name], tensor, position, size, name, report)
        groups = [group for group in groups if axis not in group.dimension_map.ragged_axes]
        first_row = 0
        for group in ragged_groups:
            end_row = first_row + len(group.rows)
            start, total = shares.start[first_row:end_row], shares.total[first_row:end_row]
            group = replace(group, positions={**group.positions, axis.start_key: start})
            for sum_of_shares in np.unique(total).tolist():
                indices = np.flatnonzero(total == sum_of_shares)
                new_sizes = {**group.sizes, axis.start_key: sum_of_shares}
                groups.append(group.select(indices, new_sizes))
            first_row = end_row
    return list(groups)


def _compare_shares(
    declared_shares: tuple[int, ...],
    tensor: Int,
    position: Int,
    size: Int,
    axis: str,
    report: Callable[[int, str], None],
) -> None:
    count = max(int(position.max(initial=0)) + 1, len(declared_shares))
    expected = np.full(count, -1, np.int64)
    expected[: len(declared_shares)] = declared_shares
    for wrong_tensor in np.unique(tensor[expected[position] != size]).tolist():
        report(wrong_tensor, f"the shares of {axis} are not {list(declared_shares)}, as declared")


def _position_along(axes: Sequence[str], group: ArrayGroup) -> Int:
    position = np.zeros(len(group.rows), np.int64)
    for axis in axes:
        position = position * group.sizes[axis] + group.positions[axis]
    return position


def compute_tensor_shape(
    tensor_dims: Sequence[ShapeDim], sizes: Sizes, environment: Environment
) -> tuple[int, ...]:
    """Return the shape of a tensor.

    Raises:
        LayoutError: a size or limit is unknown, a limit is larger than its dimension, or the
            tensor is too large.
    """
    shape = []
    extended_environment = Environment(
        environment.values, {**environment.sizes, **sizes}, {**sizes, **environment.constants}
    )
    for i, dim in enumerate(tensor_dims):
        size = size_of(dim.axes, sizes)
        if size is None:
            names = ", ".join(axis.name for axis in axes_in(dim.axes) if axis.name not in sizes)
            raise LayoutError(f"the size of {names} is unknown: give it with `let` or `where`")
        if dim.limit is not None:
            limit = evaluate(dim.limit, extended_environment)
            if not 0 <= limit <= size:
                raise LayoutError(
                    f"dimension {i} is cut at {limit}, but has {size} elements; correct `[:…]`"
                )
            size = limit
        shape.append(size)
    if math.prod(size for size in shape if size) > LARGEST_INTEGER:
        raise LayoutError(
            f"a tensor of shape {shape} would have more than {LARGEST_INTEGER} elements: check the "
            "numbers in the names of arrays"
        )
    return tuple(shape)
