"""Replicas: boxes that several ranks, their owners, hold. Each byte of them is written once."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.kernel.boxes import Box, boxes_of_range
from shardwise.kernel.boxes.box import IntArray
from shardwise.kernel.plan.division import Division

Float = npt.NDArray[np.float64]
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


@dataclass(frozen=True, slots=True, eq=False)
class OwnerSets:
    """s sets of m ranks, and the parts that exactly these ranks hold. No rank is in two sets.

    Attributes:
        first_id: the id of the first set; those of the others follow.
        owners: the ranks of each set, ascending, `(s, m)`.
        held: divisions, and which part of each tensor the ranks of each set hold; -1 for none,
            `(s,)`.
    """

    first_id: int
    owners: IntArray
    held: list[tuple[Division, IntArray]]


def find_owner_sets(divisions: Iterable[Division]) -> list[OwnerSets]:
    """Return the sets of several ranks that hold a part, small sets first.

    For example, the ranks 0 and 1 hold one half of a matrix, and 2 and 3 the other. Both hold a
    half of another matrix, too. All four hold a bias. Then there are the sets (0, 1) and (2, 3),
    which hold parts of two tensors, and the set (0, 1, 2, 3).
    """
    tables: dict[tuple[int, bytes], list[Division]] = {}
    for division in divisions:
        count = division.owners.shape[1]
        if count > 1:
            tables.setdefault((count, division.owners.tobytes()), []).append(division)
    ids: dict[bytes, int] = {}
    found: list[OwnerSets] = []
    for _, alike in sorted(tables.items(), key=lambda table: table[0][0]):
        owners, before = alike[0].owners, len(ids)
        id_of = np.array([ids.setdefault(each.tobytes(), len(ids)) for each in owners], np.int64)
        new = owners[id_of >= before]
        are_disjoint = np.bincount(new.reshape(-1)).max(initial=0) <= 1
        for sets in ([new] if len(new) else []) if are_disjoint else new[:, None]:
            found.append(OwnerSets(before, sets, []))
            before += len(sets)
        which = np.searchsorted([sets.first_id for sets in found], id_of, side="right") - 1
        for i in np.unique(which).tolist():
            parts = np.flatnonzero(which == i)
            part_of = np.full(len(found[i].owners), -1)
            part_of[id_of[parts] - found[i].first_id] = parts
            found[i].held.extend((division, part_of) for division in alike)
    return found


def find_replicas(
    sets: Sequence[OwnerSets], rank: int, fragment_at: Mapping[tuple[int, tuple[int, ...]], int]
) -> list[Replicas]:
    """Return the boxes that a rank and other ranks hold.

    Args:
        sets: the sets of several owners.
        rank: the rank.
        fragment_at: the index of the rank's fragment with a tensor and an offset.
    """
    found = []
    for each in sets:
        for row in np.flatnonzero((each.owners == rank).any(axis=1)).tolist():
            held = sorted(
                (tensor, tuple(division.offset[part_of[row]].tolist()))
                for division, part_of in each.held
                if part_of[row] >= 0
                for tensor in division.tensors.tolist()
            )
            fragment = np.array([fragment_at[place] for place in held], np.int64)
            is_first = rank == int(each.owners[row, 0])
            set_id, count = each.first_id + row, each.owners.shape[1]
            found.append(Replicas(set_id, count, is_first, fragment))
    return found


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
    2 MiB: the first rank gets 4 MiB of the first tensor, and the second rank gets the rest. Small
    replicas stay whole: if two ranks hold a weight of 32 bytes and a bias of 8, one of them writes
    the weight, and the other the bias.

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
