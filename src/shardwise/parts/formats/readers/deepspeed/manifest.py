"""Adds tensors to the builder: tensor-parallel shards, ZeRO's flat groups, steps, param groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwise.parts.formats.reader import Builder, FormatError, ParamGroup, StoredArray
from shardwise.parts.formats.readers.deepspeed.states import STEP, ModelState, Number
from shardwise.parts.formats.readers.deepspeed.tensor_parallel import (
    Placement,
    PlacementRule,
    place_whole,
)
from shardwise.parts.formats.readers.deepspeed.zero import (
    MASTER,
    FlatGroup,
    ranges_of_slices,
)


def tensor_name(parameter: str, key: str) -> str:
    """Return the name of a parameter's weight (`MASTER`) or of its optimizer state."""
    return f"model.{parameter}" if key == MASTER else f"optimizer.{parameter}.{key}"


def ensure_tensor(builder: Builder, name: str, dtype: str, placement: Placement) -> tuple[str, ...]:
    """Add a tensor unless the builder has it, and return its name for each rank.

    If a parameter is averaged, each rank has a hidden tensor.

    Raises:
        FormatError: the shape is too large.
    """
    ranks = range(len(placement.parts))
    if name not in builder and placement.averaged:
        terms = [f"{name}.of_rank_{rank}" for rank in ranks]
        builder.add_mean(name, dtype, placement.shape, terms)
    elif name not in builder:
        builder.add_tensor(name, dtype, placement.shape)
    return builder.terms_of(name) or (name,) * len(ranks)


def add_shards(
    builder: Builder, name: str, arrays: Sequence[StoredArray], placement: Placement
) -> None:
    """Add a tensor of the ranks' shards; if the builder has it, add them as replicas.

    Raises:
        FormatError: dtypes differ, or the builder has the tensor with another dtype or shape.
    """
    dtype = arrays[0].dtype
    kinds = {array.dtype for array in arrays}
    replica = name in builder
    if replica:
        entry = builder.entry(name)
        if (entry.dtype, entry.shape) != (dtype, placement.shape):
            kinds.add(f"{entry.dtype} {list(entry.shape)}")
    if len(kinds) > 1:
        raise FormatError(
            f"{name}: ranks differ in its dtype or shape: {', '.join(sorted(kinds))}. The files "
            "are from different saves: copy all files of one save"
        )
    tensors = ensure_tensor(builder, name, dtype, placement)
    for rank, (array, boxes) in enumerate(zip(arrays, placement.parts, strict=True)):
        is_replica = replica or (placement.replicated and rank > 0)
        for box, offset in boxes:
            if box.size:
                builder.add_box(tensors[rank], offset, array, box, replica=is_replica)


def add_flat_group(
    builder: Builder, shards: Sequence[FlatGroup], placement_rule: PlacementRule
) -> None:
    """Add a group of parameters that ZeRO divided: weights, optimizer state, and step counts.

    Args:
        shards: the group on each tensor-parallel rank.

    Raises:
        FormatError: the ranks have different parameters, or their shards do not fit together.
    """
    _add_flat_arrays(builder, shards, placement_rule)
    first = shards[0]
    for key in first.scalars:
        values = [value for group in shards for value in group.scalars.get(key, ())]
        add_scalars(builder, first.names, key, values)
    builder.left_out += first.left_out


def _add_flat_arrays(
    builder: Builder, shards: Sequence[FlatGroup], placement_rule: PlacementRule
) -> None:
    first = shards[0]
    for group in shards:
        if group.names != first.names or set(group.arrays) != set(first.arrays):
            example = [*sorted({*group.names} ^ {*first.names}), *first.names, "the weights"][0]
            raise FormatError(
                "tensor-parallel ranks have different parameters or optimizer state in a group, "
                f"for example {example[:200]}: their files are from different saves: copy all "
                "files of one save"
            )
    placements = [
        placement_rule(name, [group.shapes[i] for group in shards])
        for i, name in enumerate(first.names)
    ]
    for key, (_, first_arrays) in first.arrays.items():
        dtype = next(array.dtype for array in first_arrays if array is not None)
        names, in_builder = [], []
        for parameter, placement in zip(first.names, placements, strict=True):
            name = tensor_name(parameter, key)
            in_builder.append(name in builder)
            names.append(ensure_tensor(builder, name, dtype, placement))
            if builder.entry(name).shape != placement.shape:
                raise FormatError(
                    f"{name}: pipeline stages have it in different shapes, "
                    f"{list(builder.entry(name).shape)} and {list(placement.shape)}: their files "
                    "are from different saves: copy all files of one save"
                )
        for rank, group in enumerate(shards):
            ranges, arrays = group.arrays[key]
            parts = [placement.parts[rank] for placement in placements]
            builder.add_flat_ranges(
                list(zip((each[rank] for each in names), group.shapes, parts, strict=True)),
                [
                    known or (placement.replicated and rank > 0)
                    for known, placement in zip(in_builder, placements, strict=True)
                ],
                arrays,
                ranges,
            )


def add_scalars(
    builder: Builder, names: Sequence[str], key: str, values: Sequence[StoredArray | Number]
) -> None:
    """Add the first rank's value as state of each parameter that lacks this state.

    Other ranks' counts of steps are replicas. Other numbers can differ between ranks: for example,
    norms of their parts.

    Args:
        values: 0-d arrays, or numbers. A step count that is a number becomes a tensor, as in torch.
    """
    first = values[0]
    tensors = [tensor_name(name, key) for name in names if tensor_name(name, key) not in builder]
    for tensor in tensors:
        if isinstance(first, StoredArray):
            builder.add_array(tensor, first)
        elif key == STEP and not isinstance(first, bool):
            builder.add_number(tensor, first)
        else:
            builder.add_value(tensor, first)
    for value in values[1:] if key == STEP and isinstance(first, StoredArray) else ():
        if isinstance(value, StoredArray) and tensors:
            builder.add_box(tensors[0], (), value, replica=True)


def add_state(
    builder: Builder,
    parameter: str,
    key: str,
    values: Sequence[StoredArray | Number],
    placement_rule: PlacementRule,
) -> None:
    """Add the weight (`MASTER`) or a state of a parameter.

    Args:
        values: the value of each tensor-parallel rank, all of one type.
    """
    arrays = [value for value in values if isinstance(value, StoredArray)]
    if not arrays or not arrays[0].shape:
        add_scalars(builder, [parameter], key, values)
    else:
        placement = placement_rule(parameter, [array.shape for array in arrays])
        add_shards(builder, tensor_name(parameter, key), arrays, placement)


def add_param_groups(builder: Builder, groups: Iterable[ParamGroup]) -> None:
    """Add `optimizer.param_groups`; groups with equal hyperparameters become one.

    Call it after the state of all parameters was added. Steps in param groups become state of the
    parameters that have none.
    """
    cleaned = []
    for group in groups:
        hyperparameters = dict(group.hyperparameters)
        step = hyperparameters.get(STEP)
        if isinstance(step, (int, float)):
            # DeepSpeed's Adam counts steps by group, torch's by parameter.
            del hyperparameters[STEP]
            add_scalars(builder, group.names, STEP, [step])
        if hyperparameters.get("bias_correction") is True:
            del hyperparameters["bias_correction"]  # torch's Adam always corrects the bias
        cleaned.append(replace(group, hyperparameters=hyperparameters))
    if cleaned:
        builder.add_groups(cleaned, "optimizer.param_groups", merge=True)


def add_frozen_slices(
    builder: Builder, models: Sequence[Sequence[ModelState]], placement_rule: PlacementRule
) -> None:
    """Add the frozen parameters that ZeRO 3 divided.

    Args:
        models: for each tensor-parallel rank, the model states of all data-parallel ranks.

    Raises:
        FormatError: ranks have different parameters, or lack their slices.
    """
    states = models[0]
    names = list(states[0].frozen_shapes)
    for state in (state for ranks in models for state in ranks):
        if list(state.frozen_shapes) != names:
            raise FormatError(
                f"{state.path}: its frozen parameters differ from those in {states[0].path}: the "
                "files are from different saves: copy all files of one save"
            )
    for name in names:
        shape = states[0].frozen_shapes[name]
        placement = placement_rule(name, [ranks[0].frozen_shapes[name] for ranks in models])
        if len(models) > 1 and not placement.replicated:
            builder.left_out.append(
                f"model.{name}: frozen, and divided by ZeRO 3 within tensor-parallel shards"
            )
            continue
        size = math.prod(shape)
        flat = ranges_of_slices([size], len(states)), _frozen_slices(name, size, states)
        _add_flat_arrays(builder, [FlatGroup((name,), (shape,), {MASTER: flat})], place_whole)


def _frozen_slices(name: str, size: int, states: Sequence[ModelState]) -> list[StoredArray]:
    """Return the slices of all ranks of a frozen parameter."""
    slices: list[StoredArray] = []
    for state in states:
        array = state.frozen.get(name)
        if array is None or len(array.shape) != 1 or array.shape[0] < -(-size // len(states)):
            raise FormatError(
                f"{state.path}: {name}: the file lacks the rank's slice of this frozen parameter: "
                "the files are damaged, or from different saves: copy all files of one save"
            )
        if slices and array.dtype != slices[0].dtype:
            raise FormatError(
                f"{state.path}: {name}: the slice of this frozen parameter is {array.dtype}, but "
                f"{slices[0].dtype} in {states[0].path}: the files are from different saves: copy "
                "all files of one save"
            )
        slices.append(array)
    return slices
