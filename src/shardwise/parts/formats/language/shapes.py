"""Shapes in rules, such as `[(tp g (q + k + v) d) h]`: sizes of axes, and positions of elements.

A dimension is an axis, a product of axes (the last varies fastest), or a sum of consecutive parts.
Choosing one part of each sum gives a *term*. In a term, the position along every dimension is a
linear function of the positions along the axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwise.kernel.errors import LayoutError
from shardwise.parts.formats.language.arithmetic import Expression

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Axis:
    """A named axis. A literal is an axis of fixed size: `128'0` is the first literal 128.

    Attributes:
        is_ragged: whether ranks have shares of different sizes (`~f`).
        outer: in a tensor, the indexed axes before a ragged one. Its shares follow one another in
            the order of these axes.
        size: the size of a literal, and 1 for a part of a sum, which can have another size.
    """

    name: str
    is_ragged: bool = False
    outer: tuple[str, ...] = ()
    size: int | None = None

    @property
    def start_key(self) -> str:
        """The key of the sum of all shares in `Sizes`, and of a share's start in a `Term`."""
        return f"~{self.name}"


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """A product of axes, or a sum: parts that follow one another along a dimension.

    A product without parts has size 1. In a tensor, elements from `limit` on are padding.
    """

    parts: tuple[AxisExpression, ...]
    is_sum: bool = False
    limit: Expression | None = None


AxisExpression = Axis | AxisGroup


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of an array, as a rule gives them.

    Attributes:
        ellipsis: the index in `dims` at which `...` stands; None without `...`.
        position: the index of the first character in the text.
    """

    dims: tuple[AxisExpression, ...]
    ellipsis: int | None = None
    position: int = field(default=0, compare=False)

    def expand_ellipsis(self, count: int) -> tuple[AxisExpression, ...]:
        """Return the dimensions, with `count` dimensions in place of `...`."""
        if self.ellipsis is None:
            return self.dims
        unnamed = (Axis(f"...'{i}") for i in range(count))
        return (*self.dims[: self.ellipsis], *unnamed, *self.dims[self.ellipsis :])

    def __str__(self) -> str:
        words = [format_axes(dim) for dim in self.dims]
        if self.ellipsis is not None:
            words.insert(self.ellipsis, "...")
        return f"[{' '.join(words)}]"


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
    """Yield all axes in order."""
    if isinstance(expression, Axis):
        yield expression
    else:
        yield from itertools.chain.from_iterable(map(axes_in, expression.parts))


def is_unused(axis: str) -> bool:
    """Return whether an axis is `_`, a part of an array that no tensor uses."""
    return axis.startswith("_'")


def drop_axes(expression: AxisExpression, dropped: Collection[str]) -> AxisExpression | None:
    """Return an expression without some axes; None if nothing remains.

    Without the axes of ranks and captured numbers, a dimension of a tensor becomes the dimension
    of one stored array.
    """
    if isinstance(expression, Axis):
        return None if expression.name in dropped else replace(expression, is_ragged=False)
    remaining = [drop_axes(part, dropped) for part in expression.parts]
    if expression.is_sum:
        return AxisGroup(tuple(part or AxisGroup(()) for part in remaining), is_sum=True)
    kept = tuple(part for part in remaining if part is not None)
    return AxisGroup(kept) if kept or not remaining else None


def join_ragged_axes(expression: AxisExpression, indexed_axes: Collection[str]) -> AxisExpression:
    """Join each ragged axis with the indexed axes before it.

    Args:
        indexed_axes: the axes of ranks and captured numbers.

    Raises:
        LayoutError: no indexed axis comes before a ragged axis.
    """
    parts = expression.parts if isinstance(expression, AxisGroup) else (expression,)
    is_sum = isinstance(expression, AxisGroup) and expression.is_sum
    joined: list[AxisExpression] = []
    for part in parts:
        if isinstance(part, AxisGroup):
            joined.append(join_ragged_axes(part, indexed_axes))
        elif not part.is_ragged:
            joined.append(part)
        else:
            outer: list[str] = []
            while joined and not is_sum and isinstance(last := joined[-1], Axis):
                if last.name not in indexed_axes:
                    break
                outer.insert(0, last.name)
                joined.pop()
            if not outer:
                raise LayoutError(f"~{part.name} must come after the axes of ranks that divide it")
            joined.append(replace(part, outer=tuple(outer)))
    if isinstance(expression, Axis):
        return joined[0]
    return replace(expression, parts=tuple(joined))


def size_of(expression: AxisExpression, sizes: Sizes) -> int | None:
    """Return the number of elements, or None if it is unknown."""
    if isinstance(expression, Axis):
        return sizes.get(expression.start_key if expression.outer else expression.name)
    counts = [size_of(part, sizes) for part in expression.parts]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return None
    return sum(known) if expression.is_sum else math.prod(known)


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
            unknown = dict.fromkeys(a.name for left, _ in unsolved for a in axes_in(left))
            names = ", ".join(name.split("'")[0] for name in unknown if name not in known_sizes)
            shown = ", ".join(f"`{format_axes(left)}` = {total}" for left, total in unsolved)
            raise LayoutError(
                f"{shown} does not determine the sizes of {names}: give them with `let` or `where`"
            )
        unsolved = still_unsolved
    for expression, total in equations:
        if size_of(expression, known_sizes) != total:
            raise LayoutError(_describe_contradiction(expression, total, known_sizes))
    return known_sizes


def _solve_equation(expression: AxisExpression, total: int, known_sizes: dict[str, int]) -> bool:
    """Determine the size of the only unknown axis; return whether all sizes are known now."""
    unknown_axes = {axis.name for axis in axes_in(expression)} - known_sizes.keys()
    if len(unknown_axes) != 1:
        return not unknown_axes
    (axis,) = unknown_axes
    # An expression is linear in an axis that occurs once.
    at_0, at_1, at_2 = (size_of(expression, {**known_sizes, axis: n}) or 0 for n in range(3))
    if at_2 - at_1 != at_1 - at_0:
        return False
    if at_1 == at_0 or total < at_0 or (total - at_0) % (at_1 - at_0):
        raise LayoutError(_describe_contradiction(expression, total, known_sizes))
    known_sizes[axis] = (total - at_0) // (at_1 - at_0)
    return True


def _describe_contradiction(expression: AxisExpression, total: int, known_sizes: Sizes) -> str:
    names = [axis.name for axis in axes_in(expression) if "'" not in axis.name]
    sizes = ", ".join(f"{name} = {known_sizes[name]}" for name in names if name in known_sizes)
    size = size_of(expression, known_sizes)
    contradiction = f"`{format_axes(expression)}` cannot be {total}" + (sizes and f" with {sizes}")
    return contradiction + (f": its size is {size}" if size is not None else ": it does not divide")


def expand_terms(dims: Sequence[AxisExpression], sizes: Sizes) -> list[Term]:
    """Return the terms of an array with these dimensions.

    Raises:
        LayoutError: an axis occurs twice, or its size is unknown.
    """
    terms = []
    for choice in itertools.product(*(_linear_parts(dim, sizes) for dim in dims)):
        pairs = [(axis, (i, step)) for i, (_, steps) in enumerate(choice) for axis, step in steps]
        steps = dict(pairs)
        if len(steps) < len(pairs):
            names = [axis for axis, _ in pairs]
            repeated_axis = next(axis for axis in names if names.count(axis) > 1)
            raise LayoutError(f"the axis {repeated_axis} occurs twice: rename one of them")
        terms.append(Term(tuple(start for start, _ in choice), steps))
    return terms


LinearPart = tuple[int, tuple[tuple[str, int], ...]]
"""A part of a dimension: its start, and the step of each axis."""


def _linear_parts(expression: AxisExpression, sizes: Sizes) -> list[LinearPart]:
    if isinstance(expression, Axis):
        keys = (expression.start_key, expression.name) if expression.outer else (expression.name,)
        return [(0, tuple((key, 1) for key in keys))]
    combined: list[LinearPart] = [] if expression.is_sum else [(0, ())]
    end = 0
    for part in expression.parts:
        size = size_of(part, sizes)
        if size is None:
            raise LayoutError(
                f"the size of `{format_axes(part)}` is unknown: give it with `let` or `where`"
            )
        parts = _linear_parts(part, sizes)
        if expression.is_sum:
            combined += [(end + start, steps) for start, steps in parts]
            end += size
        else:
            combined = [
                (
                    outer_start * size + start,
                    (*((axis, step * size) for axis, step in outer_steps), *steps),
                )
                for outer_start, outer_steps in combined
                for start, steps in parts
            ]
    return combined


def format_axes(expression: AxisExpression, *, inner: bool = False) -> str:
    """Return an expression as text.

    Args:
        inner: put a product in parentheses even if it has one factor.
    """
    if isinstance(expression, Axis):
        text = ("~" if expression.is_ragged else "") + expression.name.split("'")[0]
        return " ".join([*expression.outer, text])
    limit = "" if expression.limit is None else f"[:{expression.limit}]"
    if expression.is_sum:
        parts = " + ".join(format_axes(part).strip("()") for part in expression.parts)
        return f"({parts}){limit}"
    text = " ".join(format_axes(part, inner=True) for part in expression.parts) or "1"
    in_parentheses = len(expression.parts) > 1 or (inner and expression.parts)
    return (f"({text})" if in_parentheses else text) + limit
