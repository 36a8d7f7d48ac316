"""Choose which rank writes each box, so that ranks write about equally many bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardwise.boxes.box import IntArray, distinct_rows
from shardwise.plan.division import Division
from shardwise.plan.file_layout import PieceGroup, PieceRows
from shardwise.plan.replicas import (
    Float,
    RowSet,
    divide_replicas,
    pools_of,
    replicated_rows,
)
from shardwise.plan.structure import HeldBoxes

_NOWHERE = np.zeros(0, np.int64)


def assign_writers(
    boxes: HeldBoxes, divisions: Sequence[Division], itemsizes: IntArray, world: int
) -> tuple[PieceRows, list[PieceGroup]]:
    """Choose the pieces that each rank writes, without their offsets in files.

    A rank writes the boxes that only it holds. Then replicas are divided among their owners, those
    with few owners first.

    Args:
        boxes, divisions: the boxes of all tensors.
        itemsizes: the size of an element of each tensor, in bytes.
        world: the number of ranks.
    """
    loads = np.zeros(world, np.float64)
    rows = [_rows_of_single_owners(boxes, itemsizes, loads)]
    groups: list[PieceGroup] = []
    for division in divisions:
        if division.owners.shape[1] == 1:
            groups += _groups_of_single_owners(division, loads)
    jobs: list[tuple[int, int, RowSet | list[Division]]] = []
    jobs += [(len(owners), 0, (owners, found)) for owners, found in replicated_rows(boxes)]
    jobs += [(pool[0].owners.shape[1], 1, pool) for pool in pools_of(divisions)]
    for _, _, job in sorted(jobs, key=lambda job: job[:2]):
        if isinstance(job, list):
            groups += _divide_pool(job, loads)
        else:
            rows.append(_divide_rows(boxes, *job, itemsizes, loads))
    return PieceRows.join(rows), groups


def bytes_held(boxes: HeldBoxes, divisions: Sequence[Division], itemsizes: IntArray) -> int:
    """Return the tensor bytes of all ranks together, with replicas."""
    owner_count = np.array([*map(len, boxes.owner_sets)], np.int64)[boxes.owner_set]
    total = int((boxes.shape.prod(axis=1) * itemsizes[boxes.tensor] * owner_count).sum())
    for division in divisions:
        elements = int(division.shape.prod(axis=1).sum()) * len(division.tensors)
        total += elements * division.itemsize * division.owners.shape[1]
    return total


def _rows_of_single_owners(boxes: HeldBoxes, itemsizes: IntArray, loads: Float) -> PieceRows:
    is_alone = np.array([len(ranks) == 1 for ranks in boxes.owner_sets], bool)
    rows = np.flatnonzero(is_alone[boxes.owner_set])
    first_rank = np.array([ranks[0] for ranks in boxes.owner_sets], np.int64)
    ranks = first_rank[boxes.owner_set[rows]]
    pieces = _piece_rows(boxes, rows, ranks, boxes.offset[rows], boxes.shape[rows], itemsizes, 1)
    loads += np.bincount(ranks, weights=pieces.nbytes, minlength=len(loads))
    return pieces


def _piece_rows(
    boxes: HeldBoxes,
    rows: IntArray,
    ranks: IntArray,
    offset: IntArray,
    shape: IntArray,
    itemsizes: IntArray,
    owner_count: int,
) -> PieceRows:
    """Return pieces of the boxes in some rows."""
    tensor = boxes.tensor[rows]
    zeros = np.zeros(len(rows), np.int64)
    nbytes = shape.prod(axis=1) * itemsizes[tensor]
    fragment = boxes.fragment[rows]
    return PieceRows(ranks, tensor, fragment, zeros + owner_count, nbytes, zeros, offset, shape)


def _divide_rows(
    boxes: HeldBoxes,
    owners: tuple[int, ...],
    rows: IntArray,
    itemsizes: IntArray,
    loads: Float,
) -> PieceRows:
    shapes, sizes = boxes.shape[rows].tolist(), itemsizes[boxes.tensor[rows]].tolist()
    parts = divide_replicas(list(zip(map(tuple, shapes), sizes, strict=True)), owners, loads)
    part_rows = rows[[index for index, _, _ in parts]]
    ranks = np.array([rank for _, rank, _ in parts], np.int64)
    within = np.array([box.offset for _, _, box in parts], np.int64)
    shape = np.array([box.shape for _, _, box in parts], np.int64)
    offset = boxes.offset[part_rows] + within
    return _piece_rows(boxes, part_rows, ranks, offset, shape, itemsizes, len(owners))


def _groups_of_single_owners(division: Division, loads: Float) -> list[PieceGroup]:
    """Return a group for each distinct shape of the parts."""
    first, kind = distinct_rows(division.shape)
    groups = []
    for i, shape in enumerate(division.shape[first]):
        parts = np.flatnonzero(kind == i)
        ranks = division.owners[parts, 0]
        within = np.zeros(len(shape), np.int64)
        nbytes = int(shape.prod()) * division.itemsize
        offset = division.offset[parts]
        groups.append(_new_group(division.tensors, ranks, offset, within, shape, nbytes))
        loads[ranks] += nbytes * len(division.tensors)
    return groups


def _new_group(
    tensors: IntArray,
    ranks: IntArray,
    box: IntArray,
    within: IntArray,
    shape: IntArray,
    nbytes: int,
    *,
    owner_count: int = 1,
) -> PieceGroup:
    starts = np.zeros((0, 0), np.int64)
    return PieceGroup(tensors, ranks, box, within, shape, nbytes, owner_count, _NOWHERE, starts)


def _divide_pool(pool: Sequence[Division], loads: Float) -> list[PieceGroup]:
    """Divide the parts of a pool. Sets of owners with the same boxes and loads are alike."""
    owners = pool[0].owners
    signature = np.column_stack([*(each.shape for each in pool), loads[owners].astype(np.int64)])
    first, kind = distinct_rows(signature)
    # The sequence of boxes that each set divides: tensors in their order.
    listed = sorted(
        (tensor, which)
        for which, division in enumerate(pool)
        for tensor in division.tensors.tolist()
    )
    groups = []
    for i, example in enumerate(first.tolist()):
        members = np.flatnonzero(kind == i)
        ranks = owners[example]
        before = loads[ranks]
        replicas = [
            (tuple(pool[which].shape[example].tolist()), pool[which].itemsize)
            for _, which in listed
        ]
        parts = divide_replicas(replicas, ranks.tolist(), loads)
        added = loads[ranks] - before
        loads[ranks] = before
        loads[owners[members]] += added  # no rank is in two sets
        position_of = {rank: position for position, rank in enumerate(ranks.tolist())}
        merged: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for index, rank, box in parts:
            tensor, which = listed[index]
            key = which, position_of[rank], box.offset, box.shape
            merged.setdefault(key, []).append(tensor)
        for (which, position, offset, shape), tensors in merged.items():
            extent = np.array(shape, np.int64)
            groups.append(
                _new_group(
                    np.array(tensors, np.int64),
                    owners[members, position],
                    pool[which].offset[members],
                    np.array(offset, np.int64),
                    extent,
                    int(extent.prod()) * pool[which].itemsize,
                    owner_count=owners.shape[1],
                )
            )
    return groups
