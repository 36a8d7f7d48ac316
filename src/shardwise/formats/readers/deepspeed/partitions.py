"""How ZeRO divides parameters among ranks: flattened ranges, in columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.errors import FormatError
from shardwise.layout import boxes_of_ranges
from shardwise.manifest.table import Int


@dataclass(frozen=True, slots=True)
class Ranges:
    """Parts of parameters as ranks have them, in columns of n rows.

    Elements `start:stop` of parameter number `parameter` lie in the flat array of rank number
    `rank`, from its element `at` on.
    """

    parameter: Int
    rank: Int
    start: Int
    stop: Int
    at: Int


@dataclass(frozen=True, slots=True)
class Fragments:
    """Boxes of parameters as ranks have them; `at` is a box's first element in the flat array."""

    parameter: Int
    rank: Int
    at: Int
    offset: Int
    shape: Int


def concatenated(sizes: Int, gaps: Int, ranks: int, partition: int) -> Ranges:
    """ZeRO 1 and 2: all parameters of a group end to end, cut into partitions of equal length.

    Args:
        sizes, gaps: elements of each parameter, and of padding after each.
        partition: elements of a rank's partition.

    Raises:
        FormatError: the partitions have not room for all parameters.
    """
    begin = np.cumsum(sizes + gaps) - sizes - gaps
    end = begin + sizes
    if len(sizes) and end[-1] > ranks * partition:
        raise FormatError(
            f"{ranks} partitions of {partition} elements have not room for parameters of {end[-1]}"
        )
    parameter = np.flatnonzero(sizes)
    begin, end = begin[parameter], end[parameter]
    first = begin // max(partition, 1)
    count = (end - 1) // max(partition, 1) - first + 1
    row = np.repeat(np.arange(len(parameter)), count)
    rank = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    low = np.maximum(begin[row], rank * partition)
    high = np.minimum(end[row], (rank + 1) * partition)
    start = low - begin[row]
    return Ranges(parameter[row], rank, start, start + high - low, low - rank * partition)


def sliced(sizes: Int, ranks: int) -> Ranges:
    """ZeRO 3: each parameter cut into slices of equal length, those of a rank end to end."""
    slices = -(-sizes // ranks)
    before = np.cumsum(slices) - slices
    parameter = np.repeat(np.arange(len(sizes)), ranks)
    rank = np.tile(np.arange(ranks), len(sizes))
    start = np.minimum(rank * slices[parameter], sizes[parameter])
    stop = np.minimum(start + slices[parameter], sizes[parameter])
    held = start < stop
    columns = (parameter, rank, start, stop, before[parameter])
    return Ranges(*(column[held] for column in columns))


def as_fragments(ranges: Ranges, shapes: Int) -> Fragments:
    """Ranges as boxes; `shapes` are those of the parameters, padded on the right with 1."""
    boxes = boxes_of_ranges(shapes[ranges.parameter], ranges.start, ranges.stop)
    row = boxes.of
    at = ranges.at[row] + boxes.first - ranges.start[row]
    return Fragments(ranges.parameter[row], ranges.rank[row], at, boxes.offset, boxes.shape)


def least_lengths(ranges: Ranges, ranks: int) -> Int:
    """How many elements each rank's flat array has at least."""
    least = np.zeros(ranks, np.int64)
    np.maximum.at(least, ranges.rank, ranges.at + ranges.stop - ranges.start)
    return least
