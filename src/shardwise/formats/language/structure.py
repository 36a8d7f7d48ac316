"""The structure of a rule: how the axes of a stored array become those of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shardwise.errors import LayoutError
from shardwise.formats.language.axes import (
    Chain,
    Dim,
    Node,
    Ragged,
    Sum,
    axes_of,
    gathered,
    is_hole,
    render_dims,
    terms,
    without,
)
from shardwise.formats.language.expressions import Expression, Product, names_in, sizes_in
from shardwise.formats.language.rules import Capture, Rule, Spec, Target


@dataclass(frozen=True, slots=True)
class Structure:
    """How the dimensions of a stored array become those of a global tensor.

    Attributes:
        stored: the dimensions of the stored array.
        whole: the dimensions of the tensor.
        ragged: the axes that ranks divide unevenly.
        indexed: the axes of the tensor along which a stored array has a single position, namely
            axes of ranks and captured numbers.
        listed: the axes of the stored array along which each position is a tensor of its own,
            because their names are in the tensor's name.
    """

    stored: tuple[Node, ...]
    whole: tuple[Dim, ...]
    ragged: tuple[Ragged, ...]
    indexed: frozenset[str]
    listed: tuple[str, ...]


def indexed_axes(spec: Spec, rule: Rule) -> frozenset[str]:
    """Return the axes along which an array of this rule has a single position."""
    return spec.rank_axes | (frozenset(rule.pattern.captures()) & spec.numbers())


def structure(spec: Spec, rule: Rule, target: Target, more: int) -> Structure:
    """Return the structure of one target of a rule.

    Args:
        more: the number of dimensions in place of `...`.

    Raises:
        LayoutError: no axis divides a ragged axis.
    """
    indexed = indexed_axes(spec, rule)
    local = rule.shape_of(target) if rule.stored is None else rule.stored
    stored = [without(dim.node, indexed) for dim in local.unfolded(more)]
    whole = tuple(
        Dim(gathered(dim.node, indexed), dim.limit) for dim in rule.shape_of(target).unfolded(more)
    )
    ragged = tuple(found for dim in whole for found in _ragged(dim.node))
    stored_axes = {axis.name for node in stored if node for axis in axes_of(node)}
    listed = tuple(name for name in target.name.names() if name in stored_axes)
    return Structure(
        tuple(node for node in stored if node is not None),
        whole,
        ragged,
        frozenset(axis.name for dim in whole for axis in axes_of(dim.node)) & indexed
        | {name for found in ragged for name in found.axes},
        listed,
    )


def _ragged(node: Node) -> list[Ragged]:
    match node:
        case Ragged():
            return [node]
        case Chain(nodes) | Sum(nodes):
            return [found for inner in nodes for found in _ragged(inner)]
        case _:
            return []


def unfolding(spec: Spec, rule: Rule, target: Target, ndim: int) -> int:
    """Return the number of dimensions in place of `...` for a stored array of `ndim` dimensions.

    Raises:
        LayoutError: the rule does not allow `ndim` dimensions.
    """
    local = rule.shape_of(target) if rule.stored is None else rule.stored
    indexed = indexed_axes(spec, rule)
    least = sum(without(dim.node, indexed) is not None for dim in local.dims)
    if ndim < least or (ndim > least and local.rest is None):
        shown = render_dims(local.dims, local.rest)
        raise LayoutError(f"{shown} has {least} dimension(s) on a rank; the array has {ndim}")
    return ndim - least


def check_terms(spec: Spec, rule: Rule, structures: Sequence[Structure]) -> None:
    """Check that every part of the stored array is used by a tensor, and the other way round.

    Raises:
        LayoutError: a part is unused or missing, or an axis occurs twice.
    """
    taken: set[frozenset[str]] = set()
    for target, own in zip(rule.targets, structures, strict=True):
        stored = part_axes(own.stored)
        for part in part_axes([dim.node for dim in own.whole]):
            local = frozenset(
                axis for axis in part if axis not in own.indexed and not axis.startswith("~")
            ) | set(own.listed)
            if local not in stored:
                shape = rule.shape_of(target)
                raise LayoutError(
                    f"{render_dims(shape.dims, shape.rest)} takes {_list(local)} "
                    f"of an array that has {' or '.join(map(_list, stored))}"
                )
            taken.add(local)
    if rule.stored is None:
        return
    for part in part_axes(structures[0].stored):
        if part not in taken and not any(is_hole(axis) for axis in part):
            raise LayoutError(f"no tensor takes {_list(part)}; call what is not wanted `_`")


def part_axes(nodes: Sequence[Node]) -> list[frozenset[str]]:
    """Return the set of axes of each term.

    Raises:
        LayoutError: an axis occurs twice in a term, or two terms have the same axes.
    """
    ones = {axis.name: 1 for node in nodes for axis in axes_of(node)}
    ones |= {f"~{name}": 1 for name in ones}
    found = [frozenset(term.steps) for term in terms(nodes, ones)]
    if len(set(found)) < len(found):
        raise LayoutError("two parts of a sum have the same axes; give them different names")
    return found


def _list(names: frozenset[str] | Sequence[str]) -> str:
    return "`" + " ".join(sorted(name.split("'")[0] for name in names)) + "`"


KEYWORDS = frozenset(
    ["ranks", "let", "skip", "like", "where", "flat", "average", "over", "on", "as"]
)


def check_sense(spec: Spec) -> None:
    """Check that every name is defined, and that both sides of each rule agree.

    Raises:
        SpecError: a rule is wrong; the error points at it.
    """
    declared = [name for name, _ in spec.ranks] + [name for name, _ in spec.lets]
    for name in declared:
        if declared.count(name) > 1:
            raise spec.text.error(0, f"{name} is declared twice")
        if name in KEYWORDS:
            raise spec.text.error(0, f"{name} is a word of the language and cannot be a name")
    for rule in spec.rules:
        for part in rule.pattern.parts:
            if isinstance(part, Capture) and part.name in declared:
                raise spec.text.error(
                    rule.at,
                    f"{part.name} is captured here, but declared by `ranks` or `let`; rename one",
                )
        if isinstance(rule, Rule):
            _check_rule(spec, rule)
    for tie in spec.ties:
        for name in tie.name.names():
            if name not in tie.of.captures():
                raise spec.text.error(tie.at, f"{_shown(name)} is not captured on the right")


def _check_rule(spec: Spec, rule: Rule) -> None:
    constants = {name for name, _ in spec.lets}
    captures = frozenset(rule.pattern.captures())
    for axis in (*rule.flat, *rule.average, *(name for name, _ in rule.on)):
        if axis not in spec.rank_axes:
            raise spec.text.error(
                rule.at, f"{axis} is no axis of the ranks; declare it with `ranks`"
            )
    for name, _ in rule.sizes:
        if name not in rule.axes() | captures:
            raise spec.text.error(rule.at, f"`where` gives {name} a size, which is no axis here")
    for _, value in rule.on:
        _check_names(spec, value, spec.rank_axes | constants, rule.at)
    stored = frozenset() if rule.stored is None else rule.axes()
    known = captures | spec.rank_axes | constants | stored
    for target in rule.targets:
        for part in target.name.parts:
            if not isinstance(part, str):
                _check_names(spec, part, known, target.at)
                if isinstance(part, Product) and part.ragged and part.axes[-1] not in captures:
                    raise spec.text.error(target.at, f"~{part.axes[-1]} must be captured")
        shape = rule.shape_of(target)
        if (shape.rest is None) != ((rule.stored or shape).rest is None):
            raise spec.text.error(target.at, "`...` must be on both sides or on neither")
    try:
        structures = [structure(spec, rule, target, 0) for target in rule.targets]
        check_terms(spec, rule, structures)
    except LayoutError as error:
        raise spec.text.error(_place(rule), str(error)) from error
    for target, own in zip(rule.targets, structures, strict=True):
        _check_shape(spec, rule, target, frozenset(own.listed))


def _place(rule: Rule) -> int:
    shapes = [shape for shape in rule.shapes() if shape.at]
    return shapes[0].at if shapes else rule.at


def _check_names(spec: Spec, value: Expression, known: Collection[str], at: int) -> None:
    for name in (*names_in(value), *sizes_in(value)):
        if name not in known:
            raise spec.text.error(
                at, f"nothing here is called {_shown(name)}: it is not captured or declared"
            )


def _check_shape(spec: Spec, rule: Rule, target: Target, listed: frozenset[str]) -> None:
    fail = spec.text.error
    names = {axis for axis in rule.axes() if not is_hole(axis)}
    for axis in (*rule.flat, *rule.average):
        if axis in names:
            raise fail(
                target.at,
                f"{axis} is an axis here already; remove it from the dimensions or from `over`",
            )
    own = Rule(pattern=rule.pattern, targets=(target,))
    if any(is_hole(axis) for axis in own.axes()):
        raise fail(target.at, "`_` stands for what no tensor has; use it only on the left")
    if listed & own.axes():
        raise fail(
            target.at,
            f"{', '.join(listed)} is in the name of the tensor and cannot be one of its axes too",
        )
    if listed and rule.flat:
        raise fail(
            target.at,
            "a `flat` rule cannot divide an array into tensors by a number in their names",
        )


def _shown(name: str) -> str:
    return "`*`" if name.startswith("*") else name
