"""Finds the master weights of Megatron-Core's optimizers, and updates the model from them.

All values are read from the optimizers' objects, without communication. Classes are recognised by
their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from shardwise.errors import StateError


@dataclass(frozen=True, slots=True)
class MasterWeight:
    """The tensor that an optimizer updates in place of a parameter.

    Attributes:
        parameter: the parameter of the model.
        tensor: the master weight, or the parameter itself if it has no master weight. None if the
            optimizer updates this parameter only on other ranks.
        low, high: the range of elements of the flattened parameter that the tensor holds.
    """

    parameter: torch.Tensor
    tensor: torch.Tensor | None
    low: int
    high: int


def is_megatron_optimizer(value: object) -> bool:
    """Return whether a value is one of Megatron-Core's optimizers, which wrap torch optimizers."""
    return any(
        (cls.__module__, cls.__name__) == ("megatron.core.optimizer.optimizer", "MegatronOptimizer")
        for cls in type(value).__mro__
    )


def optimizers_in_chain(optimizer: Any) -> list[Any]:
    """Return the optimizers in a chain of optimizers, except those without parameters."""
    chained = getattr(optimizer, "chained_optimizers", None)
    chained_optimizers = (
        [optimizer]
        if chained is None
        else [x for each in chained for x in optimizers_in_chain(each)]
    )
    return [each for each in chained_optimizers if not getattr(each, "is_stub_optimizer", False)]


def inner_optimizers(optimizer: object) -> list[Optimizer]:
    """Return the torch optimizers inside an optimizer of Megatron-Core."""
    return [each.optimizer for each in optimizers_in_chain(optimizer)]


def refuse_unknown_optimizer(name: str, optimizer: object) -> None:
    """Refuse an optimizer with features that this module cannot read.

    Raises:
        StateError: names the feature.
    """
    unsupported = ""
    if hasattr(optimizer, "chained_optimizers") and type(optimizer).__name__ != "ChainedOptimizer":
        unsupported = type(optimizer).__name__
    for chained_optimizer in optimizers_in_chain(optimizer):
        torch_optimizer = chained_optimizer.optimizer
        ddp = getattr(chained_optimizer, "ddp_config", None)
        if getattr(ddp, "use_megatron_fsdp", False):
            unsupported = "Megatron-FSDP"
        elif type(chained_optimizer).__name__ not in _MASTERS_OF_TYPE:
            unsupported = type(chained_optimizer).__name__
        elif getattr(chained_optimizer.config, "use_precision_aware_optimizer", False):
            unsupported = "a precision-aware optimizer, which keeps weights and moments in parts,"
        elif type(torch_optimizer).__name__ == "HybridDeviceOptimizer":
            unsupported = "offloading the optimizer to the CPU"
        elif not isinstance(torch_optimizer, Optimizer):
            unsupported = f"{type(torch_optimizer).__name__}, which is not a torch optimizer,"
    if unsupported:
        raise StateError(
            f"{name}: {unsupported} is not supported for Megatron-Core optimizers: save with "
            "megatron.core.dist_checkpointing; shardwise can open such checkpoints"
        )


def master_weights_of(optimizer: object) -> Iterator[MasterWeight]:
    """Yield the tensors that an optimizer updates on this rank."""
    for chained_optimizer in optimizers_in_chain(optimizer):
        yield from _MASTERS_OF_TYPE[type(chained_optimizer).__name__](chained_optimizer)


def rebuild_weights(optimizer: object) -> None:
    """Compute the model's weights from the master weights. This is a collective."""
    gathering_chunks = []
    for chained_optimizer in optimizers_in_chain(optimizer):
        if type(chained_optimizer).__name__ == "DistributedOptimizer":
            gathering_chunks += [
                chunk for chunk in chained_optimizer.model_chunks if chunk not in gathering_chunks
            ]
    for chunk in gathering_chunks:
        if chunk.ddp_config.overlap_param_gather:  # finish the gather of old weights first
            chunk.start_param_sync(force_sync=True)
    for chained_optimizer in optimizers_in_chain(optimizer):
        if hasattr(chained_optimizer, "_copy_main_params_to_model_params"):
            chained_optimizer._copy_main_params_to_model_params()
    for chunk in gathering_chunks:
        chunk.start_param_sync(force_sync=True)


def _masters_of_float32(optimizer: Any) -> Iterator[MasterWeight]:
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            yield _whole_weight(parameter, parameter)


def _masters_of_float16(optimizer: Any) -> Iterator[MasterWeight]:
    groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
    for parameters, masters in groups:
        for parameter, master in zip(parameters, masters, strict=True):
            yield _whole_weight(parameter, master)
    for parameter in chain.from_iterable(optimizer.fp32_from_fp32_groups):
        yield _whole_weight(parameter, parameter)


def _masters_of_distributed(optimizer: Any) -> Iterator[MasterWeight]:
    groups = chain(
        zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
        zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
    )
    parameter_ids: set[int] = set()
    for parameters, shards in groups:
        for parameter, shard in zip(parameters, shards, strict=True):
            own_range = optimizer._get_model_param_range_map(parameter)["param"]
            parameter_ids.add(id(parameter))
            yield MasterWeight(parameter, shard, own_range.start, own_range.end)
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:
            if id(parameter) not in parameter_ids:
                yield MasterWeight(parameter, None, 0, 0)


def _whole_weight(parameter: torch.Tensor, tensor: torch.Tensor) -> MasterWeight:
    return MasterWeight(parameter, tensor, 0, parameter.numel())


_MASTERS_OF_TYPE: dict[str, Callable[[Any], Iterator[MasterWeight]]] = {
    "FP32Optimizer": _masters_of_float32,
    "Float16OptimizerWithFloat16Params": _masters_of_float16,
    "DistributedOptimizer": _masters_of_distributed,
}
