"""Choose which rank writes each box, so that ranks write about equally many bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.boxes.box import IntArray, distinct_rows
from shardwise.plan.division import Division
from shardwise.plan.file_layout import PieceGroup, PieceRows
from shardwise.plan.replicas import Float, divide_replicas
from shardwise.plan.structure import HeldBoxes

_RowSet = tuple[tuple[int, ...], IntArray]
"""A set of ranks, and the rows of the boxes that exactly these ranks hold."""
_NOWHERE = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Replicas:
    """The boxes that exactly the same ranks hold, this rank among them.

    Attributes:
        number: the number of the set of ranks, which is equal on these ranks.
        holders: the number of these ranks.
        is_first_holder: whether this rank is the first of them.
        fragment: for each box, the index of this rank's fragment that the box is, `(n,)`. The order
            is the same on all holders.
    """

    number: int
    holders: int
    is_first_holder: bool
    fragment: IntArray


def assign_writers(
    boxes: HeldBoxes, divisions: Sequence[Division], itemsizes: IntArray, world: int
) -> tuple[PieceRows, list[PieceGroup]]:
    """Choose the pieces that each rank writes, without their offsets in files.

    A rank writes the boxes that only it holds. Then replicas are divided among their holders, those
    with few holders first.

    Args:
        boxes, divisions: the boxes of all tensors.
        itemsizes: the size of an element of each tensor, in bytes.
        world: the number of ranks.
    """
    loads = np.zeros(world, np.float64)
    rows = [_rows_of_single_holders(boxes, itemsizes, loads)]
    groups: list[PieceGroup] = []
    for division in divisions:
        if division.holders.shape[1] == 1:
            groups += _groups_of_single_holders(division, loads)
    jobs: list[tuple[int, int, _RowSet | list[Division]]] = []
    jobs += [(len(holders), 0, (holders, found)) for holders, found in replicated_rows(boxes)]
    jobs += [(pool[0].holders.shape[1], 1, pool) for pool in _pools_of(divisions)]
    for _, _, job in sorted(jobs, key=lambda job: job[:2]):
        if isinstance(job, list):
            groups += _divide_pool(job, loads)
        else:
            rows.append(_divide_rows(boxes, *job, itemsizes, loads))
    return PieceRows.join(rows), groups


def find_replicas(
    boxes: HeldBoxes,
    divisions: Sequence[Division],
    rank: int,
    fragment_at: Mapping[tuple[int, tuple[int, ...]], int],
    world: int,
) -> list[Replicas]:
    """Return the boxes that a rank and other ranks hold.

    Args:
        boxes, divisions: the boxes of all tensors.
        rank: the rank.
        fragment_at: the index of the rank's fragment with a tensor and an offset.
        world: the number of ranks.
    """
    found = []
    sets = replicated_rows(boxes)
    for number, (ranks, rows) in enumerate(sets):
        if rank in ranks:
            is_first = rank == ranks[0]
            found.append(Replicas(number, len(ranks), is_first, boxes.fragment[rows]))
    for index, pool in enumerate(_pools_of(divisions)):
        holders = pool[0].holders
        for row in np.flatnonzero((holders == rank).any(axis=1)).tolist():
            held = sorted(
                (tensor, tuple(division.offset[row].tolist()))
                for division in pool
                for tensor in division.tensors.tolist()
            )
            fragment = np.array([fragment_at[each] for each in held], np.int64)
            number = len(sets) + index * world + int(holders[row, 0])
            is_first = rank == int(holders[row, 0])
            found.append(Replicas(number, holders.shape[1], is_first, fragment))
    return found


def bytes_held(boxes: HeldBoxes, divisions: Sequence[Division], itemsizes: IntArray) -> int:
    """Return the tensor bytes of all ranks together, with replicas."""
    holders = np.array([*map(len, boxes.sets)], np.int64)[boxes.holders]
    total = int((boxes.shape.prod(axis=1) * itemsizes[boxes.tensor] * holders).sum())
    for division in divisions:
        elements = int(division.shape.prod(axis=1).sum()) * len(division.tensors)
        total += elements * division.itemsize * division.holders.shape[1]
    return total


def replicated_rows(boxes: HeldBoxes) -> list[_RowSet]:
    """Return the sets of several ranks, small sets first, and the rows of the boxes they hold."""
    order = np.argsort(boxes.holders, kind="stable")
    limits = np.searchsorted(boxes.holders[order], np.arange(1, len(boxes.sets)))
    rows_of = np.split(order, limits)
    found = [
        (ranks, rows)
        for ranks, rows in zip(boxes.sets, rows_of, strict=False)
        if len(ranks) > 1 and len(rows)
    ]
    return sorted(found, key=lambda each: (len(each[0]), each[0]))


def _pools_of(divisions: Sequence[Division]) -> list[list[Division]]:
    """Return the divisions with several holders for each part, grouped by equal holders."""
    pools: dict[tuple[int, bytes], list[Division]] = {}
    for division in divisions:
        count = division.holders.shape[1]
        if count > 1:
            pools.setdefault((count, division.holders.tobytes()), []).append(division)
    return [*pools.values()]


def _rows_of_single_holders(boxes: HeldBoxes, itemsizes: IntArray, loads: Float) -> PieceRows:
    is_alone = np.array([len(ranks) == 1 for ranks in boxes.sets], bool)
    rows = np.flatnonzero(is_alone[boxes.holders])
    first_rank = np.array([ranks[0] for ranks in boxes.sets], np.int64)
    ranks = first_rank[boxes.holders[rows]]
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
    holders: int,
) -> PieceRows:
    """Return pieces of the boxes in some rows."""
    tensor = boxes.tensor[rows]
    zeros = np.zeros(len(rows), np.int64)
    nbytes = shape.prod(axis=1) * itemsizes[tensor]
    fragment = boxes.fragment[rows]
    return PieceRows(ranks, tensor, fragment, zeros + holders, nbytes, zeros, offset, shape)


def _divide_rows(
    boxes: HeldBoxes,
    holders: tuple[int, ...],
    rows: IntArray,
    itemsizes: IntArray,
    loads: Float,
) -> PieceRows:
    shapes, sizes = boxes.shape[rows].tolist(), itemsizes[boxes.tensor[rows]].tolist()
    parts = divide_replicas(list(zip(map(tuple, shapes), sizes, strict=True)), holders, loads)
    part_rows = rows[[index for index, _, _ in parts]]
    ranks = np.array([rank for _, rank, _ in parts], np.int64)
    within = np.array([box.offset for _, _, box in parts], np.int64)
    shape = np.array([box.shape for _, _, box in parts], np.int64)
    offset = boxes.offset[part_rows] + within
    return _piece_rows(boxes, part_rows, ranks, offset, shape, itemsizes, len(holders))


def _groups_of_single_holders(division: Division, loads: Float) -> list[PieceGroup]:
    """Return a group for each distinct shape of the parts."""
    first, kind = distinct_rows(division.shape)
    groups = []
    for number, shape in enumerate(division.shape[first]):
        parts = np.flatnonzero(kind == number)
        ranks = division.holders[parts, 0]
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
    holders: int = 1,
) -> PieceGroup:
    starts = np.zeros((0, 0), np.int64)
    return PieceGroup(tensors, ranks, box, within, shape, nbytes, holders, _NOWHERE, starts)


def _divide_pool(pool: Sequence[Division], loads: Float) -> list[PieceGroup]:
    """Divide the parts of a pool. Sets of holders with the same boxes and loads are alike."""
    holders = pool[0].holders
    signature = np.column_stack([*(each.shape for each in pool), loads[holders].astype(np.int64)])
    first, kind = distinct_rows(signature)
    # The sequence of boxes that each set divides: tensors in their order.
    listed = sorted(
        (tensor, number)
        for number, division in enumerate(pool)
        for tensor in division.tensors.tolist()
    )
    groups = []
    for number, example in enumerate(first.tolist()):
        members = np.flatnonzero(kind == number)
        ranks = holders[example]
        before = loads[ranks]
        replicas = [
            (tuple(pool[which].shape[example].tolist()), pool[which].itemsize)
            for _, which in listed
        ]
        parts = divide_replicas(replicas, ranks.tolist(), loads)
        added = loads[ranks] - before
        loads[ranks] = before
        loads[holders[members]] += added  # no rank is in two sets
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
                    holders[members, position],
                    pool[which].offset[members],
                    np.array(offset, np.int64),
                    extent,
                    int(extent.prod()) * pool[which].itemsize,
                    holders=holders.shape[1],
                )
            )
    return groups
