"""FullyShardedDataParallel (FSDP1): flat parameters as boxes, without communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle

from shardwise.adapters.parameters import CleanNames, FlatRange, Parameter
from shardwise.state.leaves import TensorLeaf


def is_fsdp1(module: nn.Module) -> bool:
    """Return whether any part of a module is wrapped in FullyShardedDataParallel."""
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def reshard(module: nn.Module) -> None:
    """Free gathered parameters, which an evaluation leaves behind, before a load fills shards.

    Otherwise the next forward would use the old gathered values.
    """
    for _, handle in _units(module):
        initialized = hasattr(handle.flat_param, "_local_shard")
        if initialized and handle.uses_sharded_strategy and not handle.needs_unshard():
            handle.reshard(free_unsharded_flat_param=True)


def flat_tensors(module: nn.Module, root: str) -> tuple[list[TensorLeaf], dict[str, str]]:
    """Return all flattened parameters as leaves with their original names and shapes.

    Args:
        root: name of `module` in the state.

    Returns:
        The leaves, and a mapping from the further names of shared parameters to their first names.
    """
    leaves = []
    shared: dict[str, str] = {}
    clean = CleanNames(module)
    for flat, prefix, parts in _flat_parameters(module):
        local = _local_shard(flat)
        for part in parts:
            name = f"{root}.{part.name}"
            leaves.append(part.leaf(name, local, identity=name))
        for info in flat._shared_param_infos:
            path = f"{prefix}{info.module_name}.{info.param_name}"
            first = f"{prefix}{info.prim_module_name}.{info.prim_param_name}"
            shared[f"{root}.{clean(path)}"] = f"{root}.{clean(first)}"
    return leaves, shared


def flat_parameters(module: nn.Module) -> Iterator[Parameter]:
    """Yield what an optimizer may hold: flat parameters, or views of original parameters."""
    for flat, _, parts in _flat_parameters(module):
        yield Parameter(flat, "", tuple(parts))
        for original, part in zip(flat._params or (), parts, strict=False):
            yield Parameter(original, "", (replace(part, start=0),))


def _flat_parameters(module: nn.Module) -> Iterator[tuple[FlatParameter, str, list[FlatRange]]]:
    """Yield each flat parameter, the path prefix of its FSDP unit, and its parts by full name."""
    clean = CleanNames(module)
    for path, handle in _units(module):
        flat = handle.flat_param
        prefix = f"{path}." if path else ""
        parts = []
        infos = zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)
        for fqn, shape, info in infos:
            first, last = info.intra_param_start_idx, info.intra_param_end_idx
            here = (0, 0) if first is None or last is None else (first, last + 1)
            part = FlatRange.whole(clean(prefix + fqn), shape).cut(*here)
            parts.append(replace(part, start=info.offset_in_shard or 0))
        yield flat, prefix, parts


def _units(module: nn.Module) -> Iterator[tuple[str, FlatParamHandle]]:
    """Yield the FSDP units of a module that have parameters, by path."""
    for path, part in module.named_modules():
        handle = getattr(part, "_handle", None)
        if isinstance(part, FullyShardedDataParallel) and handle is not None:
            yield path, handle


def _local_shard(flat: torch.Tensor) -> torch.Tensor:
    shard: torch.Tensor = getattr(flat, "_local_shard", flat)
    return shard.detach()
