"""Replicas divided among their holders, so that every rank writes about as many bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.layout import Box, boxes_of_range

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float64]
LARGEST_GRAIN = 1 << 20
SMALLEST_GRAIN = 1 << 16


@dataclass(frozen=True, slots=True)
class Cut:
    """Part of a replica, given to one of its holders: `box` is relative to the replica."""

    replica: int
    rank: int
    box: Box


def fill_levels(loads: Float, amount: float) -> Float:
    """How much of `amount` to pour into each of several vessels so that their levels even out."""
    ordered = np.sort(loads)
    level = amount
    for n in range(1, len(ordered) + 1):
        level = (float(ordered[:n].sum()) + amount) / n
        if n == len(ordered) or level <= ordered[n]:
            break
    poured: Float = np.maximum(level - loads, 0.0)
    return poured


def divide(
    replicas: Sequence[tuple[int, tuple[int, ...], int]],
    holders: Sequence[int],
    loads: Float,
    *,
    grain: int | None = None,
) -> list[Cut]:
    """Give replicas, in their order, to their holders, and cut those that lie on a boundary.

    Each holder gets one contiguous part of the sequence, as long as levels the loads. Replicas
    are cut at multiples of about `grain` bytes, smaller ones not at all; without it the grain is a
    thirty-second of what a holder gets, within bounds.

    Args:
        replicas: index, shape and itemsize of each, all held by the same ranks.
        holders: these ranks.
        loads: bytes that each rank of the world has been given so far; added to in place.
    """
    sizes = [int(np.prod(shape, dtype=np.int64)) * itemsize for _, shape, itemsize in replicas]
    if grain is None:
        part = sum(sizes) // (32 * len(holders))
        grain = max(SMALLEST_GRAIN, min(LARGEST_GRAIN, part))
    ends = np.cumsum(fill_levels(loads[list(holders)], float(sum(sizes)))).tolist()
    ends[-1] = float("inf")
    cuts: list[Cut] = []
    turn = 0
    position = 0
    for (index, shape, itemsize), nbytes in zip(replicas, sizes, strict=True):
        done = 0
        while done < nbytes:
            take = _bytes_to_take(shape, itemsize, done, nbytes, ends[turn] - position, grain)
            boxes = boxes_of_range(shape, done // itemsize, (done + take) // itemsize)
            cuts += [Cut(index, holders[turn], box) for box in boxes]
            loads[holders[turn]] += take
            position += take
            done += take
            if take == 0 or position >= ends[turn] - grain / 2:
                turn += 1
    return cuts


def _bytes_to_take(
    shape: tuple[int, ...], itemsize: int, done: int, nbytes: int, room: float, grain: int
) -> int:
    """How many bytes, from byte `done` on, to take of a replica where there is room for `room`."""
    rest = nbytes - done
    if rest <= room + grain / 2:
        return rest
    unit = itemsize
    for n in reversed(shape):
        if unit * n > grain:
            break
        unit *= n
    unit *= max(1, grain // unit)
    return max(0, min(rest, (done + round(room)) // unit * unit - done))
