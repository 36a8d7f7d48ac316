"""Which rule each stored array is of, and what its name captures."""

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
    """Rules and the rows of a catalogue that are theirs.

    Attributes:
        rows: by rule, in the order of the specification.
        captured: by rule, what names captured, by the name's index.
        unmatched: rows that no rule matches.
    """

    rows: tuple[Int, ...]
    captured: tuple[Mapping[int, Captured], ...]
    unmatched: Int


def match_rules(spec: Spec, catalogue: Catalogue, known: Known) -> Matches:
    """Give each array to the first rule that its name and its rank match.

    Raises:
        LayoutError: the ranks of a rule depend on something unknown; an array is of no rank.
    """
    sizes = np.array(list(catalogue.axes.values()), np.int64)
    if ((catalogue.coordinate < 0) | (catalogue.coordinate >= sizes)).any():
        raise LayoutError(f"an array is of a rank that is not one of {dict(catalogue.axes)}")
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
    """Where along an axis the rank of each array is; 0 along one that the checkpoint lacks."""
    axes = list(catalogue.axes)
    if axis not in axes:
        return np.zeros(len(catalogue), np.int64)
    return catalogue.coordinate[:, axes.index(axis)]


def captured_numbers(
    spec: Spec, catalogue: Catalogue, matches: Matches, rule: int
) -> dict[str, Int]:
    """The numbers that the names of a rule's rows captured, by capture, as columns."""
    found = {}
    rows = matches.rows[rule]
    for name in set(spec.rules[rule].pattern.captures()) & spec.numbers():
        table = np.zeros(len(catalogue.names), np.int64)
        captured = matches.captured[rule]
        table[list(captured)] = [int(captures[name]) for captures in captured.values()]
        found[name] = table[catalogue.name[rows]]
    return found


def count_captures(spec: Spec, catalogue: Catalogue, matches: Matches, known: Known) -> Known:
    """Find out how many there are of each captured number, in all rules together.

    Returns:
        `known` with sizes of captures, and where the shares of ragged ones begin.
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
            raise LayoutError(f"no {axes[-1]} at {' '.join(axes[:-1])} = {position}")
        found[position] = at
        at += shares[position]
    return found


def constants_of(spec: Spec, given: Mapping[str, int]) -> dict[str, Value]:
    """The numbers that `let` declares; those that are given from outside count first.

    Raises:
        MismatchError: a number is neither declared nor given, or given but not declared.
    """
    found: dict[str, Value] = dict(given)
    names = [name for name, _ in spec.lets]
    extra = [name for name in given if name not in names]
    problems = [f"{name} is given, but not declared with `let`" for name in extra]
    for name, declared in spec.lets:
        if name in given:
            continue
        if declared is None:
            problems.append(f"{name} is declared without a number, so it must be given")
            continue
        try:
            found[name] = number_or_list(declared, Known(constants=found))
        except LayoutError as error:
            problems.append(f"let {name}: {error}")
    if problems:
        raise MismatchError(f"{spec.text.source}: its numbers are not all known:", problems)
    return found


def rank_sizes(spec: Spec, axes: Mapping[str, int]) -> dict[str, int]:
    """How many ranks there are along each axis; those that a checkpoint does not have are 1.

    Raises:
        MismatchError: the specification says otherwise.
    """
    problems = [
        f"{name} is {axes.get(name, 1)} here, and {size} in the specification"
        for name, size in spec.ranks
        if size is not None and size != axes.get(name, 1)
    ]
    if problems:
        raise MismatchError(f"{spec.text.source} is for other ranks:", problems)
    return {**dict.fromkeys((name for name, _ in spec.ranks), 1), **axes}


def rule_sizes(rule: Rule, known: Known) -> dict[str, Value]:
    """Sizes that a rule declares for its axes; parts of sums for which nothing does have 1.

    Raises:
        LayoutError: one depends on something unknown.
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
    """The value of what stands after `=`.

    Raises:
        LayoutError: it depends on something unknown.
    """
    if isinstance(declared, tuple):
        return tuple(evaluate(item, known) for item in declared)
    return evaluate(declared, known)


LARGEST_KEY = 2**62


class Tensors:
    """Tensors in the order in which they were first named.

    Attributes:
        names: of all.
        averages: which of them are hidden, each the value of one rank; by the name of their mean.
        computed: numbers that names were given by arithmetic, by the text before them.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.averages: dict[str, list[str]] = {}
        self.computed: dict[str, set[int]] = {}
        self._index: dict[str, int] = {}

    def index(self, name: str) -> int:
        """The number of a tensor, which it is given if it has none yet."""
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
            averages: axes of the ranks each of which has a value of its own.
            captured: by the index of an array's name.
            columns: indices of names, and positions along axes.

        Returns:
            `(n,)`: numbers of the tensors.

        Raises:
            LayoutError: a name depends on something unknown.
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
    """Rows with the first of each distinct combination, and for all rows which one they have."""
    key = np.zeros_like(columns[0])
    most = 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        most *= size
        if most > LARGEST_KEY:
            raise LayoutError("absurdly large numbers in names")
        key = key * size + column
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return first.astype(np.int64), inverse.astype(np.int64)
