"""What a rule says of one of its tensors, once the number of dimensions is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import LayoutError
from shardwise.formats.language.axes import (
    Chain,
    Dim,
    Node,
    Ragged,
    Shape,
    Sum,
    axes_of,
    gathered,
    is_hole,
    render_dims,
    terms,
    without,
)
from shardwise.formats.language.rules import Rule, Spec, Target


@dataclass(frozen=True, slots=True)
class Structure:
    """How the dimensions of a stored array become those of a global tensor.

    Attributes:
        stored: the dimensions of the stored array.
        whole: those of the tensor.
        ragged: axes that ranks divide unevenly, and what divides them.
        indexed: axes of the tensor of which a stored array has one position: coordinates of the
            rank, and captured numbers.
        listed: axes of the stored array that tell tensors apart: `{e}` in their names.
    """

    stored: tuple[Node, ...]
    whole: tuple[Dim, ...]
    ragged: tuple[Ragged, ...]
    indexed: frozenset[str]
    listed: tuple[str, ...]


def indexed_axes(spec: Spec, rule: Rule) -> frozenset[str]:
    """Axes of which an array of this rule has one position."""
    return spec.rank_axes | (frozenset(rule.pattern.captures()) & spec.numbers())


def structure(spec: Spec, rule: Rule, target: Target, more: int) -> Structure:
    """Divide the axes of a rule into those of the array, and those that tell arrays apart.

    Args:
        more: how many dimensions `...` stands for.

    Raises:
        LayoutError: a ragged axis is not divided by anything.
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
    """How many dimensions `...` stands for in a stored array of `ndim` dimensions.

    Raises:
        LayoutError: the array cannot have so many dimensions.
    """
    local = rule.shape_of(target) if rule.stored is None else rule.stored
    least = _kept(local, indexed_axes(spec, rule))
    if ndim < least or (ndim > least and local.rest is None):
        shown = render_dims(local.dims, local.rest)
        raise LayoutError(f"{shown} has {least} dimension(s) on a rank; the array has {ndim}")
    return ndim - least


def _kept(shape: Shape, indexed: frozenset[str]) -> int:
    return sum(without(dim.node, indexed) is not None for dim in shape.dims)


def check_terms(spec: Spec, rule: Rule, structures: Sequence[Structure]) -> None:
    """Check that every part of the stored array is a part of one of the tensors.

    Raises:
        LayoutError: a part goes nowhere, or comes from nowhere, or an axis is there twice.
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
    """The axes of each term.

    Raises:
        LayoutError: an axis is twice in one, or two terms have the same.
    """
    ones = {axis.name: 1 for node in nodes for axis in axes_of(node)}
    ones |= {f"~{name}": 1 for name in ones}
    found = [frozenset(term.steps) for term in terms(nodes, ones)]
    if len(set(found)) < len(found):
        raise LayoutError("two parts of a sum have the same axes; give them different names")
    return found


def _list(names: frozenset[str] | Sequence[str]) -> str:
    return "`" + " ".join(sorted(name.split("'")[0] for name in names)) + "`"
