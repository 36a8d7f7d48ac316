"""FullyShardedDataParallel (FSDP1): turn flat parameters into boxes, without communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.adapters.parameters import FlatRange, NameCleaner, Parameter
from shardwise.state.leaves import TensorLeaf
from shardwise.state.tensor_memory import is_instance

if TYPE_CHECKING:
    from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle


def is_fsdp1(module: nn.Module) -> bool:
    """Return whether any part of a module is wrapped in FullyShardedDataParallel."""
    return any(map(_is_fsdp_unit, module.modules()))


def reshard_fsdp1(module: nn.Module) -> None:
    """Free the gathered parameters that an evaluation leaves behind, before a load fills shards.

    Otherwise the next forward would use the old gathered values.
    """
    for _, handle in _fsdp_units(module):
        initialized = hasattr(handle.flat_param, "_local_shard")
        if initialized and handle.uses_sharded_strategy and not handle.needs_unshard():
            handle.reshard(free_unsharded_flat_param=True)


def leaves_of_flat_parameters(
    module: nn.Module, module_name: str
) -> tuple[list[TensorLeaf], dict[str, str]]:
    """Return all flattened parameters as leaves with their original names and shapes.

    Args:
        module_name: name of `module` in the state.

    Returns:
        The leaves, and the first name of each shared parameter by its other names.
    """
    leaves = []
    first_names: dict[str, str] = {}
    clean = NameCleaner(module)
    for flat, prefix, ranges in _flat_parameters(module):
        local = _local_shard(flat)
        for part in ranges:
            name = f"{module_name}.{part.name}"
            leaves.append(part.leaf(name, local, tie_key=name))
        for info in flat._shared_param_infos:
            path = f"{prefix}{info.module_name}.{info.param_name}"
            first_name = f"{prefix}{info.prim_module_name}.{info.prim_param_name}"
            first_names[f"{module_name}.{clean(path)}"] = f"{module_name}.{clean(first_name)}"
    return leaves, first_names


def flat_parameters(module: nn.Module) -> Iterator[Parameter]:
    """Yield the parameters that an optimizer may hold: flat ones, and views of original ones."""
    for flat, _, ranges in _flat_parameters(module):
        yield Parameter(flat, "", tuple(ranges))
        for original, part in zip(flat._params or (), ranges, strict=False):
            yield Parameter(original, "", (replace(part, start=0),))


def _flat_parameters(module: nn.Module) -> Iterator[tuple[FlatParameter, str, list[FlatRange]]]:
    """Yield each flat parameter, the path prefix of its FSDP unit, and its original parameters."""
    clean = NameCleaner(module)
    for path, handle in _fsdp_units(module):
        flat = handle.flat_param
        prefix = f"{path}." if path else ""
        ranges = []
        infos = zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)
        for fqn, shape, info in infos:
            first, last = info.intra_param_start_idx, info.intra_param_end_idx
            local_range = (0, 0) if first is None or last is None else (first, last + 1)
            part = FlatRange.whole(clean(prefix + fqn), shape).cut(*local_range)
            ranges.append(replace(part, start=info.offset_in_shard or 0))
        yield flat, prefix, ranges


def _is_fsdp_unit(module: nn.Module) -> bool:
    return is_instance(module, "torch.distributed.fsdp", "FullyShardedDataParallel")


def _fsdp_units(module: nn.Module) -> Iterator[tuple[str, FlatParamHandle]]:
    """Yield the path and the handle of each FSDP unit that has parameters."""
    for path, part in module.named_modules():
        handle = getattr(part, "_handle", None)
        if _is_fsdp_unit(part) and handle is not None:
            yield path, handle


def _local_shard(flat: torch.Tensor) -> torch.Tensor:
    shard: torch.Tensor = getattr(flat, "_local_shard", flat)
    return shard.detach()
