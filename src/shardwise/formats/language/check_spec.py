"""Check a parsed specification: all names are defined, and both sides of each rule agree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NoReturn

from shardwise.errors import LayoutError
from shardwise.formats.language.arithmetic import (
    CombinedIndex,
    Expression,
    sized_axes_in,
    variables_in,
)
from shardwise.formats.language.rules import (
    Capture,
    DimensionMap,
    Rule,
    Spec,
    Target,
    map_dimensions,
)
from shardwise.formats.language.shapes import (
    AxisExpression,
    axes_in,
    expand_terms,
    format_shape,
    is_unused,
)


def check_spec(spec: Spec) -> None:
    """Check that every name is defined, and that both sides of each rule agree.

    Raises:
        SpecError: a rule is wrong; the error points at it.
    """
    declared = {name for name, _ in (*spec.ranks, *spec.lets)}
    for rule in spec.rules:
        for part in rule.pattern.parts:
            if isinstance(part, Capture) and part.name in declared:
                raise spec.source.error(
                    rule.position,
                    f"{part.name} is captured here, but declared by `ranks` or `let`; rename one",
                )
        if isinstance(rule, Rule):
            _check_rule(spec, rule)
    for tie in spec.ties:
        for name in tie.name.variables():
            if name not in tie.target.capture_names():
                raise spec.source.error(
                    tie.position, f"{_format_name(name)} is not captured on the right"
                )


def _check_rule(spec: Spec, rule: Rule) -> None:
    constants = {name for name, _ in spec.lets}
    captures = frozenset(rule.pattern.capture_names())
    for axis in (*rule.flat_axes, *rule.average_axes, *(name for name, _ in rule.coordinates)):
        if axis not in spec.rank_axes:
            raise spec.source.error(
                rule.position, f"{axis} is not an axis of the ranks; declare it with `ranks`"
            )
    for name, _ in rule.sizes:
        if name not in rule.axis_names() | captures:
            raise spec.source.error(
                rule.position, f"`where` gives {name} a size, but this rule has no such axis"
            )
    for _, value in rule.coordinates:
        _check_variables(spec, value, spec.rank_axes | constants, rule.position)
    array_axes = frozenset() if rule.array_shape is None else rule.axis_names()
    known_names = captures | spec.rank_axes | constants | array_axes
    for target in rule.targets:
        for part in target.name.parts:
            if not isinstance(part, str):
                _check_variables(spec, part, known_names, target.position)
                if (
                    isinstance(part, CombinedIndex)
                    and part.ragged
                    and part.axes[-1] not in captures
                ):
                    raise spec.source.error(
                        target.position, f"~{part.axes[-1]} must be captured on the left"
                    )
        shape = rule.shape_of(target)
        if (shape.ellipsis is None) != ((rule.array_shape or shape).ellipsis is None):
            raise spec.source.error(target.position, "`...` must be on both sides or on neither")
    try:
        dimension_maps = [map_dimensions(spec, rule, target, 0) for target in rule.targets]
        _check_array_parts(rule, dimension_maps)
    except LayoutError as error:
        positions = [shape.position for shape in rule.shapes() if shape.position]
        raise spec.source.error((*positions, rule.position)[0], str(error)) from error
    for target, dimension_map in zip(rule.targets, dimension_maps, strict=True):
        _check_axes(spec, rule, target, frozenset(dimension_map.split_axes))


def _check_variables(
    spec: Spec, value: Expression, known_names: Collection[str], position: int
) -> None:
    for name in (*variables_in(value), *sized_axes_in(value)):
        if name not in known_names:
            raise spec.source.error(
                position, f"unknown name {_format_name(name)}: neither captured nor declared"
            )


def _check_array_parts(rule: Rule, dimension_maps: Sequence[DimensionMap]) -> None:
    """Check that tensors use every part of the stored array, and only parts that it has.

    Raises:
        LayoutError: a part is unused or missing, or an axis occurs twice.
    """
    used_parts: set[frozenset[str]] = set()
    for target, dimension_map in zip(rule.targets, dimension_maps, strict=True):
        array_parts = _axes_of_terms(dimension_map.array_dims)
        for tensor_part in _axes_of_terms([dim.axes for dim in dimension_map.tensor_dims]):
            local_axes = frozenset(
                axis for axis in tensor_part if dimension_map.is_local(axis)
            ) | set(dimension_map.split_axes)
            if local_axes not in array_parts:
                raise LayoutError(
                    f"{format_shape(rule.shape_of(target))} uses the part "
                    f"{_format_axes(local_axes)}, but the array has only "
                    f"{', '.join(map(_format_axes, array_parts))}"
                )
            used_parts.add(local_axes)
    if rule.array_shape is None:
        return
    for part in _axes_of_terms(dimension_maps[0].array_dims):
        if part not in used_parts and not any(is_unused(axis) for axis in part):
            raise LayoutError(
                f"no tensor takes {_format_axes(part)}; call a part that no tensor needs `_`"
            )


def _axes_of_terms(dims: Sequence[AxisExpression]) -> list[frozenset[str]]:
    """Return the axes of each term.

    Raises:
        LayoutError: an axis occurs twice in a term, or two terms have the same axes.
    """
    unit_sizes = {axis.name: 1 for dim in dims for axis in axes_in(dim)}
    unit_sizes |= {f"~{name}": 1 for name in unit_sizes}
    parts = [frozenset(term.steps) for term in expand_terms(dims, unit_sizes)]
    if len(set(parts)) < len(parts):
        raise LayoutError("two parts of a sum have the same axes; give them different names")
    return parts


def _format_axes(names: frozenset[str]) -> str:
    return "`" + " ".join(sorted(name.split("'")[0] for name in names)) + "`"


def _check_axes(spec: Spec, rule: Rule, target: Target, split_axes: frozenset[str]) -> None:
    def fail(message: str) -> NoReturn:
        raise spec.source.error(target.position, message)

    axis_names = {axis for axis in rule.axis_names() if not is_unused(axis)}
    for axis in (*rule.flat_axes, *rule.average_axes):
        if axis in axis_names:
            fail(f"{axis} is an axis here already; remove it from the dimensions or from `over`")
    target_axes = Rule(pattern=rule.pattern, targets=(target,)).axis_names()
    if any(is_unused(axis) for axis in target_axes):
        fail("`_` is a part of an array that no tensor takes; use it only on the left")
    for axis in sorted(split_axes & target_axes):
        fail(f"{axis} is in the name of the tensor, so it cannot also be an axis of the tensor")
    if split_axes and rule.flat_axes:
        fail("a `flat` rule cannot divide an array into tensors by a number in their names")


def _format_name(name: str) -> str:
    return "`*`" if name.startswith("*") else name
