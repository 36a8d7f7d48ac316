"""Axis expressions such as `[(tp g (q + k + v) d) h]`: their sizes and element positions.

A dimension is an axis, a product of axes (the last runs fastest), or a sum of consecutive parts.
Choosing one part of each sum gives a *term*. In a term, the position along every dimension is a
linear function of the positions along the axes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.errors import LayoutError
from shardwise.formats.language.expressions import Expression, render

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Axis:
    """A named axis. A literal is an axis of fixed size: `128'0` is the first literal 128.

    The size of a `ragged` axis (`~f`) depends on the position along the indexed axes before it.
    """

    name: str
    ragged: bool = False
    size: int | None = None
    at: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Ragged:
    """A ragged axis with the indexed axes before it. Their shares follow one after another."""

    axes: tuple[str, ...]
    axis: str

    @property
    def start(self) -> str:
        """The key of the sum of all shares in sizes, and of a share's start in terms."""
        return f"~{self.axis}"


@dataclass(frozen=True, slots=True)
class Chain:
    """A product. Without factors, its size is 1."""

    factors: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """A sum: consecutive parts."""

    parts: tuple[Node, ...]


Node = Axis | Ragged | Chain | Sum


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of a tensor. A `limit` cuts off padding after that many elements."""

    node: Node
    limit: Expression | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions of an array. `rest` is the position of `...`, if there is one."""

    dims: tuple[Dim, ...]
    rest: int | None = None
    at: int = field(default=0, compare=False)

    def unfolded(self, more: int) -> tuple[Dim, ...]:
        """Return the dimensions, with `more` dimensions in place of `...`."""
        if self.rest is None:
            return self.dims
        rest = (Dim(Axis(f"...'{i}")) for i in range(more))
        return (*self.dims[: self.rest], *rest, *self.dims[self.rest :])


@dataclass(frozen=True, slots=True)
class Term:
    """One choice of parts. An element is at `start` plus position × step, summed over the axes.

    `steps` maps axes to `(dimension, step)`.
    """

    start: tuple[int, ...]
    steps: Mapping[str, tuple[int, int]]


def axes_of(node: Node) -> Iterator[Axis]:
    """Yield all axes of an expression in order; for a ragged one, the sum of its shares."""
    match node:
        case Axis():
            yield node
        case Ragged():
            yield Axis(node.start)
        case Chain(factors):
            yield from itertools.chain.from_iterable(map(axes_of, factors))
        case Sum(parts):
            yield from itertools.chain.from_iterable(map(axes_of, parts))


def parts_alone(node: Node) -> Iterator[Axis]:
    """Yield axes that are a whole part of a sum, for sums without `_`."""
    match node:
        case Chain(factors):
            yield from itertools.chain.from_iterable(map(parts_alone, factors))
        case Sum(parts):
            if not any(is_hole(axis.name) for axis in axes_of(node)):
                yield from (part for part in parts if isinstance(part, Axis))
            yield from itertools.chain.from_iterable(map(parts_alone, parts))


def is_hole(axis: str) -> bool:
    """Whether an axis is `_`, a part that no tensor takes."""
    return axis.startswith("_'")


def without(node: Node, indexed: frozenset[str]) -> Node | None:
    """Return a rank's share of an expression: the expression without its indexed axes."""
    match node:
        case Axis(name):
            return None if name in indexed else Axis(name, size=node.size, at=node.at)
        case Ragged(_, axis):
            return without(Axis(axis), indexed)
        case Chain(factors):
            left = [without(factor, indexed) for factor in factors]
            kept = tuple(factor for factor in left if factor is not None)
            return Chain(kept) if kept or not factors else None
        case Sum(parts):
            return Sum(tuple(without(part, indexed) or Chain(()) for part in parts))


def gathered(node: Node, indexed: frozenset[str]) -> Node:
    """Join each ragged axis to the indexed axes before it.

    Raises:
        LayoutError: no indexed axis comes before a ragged one.
    """
    match node:
        case Axis(name, ragged):
            if ragged:
                raise LayoutError(f"~{name} must come after the axes of ranks that divide it")
            return node
        case Ragged():
            return node
        case Sum(parts):
            return Sum(tuple(gathered(part, indexed) for part in parts))
        case Chain(factors):
            found: list[Node] = []
            for factor in factors:
                if not (isinstance(factor, Axis) and factor.ragged):
                    found.append(gathered(factor, indexed))
                    continue
                before: list[str] = []
                while found and isinstance(last := found[-1], Axis) and last.name in indexed:
                    before.insert(0, last.name)
                    found.pop()
                if not before:
                    gathered(factor, indexed)
                found.append(Ragged(tuple(before), factor.name))
            return Chain(tuple(found))


def size_of(node: Node, sizes: Sizes) -> int | None:
    """Return the number of elements, or None if it is unknown."""
    match node:
        case Axis(name, size=size):
            return sizes.get(name) if size is None else size
        case Ragged():
            return sizes.get(node.start)
        case Chain(factors):
            counts = [size_of(factor, sizes) for factor in factors]
            return None if None in counts else math.prod(n for n in counts if n is not None)
        case Sum(parts):
            counts = [size_of(part, sizes) for part in parts]
            return None if None in counts else sum(n for n in counts if n is not None)


def solve(equations: Sequence[tuple[Node, int]], sizes: Sizes) -> dict[str, int]:
    """Find sizes of all axes that give each expression its number of elements.

    Raises:
        LayoutError: no sizes do, or the sizes are not determined.
    """
    known = dict(sizes)
    open_ = list(equations)
    while open_:
        left = [pair for pair in open_ if not _learn(*pair, known)]
        if len(left) == len(open_):
            raise LayoutError(_undetermined(left, known))
        open_ = left
    for node, total in equations:
        if size_of(node, known) != total:
            raise LayoutError(_contradiction(node, total, known))
    return known


def _learn(node: Node, total: int, known: dict[str, int]) -> bool:
    """Determine the size of the only unknown axis; return whether all sizes are known now."""
    unknown = {a.name for a in axes_of(node) if a.size is None and a.name not in known}
    if isinstance(size_of(node, known), int):
        return True
    if len(unknown) != 1:
        return False
    (axis,) = unknown
    zero, one, two = (size_of(node, {**known, axis: n}) for n in range(3))
    if zero is None or one is None or two is None or two - one != one - zero:
        return False
    step = one - zero
    if step == 0 or total < zero or (total - zero) % step:
        raise LayoutError(_contradiction(node, total, known))
    known[axis] = (total - zero) // step
    return True


def _contradiction(node: Node, total: int, known: Sizes) -> str:
    sizes = {a.name: known[a.name] for a in axes_of(node) if a.size is None and a.name in known}
    given = ", ".join(f"{name} = {size}" for name, size in sizes.items())
    size = size_of(node, known)
    cannot = f"`{render_node(node)}` cannot be {total}" + (f" with {given}" if given else "")
    return cannot + (f": that makes {size}" if size is not None else ": it does not divide")


def _undetermined(left: Sequence[tuple[Node, int]], known: Sizes) -> str:
    unknown = {a.name: None for node, _ in left for a in axes_of(node) if a.size is None}
    names = ", ".join(name.split("'")[0] for name in unknown if name not in known)
    where = ", ".join(f"`{render_node(node)}` = {total}" for node, total in left)
    return f"{where} leaves open how many {names} there are; say so with `let` or `where`"


def terms(dims: Sequence[Node], sizes: Sizes) -> list[Term]:
    """Return the terms of an array with these dimensions.

    Raises:
        LayoutError: an axis occurs twice, or its size is unknown.
    """
    choices = [
        [(start, [(axis, (dim, step)) for axis, step in steps]) for start, steps in lines]
        for dim, lines in enumerate(_lines(node, sizes) for node in dims)
    ]
    found = []
    for choice in itertools.product(*choices):
        pairs = [pair for _, more in choice for pair in more]
        steps = dict(pairs)
        if len(steps) < len(pairs):
            twice = next(a for a, _ in pairs if [b for b, _ in pairs].count(a) > 1)
            raise LayoutError(f"the axis {twice} is there twice")
        found.append(Term(tuple(start for start, _ in choice), steps))
    return found


Line = tuple[int, tuple[tuple[str, int], ...]]


def _lines(node: Node, sizes: Sizes) -> list[Line]:
    match node:
        case Axis(name):
            return [(0, ((name, 1),))]
        case Ragged(_, axis):
            return [(0, ((node.start, 1), (axis, 1)))]
        case Sum(parts):
            starts = itertools.accumulate((_known(part, sizes) for part in parts), initial=0)
            return [
                (start + at, steps)
                for start, part in zip(starts, parts, strict=False)
                for at, steps in _lines(part, sizes)
            ]
        case Chain(factors):
            found: list[Line] = [(0, ())]
            for factor in factors:
                size = _known(factor, sizes)
                found = [
                    (a * size + b, (*((axis, step * size) for axis, step in outer), *inner))
                    for a, outer in found
                    for b, inner in _lines(factor, sizes)
                ]
            return found


def _known(node: Node, sizes: Sizes) -> int:
    size = size_of(node, sizes)
    if size is None:
        raise LayoutError(f"nothing says how large `{render_node(node)}` is")
    return size


def render_node(node: Node, *, inner: bool = False) -> str:
    """Return an expression as text."""
    match node:
        case Axis(name, ragged):
            return ("~" if ragged else "") + name.split("'")[0]
        case Ragged(axes, axis):
            return " ".join([*axes, f"~{axis}"])
        case Chain(factors):
            if not factors:
                return "1"
            text = " ".join(render_node(factor, inner=True) for factor in factors)
            return f"({text})" if inner or len(factors) > 1 else text
        case Sum(parts):
            return "(" + " + ".join(render_node(part).strip("()") for part in parts) + ")"


def render_dims(dims: Sequence[Dim], rest: int | None = None) -> str:
    """Return an expression as text."""
    words = [
        render_node(dim.node) + (f"[:{render(dim.limit)}]" if dim.limit is not None else "")
        for dim in dims
    ]
    if rest is not None:
        words.insert(rest, "...")
    return f"[{' '.join(words)}]"
