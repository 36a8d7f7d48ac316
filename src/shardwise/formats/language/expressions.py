"""Arithmetic of the language: numbers of layers and experts, and sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwise.errors import LayoutError

Operator = Literal["+", "-", "*", "//", "%"]
Value = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Number:
    """A literal."""

    value: int


@dataclass(frozen=True, slots=True)
class Name:
    """A captured number, a coordinate of the rank, or a declared number."""

    name: str


@dataclass(frozen=True, slots=True)
class SizeOf:
    """`|tp|`: how many there are."""

    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """`first[pp]`: an element of a declared list."""

    name: str
    index: Expression


@dataclass(frozen=True, slots=True)
class Product:
    """`pp i`: the position in a product of axes, the last of which runs fastest.

    With `ragged`, the last axis has another size at each position of those before it.
    """

    axes: tuple[str, ...]
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """Integer arithmetic."""

    operator: Operator
    left: Expression
    right: Expression


Expression = Number | Name | SizeOf | Item | Product | Operation


@dataclass(frozen=True, slots=True)
class Known:
    """What the names in an expression stand for.

    Attributes:
        values: of captures and coordinates.
        sizes: of axes.
        constants: declared numbers and lists.
        starts: of ragged products, by the position of all but the last axis: where it begins.
    """

    values: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    constants: Mapping[str, Value] = field(default_factory=dict)
    starts: Mapping[tuple[str, ...], Mapping[int, int]] = field(default_factory=dict)

    def value(self, name: str) -> int:
        """What a name stands for.

        Raises:
            LayoutError: nothing says.
        """
        found = self.values.get(name, self.constants.get(name))
        if not isinstance(found, int):
            raise LayoutError(f"nothing says what {name} is")
        return found

    def size(self, name: str) -> int:
        """How many there are of an axis.

        Raises:
            LayoutError: nothing says.
        """
        found = self.sizes.get(name, self.constants.get(name))
        if isinstance(found, tuple):
            return sum(found)
        if found is None:
            raise LayoutError(f"nothing says how many {name} there are")
        return found


def evaluate(expression: Expression, known: Known) -> int:
    """The value of an expression.

    Raises:
        LayoutError: it depends on something unknown, or divides by zero, or leads out of a list.
    """
    match expression:
        case Number(value):
            return value
        case Name(name):
            return known.value(name)
        case SizeOf(name):
            return known.size(name)
        case Item(name, index):
            items = known.constants.get(name)
            at = evaluate(index, known)
            if not isinstance(items, tuple) or not 0 <= at < len(items):
                raise LayoutError(f"there is no {name}[{at}]")
            return items[at]
        case Product(axes, ragged):
            return _position(axes, ragged, known)
        case Operation(operator, left, right):
            return _calculate(operator, evaluate(left, known), evaluate(right, known))


def _position(axes: tuple[str, ...], ragged: bool, known: Known) -> int:
    *outer, last = axes
    at = 0
    for axis in outer:
        at = at * known.size(axis) + known.value(axis)
    if not ragged:
        return at * known.size(last) + known.value(last)
    starts = known.starts.get(axes, {})
    if at not in starts:
        raise LayoutError(f"nothing says where {last} begins at {' '.join(outer)} = {at}")
    return starts[at] + known.value(last)


def _calculate(operator: Operator, left: int, right: int) -> int:
    if operator in ("//", "%") and right == 0:
        raise LayoutError("there is a division by zero")
    match operator:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return left * right
        case "//":
            return left // right
        case "%":
            return left % right


def names_in(expression: Expression) -> Iterator[str]:
    """The captures, coordinates and constants whose values an expression takes."""
    match expression:
        case Name(name):
            yield name
        case Item(_, index):
            yield from names_in(index)
        case Product(axes):
            yield from axes
        case Operation(_, left, right):
            yield from names_in(left)
            yield from names_in(right)


def sizes_in(expression: Expression) -> Iterator[str]:
    """The axes whose sizes an expression takes."""
    match expression:
        case SizeOf(name):
            yield name
        case Item(_, index):
            yield from sizes_in(index)
        case Product(axes):
            yield from axes
        case Operation(_, left, right):
            yield from sizes_in(left)
            yield from sizes_in(right)


def render(expression: Expression) -> str:
    """As it is written in a specification."""
    match expression:
        case Number(value):
            return str(value)
        case Name(name):
            return name
        case SizeOf(name):
            return f"|{name}|"
        case Item(name, index):
            return f"{name}[{render(index)}]"
        case Product(axes, ragged):
            return " ".join([*axes[:-1], ("~" if ragged else "") + axes[-1]])
        case Operation(operator, left, right):
            return f"({render(left)} {operator} {render(right)})"
