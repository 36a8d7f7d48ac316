"""Which rule each stored array is of, and what its name captures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardwise.errors import LayoutError
from shardwise.formats.foreign import Catalogue
from shardwise.formats.language.numbers import Known, Product, evaluate
from shardwise.formats.language.rules import Rule, Skip, Spec
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
