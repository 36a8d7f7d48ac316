"""Choose which rank writes each part, so that ranks write about equally many bytes.

Example: the ranks 0 and 3, 1 and 4, 2 and 5 hold the parts `[0:2,0:4]`, `[2:4,0:4]` and `[4:6,0:4]`
of a weight, and the parts `[0:2]`, `[2:4]` and `[4:6]` of a bias. The ranks 0, 1 and 2 write the
weight, and the ranks 3, 4 and 5 the bias.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from shardwise.kernel.boxes import Box
from shardwise.kernel.boxes.box import IntArray, distinct_rows
from shardwise.kernel.plan.division import Division, split_repeated
from shardwise.kernel.plan.file_layout import PieceGroup
from shardwise.kernel.plan.replicas import Float, OwnerSets, divide_replicas

_Cut = tuple[tuple[int, Box], ...]
"""How a replica is cut: the position of a rank in its set of owners, and the box that it writes."""


def assign_writers(
    divisions: Sequence[Division], sets: Sequence[OwnerSets], world: int
) -> list[PieceGroup]:
    """Choose the pieces that each rank writes, without their offsets in files.

    A rank writes the parts that only it holds. Then replicas are divided among their owners, those
    with few owners first.

    Args:
        divisions: the parts of all tensors.
        sets: the sets of several owners.
        world: the number of ranks.
    """
    loads = np.zeros(world, np.float64)
    groups = []
    for each in divisions:
        if each.owners.shape[1] == 1:
            ranks = each.owners[:, 0]
            boxes = each.offset, each.offset, each.shape, each.sizes
            group = _new_group(each, each.tensors, ranks, *boxes)
            loads[ranks] += group.nbytes * len(group.tensors)
            groups.append(group)
    for owner_sets in sets:
        groups += _divide(owner_sets, loads)
    return groups


def _new_group(
    division: Division,
    tensors: IntArray,
    ranks: IntArray,
    box: IntArray,
    offset: IntArray,
    shape: IntArray,
    sizes: IntArray,
) -> PieceGroup:
    itemsize, owner_count = division.itemsize, division.owners.shape[1]
    nbytes = sizes * itemsize
    nowhere, no_starts = np.zeros(0, np.int64), np.zeros((0, 0), np.int64)
    pieces = tensors, itemsize, ranks, box, offset, shape, nbytes, owner_count
    return PieceGroup(*pieces, nowhere, no_starts)


def _divide(sets: OwnerSets, loads: Float) -> Iterator[PieceGroup]:
    """Divide what sets of ranks hold. Sets with equal loads and parts of equal shapes are alike."""
    owners = sets.owners
    # A set without a part in a division has the last kind, which is -1.
    kinds = [np.append(distinct_rows(d.shape)[1], -1)[part_of] for d, part_of in sets.held]
    first, kind = distinct_rows(np.column_stack([loads[owners].astype(np.int64), *kinds]))
    for i, example in enumerate(first.tolist()):
        members = np.flatnonzero(kind == i)
        ranks, alike = owners[example], owners[members]
        before = loads[ranks]
        cut = _cut_replicas(sets, example, loads)
        added = loads[ranks] - before
        loads[ranks] = before
        loads[alike] += added  # no rank is in two sets
        for (which, pieces), tensors in cut.items():
            division, part_of = sets.held[which]
            position = [position for position, _ in pieces]
            within = np.array([each.offset for _, each in pieces], np.int64)
            extent = np.array([each.shape for _, each in pieces], np.int64)
            # One row for each set and piece.
            box = division.offset[part_of[members]].repeat(len(pieces), axis=0)
            piece = np.arange(len(box)) % len(pieces)
            offset, shape, sizes = box + within[piece], extent[piece], extent.prod(axis=1)[piece]
            writers = alike[:, position].reshape(-1)
            are_distinct = len({*position}) == len(position)
            for rows in [slice(None)] if are_distinct else split_repeated(writers):
                columns = writers[rows], box[rows], offset[rows], shape[rows], sizes[rows]
                yield _new_group(division, np.array(tensors, np.int64), *columns)


def _cut_replicas(sets: OwnerSets, row: int, loads: Float) -> dict[tuple[int, _Cut], list[int]]:
    """Divide what one set of ranks holds, and add it to their loads.

    Returns:
        The tensors that are cut alike, by the index in `sets.held` and the pieces.
    """
    listed, example = [], {}
    for which, (division, part_of) in enumerate(sets.held):
        part = int(part_of[row])
        if part >= 0:
            offset = division.offset[part].tolist()
            example[which] = tuple(division.shape[part].tolist()), division.itemsize
            listed += [(tensor, offset, which) for tensor in division.tensors.tolist()]
    listed.sort()
    ranks = sets.owners[row].tolist()
    pieces: list[list[tuple[int, Box]]] = [[] for _ in listed]
    for index, rank, box in divide_replicas([example[which] for *_, which in listed], ranks, loads):
        pieces[index].append((bisect_left(ranks, rank), box))
    cut: dict[tuple[int, _Cut], list[int]] = {}
    for (tensor, _, which), each in zip(listed, pieces, strict=True):
        cut.setdefault((which, tuple(each)), []).append(tensor)
    return cut
