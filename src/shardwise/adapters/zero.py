"""How DeepSpeed's optimizers keep the weights that they step: ZeRO's divisions, as parameters.

What a rank has is worked out from DeepSpeed's own structures, without a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from shardwise.adapters.parameters import FlatPart, Parameter
from shardwise.adapters.tensors import tensor_leaf
from shardwise.layout import boxes_of_range
from shardwise.state.leaves import TensorLeaf

Names = Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Kind:
    """What is particular to one of DeepSpeed's optimizers.

    Attributes:
        masters: the weights that it steps, given the names of parameters by `id`.
        settle: makes the module's weights from these; a collective.
    """

    masters: Callable[[Any, Names], Iterator[Parameter]]
    settle: Callable[[Any], None]


def is_optimizer_of_engine(value: object) -> bool:
    """Whether a value is an optimizer of DeepSpeed's, around one of torch's kind."""
    return any(
        kind.__module__.startswith("deepspeed.runtime.") and kind.__name__ == "DeepSpeedOptimizer"
        for kind in type(value).__mro__
    )


def kind_of(optimizer: object) -> Kind | None:
    """What is particular to an optimizer of DeepSpeed's, if it is a known one."""
    return _KINDS.get(type(optimizer).__name__) if is_optimizer_of_engine(optimizer) else None


@contextmanager
def filled_groups(optimizer: Any) -> Iterator[None]:
    """Have param groups name what is in them, which ZeRO 3 sees to for each of its steps only."""
    fill = getattr(optimizer, "_set_fp32_optimizer_param_groups", None)
    if fill is None:
        yield
        return
    fill()
    try:
        yield
    finally:
        optimizer._clear_fp32_optimizer_param_groups()


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
    """Where each parameter begins in the flat weights of its group, by group."""
    known = getattr(optimizer, "round_robin_bit16_offsets", None)  # not before 0.19.8
    if known is not None:
        return list(known)
    return [_ends_to_end(parameters) for parameters in optimizer.round_robin_bit16_groups]


def _of_bf16(optimizer: Any, names: Names) -> Iterator[Parameter]:
    columns = zip(
        optimizer.fp32_groups_flat_partition,
        optimizer.bf16_groups,
        optimizer.real_dp_process_group,
        strict=True,
    )
    for flat, parameters, group in columns:
        rank = dist.get_rank(group)
        yield _partition(flat, parameters, _ends_to_end(parameters), rank, names)


def _of_fp16(optimizer: Any, names: Names) -> Iterator[Parameter]:
    for flat, parameters in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True):
        yield _partition(flat, parameters, _ends_to_end(parameters), 0, names)


def _of_fp16_unfused(optimizer: Any, names: Names) -> Iterator[Parameter]:
    for masters, parameters in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
        for master, parameter in zip(masters, parameters, strict=True):
            yield Parameter(master, names[id(parameter)])


def _of_zero_3(optimizer: Any, names: Names) -> Iterator[Parameter]:
    groups = zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    for flat, parameters in groups:
        parts, start = [], 0
        for parameter in parameters:
            parts.append(_slice(parameter, names[id(parameter)], start))
            start += parameter.ds_tensor.ds_numel
        yield Parameter(flat, "", tuple(parts))


def _partition(
    flat: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    starts: Sequence[int],
    rank: int,
    names: Names,
) -> Parameter:
    """Parameters laid into flat weights that ranks have equal parts of; `flat` is this one's."""
    low = rank * flat.numel()
    parts = []
    for parameter, start in zip(parameters, starts, strict=True):
        shape, size = tuple(parameter.shape), parameter.numel()
        first = min(max(low - start, 0), size)
        last = min(max(low + flat.numel() - start, 0), size)
        boxes = tuple(boxes_of_range(shape, first, last))
        parts.append(FlatPart(names[id(parameter)], shape, start + first - low, boxes))
    return Parameter(flat, "", tuple(parts))


def _slice(parameter: Any, name: str, start: int) -> FlatPart:
    """The slice of a parameter that ZeRO 3 gave this rank, lying from `start` on; it is padded."""
    size, rank = parameter.ds_tensor.ds_numel, dist.get_rank(parameter.ds_process_group)
    first = min(rank * size, parameter.ds_numel)
    last = min(first + size, parameter.ds_numel)
    shape = tuple(parameter.ds_shape)
    return FlatPart(name, shape, start, tuple(boxes_of_range(shape, first, last)))


def frozen_leaf(parameter: Any, name: str) -> TensorLeaf:
    """What this rank has of a parameter that ZeRO 3 divides and no optimizer steps."""
    return _leaf(_slice(parameter, name, 0), parameter.ds_tensor)


def master_leaves(master: Parameter) -> list[TensorLeaf]:
    """What this rank has of parameters, given the weights that are stepped in their place."""
    if not master.flat:
        return [tensor_leaf(master.name, master.tensor)]
    return [_leaf(part, master.tensor) for part in master.flat]


def _leaf(part: FlatPart, flat: torch.Tensor) -> TensorLeaf:
    return TensorLeaf(part.name, flat.dtype, part.shape, part.fragments(flat.detach()))


def _ends_to_end(parameters: Sequence[torch.Tensor]) -> list[int]:
    return list(accumulate((each.numel() for each in parameters), initial=0))[:-1]


def _settle_gathered(optimizer: Any) -> None:
    optimizer.update_lp_params()


def _settle_fp16(optimizer: Any) -> None:
    for low, master in zip(optimizer.fp16_groups_flat, optimizer.fp32_groups_flat, strict=True):
        low.data.copy_(master.data)


def _settle_fp16_unfused(optimizer: Any) -> None:
    for lows, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for low, master in zip(lows, masters, strict=True):
            low.data.copy_(master.data)


def _settle_zero_3(optimizer: Any) -> None:
    # What is gathered is of what was before: let go of it, and gather again what stays so.
    optimizer.checkpoint_event_prologue()
    for number in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    persistent = optimizer.persistent_parameters
    if persistent:
        persistent[0].partition(persistent)
    optimizer.checkpoint_event_epilogue()


_KINDS = {
    "DeepSpeedZeroOptimizer": Kind(_of_zero_1_and_2, _settle_gathered),
    "DeepSpeedZeroOptimizer_Stage3": Kind(_of_zero_3, _settle_zero_3),
    "BF16_Optimizer": Kind(_of_bf16, _settle_gathered),
    "FP16_Optimizer": Kind(_of_fp16, _settle_fp16),
    "FP16_UnfusedOptimizer": Kind(_of_fp16_unfused, _settle_fp16_unfused),
}
