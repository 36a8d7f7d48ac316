"""Integer arithmetic over ranks, layers, experts and sizes."""

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
    """A captured number, a coordinate of the rank, or a number declared with `let`."""

    name: str


@dataclass(frozen=True, slots=True)
class SizeOf:
    """The size of an axis: `|tp|`."""

    name: str


@dataclass(frozen=True, slots=True)
class Item:
    """An element of a declared list: `first[pp]`."""

    name: str
    index: Expression


@dataclass(frozen=True, slots=True)
class Product:
    """The position in a product of axes: `pp i`. The last axis runs fastest.

    A `ragged` product ends in an axis whose size depends on the position along the other axes.
    """

    axes: tuple[str, ...]
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """Two operands and an operator."""

    operator: Operator
    left: Expression
    right: Expression


Expression = Number | Name | SizeOf | Item | Product | Operation


@dataclass(frozen=True, slots=True)
class Known:
    """The values of the names in an expression.

    Attributes:
        values: captured numbers and coordinates.
        sizes: sizes of axes.
        constants: declared numbers and lists.
        starts: for each ragged product, the start of the last axis's share by the position along
            the other axes.
    """

    values: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    constants: Mapping[str, Value] = field(default_factory=dict)
    starts: Mapping[tuple[str, ...], Mapping[int, int]] = field(default_factory=dict)

    def value(self, name: str) -> int:
        """Return the value of a name.

        Raises:
            LayoutError: the name is unknown.
        """
        found = self.values.get(name, self.constants.get(name))
        if not isinstance(found, int):
            raise LayoutError(f"nothing says what {name} is")
        return found

    def size(self, name: str) -> int:
        """Return the size of an axis.

        Raises:
            LayoutError: the size is unknown.
        """
        found = self.sizes.get(name, self.constants.get(name))
        if isinstance(found, tuple):
            return sum(found)
        if found is None:
            raise LayoutError(f"nothing says how many {name} there are")
        return found


def evaluate(expression: Expression, known: Known) -> int:
    """Return the value of an expression.

    Raises:
        LayoutError: a name is unknown, a divisor is 0, or an index is out of range.
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
        raise LayoutError(f"division by zero: {left} {operator} 0")
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
    """Yield the captures, coordinates and constants whose values an expression uses."""
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
    """Yield the axes whose sizes an expression uses."""
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
    """Return an expression as text."""
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
