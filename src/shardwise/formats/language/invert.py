"""From names of tensors back to what rules captured: which arrays each rule writes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.errors import LayoutError
from shardwise.formats.language.names import Capture
from shardwise.formats.language.numbers import (
    Expression,
    Known,
    Name,
    Product,
    Value,
    evaluate,
    names_in,
    render,
)
from shardwise.formats.language.rules import Rule, Spec, Target
from shardwise.formats.language.structure import structure

MOST_ASSIGNMENTS = 2**24
Texts = tuple[tuple[str, str], ...]
Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Tensors that a target's template names, by the texts and numbers in their names.

    `holes` are the expressions whose values the numbers are.
    """

    holes: tuple[Expression, ...]
    found: Mapping[Texts, Mapping[Numbers, str]]


def wanted(spec: Spec, rule: Rule, target: Target, names: Sequence[str]) -> Wanted:
    """Find the tensors that a target's template could have named.

    Raises:
        LayoutError: the template leaves out a text that the stored name has.
    """
    numbers = spec.numbers()
    texts = [name for name in rule.pattern.captures() if name not in numbers]
    lost = [name for name in texts if name not in target.name.names()]
    if lost:
        what = "`*`" if lost[0].startswith("*") else f"{{{lost[0]}}}"
        raise LayoutError(f"names of tensors do not say what {what} was, so nothing can be written")
    stars = [p.name for p in rule.pattern.parts if isinstance(p, Capture) and p.star]
    pattern = target.name.pattern(texts, stars)
    holes = [name for name in pattern.captures() if name.startswith("#")]
    match = pattern.matcher(holes)
    found: dict[Texts, dict[Numbers, str]] = {}
    for name in names:
        captured = match(name)
        if captured is not None:
            key = tuple((text, captured[text]) for text in texts)
            found.setdefault(key, {})[tuple(int(captured[hole]) for hole in holes)] = name
    parts = target.name.parts
    made = tuple(part for hole in holes if not isinstance(part := parts[int(hole[1:])], str))
    return Wanted(made, found)


def count_from_names(
    spec: Spec, known: Known, targets: Sequence[tuple[Rule, Target, Wanted]]
) -> Known:
    """Find out how many there are of each captured number, from the numbers in tensors' names.

    Returns:
        `known` with sizes, and where shares of ragged captures begin.

    Raises:
        LayoutError: several are unknown in one expression.
    """
    most: dict[Expression, int] = {}
    for rule, target, own in targets:
        listed = structure(spec, rule, target, 0).listed
        for position, hole in enumerate(own.holes):
            if not set(_unknown(hole, known)) & set(listed):
                here = (numbers[position] for found in own.found.values() for numbers in found)
                most[hole] = max(most.get(hole, 0), *here)
    starts = dict(known.starts)
    sizes = dict(known.sizes)
    for hole, last in most.items():
        for axis in _unknown(hole, known):
            sizes[axis] = max(sizes.get(axis, 0), _least(hole, axis, last, known))
        if isinstance(hole, Product) and hole.ragged:
            starts[hole.axes] = _chunks(hole, last + 1, known)
    return replace(known, sizes=sizes, starts=starts)


def _least(hole: Expression, axis: str, most: int, known: Known) -> int:
    """The smallest size of an axis with which an expression reaches `most`."""
    if isinstance(hole, Name):
        return most + 1
    if isinstance(hole, Product) and hole.ragged:
        positions = 1
        for outer in hole.axes[:-1]:
            positions *= known.size(outer)
        return -(-(most + 1) // positions)
    last = {name: known.size(name) - 1 for name in names_in(hole) if name in known.sizes}
    for size in range(1, most + 2):
        tried = replace(known, sizes={**known.sizes, axis: size}, values={**last, axis: size - 1})
        if evaluate(hole, tried) >= most:
            return size
    raise LayoutError(f"{{{render(hole)}}} never is {most}")


def _chunks(hole: Product, total: int, known: Known) -> dict[int, int]:
    """Where each share of a total begins, if it is divided as `torch.chunk` does."""
    positions = 1
    for axis in hole.axes[:-1]:
        positions *= known.size(axis)
    size = -(-total // positions)
    return {position: min(position * size, total) for position in range(positions)}


def with_listed(known: Known, own: Wanted, texts: Texts, declared: Mapping[str, Value]) -> Known:
    """The same, with sizes of the axes of arrays that tell tensors apart: `{e}` in their names.

    Raises:
        LayoutError: several are unknown in one expression.
    """
    known = replace(known, constants={**known.constants, **declared})
    found = own.found.get(texts, {})
    for position, hole in enumerate(own.holes):
        most = max((numbers[position] for numbers in found), default=0)
        for axis in _unknown(hole, known):
            known = replace(known, sizes={**known.sizes, axis: _least(hole, axis, most, known)})
    return known


def _unknown(hole: Expression, known: Known) -> list[str]:
    there = {*known.sizes, *known.constants}
    unknown = [axis for axis in dict.fromkeys(names_in(hole)) if axis not in there]
    if len(unknown) > 1:
        raise LayoutError(f"how many {' and '.join(unknown)} there are must be declared")
    return unknown


def assignments(
    own: Wanted, known: Known, fixed: Mapping[str, int]
) -> Iterator[tuple[dict[str, int], Numbers]]:
    """All positions along the axes of names, and the numbers that names have there.

    Args:
        known: also how many there are along each axis.
        fixed: positions along some of them.

    Raises:
        LayoutError: there are absurdly many.
    """
    names = dict.fromkeys(name for hole in own.holes for name in names_in(hole))
    axes = [name for name in names if name in known.sizes]
    ranges = [
        range(fixed[axis], fixed[axis] + 1) if axis in fixed else range(known.size(axis))
        for axis in axes
    ]
    total = 1
    for each in ranges:
        total *= len(each)
    if total > MOST_ASSIGNMENTS:
        raise LayoutError(f"{total} names of tensors are too many")
    for values in itertools.product(*ranges):
        position = dict(zip(axes, values, strict=True))
        here = replace(known, values=position)
        numbers = tuple(evaluate(hole, here) for hole in own.holes)
        ends = [_end(hole, here) for hole in own.holes]
        if all(end is None or n < end for n, end in zip(numbers, ends, strict=True)):
            yield position, numbers


def _end(hole: Expression, known: Known) -> int | None:
    """Where the share of a ragged number ends: what lies beyond is another share's."""
    if not isinstance(hole, Product) or not hole.ragged:
        return None
    *outer, _ = hole.axes
    at = 0
    for axis in outer:
        at = at * known.size(axis) + known.value(axis)
    return known.starts[hole.axes].get(at + 1)
