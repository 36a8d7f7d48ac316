"""The tensors that rules assemble: their names, their boxes in stored arrays, and all problems."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from shardwise.errors import LayoutError
from shardwise.formats.foreign import Catalogue
from shardwise.formats.language.arithmetic import Environment, Expression
from shardwise.formats.language.boxes import ArrayGroup, find_boxes
from shardwise.formats.language.match import Matches
from shardwise.formats.language.rules import Rule, Spec, Target, map_dimensions
from shardwise.formats.language.shapes import Axis, AxisGroup, Sizes, size_of, solve_sizes
from shardwise.layout.columns import Int
from shardwise.manifest.layout import Pieces
from shardwise.manifest.manifest import LARGEST_INTEGER


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
    arrays: list[tuple[Int, Int, tuple[int, ...]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self.index)

    def report_tensors(self, tensors: Int, problem: str) -> None:
        """Add a problem of tensors."""
        names = self.names
        self.problems += [f"{names[i]}: {problem}" for i in np.unique(tensors).tolist()]

    def report_arrays(self, rows: Int, rule: Rule, problem: str) -> None:
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

    def _add_boxes(self, rule: Rule, group: ArrayGroup) -> None:
        try:
            shape = self._shape_of(group)
            self.arrays.append((group.tensor, group.rows, shape))
            self.boxes += find_boxes(self.catalogue, group, shape)
        except LayoutError as error:
            self.report_arrays(group.rows, rule, str(error))

    def _group_arrays(
        self, matches: Matches, target: Target, declared: Sizes
    ) -> Iterator[ArrayGroup]:
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
                group = ArrayGroup(
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

    def _name_tensors(self, matches: Matches, target: Target, group: ArrayGroup) -> Int:
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
            used |= {f"|{n}|": environment.sizes[n] for n in part.sized_axes()}
            raise LayoutError(
                f"{{{part}}} is {number}, with {', '.join(f'{n} = {v}' for n, v in used.items())}; "
                "a number in a name must not be negative"
            )
        if not part.is_name:
            self.numbers_in_names.setdefault(prefix, set()).add(number)
        return str(number)

    def _resolve_ragged_axis(self, axis: Axis, groups: list[ArrayGroup]) -> Iterator[ArrayGroup]:
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

    def _shape_of(self, group: ArrayGroup) -> tuple[int, ...]:
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
