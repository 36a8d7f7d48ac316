"""Finds the rule that applies to each stored array, and the sizes and numbers in its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.kernel.boxes.box import IntArray
from shardwise.kernel.errors import LayoutError, MismatchError
from shardwise.parts.formats.foreign import Catalogue
from shardwise.parts.formats.language.arithmetic import Environment
from shardwise.parts.formats.language.rules import Rule, Spec

UNMATCHED = -1


@dataclass(frozen=True, slots=True)
class Matches:
    """The arrays that a rule applies to.

    Attributes:
        rule: the rule.
        rows: the rows of the catalogue.
        texts: for the index of each array's name, the captured texts that are not numbers.
        positions: for each axis of the ranks and each captured number, the value for each array.
    """

    rule: Rule
    rows: IntArray
    texts: Mapping[int, Mapping[str, str]]
    positions: Mapping[str, IntArray]


def match_rules(
    spec: Spec, catalogue: Catalogue, environment: Environment
) -> tuple[list[Matches], IntArray]:
    """Assign each array to the first rule that matches its name and rank.

    Returns:
        The arrays of each rule that applies to any, and the rows that no rule matches.

    Raises:
        LayoutError: an `on` clause uses an unknown name.
    """
    rule_of_row = np.full(len(catalogue), UNMATCHED, np.int64)
    numbers = spec.numeric_captures()
    unmatched_names = set(np.unique(catalogue.name).tolist())
    captured: list[dict[int, dict[str, str]]] = []
    for rule_index, rule in enumerate(spec.rules):
        match = rule.pattern.compile(numbers)
        found = {i: t for i in unmatched_names if (t := match(catalogue.names[i])) is not None}
        captured.append(found)
        if not found:
            continue
        has_name = np.zeros(len(catalogue.names), bool)
        has_name[list(found)] = True
        matched = (rule_of_row == UNMATCHED) & has_name[catalogue.name]
        for name, value in rule.conditions:
            matched &= _values_of(name, found, spec, catalogue, environment) == value.evaluate(
                environment
            )
        if not rule.conditions:
            unmatched_names -= found.keys()
        rule_of_row[matched] = rule_index
    all_matches = []
    for rule_index, (rule, found) in enumerate(zip(spec.rules, captured, strict=True)):
        rows = np.flatnonzero(rule_of_row == rule_index)
        if not len(rows):
            continue
        positions = {axis: coordinates_along(catalogue, axis)[rows] for axis in spec.ranks}
        for capture in numbers.intersection(rule.pattern.variables()):
            positions[capture] = _captured_numbers(capture, found, catalogue)[rows]
            for texts in found.values():
                texts.pop(capture)
        all_matches.append(Matches(rule, rows, found, positions))
    return all_matches, np.flatnonzero(rule_of_row == UNMATCHED)


def _values_of(
    name: str,
    found: Mapping[int, Mapping[str, str]],
    spec: Spec,
    catalogue: Catalogue,
    environment: Environment,
) -> IntArray | int:
    """Return the value of a name after `on` for each array, or for all.

    Args:
        found: for the index of each name that the rule matches, the captured texts.
    """
    if name in spec.ranks:
        return coordinates_along(catalogue, name)
    if name in spec.lets:
        return environment.value_of(name)
    return _captured_numbers(name, found, catalogue)


def _captured_numbers(
    capture: str, found: Mapping[int, Mapping[str, str]], catalogue: Catalogue
) -> IntArray:
    """Return the captured number for each array; 0 for arrays that the rule does not match."""
    number_of_name = np.zeros(len(catalogue.names), np.int64)
    number_of_name[list(found)] = [int(texts[capture]) for texts in found.values()]
    return number_of_name[catalogue.name]


def coordinates_along(catalogue: Catalogue, axis: str) -> IntArray:
    """Return each array's rank coordinate along an axis; 0 if the checkpoint lacks the axis."""
    axes = list(catalogue.axes)
    if axis not in axes:
        return np.zeros(len(catalogue), np.int64)
    return catalogue.coordinate[:, axes.index(axis)]


def add_captured_numbers(environment: Environment, all_matches: Sequence[Matches]) -> Environment:
    """Add the sizes of captured numbers to the environment, and the starts of ragged shares.

    The size of a captured number is one more than its largest value over all rules.

    Raises:
        LayoutError: the files lack a share of a ragged number.
    """
    sizes = dict(environment.sizes)
    shares: dict[tuple[str, ...], IntArray] = {}
    for matches in all_matches:
        positions = matches.positions
        for name in positions.keys() - environment.sizes.keys():
            sizes[name] = max(sizes.get(name, 0), int(positions[name].max()) + 1)
        expressions = [e for target in matches.rule.targets for e in target.name.expressions()]
        for axes in {axes for each in expressions for axes in each.ragged_indices()}:
            *outer, last = axes
            outer_sizes = [environment.size_of(axis) for axis in outer]
            table = shares.setdefault(axes, np.zeros(outer_sizes, np.int64))
            index = tuple(positions[axis] for axis in outer)
            np.maximum.at(table, index, positions[last] + 1)
    for axes, table in shares.items():
        for position in np.flatnonzero(table == 0)[:1].tolist():
            raise LayoutError(
                f"no file has any {axes[-1]} of {' '.join(axes[:-1])} = {position}: copy the file, "
                "or add a rule for its arrays"
            )
    starts = {axes: (table.cumsum() - table.ravel()).tolist() for axes, table in shares.items()}
    return replace(environment, sizes=sizes, starts_of_rows=starts)


def evaluate_lets(spec: Spec, overrides: Mapping[str, int]) -> dict[str, int]:
    """Return the numbers that `let` declares.

    Args:
        overrides: numbers from the caller, which override declared numbers.

    Raises:
        MismatchError: a number has no value, or the caller gives one that is not declared.
    """
    numbers = dict(overrides)
    problems = [
        f"{name} is given, but not declared with `let`; declare it, or leave out {name}="
        for name in overrides
        if name not in spec.lets
    ]
    for name, declared in spec.lets.items():
        if name in overrides:
            continue
        if declared is None:
            problems.append(
                f"{name} is declared without a value: pass {name}=… to sw.spec, or --let {name}=…"
            )
            continue
        try:
            numbers[name] = declared.evaluate(Environment(numbers, numbers))
        except LayoutError as error:
            problems.append(f"let {name}: {error}")
    if problems:
        raise MismatchError(
            f"{spec.source.source}: some declared numbers are missing or wrong:", problems
        )
    return numbers
