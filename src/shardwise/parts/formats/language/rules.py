"""A parsed specification: its rules, the patterns of names in them, and a check of all names."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.kernel.errors import LayoutError
from shardwise.kernel.events import format_count
from shardwise.parts.formats.language.arithmetic import Expression
from shardwise.parts.formats.language.scanner import SourceText
from shardwise.parts.formats.language.shapes import (
    Axis,
    AxisExpression,
    Shape,
    axes_in,
    drop_axes,
    expand_terms,
    is_unused,
    join_ragged_axes,
)

Matcher = Callable[[str], dict[str, str] | None]
"""Takes a name; returns the captured texts, or None if the name does not match."""
ANY_SHAPE = Shape((), ellipsis=0)
NO_SOURCE = SourceText("", "specification")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of names: literal text and expressions, in order.

    In the pattern of arrays, `{name}` matches text without dots (only digits, if a rule uses it as
    a number), and `{name*}` matches any text. The pattern of a tensor is filled with matched texts
    and computed numbers.
    """

    parts: tuple[str | Expression, ...]

    def expressions(self) -> Iterator[Expression]:
        """Yield the expressions in the pattern."""
        yield from (part for part in self.parts if isinstance(part, Expression))

    def variables(self) -> tuple[str, ...]:
        """Return the captures, coordinates, axes and declared numbers in the pattern.

        Unnamed stars are `*0`, `*1`, … by position.
        """
        return tuple(dict.fromkeys(name for e in self.expressions() for name in e.variables()))

    def compile(self, numbers: Collection[str]) -> Matcher:
        """Return a function that matches names.

        Args:
            numbers: captures that match only digits.
        """
        names = list(self.variables())
        seen_names: set[str] = set()
        expressions = []
        for part in self.parts:
            if isinstance(part, str):
                expressions.append(re.escape(part))
            elif (name := part.names[0]) in seen_names:
                expressions.append(f"(?:\\{names.index(name) + 1})")
            else:
                seen_names.add(name)
                text = ".+" if part.kind == "text" else r"[^.]+"
                expressions.append(r"(\d{1,9})" if name in numbers else f"({text})")
        compiled = re.compile("".join(expressions), re.DOTALL | re.ASCII)

        def match(name: str) -> dict[str, str] | None:
            found = compiled.fullmatch(name)
            return dict(zip(names, found.groups(), strict=True)) if found else None

        return match

    def __str__(self) -> str:
        parts = ((part, str(part)) for part in self.parts)
        return "".join(t if isinstance(p, str) or t == "*" else f"{{{t}}}" for p, t in parts)


@dataclass(frozen=True, slots=True)
class Target:
    """A global tensor that a rule assembles.

    Attributes:
        name: the pattern of its name.
        shape: its shape; None if it has the shape of the stored array.
        position: the index of the target's first character in the text.
    """

    name: Pattern
    shape: Shape | None = None
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How stored arrays of one kind make up global tensors.

    Attributes:
        pattern: the pattern of the arrays' names.
        targets: the tensors; none if the arrays are left out.
        array_shape: the shape of each array; None if it is the shape of the target without the axes
            of ranks and of captured numbers.
        sizes: sizes of axes, from `where`.
        conditions: from `on`: for each axis of the ranks, captured number or declared number, the
            value at which the rule applies.
        position: the index of the rule's first character in the text.
        like: for a statement `pattern like star, results -> target`, which copies rules: `star` and
            `results`. In `pattern`, `star` captures the name of another array, whose rule is
            copied. `results` is the pattern of the copied rule's tensor names, which are renamed:
            a text and a star.
    """

    pattern: Pattern
    targets: tuple[Target, ...] = ()
    array_shape: Shape | None = None
    sizes: tuple[tuple[str, Expression], ...] = ()
    conditions: tuple[tuple[str, Expression], ...] = ()
    position: int = field(default=0, compare=False)
    like: tuple[Pattern, Pattern] | None = None

    def shape_of(self, target: Target) -> Shape:
        """Return the shape of a tensor."""
        return target.shape or self.array_shape or ANY_SHAPE

    def shapes(self) -> Iterator[Shape]:
        """Yield the shapes of the array and of all tensors."""
        if self.array_shape is not None:
            yield self.array_shape
        for target in self.targets:
            yield self.shape_of(target)

    def axes(self) -> dict[str, Axis]:
        """Return the axes in all shapes by name, with their sizes where a shape gives them."""
        dims = (dim for shape in self.shapes() for dim in shape.dims)
        axes = [axis for dim in dims for axis in axes_in(dim)]
        return {axis.name: axis for axis in sorted(axes, key=lambda axis: axis.size is not None)}


@dataclass(frozen=True, slots=True)
class Tie:
    """Further names of tensors: `head = embed`.

    Attributes:
        name: the further name, with captures of `target`.
        target: the pattern of the names of tensors that get a further name.
        unless_stored: do not tie a name that has stored arrays.
        position: the index of the statement's first character in the text.
    """

    name: Pattern
    target: Pattern
    unless_stored: bool = False
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Spec:
    """A specification. The first rule that matches a stored array applies to it.

    Attributes:
        ranks: the axes of the ranks.
        lets: declared numbers; None where the caller must give a value.
        rules: all rules in order, including those that `like` derives from others.
        ties: further names of tensors.
        source: the text that was parsed.
    """

    ranks: tuple[str, ...] = ()
    lets: Mapping[str, Expression | None] = field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    ties: tuple[Tie, ...] = ()
    source: SourceText = NO_SOURCE

    def numeric_captures(self) -> frozenset[str]:
        """Return the captures that are an axis, in arithmetic or after `on`, and so are numbers."""
        numbers: set[str] = set()
        for rule in self.rules:
            numbers |= rule.axes().keys() | {name for name, _ in rule.conditions}
            for target in rule.targets:
                for expression in target.name.expressions():
                    if not expression.is_name:
                        numbers |= {*expression.variables(), *expression.size_variables()}
        captures = [each for rule in self.rules for each in rule.pattern.expressions()]
        return frozenset(numbers & {each.names[0] for each in captures if each.kind == "name"})


@dataclass(frozen=True, slots=True)
class DimensionMap:
    """Maps the dimensions of a stored array to the dimensions of a global tensor.

    Attributes:
        array_dims: the dimensions of the stored array.
        tensor_dims: the dimensions of the tensor.
        ragged_axes: the axes that ranks divide into shares of different sizes.
        indexed_axes: the axes along which each array has one position.
        split_axes: the axes of the array that occur in the tensor's name, such as `{e}`. The array
            becomes one tensor for each position along them.
    """

    array_dims: tuple[AxisExpression, ...]
    tensor_dims: tuple[AxisExpression, ...]
    ragged_axes: tuple[Axis, ...]
    indexed_axes: frozenset[str]
    split_axes: tuple[str, ...]

    def is_local(self, axis: str) -> bool:
        """Return whether an axis of the tensor is also an axis of each array.

        An axis that is not local is an indexed axis, along which an array has one position, or the
        start of a ragged share (`~f`).
        """
        return axis not in self.indexed_axes and not axis.startswith("~")


def map_dimensions(
    rule: Rule, target: Target, indexed_axes: frozenset[str], ndim: int | None = None
) -> DimensionMap:
    """Map the dimensions of a rule's arrays to the dimensions of a target.

    For example, `tp` is an axis of ranks, and the target has the shape `[(tp f) h]`. Each array has
    one position along `tp`, so its dimensions are `f` and `h`. Those of the tensor are `(tp f)` and
    `h`.

    Args:
        indexed_axes: the axes along which each array has one position: the axes of the ranks, and
            captured numbers.
        ndim: the number of dimensions of the arrays; None if `...` matches no dimensions.

    Raises:
        LayoutError: the rule does not allow `ndim` dimensions, or no axis of ranks comes before a
            ragged axis.
    """
    shape = rule.array_shape or rule.shape_of(target)
    named = [dim for each in shape.dims if (dim := drop_axes(each, indexed_axes)) is not None]
    count = len(named) if ndim is None else ndim
    if count < len(named) or (count > len(named) and shape.ellipsis is None):
        raise LayoutError(
            f"{shape} has {format_count(len(named), 'dimension')} on a rank; the array has {ndim}: "
            "correct the dimensions, or use `...` for the others"
        )
    unnamed = count - len(named)
    array_dims = (drop_axes(dim, indexed_axes) for dim in shape.expand_ellipsis(unnamed))
    tensor_dims = tuple(
        join_ragged_axes(dim, indexed_axes)
        for dim in rule.shape_of(target).expand_ellipsis(unnamed)
    )
    kept_dims = tuple(dim for dim in array_dims if dim is not None)
    array_axes = {axis.name for dim in kept_dims for axis in axes_in(dim)}
    tensor_axes = [axis for dim in tensor_dims for axis in axes_in(dim)]
    return DimensionMap(
        kept_dims,
        tensor_dims,
        tuple(axis for axis in tensor_axes if axis.outer),
        indexed_axes,
        tuple(name for name in target.name.variables() if name in array_axes),
    )


def check_spec(spec: Spec) -> None:
    """Check that every name is defined, and that both sides of each rule agree.

    Raises:
        SpecError: a rule is wrong; the error points at it.
    """
    numbers = spec.numeric_captures()
    for rule in spec.rules:
        captures = rule.pattern.variables()
        for name in captures:
            if name in (*spec.ranks, *spec.lets):
                raise spec.source.error(
                    rule.position,
                    f"{name} is captured here, but declared by `ranks` or `let`; rename one",
                )
        _check_names(spec, rule)
        _check_shapes(spec, rule, numbers.intersection(captures).union(spec.ranks))
    for tie in spec.ties:
        for name in tie.name.variables():
            if name not in tie.target.variables():
                raise spec.source.error(
                    tie.position,
                    f"{_format_name(name)} is used on the left of this tie, but not captured on "
                    "its right: capture it there, or write the name out",
                )


def _check_names(spec: Spec, rule: Rule) -> None:
    captures, axes = rule.pattern.variables(), rule.axes()
    for name, value in rule.conditions:
        if name not in (*spec.ranks, *spec.lets, *captures):
            raise spec.source.error(
                rule.position,
                f"{name} is not an axis of the ranks, and neither captured nor declared; declare "
                "it with `ranks` or `let`, or capture it on the left",
            )
        _check_variables(spec, value, {*spec.ranks, *spec.lets}, rule.position)
    for name, _ in rule.sizes:
        if name not in (*axes, *captures):
            raise spec.source.error(
                rule.position,
                f"`where` gives {name} a size, but this rule has no such axis; correct the name, "
                "or remove it",
            )
    known_names = {*captures, *spec.ranks, *spec.lets, *(axes if rule.array_shape else ())}
    for target in rule.targets:
        for expression in target.name.expressions():
            _check_variables(spec, expression, known_names, target.position)
            for axes_of_index in expression.ragged_indices():
                if axes_of_index[-1] not in captures:
                    raise spec.source.error(
                        target.position, f"~{axes_of_index[-1]} must be captured on the left"
                    )


def _check_variables(
    spec: Spec, value: Expression, known_names: Collection[str], position: int
) -> None:
    for name in (*value.variables(), *value.size_variables()):
        if name not in known_names:
            raise spec.source.error(
                position,
                f"unknown name {_format_name(name)}: neither captured nor declared; capture it on "
                "the left, or declare it with `let`",
            )


def _check_shapes(spec: Spec, rule: Rule, indexed_axes: frozenset[str]) -> None:
    """Check that tensors use every part of the stored array. Other arrays may have more parts."""
    for target in rule.targets:
        shape = rule.shape_of(target)
        if (shape.ellipsis is None) != ((rule.array_shape or shape).ellipsis is None):
            raise spec.source.error(target.position, "`...` must be on both sides or on neither")
        if any(is_unused(axis.name) for dim in shape.dims for axis in axes_in(dim)):
            raise spec.source.error(
                target.position,
                "`_` is a part of an array that no tensor takes; use it only on the left",
            )
    try:
        dimension_maps = [map_dimensions(rule, target, indexed_axes) for target in rule.targets]
        _check_array_parts(rule, dimension_maps)
    except LayoutError as error:
        positions = [shape.position for shape in rule.shapes() if shape.position]
        raise spec.source.error((*positions, rule.position)[0], str(error)) from error
    for target, dimension_map in zip(rule.targets, dimension_maps, strict=True):
        dims = rule.shape_of(target).dims
        axes = {axis.name for dim in dims for axis in axes_in(dim)}
        for axis in sorted(axes & set(dimension_map.split_axes)):
            raise spec.source.error(
                target.position,
                f"{axis} is in the name of the tensor, so it cannot also be an axis of the tensor; "
                "leave it out of the name or of the shape",
            )


def _check_array_parts(rule: Rule, dimension_maps: Sequence[DimensionMap]) -> None:
    used_parts: set[frozenset[str]] = set()
    for target, dimension_map in zip(rule.targets, dimension_maps, strict=True):
        array_parts = _axes_of_terms(dimension_map.array_dims)
        tensor_parts = [
            frozenset(axis for axis in part if dimension_map.is_local(axis))
            | set(dimension_map.split_axes)
            for part in _axes_of_terms(dimension_map.tensor_dims)
        ]
        if not set(tensor_parts) & set(array_parts):
            raise LayoutError(
                f"{rule.shape_of(target)} uses the part {_format_axes(tensor_parts[0])}, but the "
                f"array has only {', '.join(map(_format_axes, array_parts))}"
            )
        used_parts |= set(tensor_parts)
    if rule.array_shape is None or not dimension_maps:
        return
    for part in _axes_of_terms(dimension_maps[0].array_dims):
        if part not in used_parts and not any(map(is_unused, part)):
            raise LayoutError(
                f"no tensor takes {_format_axes(part)}; call a part that no tensor needs `_`"
            )


def _axes_of_terms(dims: Sequence[AxisExpression]) -> list[frozenset[str]]:
    """Return the axes of each term.

    Raises:
        LayoutError: an axis occurs twice in a term, or two terms have the same axes.
    """
    axes = [axis for dim in dims for axis in axes_in(dim)]
    unit_sizes = {key: 1 for axis in axes for key in (axis.name, axis.start_key)}
    parts = [frozenset(term.steps) for term in expand_terms(dims, unit_sizes)]
    if len(set(parts)) < len(parts):
        raise LayoutError("two parts of a sum have the same axes; give them different names")
    return parts


def _format_axes(names: frozenset[str]) -> str:
    return "`" + " ".join(sorted(name.split("'")[0] for name in names)) + "`"


def _format_name(name: str) -> str:
    return "`*`" if name.startswith("*") else name
