"""Groups of parameters that ZeRO flattened together, of one model-parallel rank."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.foreign import StoredArray
from shardwise.formats.readers.deepspeed.partitions import (
    Ranges,
    concatenated,
    least_lengths,
    sliced,
)
from shardwise.formats.readers.deepspeed.states import Number, OptimizerState, Shape, Shapes
from shardwise.manifest.table import Int

MASTER = ""
_EXPERT = re.compile(r"(.*\bdeepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,7})(\..*)")


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat array that is divided among ranks, by rank; and at which byte each part begins."""

    dtype: str
    file: Int
    start: Int


@dataclass(frozen=True, slots=True)
class Group:
    """What all ranks have of a group.

    Attributes:
        names, shapes: of its parameters, in the order in which they lie there.
        ranges: how they are divided.
        flat: by key of the optimizer's state; the weights themselves by `MASTER`.
        arrays: small tensors by key, of each rank.
        numbers: plain numbers by key, of the first rank.
        settings: which of the optimizer's settings are the group's.
        left_out: what is not taken, and why.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    ranges: Ranges
    flat: Mapping[str, Flat]
    arrays: Mapping[str, tuple[StoredArray, ...]]
    numbers: Mapping[str, Number]
    settings: int
    left_out: tuple[str, ...]


def groups_of(
    shapes: Sequence[Shapes], states: Sequence[OptimizerState], *, data_before_experts: bool
) -> Iterator[Group]:
    """The groups that the optimizer states of all data-parallel ranks make up.

    Args:
        shapes: of the parameters of each group, in their order.
        states: by rank.
        data_before_experts: ranks with the same experts are neighbours.

    Raises:
        FormatError: ranks do not fit together, or not the parameters.
    """
    first = states[0]
    for state in states:
        same = (state.sliced, len(state.masters)) == (first.sliced, len(first.masters))
        if not same or len(state.masters) != len(shapes):
            raise FormatError(
                f"{state.where}: it has {len(state.masters)} groups, and the model {len(shapes)}"
            )
    for number, of_group in enumerate(shapes):
        count = first.counts[number] or len(states)
        if len(states) % count or any(s.counts[number] not in (0, count) for s in states):
            raise FormatError(
                f"{first.where}: group {number} is divided among {count} ranks, and there are "
                f"{len(states)}"
            )
        parallel = len(states) // count
        experts = _experts(of_group) if parallel > 1 else {}
        for rank in range(parallel):
            if data_before_experts:
                members = states[rank * count : (rank + 1) * count]
            else:
                members = states[rank::parallel]
            group = _group(number, of_group, members)
            yield replace(group, names=tuple(_global_name(n, rank, experts) for n in group.names))


def _experts(shapes: Shapes) -> dict[str, int]:
    """How many experts a rank has of each layer.

    Raises:
        FormatError: what is divided among few ranks is no expert.
    """
    counts: dict[str, int] = {}
    for name in shapes:
        found = _EXPERT.fullmatch(name)
        if found is None:
            raise FormatError(
                f"{name}: it is divided among fewer ranks than there are, and is none of "
                "DeepSpeed's experts: such a checkpoint is not read"
            )
        counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    return counts


def _global_name(name: str, rank: int, experts: Mapping[str, int]) -> str:
    found = _EXPERT.fullmatch(name) if experts else None
    if found is None:
        return name
    return f"{found[1]}{rank * experts[found[1]] + int(found[2])}{found[3]}"


def _group(number: int, shapes: Shapes, states: Sequence[OptimizerState]) -> Group:
    sizes = np.array([math.prod(shape) for shape in shapes.values()], np.int64)
    first = states[0]
    held = [_arrays(state, number) for state in states]
    keys = list(dict.fromkeys(key for arrays in held for key in arrays))
    if first.sliced:
        ranges = sliced(sizes, len(states))
    else:
        gaps = first.gaps[number] if first.gaps is not None else (0,) * len(sizes)
        if len(gaps) != len(sizes):
            raise FormatError(f"{first.where}: {len(gaps)} paddings of {len(sizes)} parameters")
        # A rank's own part may be cut where only padding follows; that of some key is not, or all
        # of the group lies in the first.
        longest = max(a.shape[0] for arrays in held for a in arrays.values() if len(a.shape) == 1)
        ranges = concatenated(sizes, np.array(gaps, np.int64), len(states), longest)
        _check_slices(list(shapes), ranges, number, states)
    least = least_lengths(ranges, len(states))
    flat, arrays, left_out = {}, {}, []
    for key in keys:
        parts = [arrays_of_rank.get(key) for arrays_of_rank in held]
        present = tuple(part for part in parts if part is not None)
        if all(part is not None and len(part.shape) == 0 for part in parts):
            arrays[key] = present
        elif _fit(parts, least):
            flat[key] = _flat(present, f"{first.where}: {key or 'weights'} of group {number}")
        elif key == MASTER:
            raise FormatError(f"{first.where}: the weights of group {number} are too short")
        else:
            left_out.append(
                f"optimizer.*.{key} of group {number}: of another form than its parameters"
            )
    return Group(
        tuple(shapes),
        tuple(shapes.values()),
        ranges,
        flat,
        arrays,
        _numbers(first, number),
        first.groups[number],
        tuple(left_out),
    )


def _arrays(state: OptimizerState, number: int) -> dict[str, StoredArray]:
    items = state.states[number].items()
    arrays = {key: item for key, item in items if isinstance(item, StoredArray)}
    return {MASTER: state.masters[number], **arrays}


def _numbers(state: OptimizerState, number: int) -> dict[str, Number]:
    items = state.states[number].items()
    return {key: item for key, item in items if not isinstance(item, StoredArray)}


def _fit(parts: Sequence[StoredArray | None], least: Int) -> bool:
    return all(
        part is not None and len(part.shape) == 1 and part.stride == (1,) and part.shape[0] >= size
        for part, size in zip(parts, least.tolist(), strict=True)
    )


def _flat(parts: Sequence[StoredArray], what: str) -> Flat:
    dtypes = {part.dtype for part in parts}
    if len(dtypes) != 1:
        raise FormatError(f"{what}: ranks have different dtypes: {', '.join(sorted(dtypes))}")
    file = np.array([part.file for part in parts], np.int64)
    return Flat(dtypes.pop(), file, np.array([part.start for part in parts], np.int64))


def _check_slices(
    names: Sequence[str], ranges: Ranges, number: int, states: Sequence[OptimizerState]
) -> None:
    """Whether ranks themselves say the same of what they have as was computed."""
    if any(state.slices is None for state in states):
        return
    numbers = {name: index for index, name in enumerate(names)}
    said = []
    for rank, state in enumerate(states):
        slices: Any = (state.slices or ())[number : number + 1]
        for name, (start, length) in (slices[0] if slices else {}).items():
            said.append((numbers.get(name, -1), rank, start, length))
    length = ranges.stop - ranges.start
    computed = np.column_stack([ranges.parameter, ranges.rank, ranges.at, length])
    told = np.array(sorted(said), np.int64).reshape(len(said), 4)
    order = np.lexsort((computed[:, 1], computed[:, 0]))
    if not np.array_equal(computed[order], told):
        raise FormatError(
            f"{states[0].where}: its param_slice_mappings of group {number} are not those of its "
            "param_shapes: files of ranks were renamed, or are of several saves"
        )
