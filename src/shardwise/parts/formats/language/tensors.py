"""The tensors that rules assemble: their names, their boxes in stored arrays, and all problems."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardwise.kernel.boxes import row_major_strides
from shardwise.kernel.boxes.box import BoolArray, IntArray
from shardwise.kernel.errors import LayoutError
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.manifest.manifest import LARGEST_INTEGER
from shardwise.kernel.manifest.pieces import Pieces
from shardwise.parts.formats.foreign import Catalogue
from shardwise.parts.formats.language.arithmetic import Environment, Expression
from shardwise.parts.formats.language.match import Matches
from shardwise.parts.formats.language.rules import DimensionMap, Rule, Spec, Target, map_dimensions
from shardwise.parts.formats.language.shapes import (
    Axis,
    AxisGroup,
    Sizes,
    Term,
    expand_terms,
    size_of,
    solve_sizes,
)

MOST_BOXES = 2**26


@dataclass(frozen=True, slots=True)
class _ArrayGroup:
    """Arrays that match the same target of a rule and have the same sizes.

    Attributes:
        rows: rows of the catalogue; repeated for an array that is part of several tensors.
        tensor: the index of each array's tensor.
        positions: the position of each array along each axis of the ranks, captured number and
            axis that splits it.
        dimension_map: the map from dimensions of the arrays to dimensions of the tensor.
        sizes: the sizes of all axes. For a ragged axis `name`, `sizes["name"]` is the size in these
            arrays, and `sizes["~name"]` is the sum over all ranks.
        strides: the strides of the arrays, in elements.
    """

    rows: IntArray
    tensor: IntArray
    positions: Mapping[str, IntArray]
    dimension_map: DimensionMap
    sizes: Sizes
    strides: tuple[int, ...]

    def select(self, rows: BoolArray | IntArray) -> _ArrayGroup:
        """Return a group of some of the arrays."""
        positions = {axis: column[rows] for axis, column in self.positions.items()}
        return replace(self, rows=self.rows[rows], tensor=self.tensor[rows], positions=positions)


@dataclass(slots=True)
class Tensors:
    """The tensors that the rules applied so far have found in a catalogue.

    Attributes:
        environment: sizes of axes and captures, and declared numbers.
        index: the index of each name, in the order in which rules first use them. All tables refer
            to a tensor by its index.
        numbers_in_names: for each prefix of a name, the numbers that follow it in names. Only
            numbers that arithmetic in a rule computed are included.
        boxes: the boxes of tensors in arrays.
        arrays: one tuple for each group of arrays: the index of each array's tensor, each array's
            row in the catalogue, and the shape of the tensors according to the rule.
        problems: one line for each problem.
    """

    spec: Spec
    catalogue: Catalogue
    environment: Environment
    index: dict[str, int] = field(default_factory=dict)
    numbers_in_names: dict[str, set[int]] = field(default_factory=dict)
    boxes: list[Pieces] = field(default_factory=list)
    arrays: list[tuple[IntArray, IntArray, tuple[int, ...]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self.index)

    def report_tensors(self, tensors: IntArray, problem: str) -> None:
        """Add a problem of tensors."""
        names = self.names
        self.problems += [f"{names[i]}: {problem}" for i in np.unique(tensors).tolist()]

    def report_arrays(self, rows: IntArray, rule: Rule, problem: str) -> None:
        """Add a problem of stored arrays to which a rule cannot be applied."""
        place = self.spec.source.place_of(rule.position)
        for i in np.unique(self.catalogue.name[rows]).tolist():
            self.problems.append(f"{self.catalogue.names[i]} ({place}): {problem}")

    def apply_rule(self, matches: Matches) -> None:
        """Add the boxes of the arrays of a rule."""
        rule = matches.rule
        try:
            declared = {name: value.evaluate(self.environment) for name, value in rule.sizes}
        except LayoutError as error:
            place = self.spec.source.place_of(rule.position)
            self.problems.append(f"{place}: {error}")
            return
        for target in rule.targets:
            groups = list(self._group_arrays(matches, target, declared))
            for axis in groups[0].dimension_map.ragged_axes if groups else ():
                groups = list(self._resolve_ragged_axis(axis, groups))
            for group in groups:
                self._add_boxes(rule, group)

    def _add_boxes(self, rule: Rule, group: _ArrayGroup) -> None:
        try:
            shape = self._shape_of(group)
            self.arrays.append((group.tensor, group.rows, shape))
            self.boxes += _find_boxes(self.catalogue, group, shape)
        except LayoutError as error:
            self.report_arrays(group.rows, rule, str(error))

    def _group_arrays(
        self, matches: Matches, target: Target, declared: Sizes
    ) -> Iterator[_ArrayGroup]:
        """Group a rule's arrays by shape and strides. Report arrays whose shape does not fit."""
        rule, rows, catalogue = matches.rule, matches.rows, self.catalogue
        sizes = self._known_sizes(matches, declared)
        columns = catalogue.ndim[rows], catalogue.shape[rows], catalogue.stride[rows]
        _, index = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
        for number in range(int(index.max(initial=-1)) + 1):
            indices = np.flatnonzero(index.ravel() == number)
            first, group_rows = int(rows[indices[0]]), rows[indices]
            ndim = int(catalogue.ndim[first])
            shape, strides = (
                tuple(column[first, :ndim].tolist())
                for column in (catalogue.shape, catalogue.stride)
            )
            try:
                dimension_map = map_dimensions(rule, target, frozenset(matches.positions), ndim)
                equations = list(zip(dimension_map.array_dims, shape, strict=True))
                group = _ArrayGroup(
                    group_rows,
                    np.zeros_like(group_rows),
                    {axis: column[indices] for axis, column in matches.positions.items()},
                    dimension_map,
                    solve_sizes(equations, sizes),
                    strides,
                )
                for axis in dimension_map.split_axes:
                    count = group.sizes[axis]
                    position = np.tile(np.arange(count), len(group.rows))
                    group = group.select(np.repeat(np.arange(len(group.rows)), count))
                    group = replace(group, positions={**group.positions, axis: position})
                yield replace(group, tensor=self._name_tensors(matches, target, group))
            except LayoutError as error:
                self.report_arrays(group_rows, rule, f"{list(shape)}: {error}")

    def _known_sizes(self, matches: Matches, declared: Sizes) -> Sizes:
        """Return the sizes of axes that are known without the shapes of the arrays."""
        sizes = {
            name: self.environment.sizes[name] for name in (*self.spec.lets, *matches.positions)
        }
        default = {
            name: axis.size
            for name, axis in matches.rule.axes().items()
            if axis.size is not None and name not in sizes
        }
        return {**default, **sizes, **declared}

    def _name_tensors(self, matches: Matches, target: Target, group: _ArrayGroup) -> IntArray:
        """Return the index of each array's tensor.

        Raises:
            LayoutError: a name uses an unknown value, or a number is negative.
        """
        axes = [axis for axis in target.name.variables() if axis in group.positions]
        columns = [self.catalogue.name[group.rows], *(group.positions[axis] for axis in axes)]
        distinct, inverse = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
        indices = []
        for name_index, *numbers in distinct.tolist():
            environment = replace(
                self.environment,
                values={**self.environment.values, **dict(zip(axes, numbers, strict=True))},
                sizes={**self.environment.sizes, **group.sizes},
            )
            name = ""
            for part in target.name.parts:
                name += self._fill_part(part, name, matches.texts[name_index], environment)
            indices.append(self.index.setdefault(name, len(self.index)))
        return np.array(indices, np.int64)[inverse.ravel()]

    def _fill_part(
        self,
        part: str | Expression,
        prefix: str,
        texts: Mapping[str, str],
        environment: Environment,
    ) -> str:
        if isinstance(part, str):
            return part
        if part.is_name and part.names[0] in texts:
            return texts[part.names[0]]
        number = part.evaluate(environment)
        if number < 0:
            used = {n: environment.values[n] for n in part.variables() if n in environment.values}
            used |= {f"|{n}|": environment.sizes[n] for n in part.size_variables()}
            raise LayoutError(
                f"{{{part}}} is {number}, with {', '.join(f'{n} = {v}' for n, v in used.items())}; "
                "a number in a name must not be negative"
            )
        if not part.is_name:
            self.numbers_in_names.setdefault(prefix, set()).add(number)
        return str(number)

    def _resolve_ragged_axis(self, axis: Axis, groups: list[_ArrayGroup]) -> Iterator[_ArrayGroup]:
        """Find where the shares of a ragged axis begin. Split each group by the sum of its shares.

        The shares of a tensor follow one another in the order of the outer axes.
        """
        is_captured = axis.name in groups[0].positions
        counts = [groups[0].sizes[outer] for outer in axis.outer]
        tensor, position, size = (
            np.concatenate(columns)
            for columns in zip(
                *(
                    (
                        group.tensor,
                        np.ravel_multi_index([group.positions[o] for o in axis.outer], counts),
                        group.positions[axis.name] + 1
                        if is_captured
                        else np.full(len(group.rows), group.sizes[axis.name]),
                    )
                    for group in groups
                ),
                strict=True,
            )
        )
        tensors, index = np.unique(tensor, return_inverse=True)
        shares = np.full((len(tensors), math.prod(counts)), -1, np.int64)
        np.maximum.at(shares, (index, position), size)
        if not is_captured:
            self.report_tensors(
                tensor[shares[index, position] != size],
                f"ranks have different shares of {axis.name} where they must have the same",
            )
        self.report_tensors(
            tensors[(shares < 0).any(axis=1)],
            f"the shares of {axis.name} of some ranks are missing; copy all files",
        )
        ends = np.maximum(shares, 0).cumsum(axis=1)
        start = (ends - np.maximum(shares, 0))[index, position]
        total = ends[index, -1]
        for group in groups:
            end = len(group.rows)
            positions = {**group.positions, axis.start_key: start[:end]}
            for sum_of_shares in np.unique(total[:end]).tolist():
                selected = replace(
                    group,
                    positions=positions,
                    sizes={**group.sizes, axis.start_key: sum_of_shares},
                ).select(total[:end] == sum_of_shares)
                yield selected
            start, total = start[end:], total[end:]

    def _shape_of(self, group: _ArrayGroup) -> tuple[int, ...]:
        """Return the shape of a group's tensors.

        Raises:
            LayoutError: a size or limit is unknown, a limit is larger than its dimension, or the
                tensor is too large.
        """
        shape = []
        numbers = {**self.environment.sizes, **group.sizes}
        environment = replace(self.environment, values=numbers, sizes=numbers)
        for i, dim in enumerate(group.dimension_map.tensor_dims):
            size = size_of(dim, group.sizes) or 0
            if isinstance(dim, AxisGroup) and dim.limit is not None:
                limit = dim.limit.evaluate(environment)
                if not 0 <= limit <= size:
                    raise LayoutError(
                        f"dimension {i} is cut at {limit}, but has {size} elements; correct `[:…]`"
                    )
                size = limit
            shape.append(size)
        if math.prod(size for size in shape if size) > LARGEST_INTEGER:
            raise LayoutError(
                f"a tensor of shape {shape} would have more than {LARGEST_INTEGER} elements: check "
                "the numbers in the names of arrays"
            )
        return tuple(shape)


def _find_boxes(catalogue: Catalogue, group: _ArrayGroup, shape: Sequence[int]) -> Iterator[Pieces]:
    """Yield the boxes that arrays hold, a table for each part of the arrays.

    Args:
        catalogue: the arrays.
        group: the arrays that have these boxes.
        shape: the shape of the tensors; padding beyond it is left out.

    Raises:
        LayoutError: there are too many boxes.
    """
    dimension_map, sizes = group.dimension_map, group.sizes
    array_terms = {
        frozenset(term.steps): term for term in expand_terms(dimension_map.array_dims, sizes)
    }
    for term in expand_terms(dimension_map.tensor_dims, sizes):
        local_axes = {axis for axis in term.steps if dimension_map.is_local(axis)}
        array_term = array_terms.get(frozenset(local_axes | set(dimension_map.split_axes)))
        if array_term is not None and all(sizes[axis] for axis in local_axes):
            yield _place_boxes(catalogue, group, term, array_term, np.array(shape, np.int64))


def _place_boxes(
    catalogue: Catalogue, group: _ArrayGroup, term: Term, array_term: Term, tensor_shape: IntArray
) -> Pieces:
    """Return the boxes of one term: as few as possible, each as large as possible.

    If the positions along all indexed axes are 0, all arrays have the same boxes. Each position
    along an indexed axis shifts them.
    """
    dims = len(tensor_shape)
    array_steps = {
        axis: step * group.strides[dim] for axis, (dim, step) in array_term.steps.items()
    }
    first = sum(a * b for a, b in zip(array_term.starts, group.strides, strict=True))
    start = np.array([first], np.int64)
    offset = np.array([term.starts], np.int64).reshape(1, dims)
    size, stride, is_closed = np.ones(dims, np.int64), np.zeros(dims, np.int64), [False] * dims
    # The innermost axes of each dimension come first, and are merged into it. After an axis that
    # cannot be merged, each further one adds boxes.
    for axis, (dim, step) in sorted(term.steps.items(), key=lambda item: item[1][1]):
        count = group.sizes[axis]
        if not group.dimension_map.is_local(axis) or count == 1:
            continue
        array_step = array_steps[axis]
        is_contiguous = size[dim] == 1 or array_step == size[dim] * stride[dim]
        if step == size[dim] and is_contiguous and not is_closed[dim]:
            stride[dim] = array_step if size[dim] == 1 else stride[dim]
            size[dim] *= count
            continue
        is_closed[dim] = True
        if len(group.rows) * len(start) * count > MOST_BOXES:
            raise LayoutError(
                f"the rule cuts {len(group.rows)} arrays into more than {MOST_BOXES} boxes; put "
                "axes that are adjacent in the arrays next to each other in the tensor"
            )
        start = np.add.outer(start, np.arange(count) * array_step).ravel()
        offset = np.repeat(offset, count, axis=0)
        offset[:, dim] += np.tile(np.arange(count) * step, len(offset) // count)
    array_start, array_offset = np.zeros_like(group.rows), np.zeros((len(group.rows), dims), int)
    for axis, (dim, step) in term.steps.items():
        if not group.dimension_map.is_local(axis):
            array_offset[:, dim] += step * group.positions[axis]
    for axis in group.dimension_map.split_axes:
        array_start += array_steps[axis] * group.positions[axis]
    offsets = (array_offset[:, None, :] + offset).reshape(len(group.rows) * len(start), dims)
    shape = np.minimum(size, tensor_shape - offsets)
    is_kept = (shape > 0).all(axis=1)
    itemsizes = np.array([DTYPES[dtype].itemsize for dtype in catalogue.dtypes], np.int64)
    starts = np.add.outer(array_start, start) * itemsizes[catalogue.dtype[group.rows], None]
    pieces = Pieces(
        np.repeat(group.tensor, len(start)),
        np.repeat(catalogue.file[group.rows], len(start)),
        (catalogue.start[group.rows, None] + starts).ravel(),
        offsets,
        shape,
        # A dimension of size 1 may have any stride: use the stride of a row-major box.
        np.where(shape == 1, row_major_strides(shape), stride),
    )
    return pieces if is_kept.all() else pieces.select(is_kept)
