"""How ZeRO divides parameters among ranks, and how its flat partitions become boxes.

Stages 1 and 2 put the parameters of a group end to end and cut the result into equal partitions
(`partitioned`); stage 3 cuts every parameter into equal slices (`sliced`). Both give flattened
ranges, which `as_boxes` turns into boxes and `add_group` adds to the manifest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.build import Builder
from shardwise.formats.foreign import PieceTable, StoredArray
from shardwise.formats.readers.deepspeed.states import ModelState, Number, Shape
from shardwise.formats.readers.deepspeed.tensor_parallel import Place, Placement, declare
from shardwise.layout import boxes_of_ranges, find_overlaps, row_major
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.table import Int, Pieces, padded_rows

MASTER = ""
"""The key of the weights among those of the optimizer's state."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """Flattened ranges of parameters, in columns of n rows.

    Elements `start:stop` of parameter number `parameter` lie in the flat array of rank number
    `rank`, from its element `at`.
    """

    parameter: Int
    rank: Int
    start: Int
    stop: Int
    at: Int


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """Boxes of parameters, in columns; `at` is a box's first element in the rank's flat array."""

    parameter: Int
    rank: Int
    at: Int
    offset: Int
    shape: Int


@dataclass(frozen=True, slots=True)
class FlatArray:
    """A flat array that is divided among ranks; `file` and `start` (in bytes) are by rank."""

    dtype: str
    file: Int
    start: Int


@dataclass(frozen=True, slots=True)
class Group:
    """A group of parameters that ZeRO flattened together, on all data-parallel ranks.

    Attributes:
        names, shapes: the parameters, in the order in which they were flattened.
        ranges: the division of the parameters among the ranks.
        flat: the flat arrays, by key of the optimizer's state; the weights by `MASTER`.
        scalars: 0-d tensors of all ranks, by key.
        numbers: plain numbers of the first rank, by key.
        settings: the index of the group's hyperparameters.
        left_out: lines about state that is not taken.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    ranges: Ranges
    flat: Mapping[str, FlatArray]
    scalars: Mapping[str, tuple[StoredArray, ...]]
    numbers: Mapping[str, Number]
    settings: int
    left_out: tuple[str, ...]


def partitioned(sizes: Int, paddings: Int, ranks: int, partition: int) -> Ranges:
    """Return the ranges of ZeRO 1 and 2: a group is cut into partitions of equal length.

    Args:
        sizes: elements of each parameter.
        paddings: elements of padding after each parameter.
        partition: elements of one rank's partition.

    Raises:
        FormatError: the partitions are too short for the parameters.
    """
    begin = np.cumsum(sizes + paddings) - sizes - paddings
    end = begin + sizes
    if len(sizes) and end[-1] > ranks * partition:
        raise FormatError(
            f"{ranks} partitions of {partition} elements are too short for parameters of {end[-1]}"
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
    """Return the ranges of ZeRO 3: each parameter is cut into slices of equal length.

    A rank has its slices of all parameters end to end.
    """
    slices = -(-sizes // ranks)
    before = np.cumsum(slices) - slices
    parameter = np.repeat(np.arange(len(sizes)), ranks)
    rank = np.tile(np.arange(ranks), len(sizes))
    start = np.minimum(rank * slices[parameter], sizes[parameter])
    stop = np.minimum(start + slices[parameter], sizes[parameter])
    held = start < stop
    columns = (parameter, rank, start, stop, before[parameter])
    return Ranges(*(column[held] for column in columns))


def as_boxes(ranges: Ranges, shapes: Int) -> HeldBoxes:
    """Return ranges as boxes.

    Args:
        shapes: of the parameters, padded on the right with 1.
    """
    boxes = boxes_of_ranges(shapes[ranges.parameter], ranges.start, ranges.stop)
    row = boxes.of
    at = ranges.at[row] + boxes.first - ranges.start[row]
    return HeldBoxes(ranges.parameter[row], ranges.rank[row], at, boxes.offset, boxes.shape)


def least_lengths(ranges: Ranges, ranks: int) -> Int:
    """Return how many elements each rank's flat array must have at least."""
    least = np.zeros(ranks, np.int64)
    np.maximum.at(least, ranges.rank, ranges.at + ranges.stop - ranges.start)
    return least


def add_group(builder: Builder, shards: Sequence[Group], place: Place) -> None:
    """Add the weights and the divided optimizer state of a group of parameters.

    Args:
        shards: the group on each tensor-parallel rank.

    Raises:
        FormatError: the ranks have different parameters, or their shards do not fit together.
    """
    first = shards[0]
    if any(other.names != first.names or set(other.flat) != set(first.flat) for other in shards):
        raise FormatError("tensor-parallel ranks have different parameters or state in a group")
    placements = [
        place(name, [group.shapes[i] for group in shards]) for i, name in enumerate(first.names)
    ]
    tensors = {key: _declare(builder, first, key, placements) for key in first.flat}
    dims = max((len(shape) for group in shards for shape in group.shapes), default=0)
    for rank, group in enumerate(shards):
        shapes = padded_rows(group.shapes, dims, 1)
        held = as_boxes(group.ranges, shapes)
        offset = held.offset
        if len(shards) > 1:
            held, offset = _placed(held, shapes, placements, rank)
        stride = row_major(shapes)[held.parameter]
        for key, (numbers, replica) in tensors.items():
            flat = group.flat[key]
            start = flat.start[held.rank] + held.at * DTYPES[flat.dtype].itemsize
            again = replica[rank][held.parameter]
            for rows, as_replica in ((~again, False), (again, True)):
                if rows.any():
                    pieces = Pieces(
                        numbers[rank][held.parameter][rows],
                        flat.file[held.rank][rows],
                        start[rows],
                        offset[rows],
                        held.shape[rows],
                    )
                    strides = np.where(pieces.shape > 1, stride[rows], 0)
                    builder.add_table(PieceTable(pieces, strides), replica=as_replica)


def _declare(
    builder: Builder, group: Group, key: str, placements: Sequence[Placement]
) -> tuple[Int, np.ndarray[tuple[int, int], np.dtype[np.bool_]]]:
    """Return the numbers of the tensors by rank and parameter, and which pieces are replicas."""
    ranks = len(placements[0].parts) if placements else 1
    numbers = np.zeros((ranks, len(placements)), np.int64)
    replica = np.zeros((ranks, len(placements)), np.bool_)
    for i, (name, placement) in enumerate(zip(group.names, placements, strict=True)):
        full = name_of(name, key)
        replica[:, i] = full in builder
        if placement.replicated:
            replica[1:, i] = True
        numbers[:, i] = declare(builder, full, group.flat[key].dtype, placement)
        if builder.entry(full).shape != placement.shape:
            raise FormatError(
                f"{full}: pipeline stages have it in different shapes, "
                f"{list(builder.entry(full).shape)} and {list(placement.shape)}"
            )
    return numbers, replica


def name_of(parameter: str, key: str) -> str:
    """Return the name of a parameter's weight (`MASTER`) or of its optimizer state."""
    return f"model.{parameter}" if key == MASTER else f"optimizer.{parameter}.{key}"


def _placed(
    held: HeldBoxes, shapes: Int, placements: Sequence[Placement], rank: int
) -> tuple[HeldBoxes, Int]:
    """Return the boxes of a tensor-parallel shard and their offsets in the whole parameters.

    Boxes are cut where the parts of the shard lie apart in the parameter.
    """
    boxes = [(i, *part) for i, placed in enumerate(placements) for part in placed.parts[rank]]
    dims = shapes.shape[1]
    owner = np.array([i for i, _, _ in boxes], np.int64)
    local = padded_rows([box.offset for _, box, _ in boxes], dims, 0)
    target = padded_rows([offset for _, _, offset in boxes], dims, 0)
    extent = padded_rows([box.shape for _, box, _ in boxes], dims, 1)
    common = find_overlaps((held.parameter, held.offset, held.shape), (owner, local, extent))
    row = common.left
    strides = row_major(shapes)[held.parameter[row]]
    inside = ((common.offset - held.offset[row]) * strides).sum(axis=1)
    cut = HeldBoxes(
        held.parameter[row], held.rank[row], held.at[row] + inside, common.offset, common.shape
    )
    return cut, common.offset + (target - local)[common.right]


def add_frozen_slices(builder: Builder, grid: Sequence[Sequence[ModelState]], place: Place) -> None:
    """Add the frozen parameters that ZeRO 3 divided.

    Args:
        grid: for each tensor-parallel rank, the model states of all data-parallel ranks.

    Raises:
        FormatError: ranks have different parameters, or lack their slices.
    """
    states = grid[0]
    names = list(states[0].frozen_shapes)
    if any(list(state.frozen_shapes) != names for ranks in grid for state in ranks):
        raise FormatError("the ranks have different frozen parameters")
    added = []
    for name in names:
        placement = place(name, [ranks[0].frozen_shapes[name] for ranks in grid])
        if len(grid) > 1 and not placement.replicated:
            builder.left_out.append(
                f"model.{name}: frozen, and divided by ZeRO 3 within tensor-parallel shards"
            )
        else:
            added.append(name)
    if not added:
        return
    shapes = [states[0].frozen_shapes[name] for name in added]
    sizes = [math.prod(shape) for shape in shapes]
    slices = [
        _slices_of(name, -(-size // len(states)), states)
        for name, size in zip(added, sizes, strict=True)
    ]
    padded = padded_rows(shapes, max(map(len, shapes)), 1)
    ranges = sliced(np.array(sizes, np.int64), len(states))
    held = as_boxes(replace(ranges, at=np.zeros_like(ranges.at)), padded)
    dtypes = [parts[0].dtype for parts in slices]
    numbers = [
        builder.add_tensor(f"model.{name}", dtype, shape)
        for name, dtype, shape in zip(added, dtypes, shapes, strict=True)
    ]
    at = held.parameter, held.rank
    file = np.array([[part.file for part in parts] for parts in slices], np.int64)[at]
    start = np.array([[part.start for part in parts] for parts in slices], np.int64)[at]
    itemsize = np.array([DTYPES[dtype].itemsize for dtype in dtypes], np.int64)
    start = start + held.at * itemsize[held.parameter]
    stride = np.where(held.shape > 1, row_major(padded)[held.parameter], 0)
    tensor = np.array(numbers, np.int64)[held.parameter]
    builder.add_table(PieceTable(Pieces(tensor, file, start, held.offset, held.shape), stride))


def _slices_of(name: str, least: int, states: Sequence[ModelState]) -> list[StoredArray]:
    """Return each rank's slice of a frozen parameter, of at least so many elements."""
    arrays = [state.frozen.get(name) for state in states]
    parts = [array for array in arrays if array is not None and len(array.shape) == 1]
    if len(parts) != len(states) or any(part.shape[0] < least for part in parts):
        raise FormatError(f"{name}: a rank lacks its slice of this frozen parameter")
    if len({part.dtype for part in parts}) != 1:
        raise FormatError(f"{name}: the ranks have this frozen parameter in different dtypes")
    return parts
