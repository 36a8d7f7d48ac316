"""Reading: a specification applied to what lies in the files of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from shardwise.errors import LayoutError, MismatchError
from shardwise.formats.foreign import Catalogue, Foreign
from shardwise.formats.language.assembly import Assembly, Shapes
from shardwise.formats.language.complete import complete
from shardwise.formats.language.constants import constants_of, rank_sizes, rule_sizes
from shardwise.formats.language.flat import lay_flat
from shardwise.formats.language.matching import count_captures, match_rules
from shardwise.formats.language.numbers import Known, Value
from shardwise.formats.language.parts import (
    Part,
    cases,
    listed,
    sized,
    tensor_shape,
    with_ragged,
)
from shardwise.formats.language.pieces import spread, stencils
from shardwise.formats.language.report import Report
from shardwise.formats.language.rules import Rule, Spec, Target


def lay(
    spec: Spec,
    catalogue: Catalogue,
    *,
    sizes: Mapping[str, int] | None = None,
    shapes: Shapes | None = None,
) -> Foreign:
    """Lay a specification over the arrays of all ranks.

    Args:
        sizes: numbers that the specification declares with `let`; they count before its own.
        shapes: what is known of global tensors, by name; the result must have these.

    Raises:
        MismatchError: it does not fit; `problems` lists everything.
    """
    foreign, report = examine(spec, catalogue, sizes=sizes, shapes=shapes)
    if foreign is None:
        raise MismatchError(f"{spec.text.source} does not fit the checkpoint:", report.problems)
    return foreign


def check(
    spec: Spec,
    catalogue: Catalogue,
    *,
    sizes: Mapping[str, int] | None = None,
    shapes: Shapes | None = None,
) -> Report:
    """Say whether a specification fits, and all that is wrong if it does not: as `lay`."""
    return examine(spec, catalogue, sizes=sizes, shapes=shapes)[1]


def examine(
    spec: Spec,
    catalogue: Catalogue,
    *,
    sizes: Mapping[str, int] | None = None,
    shapes: Shapes | None = None,
) -> tuple[Foreign | None, Report]:
    """The foreign checkpoint, if nothing is wrong, and what there is to say about it."""
    try:
        known = Known(
            sizes=rank_sizes(spec, catalogue.axes), constants=constants_of(spec, sizes or {})
        )
        matches = match_rules(spec, catalogue, known)
        known = count_captures(spec, catalogue, matches, known)
    except MismatchError as error:
        return None, Report(source=spec.text.source, problems=tuple(error.problems))
    except LayoutError as error:
        return None, Report(source=spec.text.source, problems=(str(error),))
    assembly = Assembly(spec, catalogue, matches, known, shapes or {})
    for number, rule in enumerate(spec.rules):
        if isinstance(rule, Rule) and len(matches.rows[number]):
            _apply(assembly, number, rule)
    return complete(assembly)


def _apply(assembly: Assembly, number: int, rule: Rule) -> None:
    try:
        declared = rule_sizes(rule, assembly.known)
    except LayoutError as error:
        assembly.problems.append(f"{assembly.line(rule)}: {error}")
        return
    if rule.flat:
        lay_flat(assembly, number, rule, declared)
        return
    lists = {name: size for name, size in declared.items() if isinstance(size, tuple)}
    for target in rule.targets:
        parts = _parts(assembly, number, target, declared)
        for part in with_ragged(parts, lists, assembly.complain):
            _lay_part(assembly, rule, part)


def _parts(
    assembly: Assembly, number: int, target: Target, declared: Mapping[str, Value]
) -> list[Part]:
    rule, rows = assembly.rule(number), assembly.matches.rows[number]
    catalogue = assembly.catalogue
    positions = assembly.positions(number)
    sizes = assembly.sizes(rule, declared)
    found = []
    for which in cases(catalogue, rows):
        first = int(rows[which[0]])
        ndim = int(catalogue.ndim[first])
        array = tuple(catalogue.shape[first, :ndim].tolist())
        strides = tuple(catalogue.stride[first, :ndim].tolist())
        here = rows[which]
        try:
            own, solved = sized(assembly.spec, rule, target, array, sizes)
            column = {axis: position[which] for axis, position in positions.items()}
            part = listed(Part(here, column, own, solved, strides, np.zeros_like(here)))
            tensor = assembly.named(number, target, part)
        except LayoutError as error:
            assembly.reject(here, rule, f"{list(array)}: {error}")
            continue
        found.append(replace(part, tensor=tensor))
    return found


def _lay_part(assembly: Assembly, rule: Rule, part: Part) -> None:
    try:
        shape = tensor_shape(part.own.whole, part.sizes, assembly.known, None)
        shapes = [(part, shape)]
    except LayoutError:
        shapes = _shapes_given(assembly, rule, part)
    try:
        for own, shape in shapes:
            limits = np.array(shape, np.int64)
            assembly.note(own, shape)
            for stencil in stencils(own.own, own.sizes, own.strides):
                assembly.blocks.append(spread(stencil, own.rows, own.tensor, own.positions, limits))
    except LayoutError as error:
        assembly.reject(part.rows, rule, str(error))


def _shapes_given(assembly: Assembly, rule: Rule, part: Part) -> list[tuple[Part, tuple[int, ...]]]:
    """Parts of one tensor each, whose shapes follow what the caller knows of it."""
    found = []
    for tensor in np.unique(part.tensor).tolist():
        own = part.taken(np.flatnonzero(part.tensor == tensor))
        given = assembly.given.get(assembly.tensors.names[tensor])
        try:
            shape = tensor_shape(own.own.whole, own.sizes, assembly.known, given)
        except LayoutError as error:
            assembly.reject(own.rows, rule, str(error))
            continue
        found.append((own, shape))
    return found
