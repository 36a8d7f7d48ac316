"""Finds the rule that applies to each stored array, and the sizes and numbers in its name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardwise.errors import LayoutError, MismatchError
from shardwise.formats.foreign import Catalogue
from shardwise.formats.language.arithmetic import (
    CombinedIndex,
    Environment,
    NumberOrList,
    evaluate,
)
from shardwise.formats.language.rules import DeclaredValue, Rule, Skip, Spec
from shardwise.formats.language.shapes import single_axis_parts
from shardwise.layout.columns import Int

UNMATCHED = -1
CapturedTexts = dict[str, str]


@dataclass(frozen=True, slots=True)
class Matches:
    """The rows of a catalogue that each rule matches.

    Attributes:
        rows: rows for each rule, in the order of the specification.
        captured: for each rule, a dict from the index of an array's name to its captured texts.
        unmatched: rows that no rule matches.
    """

    rows: tuple[Int, ...]
    captured: tuple[Mapping[int, CapturedTexts], ...]
    unmatched: Int


def match_rules(spec: Spec, catalogue: Catalogue, environment: Environment) -> Matches:
    """Assign each array to the first rule that matches its name and rank.

    Raises:
        LayoutError: an `on` clause uses an unknown name, or the rank of an array is out of range.
    """
    sizes = np.array(list(catalogue.axes.values()), np.int64)
    is_outside = ((catalogue.coordinate < 0) | (catalogue.coordinate >= sizes)).any(axis=1)
    if is_outside.any():
        row = int(np.flatnonzero(is_outside)[0])
        coordinate = dict(zip(catalogue.axes, catalogue.coordinate[row].tolist(), strict=True))
        raise LayoutError(
            f"array {catalogue.names[int(catalogue.name[row])]} is of rank {coordinate}, but the "
            f"sizes of the axes are {dict(catalogue.axes)}: check the sizes in `ranks`"
        )
    rule_of_row = np.full(len(catalogue), UNMATCHED, np.int64)
    numeric_captures = spec.numeric_captures()
    unmatched_names = set(np.unique(catalogue.name).tolist())
    captured: list[Mapping[int, CapturedTexts]] = []
    for rule_index, rule in enumerate(spec.rules):
        match = rule.pattern.compile(numeric_captures)
        texts_by_name_index = {
            i: texts for i in unmatched_names if (texts := match(catalogue.names[i])) is not None
        }
        captured.append(texts_by_name_index)
        if not texts_by_name_index:
            continue
        has_name = np.zeros(len(catalogue.names), bool)
        has_name[list(texts_by_name_index)] = True
        matched = (rule_of_row == UNMATCHED) & has_name[catalogue.name]
        if isinstance(rule, Rule) and rule.coordinates:
            for axis, value in rule.coordinates:
                try:
                    coordinate_in_rule = evaluate(value, environment)
                except LayoutError as error:
                    line = spec.source.line_number(rule.position)
                    raise LayoutError(f"{spec.source.source}:{line}: {error}") from error
                matched &= coordinates_along(catalogue, axis) == coordinate_in_rule
        else:
            unmatched_names -= set(texts_by_name_index)
        rule_of_row[matched] = rule_index
    order = np.argsort(rule_of_row, kind="stable")
    rule_bounds = np.arange(UNMATCHED, len(spec.rules) + 1)
    bounds = np.searchsorted(rule_of_row[order], rule_bounds).tolist()
    rows = [order[start:end] for start, end in itertools.pairwise(bounds)]
    return Matches(tuple(rows[1:]), tuple(captured), rows[0])


def coordinates_along(catalogue: Catalogue, axis: str) -> Int:
    """Return each array's rank coordinate along an axis; 0 if the checkpoint lacks the axis."""
    axes = list(catalogue.axes)
    if axis not in axes:
        return np.zeros(len(catalogue), np.int64)
    return catalogue.coordinate[:, axes.index(axis)]


def find_captured_numbers(
    spec: Spec, catalogue: Catalogue, matches: Matches, rule_index: int
) -> dict[str, Int]:
    """Return the numbers captured from the names of a rule's rows, a column for each capture."""
    columns = {}
    rows = matches.rows[rule_index]
    captures = spec.rules[rule_index].pattern.capture_names()
    for capture in set(captures) & spec.numeric_captures():
        number_of_name = np.zeros(len(catalogue.names), np.int64)
        captured = matches.captured[rule_index]
        number_of_name[list(captured)] = [int(texts[capture]) for texts in captured.values()]
        columns[capture] = number_of_name[catalogue.name[rows]]
    return columns


def add_capture_sizes(
    spec: Spec, catalogue: Catalogue, matches: Matches, environment: Environment
) -> Environment:
    """Add the sizes of captured numbers to the environment, and the starts of ragged shares.

    The size of a captured number is one more than its largest value over all rules.

    Raises:
        LayoutError: the files lack a share of a ragged number.
    """
    sizes = dict(environment.sizes)
    shares: dict[tuple[str, ...], dict[int, int]] = {}
    for rule_index, rule in enumerate(spec.rules):
        rows = matches.rows[rule_index]
        if isinstance(rule, Skip) or not len(rows):
            continue
        numbers = find_captured_numbers(spec, catalogue, matches, rule_index)
        for name, column in numbers.items():
            sizes[name] = max(sizes.get(name, 0), int(column.max()) + 1)
        for index in _ragged_indices(rule):
            columns = [
                numbers[axis] if axis in numbers else coordinates_along(catalogue, axis)[rows]
                for axis in index.axes
            ]
            _enlarge_shares(shares.setdefault(index.axes, {}), index, columns, environment)
    starts = {axes: _starts_of_shares(axes, found, environment) for axes, found in shares.items()}
    return replace(environment, sizes=sizes, ragged_starts=starts)


def _ragged_indices(rule: Rule) -> set[CombinedIndex]:
    return {
        part
        for target in rule.targets
        for part in target.name.parts
        if isinstance(part, CombinedIndex) and part.ragged
    }


def _enlarge_shares(
    shares: dict[int, int], index: CombinedIndex, columns: list[Int], environment: Environment
) -> None:
    """Enlarge the shares of the last axis until they include all rows.

    The key of a share is the position along the other axes.
    """
    outer_position = np.zeros_like(columns[0])
    for axis, column in zip(index.axes[:-1], columns, strict=False):
        outer_position = outer_position * environment.size_of(axis) + column
    for position in np.unique(outer_position).tolist():
        share_size = int(columns[-1][outer_position == position].max()) + 1
        shares[position] = max(shares.get(position, 0), share_size)


def _starts_of_shares(
    axes: tuple[str, ...], shares: Mapping[int, int], environment: Environment
) -> dict[int, int]:
    position_count = 1
    for axis in axes[:-1]:
        position_count *= environment.size_of(axis)
    starts, start = {}, 0
    for position in range(position_count):
        if position not in shares:
            raise LayoutError(
                f"no file has any {axes[-1]} of {' '.join(axes[:-1])} = {position}: copy the file, "
                "or add a rule for its arrays"
            )
        starts[position] = start
        start += shares[position]
    return starts


def evaluate_lets(spec: Spec, overrides: Mapping[str, int]) -> dict[str, NumberOrList]:
    """Return the numbers and lists that `let` declares.

    Args:
        overrides: numbers from the caller, which override declared numbers.

    Raises:
        MismatchError: a number has no value, or the caller gives one that is not declared.
    """
    constants: dict[str, NumberOrList] = dict(overrides)
    names = [name for name, _ in spec.lets]
    undeclared = [name for name in overrides if name not in names]
    problems = [
        f"{name} is given, but not declared with `let`; declare it, or leave out {name}="
        for name in undeclared
    ]
    for name, declared in spec.lets:
        if name in overrides:
            continue
        if declared is None:
            problems.append(
                f"{name} is declared without a value: pass {name}=… to sw.spec, or --let {name}=…"
            )
            continue
        try:
            constants[name] = _evaluate_declared(declared, Environment(constants=constants))
        except LayoutError as error:
            problems.append(f"let {name}: {error}")
    if problems:
        raise MismatchError(
            f"{spec.source.source}: some declared numbers are missing or wrong:", problems
        )
    return constants


def sizes_of_rank_axes(spec: Spec, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of ranks along each axis; 1 along axes that the checkpoint lacks.

    Args:
        axes: the sizes of the axes of the checkpoint.

    Raises:
        MismatchError: the specification gives other sizes.
    """
    problems = [
        f"{name} is {axes.get(name, 1)} in the checkpoint and {size} in the specification; correct "
        "`ranks`, or open another checkpoint"
        for name, size in spec.ranks
        if size is not None and size != axes.get(name, 1)
    ]
    if problems:
        raise MismatchError(f"{spec.source.source} is for another number of ranks:", problems)
    return {**dict.fromkeys((name for name, _ in spec.ranks), 1), **axes}


def evaluate_rule_sizes(rule: Rule, environment: Environment) -> dict[str, NumberOrList]:
    """Return the sizes of axes that a rule declares. A single axis in a sum has size 1 by default.

    Raises:
        LayoutError: a size uses an unknown name.
    """
    sizes: dict[str, NumberOrList] = {}
    for name, declared in rule.sizes:
        sizes[name] = _evaluate_declared(declared, environment)
    for shape in rule.shapes():
        for dim in shape.dims:
            for axis in single_axis_parts(dim.axes):
                if axis.size is None and axis.name not in environment.constants:
                    sizes.setdefault(axis.name, 1)
    return sizes


def _evaluate_declared(declared: DeclaredValue, environment: Environment) -> NumberOrList:
    if isinstance(declared, tuple):
        return tuple(evaluate(item, environment) for item in declared)
    return evaluate(declared, environment)
