"""ZeRO's divisions of parameters: the weights that DeepSpeed's optimizers step, as flat ranges.

Everything is read from DeepSpeed's own structures, without communication.
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

Names = Mapping[int, str]
"""Names of parameters, by `id`."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What is specific to one of DeepSpeed's optimizers.

    Attributes:
        masters: yields the weights that it steps, given the names of the parameters.
        rebuild: computes the module's weights from these; a collective.
    """

    masters: Callable[[Any, Names], Iterator[Parameter]]
    rebuild: Callable[[Any], None]


def is_optimizer_of_engine(value: object) -> bool:
    """Return whether a value is one of DeepSpeed's optimizers, which wrap one of torch's."""
    return any(
        kind.__module__.startswith("deepspeed.runtime.") and kind.__name__ == "DeepSpeedOptimizer"
        for kind in type(value).__mro__
    )


def kind_of(optimizer: object) -> Kind | None:
    """Return what is specific to an optimizer of DeepSpeed's; None if it is another, or unknown."""
    return _KINDS.get(type(optimizer).__name__) if is_optimizer_of_engine(optimizer) else None


@contextmanager
def filled_groups(optimizer: Any) -> Iterator[None]:
    """Fill the param groups, which ZeRO 3 empties between steps, for the length of a block."""
    fill = getattr(optimizer, "_set_fp32_optimizer_param_groups", None)
    if fill is None:
        yield
        return
    fill()
    try:
        yield
    finally:
        optimizer._clear_fp32_optimizer_param_groups()


def frozen_leaf(parameter: Any, name: str) -> TensorLeaf:
    """Return this rank's part of a parameter that ZeRO 3 divides and no optimizer steps."""
    return _slice_of_zero_3(parameter, name).leaf(name, parameter.ds_tensor.detach())


def _of_zero_1_and_2(optimizer: Any, names: Names) -> Iterator[Parameter]:
    columns = zip(
        optimizer.single_partition_of_fp32_groups,
        optimizer.round_robin_bit16_groups,
        optimizer.real_dp_process_group,
        _offsets(optimizer),
        strict=True,
    )
    for flat, parameters, group, starts in columns:
        yield _partition(flat, parameters, starts, dist.get_rank(group), names)


def _offsets(optimizer: Any) -> Sequence[Sequence[int]]:
    """Return where each parameter begins in the flat weights of its group, by group."""
    known = getattr(optimizer, "round_robin_bit16_offsets", None)  # since DeepSpeed 0.19.8
    if known is not None:
        return list(known)
    return [_end_to_end(parameters) for parameters in optimizer.round_robin_bit16_groups]


def _of_bf16(optimizer: Any, names: Names) -> Iterator[Parameter]:
    columns = zip(
        optimizer.fp32_groups_flat_partition,
        optimizer.bf16_groups,
        optimizer.real_dp_process_group,
        strict=True,
    )
    for flat, parameters, group in columns:
        rank = dist.get_rank(group)
        yield _partition(flat, parameters, _end_to_end(parameters), rank, names)


def _of_fp16(optimizer: Any, names: Names) -> Iterator[Parameter]:
    for flat, parameters in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
        yield _partition(flat, parameters, _end_to_end(parameters), 0, names)


def _of_fp16_unfused(optimizer: Any, names: Names) -> Iterator[Parameter]:
    for masters, parameters in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, parameter in zip(masters, parameters, strict=True):
            yield Parameter(master, names[id(parameter)])


def _of_zero_3(optimizer: Any, names: Names) -> Iterator[Parameter]:
    groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    for flat, parameters in groups:
        parts, start = [], 0
        for parameter in parameters:
            part = _slice_of_zero_3(parameter, names[id(parameter)])
            parts.append(replace(part, start=start))
            start += parameter.ds_tensor.ds_numel
        yield Parameter(flat, "", tuple(parts))


def _partition(
    flat: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    starts: Sequence[int],
    rank: int,
    names: Names,
) -> Parameter:
    """Return this rank's partition `flat` of parameters that lie flattened, in equal partitions."""
    low = rank * flat.numel()
    parts = [
        FlatRange.whole(names[id(parameter)], parameter.shape, start).cut(low, low + flat.numel())
        for parameter, start in zip(parameters, starts, strict=True)
    ]
    return Parameter(flat, "", tuple(parts))


def _slice_of_zero_3(parameter: Any, name: str) -> FlatRange:
    """Return the slice of a parameter that this rank has. Slices are equal, the last is padded."""
    size, rank = parameter.ds_tensor.ds_numel, dist.get_rank(parameter.ds_process_group)
    return FlatRange.whole(name, parameter.ds_shape).cut(rank * size, (rank + 1) * size)


def _end_to_end(parameters: Sequence[torch.Tensor]) -> list[int]:
    return list(accumulate((each.numel() for each in parameters), initial=0))[:-1]


def _rebuild_gathered(optimizer: Any) -> None:
    optimizer.update_lp_params()


def _rebuild_fp16(optimizer: Any) -> None:
    for low, master in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
        low.data.copy_(master.data)


def _rebuild_fp16_unfused(optimizer: Any) -> None:
    for lows, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for low, master in zip(lows, masters, strict=True):
            low.data.copy_(master.data)


def _rebuild_zero_3(optimizer: Any) -> None:
    # Free the gathered weights, which are the old ones, and gather the persistent ones again.
    optimizer.checkpoint_event_prologue()
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    persistent = optimizer.persistent_parameters
    if persistent:
        persistent[0].partition(persistent)
    optimizer.checkpoint_event_epilogue()


_KINDS = {
    "DeepSpeedZeroOptimizer": Kind(_of_zero_1_and_2, _rebuild_gathered),
    "DeepSpeedZeroOptimizer_Stage3": Kind(_of_zero_3, _rebuild_zero_3),
    "BF16_Optimizer": Kind(_of_bf16, _rebuild_gathered),
    "FP16_Optimizer": Kind(_of_fp16, _rebuild_fp16),
    "FP16_UnfusedOptimizer": Kind(_of_fp16_unfused, _rebuild_fp16_unfused),
}
