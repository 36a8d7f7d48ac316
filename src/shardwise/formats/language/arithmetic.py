"""Integer arithmetic in specifications, over the numbers of ranks, layers and experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwise.errors import LayoutError

Operator = Literal["+", "-", "*", "//", "%"]
NumberOrList = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Number:
    """A literal."""

    value: int


@dataclass(frozen=True, slots=True)
class Variable:
    """The name of a captured number, a coordinate of the rank, or a number declared by `let`."""

    name: str


@dataclass(frozen=True, slots=True)
class AxisSize:
    """The size of an axis: `|tp|`."""

    axis: str


@dataclass(frozen=True, slots=True)
class ListElement:
    """An element of a list that `let` declares: `first[pp]`."""

    name: str
    index: Expression


@dataclass(frozen=True, slots=True)
class CombinedIndex:
    """One index along several axes: `pp i`. The last axis varies fastest.

    If `ragged`, the size of the last axis depends on the position along the others: `pp ~i`.
    """

    axes: tuple[str, ...]
    ragged: bool = False


@dataclass(frozen=True, slots=True)
class BinaryOperation:
    """An operator and its two operands."""

    operator: Operator
    left: Expression
    right: Expression


Expression = Number | Variable | AxisSize | ListElement | CombinedIndex | BinaryOperation


@dataclass(frozen=True, slots=True)
class Environment:
    """The values that expressions are evaluated with.

    Attributes:
        values: captured numbers and coordinates, by name.
        sizes: sizes of axes, by name.
        constants: numbers and lists that `let` declares, by name.
        ragged_starts: for the axes of each ragged index, where the shares of the last axis start.
            The key of a start is the position along the other axes.
    """

    values: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    constants: Mapping[str, NumberOrList] = field(default_factory=dict)
    ragged_starts: Mapping[tuple[str, ...], Mapping[int, int]] = field(default_factory=dict)

    def value_of(self, name: str) -> int:
        """Return the value of a variable.

        Raises:
            LayoutError: the variable has no value.
        """
        found = self.values.get(name, self.constants.get(name))
        if not isinstance(found, int):
            raise LayoutError(f"{name} has no value: capture it, or declare it with `let`")
        return found

    def size_of(self, axis: str) -> int:
        """Return the size of an axis; for a list of shares, their sum.

        Raises:
            LayoutError: the size is unknown.
        """
        found = self.sizes.get(axis, self.constants.get(axis))
        if isinstance(found, tuple):
            return sum(found)
        if found is None:
            raise LayoutError(
                f"the size of {axis} is unknown: give it with `where`, or declare it with `let`"
            )
        return found


def evaluate(expression: Expression, environment: Environment) -> int:
    """Return the value of an expression.

    Raises:
        LayoutError: a variable has no value, a divisor is 0, or an index is out of range.
    """
    match expression:
        case Number(value):
            return value
        case Variable(name):
            return environment.value_of(name)
        case AxisSize(axis):
            return environment.size_of(axis)
        case ListElement(name, index_expression):
            elements = environment.constants.get(name)
            index = evaluate(index_expression, environment)
            if not isinstance(elements, tuple):
                raise LayoutError(f"{name} is not a list: declare it with `let {name} = [...]`")
            if not 0 <= index < len(elements):
                raise LayoutError(
                    f"{name}[{index}] is out of range: {name} has {len(elements)} elements; "
                    "correct the index or the list"
                )
            return elements[index]
        case CombinedIndex(axes, ragged):
            return _combine_index(axes, ragged, environment)
        case BinaryOperation(operator, left, right):
            return _calculate(operator, evaluate(left, environment), evaluate(right, environment))


def _combine_index(axes: tuple[str, ...], ragged: bool, environment: Environment) -> int:
    *outer, last = axes
    position = 0
    for axis in outer:
        position = position * environment.size_of(axis) + environment.value_of(axis)
    if not ragged:
        return position * environment.size_of(last) + environment.value_of(last)
    starts = environment.ragged_starts.get(axes, {})
    if position not in starts:
        raise LayoutError(
            f"the first {last} of {' '.join(outer)} = {position} is unknown: no file has any; copy "
            "the files of all ranks"
        )
    return starts[position] + environment.value_of(last)


def _calculate(operator: Operator, left: int, right: int) -> int:
    if operator in ("//", "%") and right == 0:
        raise LayoutError(f"division by zero: {left} {operator} 0; correct the specification")
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


def variables_in(expression: Expression) -> Iterator[str]:
    """Yield the captures, coordinates and constants whose values an expression uses."""
    match expression:
        case Variable(name):
            yield name
        case ListElement(_, index):
            yield from variables_in(index)
        case CombinedIndex(axes):
            yield from axes
        case BinaryOperation(_, left, right):
            yield from variables_in(left)
            yield from variables_in(right)


def sized_axes_in(expression: Expression) -> Iterator[str]:
    """Yield the axes whose sizes an expression uses."""
    match expression:
        case AxisSize(axis):
            yield axis
        case ListElement(_, index):
            yield from sized_axes_in(index)
        case CombinedIndex(axes):
            yield from axes
        case BinaryOperation(_, left, right):
            yield from sized_axes_in(left)
            yield from sized_axes_in(right)


def format_expression(expression: Expression) -> str:
    """Return an expression as text."""
    match expression:
        case Number(value):
            return str(value)
        case Variable(name):
            return name
        case AxisSize(axis):
            return f"|{axis}|"
        case ListElement(name, index):
            return f"{name}[{format_expression(index)}]"
        case CombinedIndex(axes, ragged):
            return " ".join([*axes[:-1], ("~" if ragged else "") + axes[-1]])
        case BinaryOperation(operator, left, right):
            return f"({format_expression(left)} {operator} {format_expression(right)})"
