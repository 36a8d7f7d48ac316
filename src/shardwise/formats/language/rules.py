"""A parsed specification: its rules, and the patterns and templates of names in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from shardwise.errors import LayoutError
from shardwise.events import format_count
from shardwise.formats.language.arithmetic import (
    Expression,
    Variable,
    format_expression,
    sized_axes_in,
    variables_in,
)
from shardwise.formats.language.scanner import SourceText
from shardwise.formats.language.shapes import (
    AxisExpression,
    AxisProduct,
    AxisSum,
    RaggedAxis,
    Shape,
    ShapeDim,
    axes_in,
    drop_axes,
    format_shape,
    join_ragged_axes,
)

Matcher = Callable[[str], dict[str, str] | None]
"""Takes a name; returns the captured texts, or None if the name does not match."""
DeclaredValue = Expression | tuple[Expression, ...]
"""The value that `let` or `where` gives a name: a number or a list."""
ANY_SHAPE = Shape((), ellipsis=0)
NO_SOURCE = SourceText("", "specification")


@dataclass(frozen=True, slots=True)
class Capture:
    """`{name}`: a word without dots, or a number if a rule uses it as one; `{name*}`: any text."""

    name: str
    star: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern of names: literal text and captures, in order."""

    parts: tuple[str | Capture, ...]

    def capture_names(self) -> tuple[str, ...]:
        """Return the names of the captures. Unnamed stars are `*0`, `*1`, … by position."""
        names = (part.name for part in self.parts if isinstance(part, Capture))
        return tuple(dict.fromkeys(names))

    def compile(self, numeric_captures: Collection[str]) -> Matcher:
        """Return a function that matches names.

        Args:
            numeric_captures: captures that match only digits.
        """
        names = list(self.capture_names())
        seen_names: set[str] = set()
        expressions = []
        for part in self.parts:
            if isinstance(part, str):
                expressions.append(re.escape(part))
            elif part.name in seen_names:
                expressions.append(f"(?:\\{names.index(part.name) + 1})")
            else:
                seen_names.add(part.name)
                capture_pattern = (
                    r"\d{1,9}" if part.name in numeric_captures else ".+" if part.star else r"[^.]+"
                )
                expressions.append(f"({capture_pattern})")
        compiled = re.compile("".join(expressions), re.DOTALL | re.ASCII)

        def match(name: str) -> dict[str, str] | None:
            found = compiled.fullmatch(name)
            return dict(zip(names, found.groups(), strict=True)) if found else None

        return match

    def __str__(self) -> str:
        return "".join(
            part if isinstance(part, str) else _format_capture(part) for part in self.parts
        )


def _format_capture(capture: Capture) -> str:
    if capture.name.startswith("*"):
        return "*"
    return "{" + capture.name + ("*" if capture.star else "") + "}"


@dataclass(frozen=True, slots=True)
class Template:
    """The name of a tensor: literal text and expressions. A variable may be a captured text."""

    parts: tuple[str | Expression, ...]

    def fill(self, texts: Mapping[str, str]) -> str:
        """Return the name, with captured texts filled in.

        Raises:
            LayoutError: the template contains arithmetic.
        """
        words = []
        for part in self.parts:
            if not isinstance(part, str | Variable):
                raise LayoutError(f"{self}: the name of a tied tensor cannot contain arithmetic")
            words.append(part if isinstance(part, str) else texts[part.name])
        return "".join(words)

    def __str__(self) -> str:
        return "".join(
            part if isinstance(part, str) else f"{{{format_expression(part)}}}"
            for part in self.parts
        )

    def variables(self) -> tuple[str, ...]:
        """Return the captures, coordinates, axes and constants in the template."""
        expressions = (part for part in self.parts if not isinstance(part, str))
        return tuple(dict.fromkeys(name for each in expressions for name in variables_in(each)))


def substitute_captures(
    parts: tuple[str | Capture, ...], replacements: Mapping[str, tuple[str | Capture, ...]]
) -> tuple[str | Capture, ...]:
    """Return a pattern's parts with some captures replaced by the parts of another pattern."""
    substituted: list[str | Capture] = []
    for part in parts:
        replacement = replacements.get(part.name) if isinstance(part, Capture) else None
        substituted.extend((part,) if replacement is None else replacement)
    return tuple(substituted)


@dataclass(frozen=True, slots=True)
class Target:
    """A global tensor that a rule assembles.

    Attributes:
        name: the template of its name.
        shape: its shape; None if it has the shape of the stored array.
        position: the index of the target's first character in the text.
    """

    name: Template
    shape: Shape | None = None
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How stored arrays of one kind make up global tensors.

    Attributes:
        pattern: the pattern of the arrays' names.
        targets: the tensors.
        array_shape: the shape of each array; None if it is the shape of the target without the axes
            of ranks and of captured numbers.
        sizes: sizes of axes, from `where`.
        flat_axes: axes of the ranks that divide the flattened tensors.
        average_axes: axes of the ranks over which the tensor is the mean.
        dtype: the required dtype of the arrays, if any.
        coordinates: from `on`: for each axis, the coordinate of the ranks to which the rule
            applies.
        position: the index of the rule's first character in the text.
    """

    pattern: Pattern
    targets: tuple[Target, ...]
    array_shape: Shape | None = None
    sizes: tuple[tuple[str, DeclaredValue], ...] = ()
    flat_axes: tuple[str, ...] = ()
    average_axes: tuple[str, ...] = ()
    dtype: str | None = None
    coordinates: tuple[tuple[str, Expression], ...] = ()
    position: int = field(default=0, compare=False)

    def shape_of(self, target: Target) -> Shape:
        """Return the shape of a tensor."""
        return target.shape or self.array_shape or ANY_SHAPE

    def shapes(self) -> Iterator[Shape]:
        """Yield the shapes of the array and of all tensors."""
        if self.array_shape is not None:
            yield self.array_shape
        for target in self.targets:
            yield self.shape_of(target)

    def axis_names(self) -> frozenset[str]:
        """Return the names of the axes in all shapes."""
        return frozenset(
            axis.name for shape in self.shapes() for dim in shape.dims for axis in axes_in(dim.axes)
        )


@dataclass(frozen=True, slots=True)
class Skip:
    """Stored arrays that are left out."""

    pattern: Pattern
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Tie:
    """Further names of tensors: `head = embed`.

    Attributes:
        name: the template of the further name.
        target: the pattern of the names of tensors that get a further name.
        unless_stored: do not tie a name that has stored arrays.
        position: the index of the statement's first character in the text.
    """

    name: Template
    target: Pattern
    unless_stored: bool = False
    position: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Spec:
    """A specification. The first rule that matches a stored array applies to it.

    Attributes:
        ranks: the axes of the ranks, with their sizes where the text gives them.
        lets: declared numbers and lists; None where the caller must give a value.
        rules: all rules in order, including those that `like` derives from others.
        ties: further names of tensors.
        source: the text that was parsed.
    """

    ranks: tuple[tuple[str, int | None], ...] = ()
    lets: tuple[tuple[str, DeclaredValue | None], ...] = ()
    rules: tuple[Rule | Skip, ...] = ()
    ties: tuple[Tie, ...] = ()
    source: SourceText = NO_SOURCE

    @property
    def rank_axes(self) -> frozenset[str]:
        """Names of the axes of the ranks."""
        return frozenset(name for name, _ in self.ranks)

    def numeric_captures(self) -> frozenset[str]:
        """Return the captures that are used as an axis or in arithmetic, and so are numbers."""
        names_used_as_numbers: set[str] = set()
        for rule in self.rules:
            if isinstance(rule, Rule):
                names_used_as_numbers |= rule.axis_names()
                for target in rule.targets:
                    for part in target.name.parts:
                        if not isinstance(part, str | Variable):
                            names_used_as_numbers |= {*variables_in(part), *sized_axes_in(part)}
        captures = {
            part.name
            for rule in self.rules
            for part in rule.pattern.parts
            if isinstance(part, Capture) and not part.star
        }
        return frozenset(names_used_as_numbers & captures)

    def indexed_axes(self, rule: Rule) -> frozenset[str]:
        """Return the axes along which each array of a rule has one position.

        These are the axes of the ranks, and captured numbers.
        """
        return self.rank_axes | (frozenset(rule.pattern.capture_names()) & self.numeric_captures())


@dataclass(frozen=True, slots=True)
class DimensionMap:
    """Maps the dimensions of a stored array to the dimensions of a global tensor.

    Attributes:
        array_dims: the dimensions of the stored array.
        tensor_dims: the dimensions of the tensor.
        ragged_axes: the axes that ranks divide into shares of different sizes.
        indexed_axes: the axes of the tensor along which each array has one position.
        split_axes: the axes of the array whose names are in the tensor's name. The array is split
            into one tensor for each position along them.
    """

    array_dims: tuple[AxisExpression, ...]
    tensor_dims: tuple[ShapeDim, ...]
    ragged_axes: tuple[RaggedAxis, ...]
    indexed_axes: frozenset[str]
    split_axes: tuple[str, ...]

    def is_local(self, axis: str) -> bool:
        """Return whether an axis of the tensor is also an axis of each array.

        All other axes are indexed axes, and the starts of ragged shares (`~f`).
        """
        return axis not in self.indexed_axes and not axis.startswith("~")


def map_dimensions(spec: Spec, rule: Rule, target: Target, ellipsis_dims: int) -> DimensionMap:
    """Map the dimensions of a rule's arrays to the dimensions of a target.

    Args:
        ellipsis_dims: the number of dimensions in place of `...`.

    Raises:
        LayoutError: no axis of ranks comes before a ragged axis.
    """
    indexed_axes = spec.indexed_axes(rule)
    array_dims = [
        drop_axes(dim.axes, indexed_axes)
        for dim in (rule.array_shape or rule.shape_of(target)).expand_ellipsis(ellipsis_dims)
    ]
    tensor_dims = tuple(
        ShapeDim(join_ragged_axes(dim.axes, indexed_axes), dim.limit)
        for dim in rule.shape_of(target).expand_ellipsis(ellipsis_dims)
    )
    ragged_axes = tuple(axis for dim in tensor_dims for axis in _ragged_axes_in(dim.axes))
    array_axes = {axis.name for dim in array_dims if dim for axis in axes_in(dim)}
    tensor_axes = {axis.name for dim in tensor_dims for axis in axes_in(dim.axes)}
    return DimensionMap(
        array_dims=tuple(dim for dim in array_dims if dim is not None),
        tensor_dims=tensor_dims,
        ragged_axes=ragged_axes,
        indexed_axes=(indexed_axes & tensor_axes)
        | {name for each in ragged_axes for name in each.outer_axes},
        split_axes=tuple(name for name in target.name.variables() if name in array_axes),
    )


def _ragged_axes_in(expression: AxisExpression) -> list[RaggedAxis]:
    match expression:
        case RaggedAxis():
            return [expression]
        case AxisProduct(children) | AxisSum(children):
            return [axis for child in children for axis in _ragged_axes_in(child)]
        case _:
            return []


def count_ellipsis_dims(spec: Spec, rule: Rule, target: Target, ndim: int) -> int:
    """Return the number of dimensions in place of `...`, for arrays of `ndim` dimensions.

    Raises:
        LayoutError: the rule does not allow `ndim` dimensions.
    """
    shape = rule.array_shape or rule.shape_of(target)
    indexed_axes = spec.indexed_axes(rule)
    named_dims = sum(drop_axes(dim.axes, indexed_axes) is not None for dim in shape.dims)
    if ndim < named_dims or (ndim > named_dims and shape.ellipsis is None):
        raise LayoutError(
            f"{format_shape(shape)} has {format_count(named_dims, 'dimension')} on a rank; the "
            f"array has {ndim}: "
            "correct the dimensions, or use `...` for the others"
        )
    return ndim - named_dims
