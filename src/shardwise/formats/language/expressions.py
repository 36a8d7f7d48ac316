"""Arithmetic and axis expressions, from their text."""

from __future__ import annotations

from collections import Counter

from shardwise.formats.language.axes import Axis, Chain, Dim, Node, Shape, Sum
from shardwise.formats.language.cursor import NAME, Cursor
from shardwise.formats.language.numbers import (
    Expression,
    Item,
    Name,
    Number,
    Operation,
    Operator,
    Product,
    SizeOf,
)
from shardwise.formats.language.rules import Declared

MOST_DEPTH = 32
MOST_DIMS = 32
SUMS: tuple[Operator, ...] = ("+", "-")
PRODUCTS: tuple[Operator, ...] = ("*", "//", "%")


def declared(cursor: Cursor) -> Declared:
    """What stands after `=`: a number, or a list of them."""
    if not cursor.take("["):
        return expression(cursor)
    items = [expression(cursor)]
    while cursor.take(","):
        items.append(expression(cursor))
    cursor.expect("]", "at the end of the list")
    return tuple(items)


def expression(cursor: Cursor, depth: int = 0) -> Expression:
    """A sum of products of atoms."""
    if depth > MOST_DEPTH:
        cursor.fail("too many parentheses")
    return _operations(cursor, depth, SUMS)


def _operations(cursor: Cursor, depth: int, operators: tuple[Operator, ...]) -> Expression:
    def operand() -> Expression:
        if operators is SUMS:
            return _operations(cursor, depth, PRODUCTS)
        return _atom(cursor, depth)

    left = operand()
    while True:
        for operator in operators:
            if not cursor.sees("->") and not _ends_capture(cursor) and cursor.take(operator):
                left = Operation(operator, left, operand())
                break
        else:
            return left


def _ends_capture(cursor: Cursor) -> bool:
    # `{rest*}`: the star is of the capture.
    return cursor.sees("*}")


def _atom(cursor: Cursor, depth: int) -> Expression:
    number = cursor.number()
    if number is not None:
        return Number(number)
    if cursor.take("("):
        inner = expression(cursor, depth + 1)
        cursor.expect(")", "at the end of what `(` began")
        return inner
    if cursor.take("|"):
        name = cursor.name("the axis whose size is meant")
        cursor.expect("|", f"after `|{name}`")
        return SizeOf(name)
    axes, ragged = [cursor.name("a number, a name, `|axis|` or `(`")], False
    if cursor.take("["):
        index = expression(cursor, depth + 1)
        cursor.expect("]", "after the position in the list")
        return Item(axes[0], index)
    while not ragged and not _is_keyword(cursor):
        ragged = cursor.take("~")
        found = cursor.name("the ragged axis") if ragged else cursor.match(NAME)
        if found is None:
            break
        axes.append(found)
    return Product(tuple(axes), ragged) if len(axes) > 1 else Name(axes[0])


def _is_keyword(cursor: Cursor) -> bool:
    return any(cursor.sees(word) for word in ("where", "flat", "average", "on", "as"))


def shape(cursor: Cursor) -> Shape:
    """An axis expression: `[(tp f) h]`."""
    at = cursor.at
    cursor.expect("[", "and the dimensions of the array")
    dims: list[Dim] = []
    rest = None
    literals: Counter[str] = Counter()
    while not cursor.take("]"):
        if cursor.done:
            cursor.fail("expected `]` at the end of the dimensions")
        if len(dims) > MOST_DIMS:
            cursor.fail(f"too many dimensions; at most {MOST_DIMS}")
        if cursor.sees("..."):
            if rest is not None:
                cursor.fail("`...` can stand for dimensions only once")
            cursor.take("...")
            rest = len(dims)
            continue
        node = _factor(cursor, literals, 0)
        limit = None
        if cursor.take("["):
            cursor.expect(":", "and how many elements the tensor has, as in `(tp v)[:vocab]`")
            limit = expression(cursor)
            cursor.expect("]", "after the number of elements")
        dims.append(Dim(node, limit))
    return Shape(tuple(dims), rest, at)


def _factor(cursor: Cursor, literals: Counter[str], depth: int) -> Node:
    at = cursor.at
    if depth > MOST_DEPTH:
        cursor.fail("too many parentheses")
    if cursor.take("("):
        return _sum(cursor, literals, depth)
    number = cursor.number()
    if number is not None:
        return (
            Chain(()) if number == 1 else Axis(_counted(str(number), literals), size=number, at=at)
        )
    ragged = cursor.take("~")
    name = cursor.name("an axis, a number or `(`")
    return Axis(_counted(name, literals) if name == "_" else name, ragged, at=at)


def _counted(name: str, literals: Counter[str]) -> str:
    literals[name] += 1
    return f"{name}'{literals[name] - 1}"


def _sum(cursor: Cursor, literals: Counter[str], depth: int) -> Node:
    parts: list[Node] = []
    factors: list[Node] = []
    while True:
        factors.append(_factor(cursor, literals, depth + 1))
        if cursor.sees("+") or cursor.sees(")"):
            parts.append(factors[0] if len(factors) == 1 else Chain(tuple(factors)))
            factors = []
            if cursor.take(")"):
                return parts[0] if len(parts) == 1 else Sum(tuple(parts))
            cursor.take("+")
