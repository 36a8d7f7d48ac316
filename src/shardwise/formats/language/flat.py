"""Arrays that were flattened, laid one after another, and divided among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np

from shardwise.errors import LayoutError
from shardwise.formats.language.assembly import Assembly
from shardwise.formats.language.axes import size_of, solve
from shardwise.formats.language.numbers import Value
from shardwise.formats.language.parts import Part, tensor_shape
from shardwise.formats.language.pieces import Block, spread, stencils
from shardwise.formats.language.ragged import Shares, shares
from shardwise.formats.language.rules import Rule, Target
from shardwise.formats.language.structure import Structure, structure
from shardwise.layout import Box
from shardwise.layout.flat import boxes_within, row_major
from shardwise.manifest.table import Int

NOTHING = Structure((), (), (), frozenset(), ())


def lay_flat(assembly: Assembly, number: int, rule: Rule, declared: Mapping[str, Value]) -> None:
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
            before = _lay_target(assembly, (number, rule), target, declared, (low, before))
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


def _lay_target(
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
        own, sizes = _sized(assembly, rule, target, given, declared)
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


def _sized(
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
