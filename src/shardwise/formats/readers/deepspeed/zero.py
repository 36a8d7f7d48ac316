"""How ZeRO divides parameters among ranks: flat groups, their ranges, and the boxes of these.

ZeRO 1 and 2 put the parameters of a group end to end and cut the result into equal partitions
(`ranges_of_partitions`). ZeRO 3 cuts every parameter into equal slices (`ranges_of_slices`).
`find_flat_groups` computes these ranges from the files of all ranks. `boxes_of_flat_ranges` turns
them into boxes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.foreign import StoredArray
from shardwise.formats.readers.deepspeed.states import Number, OptimizerState, Shape, Shapes
from shardwise.layout import boxes_of_ranges
from shardwise.layout.columns import Int

MASTER = ""
"""The key of the master weights among the keys of the optimizer's state."""
MOMENTUM = "momentum_buffer"
_EXPERT = re.compile(r"(.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,7})(\..*)")


@dataclass(frozen=True, slots=True)
class FlatRanges:
    """Ranges of flattened parameters, in columns of n rows.

    Elements `start:stop` of the parameter with index `parameter` lie in the flat array of rank
    `rank`, from its element `flat_start`.
    """

    parameter: Int
    rank: Int
    start: Int
    stop: Int
    flat_start: Int


@dataclass(frozen=True, slots=True)
class FlatBoxes:
    """Boxes of parameters, in columns of n rows.

    A box lies in the flat array of rank `rank`, from its element `flat_start`.
    """

    parameter: Int
    rank: Int
    flat_start: Int
    offset: Int
    shape: Int


@dataclass(frozen=True, slots=True)
class FlatArray:
    """A flat array that is divided among ranks.

    Attributes:
        dtype: torch's name.
        file: for each rank, the name of its file.
        start: for each rank, the offset of its part in the file, in bytes.
    """

    dtype: str
    file: tuple[str, ...]
    start: Int


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Parameters that ZeRO flattened together, on all data-parallel ranks.

    Attributes:
        names, shapes: the parameters, in the order in which they were flattened.
        ranges: the division of the parameters among the ranks.
        flat: for each key of the optimizer's state, the flat arrays. The key `MASTER` has the
            weights.
        scalars: for each key, the 0-d tensors of all ranks.
        numbers: for each key, the plain number of the first rank.
        param_group: the index of the param group that has the hyperparameters.
        left_out: lines about state that is not read.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    ranges: FlatRanges
    flat: Mapping[str, FlatArray]
    scalars: Mapping[str, tuple[StoredArray, ...]]
    numbers: Mapping[str, Number]
    param_group: int
    left_out: tuple[str, ...]


def ranges_of_partitions(sizes: Int, paddings: Int, ranks: int, partition: int) -> FlatRanges:
    """Return the ranges of ZeRO 1 and 2, which cut a group into partitions of equal length.

    Args:
        sizes: elements of each parameter.
        paddings: elements of padding after each parameter.
        ranks: the number of ranks.
        partition: elements of one rank's partition.

    Raises:
        FormatError: the partitions are too short for the parameters.
    """
    begin = np.cumsum(sizes + paddings) - sizes - paddings
    end = begin + sizes
    if len(sizes) and end[-1] > ranks * partition:
        raise FormatError(
            f"{ranks} partitions of {partition} elements are too short for parameters of {end[-1]} "
            "elements: the files are from different saves: copy all files of one save"
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
    return FlatRanges(parameter[row], rank, start, start + high - low, low - rank * partition)


def ranges_of_slices(sizes: Int, ranks: int) -> FlatRanges:
    """Return the ranges of ZeRO 3, which cuts each parameter into slices of equal length.

    A rank has its slices of all parameters end to end.

    Args:
        sizes: elements of each parameter.
        ranks: the number of ranks.
    """
    lengths = -(-sizes // ranks)
    slice_starts = np.cumsum(lengths) - lengths
    parameter = np.repeat(np.arange(len(sizes)), ranks)
    rank = np.tile(np.arange(ranks), len(sizes))
    start = np.minimum(rank * lengths[parameter], sizes[parameter])
    stop = np.minimum(start + lengths[parameter], sizes[parameter])
    columns = (parameter, rank, start, stop, slice_starts[parameter])
    return FlatRanges(*(column[start < stop] for column in columns))


def boxes_of_flat_ranges(ranges: FlatRanges, shapes: Int) -> FlatBoxes:
    """Return the boxes that ranges consist of.

    Args:
        shapes: `(parameters, D)`, the shapes of the parameters, padded on the right with 1.
    """
    boxes = boxes_of_ranges(shapes[ranges.parameter], ranges.start, ranges.stop)
    row = boxes.range_index
    flat_start = ranges.flat_start[row] + boxes.first - ranges.start[row]
    return FlatBoxes(ranges.parameter[row], ranges.rank[row], flat_start, boxes.offset, boxes.shape)


def compute_minimum_lengths(ranges: FlatRanges, ranks: int) -> Int:
    """Return, for each rank, the least number of elements that its flat array must have."""
    minimum_lengths = np.zeros(ranks, np.int64)
    np.maximum.at(minimum_lengths, ranges.rank, ranges.flat_start + ranges.stop - ranges.start)
    return minimum_lengths


def find_flat_groups(
    shapes: Sequence[Shapes], states: Sequence[OptimizerState], *, data_before_experts: bool
) -> Iterator[FlatGroup]:
    """Yield the flat groups that the optimizer states of all data-parallel ranks make up.

    Args:
        shapes: the parameters of each group, in the order in which they were flattened.
        states: the optimizer states by data-parallel rank.
        data_before_experts: whether ranks with the same experts are neighbours.

    Raises:
        FormatError: the ranks do not fit together, or do not fit the parameters.
    """
    first = states[0]
    for state in states:
        is_consistent = (state.zero_3, len(state.masters)) == (first.zero_3, len(first.masters))
        if not is_consistent or len(state.masters) != len(shapes):
            raise FormatError(
                f"{state.path}: the file has {len(state.masters)} parameter groups, and the model "
                f"has {len(shapes)}: the files are from different saves: copy all files of one save"
            )
    for index, group_shapes in enumerate(shapes):
        count = first.partition_counts[index] or len(states)
        if len(states) % count or any(s.partition_counts[index] not in (0, count) for s in states):
            raise FormatError(
                f"{first.path}: parameter group {index} is divided among {count} ranks, but there "
                f"are files of {len(states)} ranks: copy the files of all ranks from one save"
            )
        expert_rank_count = len(states) // count
        experts = _count_experts(group_shapes, first.path) if expert_rank_count > 1 else {}
        for expert_rank in range(expert_rank_count):
            if data_before_experts:
                states_of_group = states[expert_rank * count : (expert_rank + 1) * count]
            else:
                states_of_group = states[expert_rank::expert_rank_count]
            group = _build_flat_group(index, group_shapes, states_of_group)
            names = tuple(_global_name(name, expert_rank, experts) for name in group.names)
            yield replace(group, names=names)


def _count_experts(shapes: Shapes, path: str) -> dict[str, int]:
    """Return the number of experts that a rank has in each layer.

    Raises:
        FormatError: a parameter does not belong to an expert.
    """
    counts: dict[str, int] = {}
    for name in shapes:
        match = _EXPERT.fullmatch(name)
        if match is None:
            raise FormatError(
                f"{path}: {name}: this parameter is divided among only a part of the ranks, and "
                "does not belong to one of DeepSpeed's experts: such checkpoints are not "
                "supported; load it with DeepSpeed, and save it with sw.save"
            )
        counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return counts


def _global_name(name: str, rank: int, experts: Mapping[str, int]) -> str:
    """Return the name with the global number of the expert instead of its number on the rank."""
    match = _EXPERT.fullmatch(name) if experts else None
    if match is None:
        return name
    return f"{match[1]}{rank * experts[match[1]] + int(match[2])}{match[3]}"


def _build_flat_group(index: int, shapes: Shapes, states: Sequence[OptimizerState]) -> FlatGroup:
    first = states[0]
    arrays_of_ranks = [
        {
            MASTER: state.masters[index],
            **{k: v for k, v in state.states[index].items() if isinstance(v, StoredArray)},
        }
        for state in states
    ]
    ranges = _find_ranges(index, shapes, states)
    minimum_lengths = compute_minimum_lengths(ranges, len(states)).tolist()
    flat, scalars, left_out = {}, {}, []
    momentum = _join_momentum_of_parameters(ranges, shapes, arrays_of_ranks)
    for key in dict.fromkeys(key for arrays in arrays_of_ranks for key in arrays):
        parts = [arrays[key] for arrays in arrays_of_ranks if key in arrays]
        complete = len(parts) == len(states)
        if key == MOMENTUM and momentum is not None:
            flat[key] = momentum
        elif complete and all(len(part.shape) == 0 for part in parts):
            scalars[key] = tuple(parts)
        elif (
            complete
            and all(map(_is_flat_array, parts, minimum_lengths))
            and (key != MOMENTUM or _are_partitions(parts, states, index))
        ):
            label = f"{key or 'weights'} of parameter group {index}"
            flat[key] = _join_flat_parts(parts, f"{first.path}: {label}")
        elif key == MASTER:
            raise FormatError(
                f"{first.path}: the weights of parameter group {index} have fewer elements than "
                "its parameters: the files are damaged, or from different saves: copy all files of "
                "one save"
            )
        else:
            left_out.append(f"optimizer.*.{key} of group {index}: {_reason_for_shape(key)}")
    numbers = {k: v for k, v in first.states[index].items() if not isinstance(v, StoredArray)}
    return FlatGroup(
        tuple(shapes),
        tuple(shapes.values()),
        ranges,
        flat,
        scalars,
        numbers,
        first.param_groups[index],
        tuple(left_out),
    )


def _find_ranges(
    index: int,
    shapes: Shapes,
    states: Sequence[OptimizerState],
) -> FlatRanges:
    sizes = np.array([math.prod(shape) for shape in shapes.values()], np.int64)
    first = states[0]
    if first.zero_3:
        return ranges_of_slices(sizes, len(states))
    paddings = (0,) * len(sizes)
    if first.paddings is not None:
        paddings = first.paddings[index] if index < len(first.paddings) else ()
    if len(paddings) != len(sizes):
        raise FormatError(
            f"{first.path}: parameter group {index} has {len(paddings)} paddings of {len(sizes)} "
            "parameters: the files are from different saves: copy all files of one save"
        )
    # DeepSpeed cuts a rank's weights short where only padding follows. The longest weights of any
    # rank have the full length, unless the whole group lies in the first partition.
    longest = max(state.masters[index].shape[0] for state in states)
    try:
        ranges = ranges_of_partitions(sizes, np.array(paddings, np.int64), len(states), longest)
    except FormatError as error:
        raise FormatError(f"{first.path}: parameter group {index}: {error}") from error
    _check_recorded_slices(list(shapes), ranges, index, states)
    return ranges


def _is_flat_array(array: StoredArray, minimum_length: int) -> bool:
    return len(array.shape) == 1 and array.stride == (1,) and array.shape[0] >= minimum_length


def _are_partitions(
    parts: Sequence[StoredArray], states: Sequence[OptimizerState], index: int
) -> bool:
    """Return whether parts are all equally long, or as long as the weights."""
    lengths = [part.shape for part in parts]
    return len({*lengths}) == 1 or lengths == [state.masters[index].shape for state in states]


def _reason_for_shape(key: str) -> str:
    if key != MOMENTUM:
        return "its shape is not that of the parameters"
    return (
        "its shape is not that of the parameters: with elastic_checkpoint, DeepSpeed cuts off a "
        "part of Muon's momentum, and with parameter_alignment, it is not supported: save without "
        "these options"
    )


def _join_momentum_of_parameters(
    ranges: FlatRanges, shapes: Shapes, arrays_of_ranks: Sequence[Mapping[str, StoredArray]]
) -> FlatArray | None:
    """Return the momentum of DeepSpeed's own Muon under ZeRO 1 and 2; None if there is none.

    Muon needs whole matrices, so a rank has the momentum of all parameters of which it has a part,
    one after the other. Of these, a rank's own range of each parameter is read.
    """
    rank = ranges.rank
    arrays = [each.get(MOMENTUM) for each in arrays_of_ranks]
    sizes = np.array([math.prod(shape) for shape in shapes.values()], np.int64)[ranges.parameter]
    lengths = np.bincount(rank, sizes, len(arrays)).astype(np.int64).tolist()
    if [(0,) if each is None else each.shape for each in arrays] != [(n,) for n in lengths]:
        return None
    order = np.lexsort((ranges.parameter, rank))
    first_element = np.cumsum(sizes[order]) - sizes[order]
    first_element -= (np.cumsum(lengths) - lengths)[rank[order]]
    shift = first_element + ranges.start[order] - ranges.flat_start[order]
    shifts = np.zeros(len(arrays), np.int64)
    shifts[rank[order]] = shift
    held = [each for each in arrays if each is not None]
    if any(each.stride != (1,) for each in held):
        return None
    if (shifts[rank[order]] != shift).any() or len({each.dtype for each in held}) != 1:
        return None
    itemsize = held[0].itemsize
    start = [0 if each is None else each.start for each in arrays]
    file = tuple((each or held[0]).file for each in arrays)
    return FlatArray(held[0].dtype, file, np.array(start) + shifts * itemsize)


def _join_flat_parts(parts: Sequence[StoredArray], label: str) -> FlatArray:
    dtypes = {part.dtype for part in parts}
    if len(dtypes) != 1:
        raise FormatError(
            f"{label}: the ranks have different dtypes, {', '.join(sorted(dtypes))}: the files are "
            "from different saves: copy all files of one save"
        )
    file = tuple(part.file for part in parts)
    return FlatArray(dtypes.pop(), file, np.array([part.start for part in parts], np.int64))


def _check_recorded_slices(
    names: Sequence[str], ranges: FlatRanges, index: int, states: Sequence[OptimizerState]
) -> None:
    """Compare the computed ranges with the recorded ranges, if all ranks recorded them."""
    if any(state.slices is None for state in states):
        return
    indices = {name: i for i, name in enumerate(names)}
    recorded = [
        (indices.get(name, -1), rank, start, length)
        for rank, state in enumerate(states)
        for slices in (state.slices or ())[index : index + 1]
        for name, (start, length) in slices.items()
    ]
    length = ranges.stop - ranges.start
    computed = np.column_stack([ranges.parameter, ranges.rank, ranges.flat_start, length])
    order = np.lexsort((computed[:, 1], computed[:, 0]))
    expected = np.array(sorted(recorded), np.int64).reshape(len(recorded), 4)
    if not np.array_equal(computed[order], expected):
        raise FormatError(
            f"{states[0].path}: its param_slice_mappings of group {index} contradict its "
            "param_shapes: files of ranks were renamed, or are from different saves: copy all "
            "files of one save"
        )
