"""Replicas: boxes that several ranks, their owners, hold. Each byte of them is written once."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.boxes import Box, boxes_of_range
from shardwise.boxes.box import IntArray
from shardwise.plan.division import Division
from shardwise.plan.structure import HeldBoxes

Float = npt.NDArray[np.float64]
RowSet = tuple[tuple[int, ...], IntArray]
"""A set of ranks, and the rows of the boxes that exactly these ranks hold."""
LARGEST_GRAIN = 1 << 20
SMALLEST_GRAIN = 1 << 16
"""Bounds on the unit, in bytes, at which replicas are cut; see `divide_replicas`."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """The boxes that exactly the same ranks hold, this rank among them.

    Attributes:
        set_id: identifies this set of ranks; equal on these ranks.
        owner_count: the number of these ranks.
        is_first_owner: whether this rank is the first of them.
        fragment: for each box, the index of this rank's fragment that the box is, `(n,)`. The order
            is the same on all these ranks.
    """

    set_id: int
    owner_count: int
    is_first_owner: bool
    fragment: IntArray


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
    for set_id, (ranks, rows) in enumerate(sets):
        if rank in ranks:
            is_first = rank == ranks[0]
            found.append(Replicas(set_id, len(ranks), is_first, boxes.fragment[rows]))
    for index, pool in enumerate(pools_of(divisions)):
        owners = pool[0].owners
        for row in np.flatnonzero((owners == rank).any(axis=1)).tolist():
            held = sorted(
                (tensor, tuple(division.offset[row].tolist()))
                for division in pool
                for tensor in division.tensors.tolist()
            )
            fragment = np.array([fragment_at[each] for each in held], np.int64)
            set_id = len(sets) + index * world + int(owners[row, 0])
            is_first = rank == int(owners[row, 0])
            found.append(Replicas(set_id, owners.shape[1], is_first, fragment))
    return found


def replicated_rows(boxes: HeldBoxes) -> list[RowSet]:
    """Return the sets of several ranks, small sets first, and the rows of the boxes they hold."""
    order = np.argsort(boxes.owner_set, kind="stable")
    limits = np.searchsorted(boxes.owner_set[order], np.arange(1, len(boxes.owner_sets)))
    rows_of = np.split(order, limits)
    found = [
        (ranks, rows)
        for ranks, rows in zip(boxes.owner_sets, rows_of, strict=False)
        if len(ranks) > 1 and len(rows)
    ]
    return sorted(found, key=lambda each: (len(each[0]), each[0]))


def pools_of(divisions: Sequence[Division]) -> list[list[Division]]:
    """Return the divisions with several owners for each part, grouped by equal owners."""
    pools: dict[tuple[int, bytes], list[Division]] = {}
    for division in divisions:
        count = division.owners.shape[1]
        if count > 1:
            pools.setdefault((count, division.owners.tobytes()), []).append(division)
    return [*pools.values()]


def water_fill(loads: Float, amount: float) -> Float:
    """Divide `amount` so that the loads become as equal as possible.

    Returns:
        The amount to add to each load.
    """
    ordered = np.sort(loads)
    levels = (np.cumsum(ordered) + amount) / np.arange(1, len(ordered) + 1)
    suffices = np.append(levels[:-1] <= ordered[1:], True)
    poured: Float = np.maximum(levels[np.argmax(suffices)] - loads, 0.0)
    return poured


def divide_replicas(
    replicas: Sequence[tuple[tuple[int, ...], int]],
    owners: Sequence[int],
    loads: Float,
    *,
    grain: int | None = None,
) -> list[tuple[int, int, Box]]:
    """Divide replicas among the ranks that hold them, and cut replicas where the parts meet.

    The replicas form a sequence of bytes. Each owner gets one range of this sequence, so that the
    loads become even. For example, two ranks with equal loads hold a tensor of 6 MiB and one of
    2 MiB: the first rank gets 4 MiB of the first tensor, and the second rank gets the rest.

    Args:
        replicas: the shape and itemsize of each replica. The same ranks hold all of them.
        owners: the ranks that hold the replicas.
        loads: the bytes assigned to each rank so far, float64; updated in place.
        grain: a replica is cut at multiples of about this many bytes, and a smaller one stays
            whole. Default: 1/32 of an owner's part, between `SMALLEST_GRAIN` and `LARGEST_GRAIN`.

    Returns:
        The index of a replica, the rank that writes this part of it, and the box of the part,
        relative to the replica; in the order of the sequence.
    """
    sizes = [math.prod(shape) * itemsize for shape, itemsize in replicas]
    if grain is None:
        part = sum(sizes) // (32 * len(owners))
        grain = max(SMALLEST_GRAIN, min(LARGEST_GRAIN, part))
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    even_bounds = np.cumsum(water_fill(loads[list(owners)], float(starts[-1]))).tolist()
    bounds = [0]
    for bound in even_bounds[:-1]:
        if bounds[-1] == starts[-1]:
            break  # nothing is left for the other owners
        bounds.append(_nearest_cut(replicas, starts, bounds[-1], bound, grain))
    bounds.append(starts[-1])
    parts = []
    for rank, low, high in zip(owners, bounds, bounds[1:], strict=False):
        loads[rank] += high - low
        for index in range(bisect_right(starts, low) - 1, bisect_left(starts, high)):
            itemsize = replicas[index][1]
            first = max(0, low - starts[index]) // itemsize
            last = min(sizes[index], high - starts[index]) // itemsize
            parts += [(index, rank, box) for box in boxes_of_range(replicas[index][0], first, last)]
    return parts


def _nearest_cut(
    replicas: Sequence[tuple[tuple[int, ...], int]],
    starts: list[int],
    previous: int,
    bound: float,
    grain: int,
) -> int:
    """Return where to cut a sequence of replicas, near a position. All positions are in bytes.

    A cut between two replicas is preferred if it is at most half a grain away. For example, a
    float32 tensor of shape (8, 4) has rows of 16 bytes. With a grain of 32, it is cut after every 2
    rows: at byte 64, if the position is 70.

    Args:
        replicas: the shape and itemsize of each replica.
        starts: the first byte of each replica, and the end of the last one.
        previous: the cut before.
        bound: the position.
    """
    index = max(bisect_left(starts, bound - grain / 2), bisect_right(starts, previous))
    if index == len(starts) or starts[index] <= bound + grain / 2:
        return starts[min(index, len(starts) - 1)]
    shape, itemsize = replicas[index - 1]
    unit = itemsize
    for n in reversed(shape):
        if unit * n > grain:
            break
        unit *= n
    unit *= max(1, grain // unit)
    start = starts[index - 1]
    begin = max(previous, start)
    return max(begin, start + (begin + round(bound - begin) - start) // unit * unit)
