"""Shapes in rules, such as `[(tp g (q + k + v) d) h]`: sizes of axes, and positions of elements.

A dimension is an axis, a product of axes (the last varies fastest), or a sum of consecutive parts.
Choosing one part of each sum gives a *term*. In a term, the position along every dimension is a
linear function of the positions along the axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.errors import LayoutError
from shardwise.formats.language.arithmetic import Expression, format_expression

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Axis:
    """A named axis. A literal is an axis of fixed size: `128'0` is the first literal 128.

    Attributes:
        ragged: whether ranks have shares of different sizes (`~f`).
        size: the size of a literal.
        position: the index of the first character in the text.
    """

    name: str
    ragged: bool = False
    size: int | None = None
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class RaggedAxis:
    """A ragged axis. Its shares follow one another in the order of the outer axes.

    Attributes:
        outer_axes: the axes of ranks or captured numbers before the ragged one.
    """

    outer_axes: tuple[str, ...]
    name: str

    @property
    def start_key(self) -> str:
        """The key of the sum of all shares in `Sizes`, and of a share's start in a `Term`."""
        return f"~{self.name}"


@dataclass(frozen=True, slots=True)
class AxisProduct:
    """A product of axes. A product without factors has size 1."""

    factors: tuple[AxisExpression, ...]


@dataclass(frozen=True, slots=True)
class AxisSum:
    """Parts that follow one another along a dimension."""

    parts: tuple[AxisExpression, ...]


AxisExpression = Axis | RaggedAxis | AxisProduct | AxisSum


@dataclass(frozen=True, slots=True)
class ShapeDim:
    """A dimension of a shape. Elements from `limit` on are padding."""

    axes: AxisExpression
    limit: Expression | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of an array, as a rule gives them.

    Attributes:
        ellipsis: the index in `dims` at which `...` stands; None without `...`.
        position: the index of the first character in the text.
    """

    dims: tuple[ShapeDim, ...]
    ellipsis: int | None = None
    position: int = field(default=0, compare=False)

    def expand_ellipsis(self, count: int) -> tuple[ShapeDim, ...]:
        """Return the dimensions, with `count` dimensions in place of `...`."""
        if self.ellipsis is None:
            return self.dims
        unnamed = (ShapeDim(Axis(f"...'{i}")) for i in range(count))
        return (*self.dims[: self.ellipsis], *unnamed, *self.dims[self.ellipsis :])


@dataclass(frozen=True, slots=True)
class Term:
    """One choice of a part of each sum.

    The index of an element along a dimension is a start, plus the sum of position × step over all
    axes.

    Attributes:
        starts: the start along each dimension.
        steps: `(dimension, step)` for each axis.
    """

    starts: tuple[int, ...]
    steps: Mapping[str, tuple[int, int]]


def axes_in(expression: AxisExpression) -> Iterator[Axis]:
    """Yield all axes in order. A ragged axis becomes an axis with the sum of its shares as size."""
    match expression:
        case Axis():
            yield expression
        case RaggedAxis():
            yield Axis(expression.start_key)
        case AxisProduct(factors):
            yield from itertools.chain.from_iterable(map(axes_in, factors))
        case AxisSum(parts):
            yield from itertools.chain.from_iterable(map(axes_in, parts))


def single_axis_parts(expression: AxisExpression) -> Iterator[Axis]:
    """Yield the parts of sums that are a single axis; sums that contain `_` are left out."""
    match expression:
        case AxisProduct(factors):
            yield from itertools.chain.from_iterable(map(single_axis_parts, factors))
        case AxisSum(parts):
            if not any(is_unused(axis.name) for axis in axes_in(expression)):
                yield from (part for part in parts if isinstance(part, Axis))
            yield from itertools.chain.from_iterable(map(single_axis_parts, parts))


def is_unused(axis: str) -> bool:
    """Return whether an axis is `_`, a part of an array that no tensor uses."""
    return axis.startswith("_'")


def drop_axes(expression: AxisExpression, dropped: frozenset[str]) -> AxisExpression | None:
    """Return an expression without some axes; None if nothing remains.

    Without the axes of ranks and captured numbers, a dimension of a tensor becomes the dimension
    of one stored array.
    """
    match expression:
        case Axis(name):
            if name in dropped:
                return None
            return Axis(name, size=expression.size, position=expression.position)
        case RaggedAxis(_, name):
            return drop_axes(Axis(name), dropped)
        case AxisProduct(factors):
            remaining = [drop_axes(factor, dropped) for factor in factors]
            kept = tuple(factor for factor in remaining if factor is not None)
            return AxisProduct(kept) if kept or not factors else None
        case AxisSum(parts):
            return AxisSum(tuple(drop_axes(part, dropped) or AxisProduct(()) for part in parts))


def join_ragged_axes(expression: AxisExpression, indexed_axes: frozenset[str]) -> AxisExpression:
    """Join each ragged axis and the indexed axes before it to a `RaggedAxis`.

    Args:
        indexed_axes: the axes of ranks and captured numbers.

    Raises:
        LayoutError: no indexed axis comes before a ragged axis.
    """
    match expression:
        case Axis(name, ragged):
            if ragged:
                raise LayoutError(f"~{name} must come after the axes of ranks that divide it")
            return expression
        case RaggedAxis():
            return expression
        case AxisSum(parts):
            return AxisSum(tuple(join_ragged_axes(part, indexed_axes) for part in parts))
        case AxisProduct(factors):
            joined_factors: list[AxisExpression] = []
            for factor in factors:
                if not (isinstance(factor, Axis) and factor.ragged):
                    joined_factors.append(join_ragged_axes(factor, indexed_axes))
                    continue
                outer_axes: list[str] = []
                while (
                    joined_factors
                    and isinstance(last := joined_factors[-1], Axis)
                    and last.name in indexed_axes
                ):
                    outer_axes.insert(0, last.name)
                    joined_factors.pop()
                if not outer_axes:
                    join_ragged_axes(factor, indexed_axes)  # raises
                joined_factors.append(RaggedAxis(tuple(outer_axes), factor.name))
            return AxisProduct(tuple(joined_factors))


def size_of(expression: AxisExpression, sizes: Sizes) -> int | None:
    """Return the number of elements, or None if it is unknown."""
    match expression:
        case Axis(name, size=size):
            return sizes.get(name) if size is None else size
        case RaggedAxis():
            return sizes.get(expression.start_key)
        case AxisProduct(factors):
            counts = [size_of(factor, sizes) for factor in factors]
            return None if None in counts else math.prod(n for n in counts if n is not None)
        case AxisSum(parts):
            counts = [size_of(part, sizes) for part in parts]
            return None if None in counts else sum(n for n in counts if n is not None)


def size_of_axis(axis: str, sizes: Sizes) -> int:
    """Return the size of an axis, or of a literal such as `128'0`."""
    number, literal, _ = axis.partition("'")
    return int(number) if literal and number.isdigit() else sizes[axis]


def solve_sizes(equations: Sequence[tuple[AxisExpression, int]], sizes: Sizes) -> dict[str, int]:
    """Find the sizes of all axes.

    Args:
        equations: expressions, and the number of elements of each.
        sizes: the sizes that are known.

    Raises:
        LayoutError: the equations contradict each other, or do not determine all sizes.
    """
    known_sizes = dict(sizes)
    unsolved = list(equations)
    while unsolved:
        still_unsolved = [pair for pair in unsolved if not _solve_equation(*pair, known_sizes)]
        if len(still_unsolved) == len(unsolved):
            raise LayoutError(_describe_undetermined(still_unsolved, known_sizes))
        unsolved = still_unsolved
    for expression, total in equations:
        if size_of(expression, known_sizes) != total:
            raise LayoutError(_describe_contradiction(expression, total, known_sizes))
    return known_sizes


def _solve_equation(expression: AxisExpression, total: int, known_sizes: dict[str, int]) -> bool:
    """Determine the size of the only unknown axis; return whether all sizes are known now."""
    unknown_axes = {
        a.name for a in axes_in(expression) if a.size is None and a.name not in known_sizes
    }
    if isinstance(size_of(expression, known_sizes), int):
        return True
    if len(unknown_axes) != 1:
        return False
    (axis,) = unknown_axes
    # An expression is linear in an axis that occurs once.
    size_at_0, size_at_1, size_at_2 = (
        size_of(expression, {**known_sizes, axis: n}) for n in range(3)
    )
    if (
        size_at_0 is None
        or size_at_1 is None
        or size_at_2 is None
        or size_at_2 - size_at_1 != size_at_1 - size_at_0
    ):
        return False
    size_per_step = size_at_1 - size_at_0
    if size_per_step == 0 or total < size_at_0 or (total - size_at_0) % size_per_step:
        raise LayoutError(_describe_contradiction(expression, total, known_sizes))
    known_sizes[axis] = (total - size_at_0) // size_per_step
    return True


def _describe_contradiction(expression: AxisExpression, total: int, known_sizes: Sizes) -> str:
    axes = [axis.name for axis in axes_in(expression) if axis.size is None]
    sizes = {axis: known_sizes[axis] for axis in axes if axis in known_sizes}
    sizes_text = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    size = size_of(expression, known_sizes)
    contradiction = f"`{format_axes(expression)}` cannot be {total}" + (
        f" with {sizes_text}" if sizes_text else ""
    )
    return contradiction + (f": its size is {size}" if size is not None else ": it does not divide")


def _describe_undetermined(
    equations: Sequence[tuple[AxisExpression, int]], known_sizes: Sizes
) -> str:
    unknown = {
        axis.name: None for left, _ in equations for axis in axes_in(left) if axis.size is None
    }
    names = ", ".join(name.split("'")[0] for name in unknown if name not in known_sizes)
    shown = ", ".join(f"`{format_axes(left)}` = {total}" for left, total in equations)
    return f"{shown} does not determine the sizes of {names}: give them with `let` or `where`"


def expand_terms(dims: Sequence[AxisExpression], sizes: Sizes) -> list[Term]:
    """Return the terms of an array with these dimensions.

    Raises:
        LayoutError: an axis occurs twice, or its size is unknown.
    """
    choices = [
        [(start, [(axis, (dim, step)) for axis, step in steps]) for start, steps in parts]
        for dim, parts in enumerate(_linear_parts(expression, sizes) for expression in dims)
    ]
    terms = []
    for choice in itertools.product(*choices):
        pairs = [pair for _, pairs_of_dim in choice for pair in pairs_of_dim]
        steps = dict(pairs)
        if len(steps) < len(pairs):
            names = [axis for axis, _ in pairs]
            repeated_axis = next(axis for axis in names if names.count(axis) > 1)
            raise LayoutError(
                f"the axis {repeated_axis} occurs twice; give the two different names"
            )
        terms.append(Term(tuple(start for start, _ in choice), steps))
    return terms


LinearPart = tuple[int, tuple[tuple[str, int], ...]]
"""A part of a dimension: its start, and the step of each axis."""


def _linear_parts(expression: AxisExpression, sizes: Sizes) -> list[LinearPart]:
    match expression:
        case Axis(name):
            return [(0, ((name, 1),))]
        case RaggedAxis(_, name):
            return [(0, ((expression.start_key, 1), (name, 1)))]
        case AxisSum(parts):
            part_sizes = (_require_size(part, sizes) for part in parts)
            part_starts = itertools.accumulate(part_sizes, initial=0)
            return [
                (part_start + start, steps)
                for part_start, part in zip(part_starts, parts, strict=False)
                for start, steps in _linear_parts(part, sizes)
            ]
        case AxisProduct(factors):
            product: list[LinearPart] = [(0, ())]
            for factor in factors:
                size = _require_size(factor, sizes)
                product = [
                    (
                        outer_start * size + start,
                        (*((axis, step * size) for axis, step in outer_steps), *steps),
                    )
                    for outer_start, outer_steps in product
                    for start, steps in _linear_parts(factor, sizes)
                ]
            return product


def _require_size(expression: AxisExpression, sizes: Sizes) -> int:
    size = size_of(expression, sizes)
    if size is None:
        raise LayoutError(
            f"the size of `{format_axes(expression)}` is unknown: give it with `let` or `where`"
        )
    return size


def format_axes(expression: AxisExpression, *, inner: bool = False) -> str:
    """Return an expression as text.

    Args:
        inner: put a product in parentheses even if it has one factor.
    """
    match expression:
        case Axis(name, ragged):
            return ("~" if ragged else "") + name.split("'")[0]
        case RaggedAxis(outer_axes, name):
            return " ".join([*outer_axes, f"~{name}"])
        case AxisProduct(factors):
            if not factors:
                return "1"
            text = " ".join(format_axes(factor, inner=True) for factor in factors)
            return f"({text})" if inner or len(factors) > 1 else text
        case AxisSum(parts):
            return "(" + " + ".join(format_axes(part).strip("()") for part in parts) + ")"


def format_shape(shape: Shape) -> str:
    """Return a shape as text."""
    words = [
        format_axes(dim.axes)
        + (f"[:{format_expression(dim.limit)}]" if dim.limit is not None else "")
        for dim in shape.dims
    ]
    if shape.ellipsis is not None:
        words.insert(shape.ellipsis, "...")
    return f"[{' '.join(words)}]"
