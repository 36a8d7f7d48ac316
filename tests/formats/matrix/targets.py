"""A model with any names and shapes under each parallelism of torch, to load into."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.kernel.adapters import local_state_of
from shardwise.kernel.adapters.optimizer_groups import NOT_HYPERPARAMETERS
from shardwise.ports.binding import decode
from tests.formats.comparing import assert_same
from tests.formats.matrix.wanted import Wanted
from tests.multirank.models import CPU, GRIDS, WORLDS

# A flat parameter of FSDP1 is in one param group, but the groups of sources divide modules.
KINDS = {kind: world for kind, world in WORLDS.items() if kind != "fsdp1_flat"}
UNSET = 7.5  # a learning rate that differs from all sources
Held = dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]


def load_each(kind: str, places: Sequence[tuple[str, str]]) -> list[Held]:
    """Load each checkpoint into a model under a parallelism, and compare this rank's part.

    Args:
        places: the path of each checkpoint, and the file with its expected values.

    Returns:
        For each checkpoint, the boxes that this rank holds of each tensor, after comparing them.
    """
    warnings.simplefilter("ignore")
    mesh = GRIDS[kind].mesh() if kind in GRIDS else None  # once, because this is slow
    wanted = [torch.load(file, weights_only=False) for _, file in places]
    return [_load(kind, mesh, place, each) for (place, _), each in zip(places, wanted, strict=True)]


def _load(kind: str, mesh: DeviceMesh | None, place: str, wanted: Wanted) -> Held:
    state = _state(kind, mesh, wanted)
    sw.load(place, state, cast=True, rename=wanted.rename)
    tensors, settings = wanted.tensors(), wanted.settings()
    held = local_state_of(state, allow_pickle=False)
    found: Held = {}
    for leaf in held.tensors:
        for fragment in leaf.fragments:
            box = fragment.box
            assert_same(fragment.data, tensors[leaf.name][box.slices()])
            found.setdefault(leaf.name, []).append((box.offset, box.shape))
    for members, value in held.grouped.get("optimizer.param_groups", ()):
        for member in members:
            has: Any = decode(value, "group")
            wanted_here = {
                k: v for k, v in settings[member].items() if k not in NOT_HYPERPARAMETERS
            }
            assert {key: has[key] for key in wanted_here} == wanted_here, member
    return found


def _state(kind: str, mesh: DeviceMesh | None, wanted: Wanted) -> dict[str, Any]:
    parts = list(_parts(kind, wanted))
    models = [_wrapped(kind, mesh, root, stage) for root, stage in parts]
    state: dict[str, Any] = {"model": models if len(models) > 1 else models[0]}
    if wanted.state:
        optimizers = [_optimizer(root, wanted) for root, _ in parts if _is_trained(root)]
        state["optimizer"] = optimizers if len(optimizers) > 1 else optimizers[0]
    return state


def _parts(kind: str, wanted: Wanted) -> Iterator[tuple[nn.Module, tuple[int, int]]]:
    """Yield this rank's modules, each with the index of its stage and the number of stages."""
    world = WORLDS[kind]
    rank = dist.get_rank() if world > 1 else 0
    stages = {"pipeline": [rank], "interleaved": [rank, rank + world], "pipeline_fsdp": [rank // 2]}
    count = {"pipeline": 2, "interleaved": 2 * world, "pipeline_fsdp": 2}.get(kind, 1)
    names = [*wanted.parameters, *wanted.buffers]
    for stage in stages.get(kind, [0]):
        low, high = (len(names) * at // count for at in (stage, stage + 1))
        yield _module(wanted, names[low:high]), (stage, count)


def _module(wanted: Wanted, names: Sequence[str]) -> nn.Module:
    root = nn.Module()
    for name in names:
        owner, last = _owner(root, name)
        if name in wanted.buffers:
            owner.register_buffer(last, torch.zeros_like(wanted.buffers[name]))
        else:
            filled = torch.full_like(wanted.parameters[name], math.nan)
            owner.register_parameter(last, nn.Parameter(filled, name not in wanted.frozen))
    for name, same in wanted.ties.items():
        if same in names:
            owner, last = _owner(root, name)
            owner.register_parameter(last, root.get_parameter(same))
    return root


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, last = name.split(".")
    for part in path:
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root, last


def _wrapped(kind: str, mesh: DeviceMesh | None, root: nn.Module, stage: tuple[int, int]) -> Any:
    if kind in ("ddp", "ddp_of_four"):
        return DistributedDataParallel(root)
    if kind == "fsdp1":
        return FullyShardedDataParallel(root, use_orig_params=True, device_id=CPU)
    group = None
    if mesh is not None:
        grid = GRIDS[kind]
        group = mesh[grid.stages].get_group() if grid.stages else None
        if grid.tensors is not None:
            _divide(root, mesh[grid.tensors], evenly=grid.data is not None)
        if grid.data is not None:
            fully_shard(root, mesh=mesh[grid.data])
    return root if stage[1] == 1 else PipelineStage(root, *stage, CPU, group=group)


def _divide(root: nn.Module, mesh: DeviceMesh, *, evenly: bool) -> None:
    """Shard parameters along alternating dimensions; replicate those that cannot be sharded.

    Args:
        evenly: shard only dimensions that four ranks divide evenly, as FSDP requires.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    for turn, (name, parameter) in enumerate([*root.named_parameters(remove_duplicate=False)]):
        owner, last = _owner(root, name)
        dims = [(turn + at) % parameter.ndim for at in range(parameter.ndim)]
        fitting = [dim for dim in dims if not evenly or parameter.shape[dim] % 4 == 0]
        placement = Shard(fitting[0]) if fitting else Replicate()
        if parameter not in made:
            divided = distribute_tensor(parameter.detach(), mesh, [placement])
            made[parameter] = nn.Parameter(divided, parameter.requires_grad)
        owner.register_parameter(last, made[parameter])


def _is_trained(root: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in root.parameters())


def _optimizer(root: nn.Module, wanted: Wanted) -> torch.optim.Optimizer:
    """Return an optimizer with the expected groups and another learning rate, before its first
    step.
    """
    parameters = {
        name.replace("_fsdp_wrapped_module.", ""): p for name, p in root.named_parameters()
    }
    groups: list[dict[str, Any]] = []
    for members, settings in wanted.groups:
        mine = [parameters[name] for name in members if name in parameters]
        if mine:
            groups.append({**settings, "params": mine, "lr": UNSET})
    keys = {name.rpartition(".")[2] for name in wanted.state}
    if "momentum_buffer" in keys:
        return torch.optim.SGD(groups, momentum=0.1)
    return torch.optim.AdamW(groups)


def uncovered(wanted: Mapping[str, torch.Tensor], ranks: Sequence[Held]) -> list[str]:
    """Return names of which no rank has some element, and unexpected names."""
    missing = set().union(*ranks) - set(wanted)
    for name, tensor in wanted.items():
        seen = torch.zeros(tensor.shape, dtype=torch.bool)
        for held in ranks:
            for offset, shape in held.get(name, ()):
                seen[sw.Box(offset, shape).slices()] = True
        if not seen.all():
            missing.add(name)
    return sorted(missing)
