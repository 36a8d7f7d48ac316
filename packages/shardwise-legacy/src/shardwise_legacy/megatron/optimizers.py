"""Finds the optimizer state of each parameter of a rank, in each form that Megatron-LM saves it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeAlias

from shardwise.parts.formats.reader import FormatError, StoredArray
from shardwise_legacy.megatron.ranks import (
    EMBEDDING,
    OUTPUT,
    PARAMS,
    UNSUPPORTED,
    UNTIED,
    OptimizerPart,
    Parameter,
    Rank,
    SavedParamGroup,
)

MASTER = "param"
"""The key of the master weights among the keys of the optimizer's state."""
STEP = "step"
ALIGNMENTS = (64, 1)
"""Possible alignments of parameters in a buffer, in elements; old versions did not align."""
MOST_KEYS = 64
_HALF_DTYPES = ("float16", "bfloat16")

Bucketing: TypeAlias = tuple[int | None, frozenset[str]]
"""How buffers were divided into buckets: the number of elements after which a bucket is full, or
None if there is one bucket; and the names of the parameters that have a separate bucket."""


@dataclass(slots=True)
class RankOptimizer:
    """The optimizer state of one rank.

    Attributes:
        state: for each parameter, its arrays and numbers by key. The key `MASTER` has the master
            weight.
        groups: members and hyperparameters of each param group.
        values: other values, such as the gradient scaler.
    """

    state: dict[Parameter, dict[str, StoredArray | float]] = field(default_factory=dict)
    groups: list[tuple[list[Parameter], dict[str, Any]]] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)


class UnassignedStateError(Exception):
    """The files do not say which parameters the state of an optimizer belongs to."""


def take_optimizer_state(
    optimizer: RankOptimizer,
    rank: Rank,
    parameters: Sequence[Parameter],
    bucketings: Sequence[Bucketing],
) -> None:
    """Add a rank's values and optimizer state by parameter to `optimizer`, if any was saved.

    Raises:
        FormatError: the state is malformed, or does not fit these parameters.
        UnassignedStateError: it is unknown to which parameters the state belongs.
    """
    if not rank.optimizer:
        return
    for part in rank.optimizer:
        optimizer.values.update(part.values)
    parameters_of_parts = _assign_to_parts(parameters, rank.optimizer)
    buffers_of_parts = rank.buffers if isinstance(rank.buffers, list) else [rank.buffers]
    for index, (part, members) in enumerate(zip(rank.optimizer, parameters_of_parts, strict=True)):
        grouped = _assign_to_groups(members, part)
        for group_members, group in zip(grouped, part.groups, strict=True):
            _take_hyperparameters(optimizer, group_members, group)
        _take_indexed_state(optimizer, part, grouped)
        buffers = buffers_of_parts[index] if index < len(buffers_of_parts) else None
        if buffers is not None:
            for parameter, arrays in _arrays_in_buffers(buffers, members, bucketings, rank.path):
                optimizer.state.setdefault(parameter, {}).update(arrays)


def _assign_to_parts(
    parameters: Sequence[Parameter], parts: Sequence[OptimizerPart]
) -> list[list[Parameter]]:
    """Return the parameters of each part of an optimizer.

    A model with experts has one optimizer for them and one for the rest; interleaved stages can
    have one for the first chunk.

    Raises:
        UnassignedStateError: there are other parts.
    """
    are_for_experts = [
        bool(part.groups) and all(_has_true(group, "is_expert_parallel") for group in part.groups)
        for part in parts
    ]
    dense_count = len(parts) - sum(are_for_experts)
    if dense_count not in (1, 2) or sum(are_for_experts) > 1:
        raise UnassignedStateError(
            f"it has {len(parts)} parts, and the checkpoint does not say which parameters each has"
        )
    shared = [p for p in parameters if not (p.belongs_to_expert and any(are_for_experts))]
    dense_parameters: list[list[Parameter]] = [shared]
    if dense_count == 2:
        dense_parameters = [[p for p in shared if p.chunk == 0], [p for p in shared if p.chunk]]
    expert_parameters = [p for p in parameters if p.belongs_to_expert]
    remaining = iter(dense_parameters)
    return [expert_parameters if is_expert else next(remaining) for is_expert in are_for_experts]


def _assign_to_groups(
    parameters: Sequence[Parameter], part: OptimizerPart
) -> list[list[Parameter]]:
    """Return the parameters of each param group in the module's order.

    Raises:
        UnassignedStateError: no assignment agrees with the stored state.
    """
    kinds = [_kind_of_group(group) for group in part.groups]
    candidates: list[list[tuple[bool, bool]]] = []
    if len(set(kinds)) == len(kinds):
        candidates.append(kinds)
    if len(kinds) == 2:  # the order in Megatron-LM before groups recorded their purpose
        candidates.append([(True, False), (False, False)])
    separate_rates = any(separate for _, separate in kinds)
    for candidate in candidates:
        grouped = [
            [p for p in parameters if (p.decays, separate_rates and p.is_embedding) == kind]
            for kind in candidate
        ]
        if sum(map(len, grouped)) == len(parameters) and _fit_groups(grouped, part):
            return grouped
    if len(kinds) == 1 and _fit_groups([parameters], part):
        return [list(parameters)]
    raise UnassignedStateError(
        "the checkpoint does not name its parameters, and their shapes do not match Megatron-LM's "
        "own param groups"
    )


def _kind_of_group(group: SavedParamGroup) -> tuple[bool, bool]:
    """Return whether the weights of a group decay, and whether their learning rate is separate."""
    factor = group.get("wd_mult", group.get("pre_wd_mult", group.get("weight_decay")))
    separate = _has_true(group, "is_decoupled_lr") or group.get("default_config") is False
    return factor != 0.0, separate


def _has_true(group: SavedParamGroup, key: str) -> bool:
    return group.get(key) is True


def _fit_groups(grouped: Sequence[Sequence[Parameter]], part: OptimizerPart) -> bool:
    """Return whether parameters can be the members of a part's groups, by count and shapes."""
    return all(
        _fit_group(members, group, part)
        for members, group in zip(grouped, part.groups, strict=True)
    ) and all(
        [p.array.shape for p in members if p.array.dtype in _HALF_DTYPES]
        == [master.shape for master in masters if isinstance(master, StoredArray)]
        for members, masters in zip(grouped, part.masters, strict=False)
    )


def _fit_group(members: Sequence[Parameter], group: SavedParamGroup, part: OptimizerPart) -> bool:
    indices = group.get(PARAMS)
    if indices is None:
        return True  # the distributed optimizer does not number them
    if not isinstance(indices, list) or len(indices) != len(members):
        return False
    return all(
        array.shape in ((), parameter.array.shape)
        for index, parameter in zip(indices, members, strict=True)
        for array in part.state_at(index).values()
        if isinstance(array, StoredArray)
    )


def _take_hyperparameters(
    optimizer: RankOptimizer, members: list[Parameter], group: SavedParamGroup
) -> None:
    hyperparameters = {key: value for key, value in group.items() if key not in (PARAMS, STEP)}
    step = group.get(STEP)
    if isinstance(step, (int, float)):
        for parameter in members:
            optimizer.state.setdefault(parameter, {})[STEP] = step
    elif step is not None:
        hyperparameters[STEP] = step
    optimizer.groups.append((members, hyperparameters))


def _take_indexed_state(
    optimizer: RankOptimizer, part: OptimizerPart, grouped: Sequence[Sequence[Parameter]]
) -> None:
    """Take the state of a torch optimizer, which numbers parameters, and the master weights."""
    for group_index, (members, group) in enumerate(zip(grouped, part.groups, strict=True)):
        for parameter, index in zip(members, group.get(PARAMS, ()), strict=False):
            for key, value in part.state_at(index).items():
                if isinstance(value, StoredArray) or type(value) in (int, float):
                    optimizer.state.setdefault(parameter, {})[str(key)] = value
        masters = part.masters[group_index] if group_index < len(part.masters) else []
        half_precision = [p for p in members if p.array.dtype in _HALF_DTYPES]
        for parameter, master in zip(half_precision, masters, strict=False):
            if isinstance(master, StoredArray):
                optimizer.state.setdefault(parameter, {})[MASTER] = master


def _arrays_in_buffers(
    saved: Any, parameters: Sequence[Parameter], bucketings: Sequence[Bucketing], path: str
) -> Iterator[tuple[Parameter, dict[str, StoredArray]]]:
    """Yield parameters with their arrays in the distributed optimizer, by key: param, exp_avg, …

    Data-parallel rank 0 gathers one buffer for each dtype of each chunk of the model, without the
    padding between buckets (`DistributedOptimizer.get_parameter_state_dp_zero`). The buffer has the
    parameters from the last to the first (`_ParamAndGradBuffer`).

    Args:
        saved: flat arrays of an optimizer, by number of the buffer, by dtype.
        bucketings: the possible divisions into buckets, the most likely first.

    Raises:
        FormatError: the state is malformed, or does not fit these parameters.
    """
    groups: dict[tuple[int, str], list[Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.chunk, parameter.array.dtype), []).append(parameter)
    if not isinstance(saved, dict):
        raise FormatError(
            f"{path}: the state of the distributed optimizer is not a dict, but "
            f"{type(saved).__name__}: {UNSUPPORTED}"
        )
    buffers = [buffer for key, buffer in saved.items() if type(key) is int]
    if len(buffers) != len(groups):
        raise FormatError(
            f"{path}: the distributed optimizer has {len(buffers)} buffers, but the model needs "
            f"{len(groups)} (chunks of the model times dtypes): {UNSUPPORTED}"
        )
    for buffer, members in zip(buffers, groups.values(), strict=True):
        for key, flat in _iterate_flat_arrays(buffer, path):
            starts = _find_starts(members, bucketings, flat.shape[0])
            if starts is None:
                raise FormatError(
                    f"{path}: {key} of the distributed optimizer has {flat.shape[0]} elements, "
                    f"which do not match its {len(members)} parameters: {UNSUPPORTED}"
                )
            for parameter, first_element in zip(members, starts, strict=True):
                start = flat.start + first_element * flat.itemsize
                shape = parameter.array.shape
                yield parameter, {key: StoredArray.contiguous(flat.file, start, flat.dtype, shape)}


def _iterate_flat_arrays(buffer: object, path: str) -> Iterator[tuple[str, StoredArray]]:
    by_dtype = list(buffer.values()) if isinstance(buffer, dict) else []
    if len(by_dtype) != 1 or not isinstance(by_dtype[0], dict) or len(by_dtype[0]) > MOST_KEYS:
        raise FormatError(
            f"{path}: a buffer of the distributed optimizer is not a dict of one dtype with up to "
            f"{MOST_KEYS} arrays, but a {type(buffer).__name__} of {len(by_dtype)}: {UNSUPPORTED}"
        )
    for key, value in by_dtype[0].items():
        # Older versions had a list with an array for each bucket; a single one is the whole buffer.
        flat = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(flat, StoredArray) and len(flat.shape) == 1 and flat.stride in ((1,), (0,)):
            yield str(key), flat
        elif type(flat) is not int:
            raise FormatError(
                f"{path}: {key} of the distributed optimizer is not a flat array: if it is a "
                "list, an older Megatron-LM wrote it; load and save it with a newer one"
            )


def _find_starts(
    parameters: Sequence[Parameter], bucketings: Sequence[Bucketing], buffer_size: int
) -> list[int] | None:
    """Return the first element of each parameter in a buffer, or None if no bucketing fits.

    Args:
        buffer_size: the number of elements of the buffer.
    """
    for bucketing, alignment in product(bucketings, ALIGNMENTS):
        starts, end = _lay_out_buffer(parameters, bucketing, alignment)
        if end == buffer_size:
            return starts
    return None


def _lay_out_buffer(
    parameters: Sequence[Parameter], bucketing: Bucketing, alignment: int
) -> tuple[list[int], int]:
    """Return the first element of each parameter in a buffer, and the end of the buffer."""
    starts = []
    bucket_start = filled = 0
    bucket_size, names_with_own_bucket = bucketing
    for parameter in reversed(parameters):
        with_own_bucket = parameter.name in names_with_own_bucket
        filled = -(-filled // alignment) * alignment
        if with_own_bucket and filled:
            bucket_start, filled = bucket_start + filled, 0
        starts.append(bucket_start + filled)
        filled += math.prod(parameter.array.shape)
        if with_own_bucket or (bucket_size is not None and filled >= bucket_size):
            bucket_start, filled = bucket_start + filled, 0
    return starts[::-1], bucket_start + filled


def list_bucketings(args: Mapping[str, Any], stage: int, stages: int) -> list[Bucketing]:
    """Return the possible divisions into buckets, the most likely one first.

    Args:
        args: the arguments of the program that wrote the checkpoint.
        stage: the pipeline stage of the rank.
        stages: the number of stages.
    """
    tied = args.get(UNTIED) is False
    with_own_bucket: list[frozenset[str]] = [frozenset()]
    if stages > 1 and stage in (0, stages - 1):
        name = EMBEDDING if stage == 0 else OUTPUT
        with_own_bucket.insert(0 if tied else 1, frozenset({name, f"language_model.{name}"}))
    size = args.get("ddp_bucket_size")
    ranks = args.get("data_parallel_size")
    sizes: list[int | None] = [None]
    if type(size) is int and size > 0:
        sizes.append(size)
    elif type(ranks) is int:
        sizes.append(max(40_000_000, 1_000_000 * ranks))
    if args.get("overlap_grad_reduce") is True and stage == 0:
        sizes.reverse()
    return [(size, names) for names in with_own_bucket for size in sizes]
