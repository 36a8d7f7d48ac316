"""FullyShardedDataParallel: flattened parameters, decomposed into boxes without a collective."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParameter, FlatParamHandle

from shardwise.adapters.parameters import CleanNames, FlatPart, Parameter
from shardwise.layout import Box, boxes_of_range
from shardwise.state.leaves import TensorLeaf


def is_fsdp1(module: nn.Module) -> bool:
    """Whether any part of a module is wrapped in FullyShardedDataParallel."""
    return any(isinstance(part, FullyShardedDataParallel) for part in module.modules())


def reshard(module: nn.Module) -> None:
    """Let go of gathered parameters, which an evaluation leaves, before shards are loaded into.

    Else the next forward would take them for the values, and never see what was loaded.
    """
    for _, handle in _units(module):
        initialized = hasattr(handle.flat_param, "_local_shard")
        if initialized and handle.uses_sharded_strategy and not handle.needs_unshard():
            handle.reshard(free_unsharded_flat_param=True)


def flat_tensors(module: nn.Module, root: str) -> tuple[list[TensorLeaf], dict[str, str]]:
    """All parameters that FSDP1 holds flattened, as leaves of their original names and shapes.

    Args:
        root: the name of `module` in the state.

    Returns:
        The leaves, and the further names of those that are shared by several modules.
    """
    leaves = []
    shared: dict[str, str] = {}
    clean = CleanNames(module)
    for flat, prefix, parts in _handles(module):
        local = _local_shard(flat)
        for part in parts:
            name = f"{root}.{part.name}"
            fragments = part.fragments(local)
            leaves.append(TensorLeaf(name, local.dtype, part.shape, fragments, name))
        for info in flat._shared_param_infos:
            path = f"{prefix}{info.module_name}.{info.param_name}"
            first = f"{prefix}{info.prim_module_name}.{info.prim_param_name}"
            shared[f"{root}.{clean(path)}"] = f"{root}.{clean(first)}"
    return leaves, shared


def flat_parameters(module: nn.Module, root: str) -> Iterator[Parameter]:
    """What an optimizer may hold of them: the flat parameters, or views of original ones."""
    for flat, _, parts in _handles(module):
        named = [FlatPart(f"{root}{p.name}", p.shape, p.start, p.boxes) for p in parts]
        yield Parameter(flat, "", tuple(named))
        for original, part in zip(flat._params or (), named, strict=False):
            alone = FlatPart(part.name, part.shape, 0, part.boxes)
            yield Parameter(original, "", (alone,))


def _handles(module: nn.Module) -> Iterator[tuple[FlatParameter, str, list[FlatPart]]]:
    """Each flat parameter of a module, the path of its FSDP unit, and its parts by full name."""
    clean = CleanNames(module)
    for path, handle in _units(module):
        flat = handle.flat_param
        prefix = f"{path}." if path else ""
        parts = []
        infos = zip(flat._fqns, flat._shapes, flat._shard_param_infos, strict=True)
        for fqn, shape, info in infos:
            boxes: list[Box] = []
            first, last = info.intra_param_start_idx, info.intra_param_end_idx
            if first is not None and last is not None:
                boxes = boxes_of_range(tuple(shape), first, last + 1)
            name = clean(prefix + fqn)
            parts.append(FlatPart(name, tuple(shape), info.offset_in_shard or 0, tuple(boxes)))
        yield flat, prefix, parts


def _units(module: nn.Module) -> Iterator[tuple[str, FlatParamHandle]]:
    """The units of a module that have parameters, by path."""
    for path, part in module.named_modules():
        handle = getattr(part, "_handle", None)
        if isinstance(part, FullyShardedDataParallel) and handle is not None:
            yield path, handle


def _local_shard(flat: torch.Tensor) -> torch.Tensor:
    shard: torch.Tensor = getattr(flat, "_local_shard", flat)
    return shard.detach()
