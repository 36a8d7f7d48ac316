"""Groups of parameters that ZeRO flattened together, put together from the ranks' files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.foreign import StoredArray
from shardwise.formats.readers.deepspeed.states import OptimizerState, Shapes
from shardwise.formats.readers.deepspeed.zero import (
    MASTER,
    FlatArray,
    Group,
    Ranges,
    least_lengths,
    partitioned,
    sliced,
)
from shardwise.manifest.table import Int

_EXPERT = re.compile(r"(.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,7})(\..*)")


def groups_of(
    shapes: Sequence[Shapes], states: Sequence[OptimizerState], *, data_before_experts: bool
) -> Iterator[Group]:
    """Yield the groups that the optimizer states of all data-parallel ranks make up.

    Args:
        shapes: the parameters of each group, in the order in which they were flattened.
        states: by data-parallel rank.
        data_before_experts: ranks with the same experts are neighbours.

    Raises:
        FormatError: the ranks do not fit together, or not the parameters.
    """
    first = states[0]
    for state in states:
        same = (state.sliced, len(state.masters)) == (first.sliced, len(first.masters))
        if not same or len(state.masters) != len(shapes):
            raise FormatError(
                f"{state.where}: the file has {len(state.masters)} parameter groups, and the model "
                f"has {len(shapes)}"
            )
    for number, group_shapes in enumerate(shapes):
        count = first.counts[number] or len(states)
        if len(states) % count or any(s.counts[number] not in (0, count) for s in states):
            raise FormatError(
                f"{first.where}: group {number} is divided among {count} ranks, but there are "
                f"files of {len(states)}"
            )
        parallel = len(states) // count
        experts = _experts(group_shapes) if parallel > 1 else {}
        for rank in range(parallel):
            if data_before_experts:
                members = states[rank * count : (rank + 1) * count]
            else:
                members = states[rank::parallel]
            group = _group(number, group_shapes, members)
            yield replace(group, names=tuple(_global_name(n, rank, experts) for n in group.names))


def _experts(shapes: Shapes) -> dict[str, int]:
    """Return how many experts a rank has in each layer.

    Raises:
        FormatError: a parameter is not of an expert.
    """
    counts: dict[str, int] = {}
    for name in shapes:
        found = _EXPERT.fullmatch(name)
        if found is None:
            raise FormatError(
                f"{name}: this parameter is divided among only a part of the ranks, and it is not "
                "one of DeepSpeed's experts: such checkpoints are not supported"
            )
        counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    return counts


def _global_name(name: str, rank: int, experts: Mapping[str, int]) -> str:
    found = _EXPERT.fullmatch(name) if experts else None
    if found is None:
        return name
    return f"{found[1]}{rank * experts[found[1]] + int(found[2])}{found[3]}"


def _group(number: int, shapes: Shapes, states: Sequence[OptimizerState]) -> Group:
    first = states[0]
    held = [
        {
            MASTER: state.masters[number],
            **{k: v for k, v in state.states[number].items() if isinstance(v, StoredArray)},
        }
        for state in states
    ]
    ranges = _ranges(number, shapes, states, held)
    least = least_lengths(ranges, len(states)).tolist()
    flat, scalars, left_out = {}, {}, []
    for key in dict.fromkeys(key for arrays in held for key in arrays):
        parts = [arrays[key] for arrays in held if key in arrays]
        whole = len(parts) == len(states)
        if whole and all(len(part.shape) == 0 for part in parts):
            scalars[key] = tuple(parts)
        elif whole and all(map(_is_flat, parts, least)):
            flat[key] = _flat(parts, f"{first.where}: {key or 'weights'} of group {number}")
        elif key == MASTER:
            raise FormatError(f"{first.where}: the weights of group {number} are too short")
        else:
            left_out.append(
                f"optimizer.*.{key} of group {number}: of another form than its parameters"
            )
    numbers = {k: v for k, v in first.states[number].items() if not isinstance(v, StoredArray)}
    return Group(
        tuple(shapes),
        tuple(shapes.values()),
        ranges,
        flat,
        scalars,
        numbers,
        first.groups[number],
        tuple(left_out),
    )


def _ranges(
    number: int,
    shapes: Shapes,
    states: Sequence[OptimizerState],
    held: Sequence[Mapping[str, StoredArray]],
) -> Ranges:
    sizes = np.array([math.prod(shape) for shape in shapes.values()], np.int64)
    first = states[0]
    if first.sliced:
        return sliced(sizes, len(states))
    paddings = first.paddings[number] if first.paddings is not None else (0,) * len(sizes)
    if len(paddings) != len(sizes):
        raise FormatError(f"{first.where}: {len(paddings)} paddings of {len(sizes)} parameters")
    # DeepSpeed cuts a rank's partition short where only padding follows. The longest array of any
    # rank and key has the full length, unless the whole group lies in the first partition.
    longest = max(a.shape[0] for arrays in held for a in arrays.values() if len(a.shape) == 1)
    ranges = partitioned(sizes, np.array(paddings, np.int64), len(states), longest)
    _check_slices(list(shapes), ranges, number, states)
    return ranges


def _is_flat(part: StoredArray, least: int) -> bool:
    return len(part.shape) == 1 and part.stride == (1,) and part.shape[0] >= least


def _flat(parts: Sequence[StoredArray], what: str) -> FlatArray:
    dtypes = {part.dtype for part in parts}
    if len(dtypes) != 1:
        raise FormatError(f"{what}: the ranks have different dtypes: {', '.join(sorted(dtypes))}")
    file: Int = np.array([part.file for part in parts], np.int64)
    return FlatArray(dtypes.pop(), file, np.array([part.start for part in parts], np.int64))


def _check_slices(
    names: Sequence[str], ranges: Ranges, number: int, states: Sequence[OptimizerState]
) -> None:
    """Compare the computed ranges with those that the ranks recorded, if all recorded them."""
    if any(state.slices is None for state in states):
        return
    numbers = {name: index for index, name in enumerate(names)}
    recorded = [
        (numbers.get(name, -1), rank, start, length)
        for rank, state in enumerate(states)
        for slices in (state.slices or ())[number : number + 1]
        for name, (start, length) in slices.items()
    ]
    length = ranges.stop - ranges.start
    computed = np.column_stack([ranges.parameter, ranges.rank, ranges.at, length])
    order = np.lexsort((computed[:, 1], computed[:, 0]))
    expected = np.array(sorted(recorded), np.int64).reshape(len(recorded), 4)
    if not np.array_equal(computed[order], expected):
        raise FormatError(
            f"{states[0].where}: its param_slice_mappings of group {number} contradict its "
            "param_shapes: files of ranks were renamed, or are from different saves"
        )
