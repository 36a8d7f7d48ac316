"""Apply a specification to the arrays in the files of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardwise.errors import LayoutError, MismatchError
from shardwise.formats.foreign import Catalogue, Foreign
from shardwise.formats.language.assembly import Assembly, finish
from shardwise.formats.language.axes import size_of
from shardwise.formats.language.expressions import Known, Value
from shardwise.formats.language.match import (
    constants_of,
    count_captures,
    match_rules,
    rank_sizes,
    rule_sizes,
)
from shardwise.formats.language.pieces import (
    ArrayGroup,
    Boxes,
    Shares,
    boxes_of,
    group_by_shape,
    repeat_listed,
    shares,
    solve_sizes,
    split_by_shares,
    stencils,
    tensor_shape,
)
from shardwise.formats.language.rules import Rule, Spec, Target
from shardwise.formats.language.structure import Structure, structure
from shardwise.layout import Box
from shardwise.layout.flat import boxes_within, row_major
from shardwise.manifest.table import Int

NO_STRUCTURE = Structure((), (), (), frozenset(), ())


def apply_spec(
    spec: Spec, catalogue: Catalogue, *, sizes: Mapping[str, int] | None = None
) -> Foreign:
    """Return the checkpoint that a specification makes of the arrays of all ranks.

    Every element of every tensor is there exactly once, apart from replicas and averages, and
    every stored array is used or skipped.

    Args:
        sizes: values for numbers that the specification declares with `let`; they override it.

    Raises:
        MismatchError: the specification does not fit; `problems` lists everything that is wrong.
    """
    try:
        known = Known(
            sizes=rank_sizes(spec, catalogue.axes), constants=constants_of(spec, sizes or {})
        )
        matches = match_rules(spec, catalogue, known)
        known = count_captures(spec, catalogue, matches, known)
    except MismatchError as error:
        raise _does_not_fit(spec, error.problems) from error
    except LayoutError as error:
        raise _does_not_fit(spec, [str(error)]) from error
    assembly = Assembly(spec, catalogue, matches, known)
    for number, rule in enumerate(spec.rules):
        if isinstance(rule, Rule) and len(matches.rows[number]):
            _apply_rule(assembly, number, rule)
    foreign = finish(assembly)
    if assembly.problems:
        raise _does_not_fit(spec, assembly.problems)
    return foreign


def _does_not_fit(spec: Spec, problems: list[str]) -> MismatchError:
    what = f"{spec.text.source} does not fit the checkpoint:"
    return MismatchError(what, list(dict.fromkeys(problems)))


def _apply_rule(assembly: Assembly, number: int, rule: Rule) -> None:
    try:
        declared = rule_sizes(rule, assembly.known)
    except LayoutError as error:
        assembly.problems.append(f"{assembly.line(rule)}: {error}")
        return
    if rule.flat:
        _apply_flat(assembly, number, rule, declared)
        return
    lists = {name: size for name, size in declared.items() if isinstance(size, tuple)}
    for target in rule.targets:
        groups = _groups(assembly, number, target, declared)
        for group in split_by_shares(groups, lists, assembly.complain):
            _add_boxes(assembly, rule, group)


def _groups(
    assembly: Assembly, number: int, target: Target, declared: Mapping[str, Value]
) -> list[ArrayGroup]:
    """Group a rule's arrays by shape; reject those whose shape does not fit."""
    rule, rows = assembly.rule(number), assembly.matches.rows[number]
    catalogue = assembly.catalogue
    positions = assembly.positions(number)
    sizes = assembly.sizes(rule, declared)
    found = []
    for which in group_by_shape(catalogue, rows):
        first = int(rows[which[0]])
        ndim = int(catalogue.ndim[first])
        array = tuple(catalogue.shape[first, :ndim].tolist())
        strides = tuple(catalogue.stride[first, :ndim].tolist())
        here = rows[which]
        try:
            own, solved = solve_sizes(assembly.spec, rule, target, array, sizes)
            column = {axis: position[which] for axis, position in positions.items()}
            group = ArrayGroup(here, column, own, solved, strides, np.zeros_like(here))
            group = repeat_listed(group)
            tensor = assembly.tensors_of(number, target, group)
        except LayoutError as error:
            assembly.reject(here, rule, f"{list(array)}: {error}")
            continue
        found.append(replace(group, tensor=tensor))
    return found


def _add_boxes(assembly: Assembly, rule: Rule, group: ArrayGroup) -> None:
    try:
        shape = tensor_shape(group.own.whole, group.sizes, assembly.known)
        assembly.arrays.append((group.tensor, group.rows, shape))
        for stencil in stencils(group.own, group.sizes, group.strides):
            limits = np.array(shape, np.int64)
            boxes = boxes_of(stencil, group.rows, group.tensor, group.positions, limits)
            assembly.boxes.append(boxes)
    except LayoutError as error:
        assembly.reject(group.rows, rule, str(error))


def _apply_flat(assembly: Assembly, number: int, rule: Rule, declared: Mapping[str, Value]) -> None:
    """Apply a `flat over` rule: its arrays are ranges of its tensors, concatenated, and padding."""
    catalogue, rows = assembly.catalogue, assembly.matches.rows[number]
    strided = (catalogue.ndim[rows] != 1) | (catalogue.stride[rows, 0] != 1)
    strided &= catalogue.shape[rows].prod(axis=1) > 1
    if strided.any():
        what = "an array of a `flat` rule must be contiguous and have one dimension"
        assembly.reject(rows[strided], rule, what)
        return
    ranges = _flat_ranges(assembly, number, rule)
    before = 0
    try:
        for target in rule.targets:
            before += _add_flat_boxes(assembly, number, target, declared, (ranges.start, before))
    except LayoutError as error:
        assembly.reject(rows, rule, str(error))
        return
    short = before > ranges.total
    if short.any():
        total = ranges.total[short][0]
        what = f"the tensors have {before} elements, but the arrays have only {total}"
        assembly.reject(rows[short], rule, what)


def _flat_ranges(assembly: Assembly, number: int, rule: Rule) -> Shares:
    """Find where each array begins in the concatenated tensors."""
    catalogue, rows = assembly.catalogue, assembly.matches.rows[number]
    group, position, count = catalogue.name[rows], np.zeros_like(rows), 1
    positions = assembly.positions(number)
    for axis in sorted(assembly.spec.rank_axes - set(rule.flat)):
        group = group * assembly.known.size(axis) + positions[axis]
    for axis in rule.flat:
        count *= assembly.known.size(axis)
        position = position * assembly.known.size(axis) + positions[axis]
    share = shares(group, position, catalogue.shape[rows].prod(axis=1), count)
    for wrong, what in ((share.unequal, "there twice"), (share.missing, "missing")):
        if len(wrong):
            assembly.reject(rows[np.isin(group, wrong)], rule, f"the share of a rank is {what}")
    return share


def _add_flat_boxes(
    assembly: Assembly,
    number: int,
    target: Target,
    declared: Mapping[str, Value],
    at: tuple[Int, int],
) -> int:
    """Add the boxes of one tensor of a flat rule; return the number of its elements.

    Args:
        at: where each array and where the tensor begins in the concatenated tensors.
    """
    rule, rows = assembly.rule(number), assembly.matches.rows[number]
    own, sizes = _flat_sizes(assembly, rule, target, declared)
    counts = [size_of(node, sizes) or 0 for node in own.stored]
    strides = row_major(np.array([counts], np.int64))[0].tolist()
    shape = tensor_shape(own.whole, sizes, assembly.known)
    positions = assembly.positions(number)
    group = ArrayGroup(rows, positions, NO_STRUCTURE, assembly.known.sizes, (), rows)
    group = replace(group, tensor=assembly.tensors_of(number, target, group), sizes=sizes)
    assembly.arrays.append((group.tensor, rows, shape))
    low, before = at
    length = assembly.catalogue.shape[rows].prod(axis=1)
    pairs = zip((low - before).tolist(), length.tolist(), strict=True)
    bounds = dict(zip(rows.tolist(), pairs, strict=True))
    for stencil in stencils(own, sizes, strides):
        boxes = boxes_of(stencil, rows, group.tensor, positions, np.array(shape))
        assembly.boxes.append(_cut(boxes, bounds))
    return int(np.prod(counts, dtype=np.int64))


def _flat_sizes(
    assembly: Assembly, rule: Rule, target: Target, declared: Mapping[str, Value]
) -> tuple[Structure, dict[str, int]]:
    own = structure(assembly.spec, rule, target, 0)
    if own.ragged:
        raise LayoutError("a tensor of a `flat` rule cannot have a ragged axis")
    base = assembly.sizes(rule, declared)
    known = {name: size for name, size in base.items() if isinstance(size, int)}
    shape = rule.shape_of(target)
    if shape.rest is not None or any(size_of(node, known) is None for node in own.stored):
        raise LayoutError(
            "the shapes of the tensors of a `flat` rule do not follow from the arrays: give "
            "dimensions in brackets, and their sizes with `where`"
        )
    return own, known


def _cut(boxes: Boxes, bounds: Mapping[int, tuple[int, int]]) -> Boxes:
    """Cut boxes to the range of elements that each array has.

    Args:
        bounds: for each row of the catalogue, the first element and the number of elements.
    """
    found = []
    columns = boxes.row, boxes.start, boxes.offset, boxes.shape, boxes.stride
    for i, (row, start, offset, shape, stride) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        low, length = bounds[row]
        for box in _boxes_within(tuple(shape), tuple(stride), low - start, low + length - start):
            moved = sum(a * b for a, b in zip(box.offset, stride, strict=True))
            there = [a + b for a, b in zip(offset, box.offset, strict=True)]
            found.append((i, start + moved - low, *there, *box.shape))
    dims = boxes.offset.shape[1]
    table = np.array(found, np.int64).reshape(len(found), 2 + 2 * dims)
    which = table[:, 0]
    return Boxes(
        boxes.tensor[which],
        boxes.row[which],
        table[:, 1],
        table[:, 2 : 2 + dims],
        table[:, 2 + dims :],
        boxes.stride[which],
    )


@lru_cache(maxsize=4096)
def _boxes_within(
    shape: tuple[int, ...], stride: tuple[int, ...], low: int, high: int
) -> list[Box]:
    return boxes_within(shape, stride, 1, low, high)
