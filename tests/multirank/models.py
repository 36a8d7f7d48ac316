"""A small model under every parallelism of torch, with an optimizer and a scheduler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WIDTH, VOCABULARY, DEPTH = 6, 11, 4
CPU = torch.device("cpu")
MakeOptimizer = Callable[[nn.Module, float], torch.optim.Optimizer]


@dataclass(frozen=True, slots=True)
class Grid:
    """A device mesh, and its dimensions for stages, tensor parallelism and data parallelism."""

    shape: tuple[int, ...]
    stages: str | None = None
    tensors: str | None = None
    data: str | tuple[str, str] | None = None

    def mesh(self) -> DeviceMesh:
        """Return the mesh, whose dimensions have the names a, b and c."""
        return init_device_mesh("cpu", self.shape, mesh_dim_names=tuple("abc"[: len(self.shape)]))


GRIDS = {
    "fsdp2": Grid((2,), data="a"),
    "fsdp2_uneven": Grid((4,), data="a"),
    "hsdp": Grid((2, 2), data=("a", "b")),
    "tp": Grid((2,), tensors="a"),
    "fsdp_tp": Grid((2, 2), data="a", tensors="b"),
    "hsdp_tp": Grid((1, 2, 2), data=("a", "b"), tensors="c"),
    "pipeline_fsdp": Grid((2, 2), stages="a", data="b"),
}
WORLDS = {
    "plain": 1,
    "ddp": 2,
    "ddp_of_four": 4,
    "fsdp1": 2,
    "fsdp1_flat": 4,
    "pipeline": 2,
    "interleaved": 2,
} | {kind: prod(grid.shape) for kind, grid in GRIDS.items()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale.mean()


class Model(nn.Module):
    """A whole model, or the part of a stage. Parts keep the names of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Embedding | None = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(DEPTH)})
        self.head: nn.Linear | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)

    def part(self, index: int, count: int) -> Model:
        """Return the part of stage `index` of `count`."""
        part = copy.deepcopy(self)
        size = DEPTH // count
        part.blocks = nn.ModuleDict(dict([*part.blocks.items()][index * size : (index + 1) * size]))
        part.embed = part.embed if index == 0 else None
        part.head = part.head if index == count - 1 else None
        return part


class Schedulers:
    """One scheduler for each optimizer, with a common state."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.all = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]

    def step(self) -> None:
        for scheduler in self.all:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.all[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for scheduler in self.all:
            scheduler.load_state_dict(state)


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return an optimizer with two groups: norms learn faster and have no weight decay."""
    named = list(model.named_parameters())
    norms = [parameter for name, parameter in named if "norm" in name]
    rest = [parameter for name, parameter in named if "norm" not in name]
    groups = [{"params": rest}, {"params": norms, "lr": 2 * lr, "weight_decay": 0}]
    return torch.optim.AdamW(groups, lr=lr)


def build(kind: str, seed: int, make: MakeOptimizer = adamw) -> dict[str, Any]:
    """Return a state under a parallelism: model, optimizer, scheduler, step. Its values depend on
    `seed`.
    """
    torch.manual_seed(seed)
    parts = parallelize(kind, Model())
    optimizers = [make(module, 0.01 * seed) for module in map(module_of, parts)]
    alone = len(parts) == 1
    return {
        "model": parts[0] if alone else parts,
        "optimizer": optimizers[0] if alone else optimizers,
        "scheduler": Schedulers(optimizers),
        "step": seed,
    }


def module_of(part: nn.Module | PipelineStage) -> nn.Module:
    """Return the module itself, or the module of a stage."""
    return part.submod if isinstance(part, PipelineStage) else part


def optimizers_of(state: dict[str, Any]) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a state as a list."""
    optimizers = state["optimizer"]
    return optimizers if isinstance(optimizers, list) else [optimizers]


def train(state: dict[str, Any], steps: int = 2) -> None:
    """Train with gradients that are computed element by element, so that all kinds step equally."""
    for step in range(steps):
        for optimizer in optimizers_of(state):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = parameter.detach() * (step + 1)
            optimizer.step()
            optimizer.zero_grad()
        state["scheduler"].step()


def parallelize(kind: str, model: Model) -> list[Any]:
    """Return this rank's modules or pipeline stages of a model under a parallelism."""
    if kind == "plain":
        return [model]
    if kind in GRIDS:
        return [_on_mesh(model, GRIDS[kind])]
    if kind.startswith("ddp"):
        return [DistributedDataParallel(model)]
    if kind.startswith("fsdp1"):
        policy = ModuleWrapPolicy({nn.LayerNorm})
        wrapped: nn.Module = FullyShardedDataParallel(
            model, use_orig_params=kind == "fsdp1", auto_wrap_policy=policy, device_id=CPU
        )
        return [wrapped]
    world, rank = dist.get_world_size(), dist.get_rank()
    mine = [rank, rank + world] if kind == "interleaved" else [rank]
    count = world * len(mine)
    return [PipelineStage(model.part(i, count), i, count, CPU) for i in mine]


def _on_mesh(model: Model, grid: Grid) -> nn.Module | PipelineStage:
    """Return the model, or this rank's stage of it, with parameters that are DTensors."""
    mesh = grid.mesh()
    if grid.stages is not None:
        pipeline = mesh[grid.stages]
        index, count = pipeline.get_local_rank(), pipeline.size()
        part = model.part(index, count)
        _shard(part, mesh, grid)
        return PipelineStage(part, index, count, CPU, group=pipeline.get_group())
    _shard(model, mesh, grid)
    return model


def _shard(model: Model, mesh: DeviceMesh, grid: Grid) -> None:
    for block in model.blocks.values():
        if grid.tensors is not None:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            frozen = [name for name, each in block.named_parameters() if not each.requires_grad]
            parallelize_module(block, mesh[grid.tensors], plan)
            for name in frozen:  # torch 2.9 would train them
                block.get_parameter(name).requires_grad_(False)
        if grid.data is not None:
            fully_shard(block, mesh=mesh[grid.data])
    if grid.data is not None:
        fully_shard(model, mesh=mesh[grid.data])
