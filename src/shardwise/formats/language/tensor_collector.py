"""Collects the boxes of global tensors, and all problems, while rules are applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from shardwise.errors import LayoutError
from shardwise.formats.foreign import Catalogue
from shardwise.formats.language.arithmetic import (
    Environment,
    Expression,
    NumberOrList,
    Variable,
    evaluate,
    format_expression,
    sized_axes_in,
    variables_in,
)
from shardwise.formats.language.array_groups import ArrayGroup
from shardwise.formats.language.boxes import BoxTable
from shardwise.formats.language.match import (
    CapturedTexts,
    Matches,
    coordinates_along,
    find_captured_numbers,
)
from shardwise.formats.language.rules import Rule, Skip, Spec, Target, Template
from shardwise.layout.columns import Int

MOST_COMBINATIONS = 2**62


class TensorNames:
    """The names of global tensors, indexed in the order in which rules first use them.

    Attributes:
        names: the names of all tensors.
        tensors_to_average: for each tensor that is a mean over ranks, the names of its terms. A
            term is a tensor with the values of one rank, which users do not see.
        numbers_in_names: for each prefix of a name, the numbers that follow it in names. Only
            numbers that arithmetic in a rule computed are included.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tensors_to_average: dict[str, list[str]] = {}
        self.numbers_in_names: dict[str, set[int]] = {}
        self._index: dict[str, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def index_of(self, name: str) -> int:
        """Return the index of a tensor; a new name gets the next index."""
        index = self._index.setdefault(name, len(self.names))
        if index == len(self.names):
            self.names.append(name)
        return index

    def name_tensors(
        self,
        template: Template,
        average_axes: Sequence[str],
        captured: Mapping[int, CapturedTexts],
        array_names: Int,
        positions: Mapping[str, Int],
        environment: Environment,
    ) -> Int:
        """Name the tensors of n arrays.

        Args:
            average_axes: axes of the ranks over which the tensor is the mean.
            captured: for the index of each array name, the captured texts.
            array_names: `(n,)`, the index of each array's name.
            positions: for each axis, `(n,)`, the position of each array along it.

        Returns:
            `(n,)`, the index of each array's tensor.

        Raises:
            LayoutError: a name uses an unknown value, or a number is negative or too large.
        """
        needed_names = dict.fromkeys([*template.variables(), *average_axes])
        axes = [axis for axis in needed_names if axis in positions]
        first_rows, inverse = _distinct_rows([array_names, *(positions[axis] for axis in axes)])
        indices = np.zeros(len(first_rows), np.int64)
        for i, row in enumerate(first_rows.tolist()):
            values = {axis: int(positions[axis][row]) for axis in axes}
            texts = captured[int(array_names[row])]
            name = self._fill_template(template, texts, replace(environment, values=values))
            if average_axes:
                term_name = f"{name}#{','.join(f'{axis}={values[axis]}' for axis in average_axes)}"
                self.tensors_to_average.setdefault(name, []).append(term_name)
                name = term_name
            indices[i] = self.index_of(name)
        return indices[inverse]

    def _fill_template(
        self, template: Template, texts: CapturedTexts, environment: Environment
    ) -> str:
        name = ""
        for part in template.parts:
            if isinstance(part, str):
                name += part
            elif isinstance(part, Variable) and part.name in texts:
                name += texts[part.name]
            else:
                number = evaluate(part, environment)
                if number < 0:
                    raise LayoutError(
                        f"{{{format_expression(part)}}} is {number}, with "
                        f"{_format_values(part, environment)}; a number in a name must not be "
                        "negative"
                    )
                if not isinstance(part, Variable):
                    self.numbers_in_names.setdefault(name, set()).add(number)
                name += str(number)
        return name


def _format_values(expression: Expression, environment: Environment) -> str:
    values, sizes = environment.values, environment.sizes
    used_values = {name: values[name] for name in variables_in(expression) if name in values}
    used_values |= {f"|{axis}|": sizes[axis] for axis in sized_axes_in(expression) if axis in sizes}
    return ", ".join(f"{name} = {value}" for name, value in used_values.items())


def _distinct_rows(columns: Sequence[Int]) -> tuple[Int, Int]:
    """Return the first row of each distinct combination, and each row's index among these."""
    combination_key = np.zeros_like(columns[0])
    combinations = 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        combinations *= size
        if combinations > MOST_COMBINATIONS:
            raise LayoutError(
                f"the numbers in names have more than {MOST_COMBINATIONS} combinations; check the "
                "numbers that the rule captures"
            )
        combination_key = combination_key * size + column
    _, first_row, combination_index = np.unique(
        combination_key, return_index=True, return_inverse=True
    )
    return first_row.astype(np.int64), combination_index.astype(np.int64)


@dataclass(slots=True)
class Collector:
    """The tensors that the rules applied so far have found in a catalogue.

    Attributes:
        environment: sizes of axes and captures, and constants.
        tensors: the names of the tensors. All tables refer to a tensor by its index here.
        boxes: tables of the boxes of tensors in arrays.
        arrays: one tuple for each group of arrays: the index of each array's tensor, each array's
            row in the catalogue, and the shape of the tensors according to the rule.
        problems: one line for each problem.
    """

    spec: Spec
    catalogue: Catalogue
    matches: Matches
    environment: Environment
    tensors: TensorNames = field(default_factory=TensorNames)
    boxes: list[BoxTable] = field(default_factory=list)
    arrays: list[tuple[Int, Int, tuple[int, ...]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def source_line(self, rule: Rule | Skip) -> str:
        """Return the source and line of a rule: `my.spec:3`."""
        return f"{self.spec.source.source}:{self.spec.source.line_number(rule.position)}"

    def positions(self, rule_index: int) -> dict[str, Int]:
        """Return the value of each rank axis and each captured number for each array of a rule."""
        rows = self.matches.rows[rule_index]
        ranks = {
            axis: coordinates_along(self.catalogue, axis)[rows]
            for axis in sorted(self.spec.rank_axes)
        }
        return ranks | find_captured_numbers(self.spec, self.catalogue, self.matches, rule_index)

    def known_sizes(
        self, rule: Rule, declared: Mapping[str, NumberOrList]
    ) -> dict[str, NumberOrList]:
        """Return the axis sizes of a rule that are known without the shapes of its arrays."""
        indexed_axes = self.spec.rank_axes | set(rule.pattern.capture_names())
        sizes = {
            name: size for name, size in self.environment.sizes.items() if name in indexed_axes
        }
        return {**self.environment.constants, **sizes, **declared}

    def add_tensors(self, rule_index: int, rule: Rule, target: Target, group: ArrayGroup) -> Int:
        """Name the tensors of a group of arrays; return the index of each array's tensor.

        Raises:
            LayoutError: a name uses an unknown value.
        """
        sizes = {**self.environment.sizes, **group.sizes}
        array_names = self.catalogue.name[group.rows]
        numeric = self.spec.numeric_captures()
        texts = {
            i: {name: text for name, text in captured.items() if name not in numeric}
            for i, captured in self.matches.captured[rule_index].items()
        }
        environment = replace(self.environment, sizes=sizes)
        return self.tensors.name_tensors(
            target.name, rule.average_axes, texts, array_names, group.positions, environment
        )

    def report_tensor(self, tensor: int, problem: str) -> None:
        """Add a problem of a tensor."""
        self.problems.append(f"{self.tensors.names[tensor]}: {problem}")

    def report_arrays(self, rows: Int, rule: Rule, problem: str) -> None:
        """Add a problem of stored arrays to which a rule cannot be applied."""
        for i in np.unique(self.catalogue.name[rows]).tolist():
            self.problems.append(f"{self.catalogue.names[i]} ({self.source_line(rule)}): {problem}")
