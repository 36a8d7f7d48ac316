"""Compute which range of which parameter each rank holds in the files of ZeRO 1, 2 and 3.

ZeRO 1 and 2 put the parameters of a group end to end and cut the result into equal partitions
(`ranges_of_partitions`). ZeRO 3 cuts every parameter into equal slices (`ranges_of_slices`).
`find_flat_groups` computes these ranges from the files of all ranks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import add
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise.parts.formats.masters import Run, find_flat_run
from shardwise.parts.formats.reader import FormatError, StoredArray
from shardwise.parts.formats.readers.deepspeed.states import Number, OptimizerState, Shape, Shapes

Int: TypeAlias = npt.NDArray[np.int64]
_MOST_ELEMENTS = 2**62
MASTER = ""
"""The key of the master weights among the keys of the optimizer's state."""
MOMENTUM = "momentum_buffer"
_EXPERT = re.compile(r"(.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,7})(\..*)")


class FlatRanges(NamedTuple):
    """Ranges of flattened parameters in the flat arrays of ranks, in columns.

    Attributes:
        parameter: the indices of the parameters.
        rank: the ranks.
        start, stop: elements of the parameters.
        position: the first of them in the flat array of the rank.
    """

    parameter: Int
    rank: Int
    start: Int
    stop: Int
    position: Int


Flat: TypeAlias = tuple[FlatRanges, Sequence[StoredArray | None]]
"""The ranges of parameters that ranks hold, and each rank's flat array; None if it has none."""


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """Parameters that ZeRO flattened together, on all data-parallel ranks.

    Attributes:
        names, shapes: the parameters, in the order in which they were flattened.
        arrays: for each key of the optimizer's state, the ranges and the arrays. The key `MASTER`
            has the weights.
        scalars: for each key, the 0-d tensors of all ranks, or the plain number of the first rank
            alone.
        param_group: the index of the param group that has the hyperparameters.
        left_out: lines about state that is not read.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    arrays: Mapping[str, Flat]
    scalars: Mapping[str, Sequence[StoredArray | Number]] = field(default_factory=dict)
    param_group: int = 0
    left_out: tuple[str, ...] = ()


def ranges_of_partitions(
    sizes: Sequence[int], paddings: Sequence[int], ranks: int, partition: int
) -> FlatRanges:
    """Return the ranges of ZeRO 1 and 2, which cut a group into partitions of equal length.

    Args:
        sizes: elements of each parameter.
        paddings: elements of padding after each parameter.
        ranks: the number of ranks.
        partition: elements of one rank's partition.

    Raises:
        FormatError: the partitions are too short for the parameters.
    """
    begins = list(accumulate(map(add, sizes, paddings), initial=0))[: len(sizes)]
    if any(begin + size > ranks * partition for begin, size in zip(begins, sizes, strict=True)):
        raise FormatError(
            f"{ranks} partitions of {partition} elements are too short for parameters of "
            f"{sum(sizes) + sum(paddings[:-1])} elements: the files are from different saves: "
            "copy all files of one save"
        )
    begin, size = np.array(begins, np.int64), np.array(sizes, np.int64)
    partition = max(partition, 1)
    first = begin // partition
    parameter, number = _repeat(np.where(size, (begin + size - 1) // partition - first + 1, 0))
    rank = first[parameter] + number
    begin, end = begin[parameter], (begin + size)[parameter]
    low, high = np.maximum(begin, rank * partition), np.minimum(end, (rank + 1) * partition)
    return FlatRanges(parameter, rank, low - begin, high - begin, low - rank * partition)


def ranges_of_slices(sizes: Sequence[int], ranks: int) -> FlatRanges:
    """Return the ranges of ZeRO 3, which cuts each parameter into slices of equal length.

    A rank has its slices of all parameters end to end.

    Args:
        sizes: elements of each parameter.
        ranks: the number of ranks.

    Raises:
        FormatError: the parameters are too large for any array.
    """
    lengths = [-(-size // ranks) for size in sizes]
    if sum(lengths) > _MOST_ELEMENTS:
        raise FormatError(
            f"parameters of {sum(sizes)} elements are too large: the files are damaged: copy them "
            "again from an intact source"
        )
    size, length = np.array(sizes, np.int64), np.array(lengths, np.int64)
    parameter, rank = _repeat(-(-size // np.maximum(length, 1)))
    start = rank * length[parameter]
    stop = np.minimum(start + length[parameter], size[parameter])
    return FlatRanges(parameter, rank, start, stop, (length.cumsum() - length)[parameter])


def _repeat(counts: Int) -> tuple[Int, Int]:
    """Return each index as often as its count says, and the number of each repetition."""
    index = np.repeat(np.arange(len(counts)), counts)
    return index, np.arange(len(index)) - np.repeat(counts.cumsum() - counts, counts)


def ranges_in_whole_parameters(
    ranges: FlatRanges, sizes: Sequence[int], ranks: int
) -> tuple[FlatRanges, list[int]]:
    """Return the ranges of DeepSpeed's own Muon under ZeRO 1 and 2, which needs whole matrices.

    If a rank has a range of a parameter, its file has the momentum of the whole parameter. These
    momenta lie one after the other. The result says where, within them, the rank's own range of
    each parameter is: only this is read.

    Returns:
        The ranges, and the length of each rank's momentum.
    """
    held = np.array(sizes, np.int64)[ranges.parameter]
    totals = np.zeros(ranks, np.int64)
    np.add.at(totals, ranges.rank, held)
    order = np.argsort(ranges.rank, kind="stable")
    begin = np.empty_like(held)
    begin[order] = held[order].cumsum() - held[order]
    begin -= (totals.cumsum() - totals)[ranges.rank]
    return ranges._replace(position=begin + ranges.start), totals.tolist()


def shapes_of_slices(
    states: Sequence[OptimizerState], arrays: Mapping[str, StoredArray]
) -> tuple[Shapes, ...]:
    """Return the parameters of each group, in the order in which they were flattened.

    A bf16 pipeline without ZeRO does not record their shapes. Its slices name them, and the layers
    have their shapes. A parameter of `tied_modules` has the shape of its layer.

    Args:
        states: the optimizer states by data-parallel rank.
        arrays: the weights of all layers by name.

    Raises:
        FormatError: no layer has the shape of a parameter, or layers have several that fit.
    """
    groups: list[dict[str, int]] = [{} for _ in states[0].masters]
    for state in states:
        for sizes, slices in zip(groups, state.slices or (), strict=False):
            for name, (_, length) in slices.items():
                sizes[name] = sizes.get(name, 0) + length
    trained = {name for sizes in groups for name in sizes}

    def shape_of(name: str, size: int) -> Shape:
        shapes = {arrays[name].shape} if name in arrays else set()
        if name.startswith("tied_modules."):
            key = name.split(".", 2)[-1]
            layers = (n for n in arrays if n not in trained and n.partition(".")[2] == key)
            shapes = {arrays[n].shape for n in layers}
        shapes = {shape for shape in shapes if math.prod(shape) == size}
        if len(shapes) != 1:
            raise FormatError(
                f"{states[0].path}: {name[:200]} has {size} elements, and "
                f"{'several layers have' if shapes else 'no layer has'} a weight of this name and "
                "size, so its shape is unknown: the files are from different saves: copy all files "
                "of one save; or load it with DeepSpeed, and save it with sw.save"
            )
        return shapes.pop()

    return tuple({name: shape_of(name, size) for name, size in each.items()} for each in groups)


def add_empty_shards(
    groups: Sequence[FlatGroup], arrays: Sequence[Mapping[str, StoredArray]]
) -> list[FlatGroup]:
    """Return the groups of tensor-parallel ranks with the parameters of which a rank has nothing.

    DeepSpeed flattens no parameters without elements: for example, if there are more ranks than
    heads.

    Args:
        groups: the same group on each tensor-parallel rank.
        arrays: the module of each rank.
    """
    names = tuple(dict.fromkeys(name for group in groups for name in group.names))
    index_of = {name: index for index, name in enumerate(names)}
    completed = []
    for group, module in zip(groups, arrays, strict=True):
        shapes = {n: module[n].shape for n in names if n in module and 0 in module[n].shape}
        shapes |= dict(zip(group.names, group.shapes, strict=True))
        if len(shapes) == len(names):
            moved = np.array([index_of[name] for name in group.names], np.int64)
            flat = {
                key: (ranges._replace(parameter=moved[ranges.parameter]), held)
                for key, (ranges, held) in group.arrays.items()
            }
            of_all = tuple(shapes[name] for name in names)
            group = replace(group, names=names, shapes=of_all, arrays=flat)
        completed.append(group)
    return completed


def runs_of_masters(
    group: FlatGroup, weights: Mapping[str, StoredArray]
) -> Iterator[tuple[str, Run]]:
    """Yield runs of all master weights of a group that the module has as well.

    Args:
        group: the group on one tensor-parallel rank.
        weights: the module of this rank.
    """
    ranges, arrays = group.arrays[MASTER]
    for parameter, rank, start, stop, position in zip(*(c.tolist() for c in ranges), strict=True):
        name, masters = group.names[parameter], arrays[rank]
        own = weights.get(name)
        if masters is None or own is None or own.shape != group.shapes[parameter]:
            continue
        if run := find_flat_run(masters, position, own, start, stop - start):
            yield name, run


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
        has_groups = len(state.masters) == len(shapes)
        if not has_groups or state.zero_3 != first.zero_3:
            problem = (
                f"{'ZeRO 3' if state.zero_3 else 'ZeRO 1 or 2'} wrote this file, but not "
                f"{first.path}"
                if has_groups
                else f"the file has {len(state.masters)} parameter groups, and the model has "
                f"{len(shapes)}"
            )
            raise FormatError(
                f"{state.path}: {problem}: the files are from different saves: copy all files of "
                "one save"
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
    sizes = [math.prod(shape) for shape in shapes.values()]
    ranges = _find_ranges(index, shapes, states)
    flat: dict[str, Flat] = {}
    left_out = []
    scalars: dict[str, Sequence[StoredArray | Number]] = {
        key: (value,)
        for key, value in first.states[index].items()
        if not isinstance(value, StoredArray)
    }
    for key in dict.fromkeys(key for arrays in arrays_of_ranks for key in arrays):
        arrays = [each.get(key) for each in arrays_of_ranks]
        held = [array for array in arrays if array is not None]
        lengths = [(0,) if array is None else array.shape for array in arrays]
        moved, totals = ranges, list[int]()
        if key == MOMENTUM:
            moved, totals = ranges_in_whole_parameters(ranges, sizes, len(states))
        is_moved = key == MOMENTUM and lengths == [(total,) for total in totals]
        is_whole = len(held) == len(states)
        if is_whole and all(length == () for length in lengths):
            scalars[key] = tuple(held)
        elif is_moved or (
            is_whole
            and _are_flat(held, ranges)
            and (key != MOMENTUM or _are_partitions(held, states, index))
        ):
            _require_one_dtype(held, f"{first.path}: {key or 'weights'} of parameter group {index}")
            flat[key] = moved if is_moved else ranges, arrays
        elif key == MASTER:
            raise FormatError(
                f"{first.path}: the weights of parameter group {index} have fewer elements than "
                "its parameters: the files are damaged, or from different saves: copy all files of "
                "one save"
            )
        else:
            reason = "its shape is not that of the parameters"
            if key == MOMENTUM:
                reason += (
                    ": with elastic_checkpoint, DeepSpeed cuts off a part of Muon's momentum: save "
                    "without this option"
                )
            left_out.append(f"optimizer.*.{key} of group {index}: {reason}")
    return FlatGroup(
        tuple(shapes),
        tuple(shapes.values()),
        flat,
        scalars,
        first.param_group_of[index],
        tuple(left_out),
    )


def _find_ranges(
    index: int,
    shapes: Shapes,
    states: Sequence[OptimizerState],
) -> FlatRanges:
    sizes = [math.prod(shape) for shape in shapes.values()]
    first = states[0]
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
        if first.zero_3:
            return ranges_of_slices(sizes, len(states))
        ranges = ranges_of_partitions(sizes, paddings, len(states), longest)
    except FormatError as error:
        raise FormatError(f"{first.path}: parameter group {index}: {error}") from error
    _check_recorded_slices(list(shapes), ranges, index, states)
    return ranges


def _are_flat(arrays: Sequence[StoredArray], ranges: FlatRanges) -> bool:
    """Return whether arrays have one dimension, and the elements of all ranges."""
    if not all(array.is_flat for array in arrays):
        return False
    lengths = np.array([array.shape[0] for array in arrays], np.int64)
    ends = ranges.position + ranges.stop - ranges.start
    return bool((ends <= lengths[ranges.rank]).all())


def _are_partitions(
    parts: Sequence[StoredArray], states: Sequence[OptimizerState], index: int
) -> bool:
    """Return whether parts are all equally long, or as long as the weights."""
    lengths = [part.shape for part in parts]
    return len({*lengths}) == 1 or lengths == [state.masters[index].shape for state in states]


def _require_one_dtype(arrays: Sequence[StoredArray], label: str) -> None:
    dtypes = {array.dtype for array in arrays}
    if len(dtypes) != 1:
        raise FormatError(
            f"{label}: the ranks have different dtypes, {', '.join(sorted(dtypes))}: the files are "
            "from different saves: copy all files of one save"
        )


def _check_recorded_slices(
    names: Sequence[str],
    ranges: FlatRanges,
    index: int,
    states: Sequence[OptimizerState],
) -> None:
    """Compare the computed ranges with the recorded ranges, if all ranks recorded them."""
    if any(state.slices is None for state in states):
        return
    recorded = [
        (name, rank, start, length)
        for rank, state in enumerate(states)
        for slices in (state.slices or ())[index : index + 1]
        for name, (start, length) in slices.items()
    ]
    columns = ranges.parameter, ranges.rank, ranges.position, ranges.stop - ranges.start
    rows = zip(*(column.tolist() for column in columns), strict=True)
    computed = [(names[parameter], *others) for parameter, *others in rows]
    if sorted(computed) != sorted(recorded):
        raise FormatError(
            f"{states[0].path}: its param_slice_mappings of group {index} contradict its "
            "param_shapes: files of ranks were renamed, or are from different saves: copy all "
            "files of one save"
        )
