"""Find the weights that DeepSpeed's optimizers step, as flat ranges of parameters (ZeRO 1 to 3).

All values are read from DeepSpeed's objects, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from shardwise.adapters.parameters import FlatRange, Parameter
from shardwise.state.leaves import TensorLeaf

NamesById = Mapping[int, str]
"""Names of parameters, by the `id` of the parameter."""


@dataclass(frozen=True, slots=True)
class OptimizerAdapter:
    """Functions for one of DeepSpeed's optimizer classes.

    Attributes:
        find_master_weights: takes the optimizer and the names of the parameters, and yields the
            weights that the optimizer steps.
        rebuild_weights: computes the module's weights from the weights that the optimizer steps.
            This is a collective.
    """

    find_master_weights: Callable[[Any, NamesById], Iterator[Parameter]]
    rebuild_weights: Callable[[Any], None]


def is_deepspeed_optimizer(value: object) -> bool:
    """Return whether a value is one of DeepSpeed's optimizers, which wrap a torch optimizer."""
    return any(
        ancestor.__module__.startswith("deepspeed.runtime.")
        and ancestor.__name__ == "DeepSpeedOptimizer"
        for ancestor in type(value).__mro__
    )


def adapter_of(optimizer: object) -> OptimizerAdapter | None:
    """Return the adapter of a DeepSpeed optimizer; None if the optimizer is unknown."""
    return _ADAPTERS.get(type(optimizer).__name__) if is_deepspeed_optimizer(optimizer) else None


@contextmanager
def fill_param_groups(optimizer: Any) -> Iterator[None]:
    """Fill the param groups, which ZeRO 3 empties between steps, while the block runs."""
    fill_groups = getattr(optimizer, "_set_fp32_optimizer_param_groups", None)
    if fill_groups is None:
        yield
        return
    fill_groups()
    try:
        yield
    finally:
        optimizer._clear_fp32_optimizer_param_groups()


def leaf_of_frozen_parameter(parameter: Any, name: str) -> TensorLeaf:
    """Return this rank's part of a parameter that ZeRO 3 divides but no optimizer steps."""
    return _range_of_zero_3(parameter, name).leaf(name, parameter.ds_tensor.detach())


def _masters_of_zero_1_and_2(optimizer: Any, names: NamesById) -> Iterator[Parameter]:
    columns = zip(
        optimizer.single_partition_of_fp32_groups,
        optimizer.round_robin_bit16_groups,
        optimizer.real_dp_process_group,
        _offsets_by_group(optimizer),
        strict=True,
    )
    for flat, parameters, process_group, offsets in columns:
        yield _partition_as_parameter(
            flat, parameters, offsets, dist.get_rank(process_group), names
        )


def _offsets_by_group(optimizer: Any) -> Sequence[Sequence[int]]:
    """Return, for each group, the offsets in elements of the parameters in its flat weights."""
    stored_offsets = getattr(optimizer, "round_robin_bit16_offsets", None)  # since DeepSpeed 0.19.8
    if stored_offsets is not None:
        return list(stored_offsets)
    return [_offsets_end_to_end(parameters) for parameters in optimizer.round_robin_bit16_groups]


def _masters_of_bf16(optimizer: Any, names: NamesById) -> Iterator[Parameter]:
    columns = zip(
        optimizer.fp32_groups_flat_partition,
        optimizer.bf16_groups,
        optimizer.real_dp_process_group,
        strict=True,
    )
    for flat, parameters, process_group in columns:
        rank = dist.get_rank(process_group)
        yield _partition_as_parameter(
            flat, parameters, _offsets_end_to_end(parameters), rank, names
        )


def _masters_of_fp16(optimizer: Any, names: NamesById) -> Iterator[Parameter]:
    for flat, parameters in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
        yield _partition_as_parameter(flat, parameters, _offsets_end_to_end(parameters), 0, names)


def _masters_of_fp16_unfused(optimizer: Any, names: NamesById) -> Iterator[Parameter]:
    for masters, parameters in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, parameter in zip(masters, parameters, strict=True):
            yield Parameter(master, names[id(parameter)])


def _masters_of_zero_3(optimizer: Any, names: NamesById) -> Iterator[Parameter]:
    groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    for flat, parameters in groups:
        ranges, start = [], 0
        for parameter in parameters:
            part = _range_of_zero_3(parameter, names[id(parameter)])
            ranges.append(replace(part, start=start))
            start += parameter.ds_tensor.ds_numel
        yield Parameter(flat, "", tuple(ranges))


def _partition_as_parameter(
    flat: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    offsets: Sequence[int],
    rank: int,
    names: NamesById,
) -> Parameter:
    """Return a rank's partition as a parameter.

    The parameters of a group lie in one flat tensor, at `offsets`. Each rank holds an equal
    partition of the flat tensor.

    Args:
        flat: the partition of this rank.
    """
    partition_start = rank * flat.numel()
    ranges = [
        FlatRange.whole(names[id(parameter)], parameter.shape, start).cut(
            partition_start, partition_start + flat.numel()
        )
        for parameter, start in zip(parameters, offsets, strict=True)
    ]
    return Parameter(flat, "", tuple(ranges))


def _range_of_zero_3(parameter: Any, name: str) -> FlatRange:
    """Return this rank's range of a parameter. Ranges have equal sizes; the last one is padded."""
    slice_size, rank = parameter.ds_tensor.ds_numel, dist.get_rank(parameter.ds_process_group)
    return FlatRange.whole(name, parameter.ds_shape).cut(rank * slice_size, (rank + 1) * slice_size)


def _offsets_end_to_end(parameters: Sequence[torch.Tensor]) -> list[int]:
    return list(accumulate((each.numel() for each in parameters), initial=0))[:-1]


def _rebuild_by_gather(optimizer: Any) -> None:
    optimizer.update_lp_params()


def _rebuild_fp16(optimizer: Any) -> None:
    for weight, master in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
        weight.data.copy_(master.data)


def _rebuild_fp16_unfused(optimizer: Any) -> None:
    for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master.data)


def _rebuild_zero_3(optimizer: Any) -> None:
    # Free the gathered weights, which are old, and gather the persistent ones again.
    optimizer.checkpoint_event_prologue()
    for group_index in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group_index)
    persistent = optimizer.persistent_parameters
    if persistent:
        persistent[0].partition(persistent)
    optimizer.checkpoint_event_epilogue()


_ADAPTERS = {
    "DeepSpeedZeroOptimizer": OptimizerAdapter(_masters_of_zero_1_and_2, _rebuild_by_gather),
    "DeepSpeedZeroOptimizer_Stage3": OptimizerAdapter(_masters_of_zero_3, _rebuild_zero_3),
    "BF16_Optimizer": OptimizerAdapter(_masters_of_bf16, _rebuild_by_gather),
    "FP16_Optimizer": OptimizerAdapter(_masters_of_fp16, _rebuild_fp16),
    "FP16_UnfusedOptimizer": OptimizerAdapter(_masters_of_fp16_unfused, _rebuild_fp16_unfused),
}
