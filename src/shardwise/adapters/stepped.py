"""How Megatron-Core's optimizers keep the weights that they step.

What a rank has is read off their own structures, without a collective. Classes go by their names.
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
class Stepped:
    """What is stepped in place of a parameter: its elements `low:high`, flattened.

    `tensor` is None where only other ranks have any of it.
    """

    parameter: torch.Tensor
    tensor: torch.Tensor | None
    low: int
    high: int


def is_megatron_optimizer(value: object) -> bool:
    """Whether a value is an optimizer of Megatron-Core's, around one of torch's kind."""
    return any(
        (kind.__module__, kind.__name__)
        == ("megatron.core.optimizer.optimizer", "MegatronOptimizer")
        for kind in type(value).__mro__
    )


def links_of(optimizer: Any) -> list[Any]:
    """The optimizers that one is a chain of, those left out that have nothing to step."""
    chained = getattr(optimizer, "chained_optimizers", None)
    links = [optimizer] if chained is None else [x for each in chained for x in links_of(each)]
    return [each for each in links if not getattr(each, "is_stub_optimizer", False)]


def inner_optimizers(optimizer: object) -> list[Optimizer]:
    """The optimizers of torch's kind inside."""
    return [each.optimizer for each in links_of(optimizer)]


def refuse_unknown_optimizer(name: str, optimizer: object) -> None:
    """Refuse what is not known to be described as it is.

    Raises:
        StateError: there is something.
    """
    what = ""
    if hasattr(optimizer, "chained_optimizers") and type(optimizer).__name__ != "ChainedOptimizer":
        what = type(optimizer).__name__
    for link in links_of(optimizer):
        inner, ddp = link.optimizer, getattr(link, "ddp_config", None)
        if getattr(ddp, "use_megatron_fsdp", False):
            what = "Megatron-FSDP"
        elif type(link).__name__ not in _KINDS:
            what = type(link).__name__
        elif getattr(link.config, "use_precision_aware_optimizer", False):
            what = "a precision-aware optimizer, which keeps weights and moments in parts,"
        elif type(inner).__name__ == "HybridDeviceOptimizer":
            what = "offloading the optimizer to the CPU"
        elif not isinstance(inner, Optimizer):
            what = f"an optimizer that is none of torch's kind, {type(inner).__name__},"
    if what:
        raise StateError(
            f"{name}: {what} is more than is known of Megatron-Core's optimizers: save by its "
            "dist_checkpointing; such checkpoints can be opened where they lie"
        )


def stepped_by(optimizer: object) -> Iterator[Stepped]:
    """What an optimizer steps, on this rank."""
    for link in links_of(optimizer):
        yield from _KINDS[type(link).__name__](link)


def settle(optimizer: object) -> None:
    """Make the model's weights from those that are stepped. All ranks of a model call it."""
    gathering = []
    for link in links_of(optimizer):
        if type(link).__name__ == "DistributedOptimizer":
            gathering += [chunk for chunk in link.model_chunks if chunk not in gathering]
    for chunk in gathering:
        if chunk.ddp_config.overlap_param_gather:  # what is under way is of what was before
            chunk.start_param_sync(force_sync=True)
    for link in links_of(optimizer):
        if hasattr(link, "_copy_main_params_to_model_params"):
            link._copy_main_params_to_model_params()
    for chunk in gathering:
        chunk.start_param_sync(force_sync=True)


def _of_float32(optimizer: Any) -> Iterator[Stepped]:
    for group in optimizer.optimizer.param_groups:
        for parameter in group["params"]:
            yield _whole(parameter, parameter)


def _of_float16(optimizer: Any) -> Iterator[Stepped]:
    groups = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
    for parameters, masters in groups:
        for parameter, master in zip(parameters, masters, strict=True):
            yield _whole(parameter, master)
    for parameter in chain.from_iterable(optimizer.fp32_from_fp32_groups):
        yield _whole(parameter, parameter)


def _of_distributed(optimizer: Any) -> Iterator[Stepped]:
    groups = chain(
        zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True),
        zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True),
    )
    held: set[int] = set()
    for parameters, shards in groups:
        for parameter, shard in zip(parameters, shards, strict=True):
            own = optimizer._get_model_param_range_map(parameter)["param"]
            held.add(id(parameter))
            yield Stepped(parameter, shard, own.start, own.end)
    for buffer in optimizer.buffers:
        for parameter in buffer.param_index_map:
            if id(parameter) not in held:
                yield Stepped(parameter, None, 0, 0)


def _whole(parameter: torch.Tensor, tensor: torch.Tensor) -> Stepped:
    return Stepped(parameter, tensor, 0, parameter.numel())


_KINDS: dict[str, Callable[[Any], Iterator[Stepped]]] = {
    "FP32Optimizer": _of_float32,
    "Float16OptimizerWithFloat16Params": _of_float16,
    "DistributedOptimizer": _of_distributed,
}
