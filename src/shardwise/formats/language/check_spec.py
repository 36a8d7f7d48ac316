"""Check a parsed specification: all names are defined, and both sides of each rule agree."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shardwise.errors import LayoutError
from shardwise.formats.language.arithmetic import Expression
from shardwise.formats.language.rules import DimensionMap, Rule, Spec, map_dimensions
from shardwise.formats.language.shapes import (
    AxisExpression,
    axes_in,
    expand_terms,
    is_unused,
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
    for name, value in rule.coordinates:
        if name not in spec.ranks:
            raise spec.source.error(
                rule.position, f"{name} is not an axis of the ranks; declare it with `ranks`"
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
    for name in (*value.variables(), *value.sized_axes()):
        if name not in known_names:
            raise spec.source.error(
                position,
                f"unknown name {_format_name(name)}: neither captured nor declared; capture it on "
                "the left, or declare it with `let`",
            )


def _check_shapes(spec: Spec, rule: Rule, indexed_axes: frozenset[str]) -> None:
    """Check that tensors use every part of the stored array, and only parts that it has."""
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
        for tensor_part in _axes_of_terms(dimension_map.tensor_dims):
            local_axes = frozenset(
                axis for axis in tensor_part if dimension_map.is_local(axis)
            ) | set(dimension_map.split_axes)
            if local_axes not in array_parts:
                raise LayoutError(
                    f"{rule.shape_of(target)} uses the part {_format_axes(local_axes)}, but the "
                    f"array has only {', '.join(map(_format_axes, array_parts))}"
                )
            used_parts.add(local_axes)
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
