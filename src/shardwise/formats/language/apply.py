"""Arrays that were flattened, laid one after another, and divided among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardwise.errors import LayoutError, MismatchError
from shardwise.formats.foreign import Catalogue, Foreign
from shardwise.formats.language.assembly import Assembly, Shapes
from shardwise.formats.language.axes import size_of, solve
from shardwise.formats.language.check import Report, complete
from shardwise.formats.language.expressions import Known, Value
from shardwise.formats.language.match import (
    constants_of,
    count_captures,
    match_rules,
    rank_sizes,
    rule_sizes,
)
from shardwise.formats.language.pieces import (
    Block,
    Part,
    Shares,
    cases,
    listed,
    shares,
    sized,
    spread,
    stencils,
    tensor_shape,
    with_ragged,
)
from shardwise.formats.language.rules import Rule, Spec, Target
from shardwise.formats.language.structure import Structure, structure
from shardwise.layout import Box
from shardwise.layout.flat import boxes_within, row_major
from shardwise.manifest.table import Int

NOTHING = Structure((), (), (), frozenset(), ())


def apply_flat(assembly: Assembly, number: int, rule: Rule, declared: Mapping[str, Value]) -> None:
    """Apply a rule whose arrays are ranges of its tensors, laid one after another, and padding."""
    catalogue, rows = assembly.catalogue, assembly.matches.rows[number]
    long = (catalogue.ndim[rows] != 1) | (catalogue.stride[rows, 0] != 1)
    long &= catalogue.shape[rows].prod(axis=1) > 1
    if long.any():
        assembly.reject(rows[long], rule, "what is flat must have one dimension, without gaps")
        return
    share = _ranges(assembly, number, rule)
    low, before = share.start, np.zeros(len(rows), np.int64)
    try:
        for target in rule.targets:
            before = _apply_flat_target(assembly, (number, rule), target, declared, (low, before))
    except LayoutError as error:
        assembly.reject(rows, rule, str(error))
        return
    short = before > share.total
    if short.any():
        what = f"the tensors have {before[short][0]} elements, of which {share.total[short][0]}"
        assembly.reject(rows[short], rule, f"{what} are there")


def _ranges(assembly: Assembly, number: int, rule: Rule) -> Shares:
    """Where in all that is laid one after another each array begins."""
    catalogue, rows = assembly.catalogue, assembly.matches.rows[number]
    group, position, count = catalogue.name[rows], np.zeros_like(rows), 1
    positions = assembly.positions(number)
    for axis in sorted(assembly.spec.rank_axes - set(rule.flat)):
        group = group * assembly.known.size(axis) + positions[axis]
    for axis in rule.flat:
        count *= assembly.known.size(axis)
        position = position * assembly.known.size(axis) + positions[axis]
    share = shares(group, position, catalogue.shape[rows].prod(axis=1), count)
    for wrong, what in ((share.unequal, "is there twice"), (share.missing, "is nowhere")):
        if len(wrong):
            assembly.reject(rows[np.isin(group, wrong)], rule, f"the share of a rank {what}")
    return share


def _apply_flat_target(
    assembly: Assembly,
    numbered: tuple[int, Rule],
    target: Target,
    declared: Mapping[str, Value],
    ranges: tuple[Int, Int],
) -> Int:
    """Lay one tensor of a rule; returns where what follows it begins, for each array."""
    number, rule = numbered
    rows, (low, before) = assembly.matches.rows[number], ranges
    part = Part(rows, assembly.positions(number), NOTHING, assembly.known.sizes, (), rows)
    tensor = assembly.named(number, target, part)
    after = before.copy()
    for index in np.unique(tensor).tolist():
        which = np.flatnonzero(tensor == index)
        given = assembly.given.get(assembly.tensors.names[index])
        own, sizes = _flat_sizes(assembly, rule, target, given, declared)
        stored = [size_of(node, sizes) or 0 for node in own.stored]
        strides = row_major(np.array([stored], np.int64))[0].tolist()
        mine = replace(part, own=own, tensor=tensor).taken(which, sizes)
        shape = tensor_shape(own.whole, sizes, assembly.known, given)
        assembly.note(mine, shape)
        size = int(np.prod(stored, dtype=np.int64))
        length = assembly.catalogue.shape[mine.rows].prod(axis=1)
        first = low[which] - before[which]
        pairs = zip(first.tolist(), length.tolist(), strict=True)
        bounds = dict(zip(mine.rows.tolist(), pairs, strict=True))
        for stencil in stencils(own, sizes, strides):
            block = spread(stencil, mine.rows, mine.tensor, mine.positions, np.array(shape))
            assembly.blocks.append(_within(block, bounds))
        after[which] += size
    return after


def _flat_sizes(
    assembly: Assembly,
    rule: Rule,
    target: Target,
    given: tuple[int, ...] | None,
    declared: Mapping[str, Value],
) -> tuple[Structure, dict[str, int]]:
    more = 0 if given is None else max(0, len(given) - len(rule.shape_of(target).dims))
    if rule.shape_of(target).rest is not None and given is None:
        raise LayoutError("the shape of what is flat must be known: give it, or declare sizes")
    own = structure(assembly.spec, rule, target, more)
    if own.ragged:
        raise LayoutError("what is flat cannot have a ragged axis")
    base = assembly.sizes(rule, declared)
    known = {name: size for name, size in base.items() if isinstance(size, int)}
    if given is not None and len(given) == len(own.whole):
        pairs = zip(own.whole, given, strict=True)
        known = solve([(dim.node, size) for dim, size in pairs if dim.limit is None], known)
    for node in own.stored:
        if size_of(node, known) is None:
            raise LayoutError("the shape of what is flat must be known: give it, or declare sizes")
    return own, known


def _within(block: Block, bounds: Mapping[int, tuple[int, int]]) -> Block:
    """What each array has of its boxes, where it is a range of what they lie in."""
    found = []
    columns = block.row, block.start, block.offset, block.shape, block.stride
    for i, (row, start, offset, shape, stride) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        low, length = bounds[row]
        for box in _boxes(tuple(shape), tuple(stride), low - start, low + length - start):
            moved = sum(a * b for a, b in zip(box.offset, stride, strict=True))
            there = [a + b for a, b in zip(offset, box.offset, strict=True)]
            found.append((i, start + moved - low, *there, *box.shape))
    table = np.array(found, np.int64).reshape(len(found), 2 + 2 * block.offset.shape[1])
    which, dims = table[:, 0], block.offset.shape[1]
    return Block(
        block.tensor[which],
        block.row[which],
        table[:, 1],
        table[:, 2 : 2 + dims],
        table[:, 2 + dims :],
        block.stride[which],
    )


@lru_cache(maxsize=4096)
def _boxes(shape: tuple[int, ...], stride: tuple[int, ...], low: int, high: int) -> list[Box]:
    return boxes_within(shape, stride, 1, low, high)


def apply_spec(
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


def check_spec(
    spec: Spec,
    catalogue: Catalogue,
    *,
    sizes: Mapping[str, int] | None = None,
    shapes: Shapes | None = None,
) -> Report:
    """Say whether a specification fits, and all that is wrong if it does not: as `apply_spec`."""
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
            _apply_rule(assembly, number, rule)
    return complete(assembly)


def _apply_rule(assembly: Assembly, number: int, rule: Rule) -> None:
    try:
        declared = rule_sizes(rule, assembly.known)
    except LayoutError as error:
        assembly.problems.append(f"{assembly.line(rule)}: {error}")
        return
    if rule.flat:
        apply_flat(assembly, number, rule, declared)
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
