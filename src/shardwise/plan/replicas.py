"""Divide replicas: boxes that several ranks hold, of which each byte is written once."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardwise.boxes import Box, boxes_of_range

Float = npt.NDArray[np.float64]
LARGEST_GRAIN = 1 << 20
SMALLEST_GRAIN = 1 << 16
"""Bounds on the unit, in bytes, at which replicas are cut; see `divide_replicas`."""


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
    holders: Sequence[int],
    loads: Float,
    *,
    grain: int | None = None,
) -> list[tuple[int, int, Box]]:
    """Divide replicas among the ranks that hold them, and cut replicas where the parts meet.

    The replicas form a sequence of bytes. Each holder gets one range of this sequence, so that the
    loads become even. For example, two ranks with equal loads hold a tensor of 6 MiB and one of
    2 MiB: the first rank gets 4 MiB of the first tensor, and the second rank gets the rest.

    Args:
        replicas: the shape and itemsize of each replica. The same ranks hold all of them.
        holders: the ranks that hold the replicas.
        loads: the bytes assigned to each rank so far, float64; updated in place.
        grain: a replica is cut at multiples of about this many bytes, and a smaller one stays
            whole. Default: 1/32 of a holder's part, between `SMALLEST_GRAIN` and `LARGEST_GRAIN`.

    Returns:
        The index of a replica, the rank that writes this part of it, and the box of the part,
        relative to the replica; in the order of the sequence.
    """
    sizes = [math.prod(shape) * itemsize for shape, itemsize in replicas]
    if grain is None:
        part = sum(sizes) // (32 * len(holders))
        grain = max(SMALLEST_GRAIN, min(LARGEST_GRAIN, part))
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    even_bounds = np.cumsum(water_fill(loads[list(holders)], float(starts[-1]))).tolist()
    bounds = [0]
    for bound in even_bounds[:-1]:
        if bounds[-1] == starts[-1]:
            break  # nothing is left for the other holders
        bounds.append(_nearest_cut(replicas, starts, bounds[-1], bound, grain))
    bounds.append(starts[-1])
    parts = []
    for rank, low, high in zip(holders, bounds, bounds[1:], strict=False):
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
