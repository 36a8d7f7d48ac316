"""Matching: the rule of each stored array, the captures in its name, and the tensor's name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.errors import LayoutError, MismatchError
from shardwise.formats.foreign import Catalogue
from shardwise.formats.language.axes import parts_alone
from shardwise.formats.language.expressions import (
    Expression,
    Known,
    Name,
    Product,
    Value,
    evaluate,
    names_in,
    render,
    sizes_in,
)
from shardwise.formats.language.rules import Declared, Rule, Skip, Spec, Template
from shardwise.manifest.table import Int

NOBODY = -1
Captured = dict[str, str]


@dataclass(frozen=True, slots=True)
class Matches:
    """The rows of a catalogue that each rule matches.

    Attributes:
        rows: rows by rule, in the order of the specification.
        captured: captured texts by rule and by the index of the array's name.
        unmatched: rows that no rule matches.
    """

    rows: tuple[Int, ...]
    captured: tuple[Mapping[int, Captured], ...]
    unmatched: Int


def match_rules(spec: Spec, catalogue: Catalogue, known: Known) -> Matches:
    """Assign each array to the first rule that matches its name and rank.

    Raises:
        LayoutError: an `on` clause uses an unknown name, or an array's rank is out of range.
    """
    sizes = np.array(list(catalogue.axes.values()), np.int64)
    if ((catalogue.coordinate < 0) | (catalogue.coordinate >= sizes)).any():
        raise LayoutError(f"the rank of an array is outside of {dict(catalogue.axes)}")
    owner = np.full(len(catalogue), NOBODY, np.int64)
    numbers = spec.numbers()
    open_names = set(np.unique(catalogue.name).tolist())
    captured: list[Mapping[int, Captured]] = []
    for k, rule in enumerate(spec.rules):
        match = rule.pattern.matcher(numbers)
        found = {
            i: captures for i in open_names if (captures := match(catalogue.names[i])) is not None
        }
        captured.append(found)
        if not found:
            continue
        named = np.zeros(len(catalogue.names), bool)
        named[list(found)] = True
        mine = (owner == NOBODY) & named[catalogue.name]
        if isinstance(rule, Rule) and rule.on:
            for axis, value in rule.on:
                mine &= coordinate(catalogue, axis) == evaluate(value, known)
        else:
            open_names -= set(found)
        owner[mine] = k
    order = np.argsort(owner, kind="stable")
    bounds = np.searchsorted(owner[order], np.arange(NOBODY, len(spec.rules) + 1)).tolist()
    rows = [order[a:b] for a, b in itertools.pairwise(bounds)]
    return Matches(tuple(rows[1:]), tuple(captured), rows[0])


def coordinate(catalogue: Catalogue, axis: str) -> Int:
    """Return each array's rank coordinate along an axis; 0 if the checkpoint lacks the axis."""
    axes = list(catalogue.axes)
    if axis not in axes:
        return np.zeros(len(catalogue), np.int64)
    return catalogue.coordinate[:, axes.index(axis)]


def captured_numbers(
    spec: Spec, catalogue: Catalogue, matches: Matches, rule: int
) -> dict[str, Int]:
    """Return the numbers captured from the names of a rule's rows, a column for each capture."""
    found = {}
    rows = matches.rows[rule]
    for name in set(spec.rules[rule].pattern.captures()) & spec.numbers():
        table = np.zeros(len(catalogue.names), np.int64)
        captured = matches.captured[rule]
        table[list(captured)] = [int(captures[name]) for captures in captured.values()]
        found[name] = table[catalogue.name[rows]]
    return found


def count_captures(spec: Spec, catalogue: Catalogue, matches: Matches, known: Known) -> Known:
    """Count the values of each captured number over all rules.

    Returns:
        `known` with the sizes of captures, and the starts of the shares of ragged ones.
    """
    sizes = dict(known.sizes)
    shares: dict[tuple[str, ...], dict[int, int]] = {}
    for k, rule in enumerate(spec.rules):
        if isinstance(rule, Skip) or not len(matches.rows[k]):
            continue
        numbers = captured_numbers(spec, catalogue, matches, k)
        for name, column in numbers.items():
            sizes[name] = max(sizes.get(name, 0), int(column.max()) + 1)
        for product in _ragged_products(rule):
            columns = [_column(catalogue, matches.rows[k], numbers, a) for a in product.axes]
            _add_shares(shares.setdefault(product.axes, {}), columns, known, product)
    starts = {axes: _starts(axes, found, known) for axes, found in shares.items()}
    return Known(known.values, sizes, known.constants, starts)


def _ragged_products(rule: Rule) -> set[Product]:
    return {
        part
        for target in rule.targets
        for part in target.name.parts
        if isinstance(part, Product) and part.ragged
    }


def _column(catalogue: Catalogue, rows: Int, numbers: Mapping[str, Int], axis: str) -> Int:
    return numbers[axis] if axis in numbers else coordinate(catalogue, axis)[rows]


def _add_shares(share: dict[int, int], columns: list[Int], known: Known, product: Product) -> None:
    outer = np.zeros_like(columns[0])
    for axis, column in zip(product.axes[:-1], columns, strict=False):
        outer = outer * known.size(axis) + column
    for at in np.unique(outer).tolist():
        share[at] = max(share.get(at, 0), int(columns[-1][outer == at].max()) + 1)


def _starts(axes: tuple[str, ...], shares: Mapping[int, int], known: Known) -> dict[int, int]:
    positions = 1
    for axis in axes[:-1]:
        positions *= known.size(axis)
    found, at = {}, 0
    for position in range(positions):
        if position not in shares:
            raise LayoutError(f"the files have no {axes[-1]} at {' '.join(axes[:-1])} = {position}")
        found[position] = at
        at += shares[position]
    return found


def constants_of(spec: Spec, given: Mapping[str, int]) -> dict[str, Value]:
    """Return the numbers that `let` declares. Numbers given by the program override them.

    Raises:
        MismatchError: a number has no value, or the program gives one that is not declared.
    """
    found: dict[str, Value] = dict(given)
    names = [name for name, _ in spec.lets]
    extra = [name for name in given if name not in names]
    problems = [f"{name} is given, but not declared with `let`" for name in extra]
    for name, declared in spec.lets:
        if name in given:
            continue
        if declared is None:
            problems.append(
                f"{name} is declared without a value: pass {name}=… to sw.spec, or --let {name}=…"
            )
            continue
        try:
            found[name] = number_or_list(declared, Known(constants=found))
        except LayoutError as error:
            problems.append(f"let {name}: {error}")
    if problems:
        raise MismatchError(
            f"{spec.text.source}: some declared numbers are missing or wrong:", problems
        )
    return found


def rank_sizes(spec: Spec, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the number of ranks along each axis; 1 along axes that the checkpoint lacks.

    Raises:
        MismatchError: the specification gives other sizes.
    """
    problems = [
        f"{name} is {axes.get(name, 1)} in the checkpoint and {size} in the specification"
        for name, size in spec.ranks
        if size is not None and size != axes.get(name, 1)
    ]
    if problems:
        raise MismatchError(f"{spec.text.source} is for another number of ranks:", problems)
    return {**dict.fromkeys((name for name, _ in spec.ranks), 1), **axes}


def rule_sizes(rule: Rule, known: Known) -> dict[str, Value]:
    """Return the sizes that a rule declares. Undeclared single axes in a sum have size 1.

    Raises:
        LayoutError: a size uses an unknown name.
    """
    sizes: dict[str, Value] = {}
    for name, declared in rule.sizes:
        sizes[name] = number_or_list(declared, known)
    for shape in rule.shapes():
        for dim in shape.dims:
            for part in parts_alone(dim.node):
                if part.size is None and part.name not in known.constants:
                    sizes.setdefault(part.name, 1)
    return sizes


def number_or_list(declared: Declared, known: Known) -> Value:
    """Return the value of a declaration.

    Raises:
        LayoutError: it uses an unknown name.
    """
    if isinstance(declared, tuple):
        return tuple(evaluate(item, known) for item in declared)
    return evaluate(declared, known)


LARGEST_KEY = 2**62


class Tensors:
    """Global tensors, numbered in the order in which rules first name them.

    Attributes:
        names: the names of all tensors.
        averages: for each mean, the names of the hidden tensors with the ranks' values.
        computed: numbers in names that result from arithmetic, by the text before them.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.averages: dict[str, list[str]] = {}
        self.computed: dict[str, set[int]] = {}
        self._index: dict[str, int] = {}

    def index(self, name: str) -> int:
        """Return the number of a tensor; a new name gets the next one."""
        found = self._index.setdefault(name, len(self.names))
        if found == len(self.names):
            self.names.append(name)
        return found

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def add(
        self,
        template: Template,
        averages: Sequence[str],
        captured: Mapping[int, Captured],
        columns: tuple[Int, Mapping[str, Int]],
        known: Known,
    ) -> Int:
        """Name the tensors of many arrays.

        Args:
            averages: axes of the ranks over which the tensor is the mean.
            captured: captured texts by the index of the array's name.
            columns: for each array, the index of its name and its positions along axes.

        Returns:
            `(n,)`, the number of each array's tensor.

        Raises:
            LayoutError: a name uses an unknown value.
        """
        names, positions = columns
        needed = dict.fromkeys([*template.names(), *averages])
        axes = [axis for axis in needed if axis in positions]
        first, inverse = _distinct([names, *(positions[axis] for axis in axes)])
        found = np.zeros(len(first), np.int64)
        for i, row in enumerate(first.tolist()):
            values = {axis: int(positions[axis][row]) for axis in axes}
            name = self._fill(template, captured[int(names[row])], replace(known, values=values))
            if averages:
                own = f"{name}#{','.join(f'{axis}={values[axis]}' for axis in averages)}"
                self.averages.setdefault(name, []).append(own)
                name = own
            found[i] = self.index(name)
        return found[inverse]

    def _fill(self, template: Template, captured: Captured, known: Known) -> str:
        said = ""
        for part in template.parts:
            if isinstance(part, str):
                said += part
            elif isinstance(part, Name) and part.name in captured:
                said += captured[part.name]
            else:
                number = evaluate(part, known)
                if number < 0:
                    raise LayoutError(f"{{{render(part)}}} is {number}, with {_given(part, known)}")
                if not isinstance(part, Name):
                    self.computed.setdefault(said, set()).add(number)
                said += str(number)
        return said


def _given(part: Expression, known: Known) -> str:
    used = {name: known.values[name] for name in names_in(part) if name in known.values}
    used |= {f"|{name}|": known.sizes[name] for name in sizes_in(part) if name in known.sizes}
    return ", ".join(f"{name} = {value}" for name, value in used.items())


def _distinct(columns: Sequence[Int]) -> tuple[Int, Int]:
    """Return the first row of each distinct combination, and each row's combination."""
    key = np.zeros_like(columns[0])
    most = 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        most *= size
        if most > LARGEST_KEY:
            raise LayoutError("the numbers in names are absurdly large")
        key = key * size + column
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.astype(np.int64)
