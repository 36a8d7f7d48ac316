"""A small model under every parallelism of torch, with an optimizer that has stepped."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

WIDTH, VOCABULARY, DEPTH = 6, 11, 4

WORLDS = {
    "plain": 1,
    "ddp": 2,
    "fsdp1": 2,
    "fsdp1_flat": 4,
    "fsdp2": 2,
    "fsdp2_uneven": 4,
    "hsdp": 4,
    "tp": 2,
    "fsdp_tp": 4,
    "pipeline": 2,
    "interleaved": 2,
    "pipeline_fsdp": 4,
}


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
    """Also a part of one: stages are made by leaving the rest out, names stay."""

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


def stage(model: Model, blocks: range) -> Model:
    """The part of a model that has these blocks, and what comes before the first and last."""
    part = copy.deepcopy(model)
    part.blocks = nn.ModuleDict({str(i): part.blocks[str(i)] for i in blocks})
    part.embed = part.embed if 0 in blocks else None
    part.head = part.head if DEPTH - 1 in blocks else None
    return part


def build(kind: str, seed: int) -> dict[str, Any]:
    """A state of this parallelism: model, optimizer, scheduler, step. `seed` tells it apart."""
    torch.manual_seed(seed)
    models = parallelize(kind, Model())
    optimizers = [adamw(model, 0.01 * seed) for model in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    modules: list[Any] = list(models)
    if kind in ("pipeline", "interleaved"):
        modules = [
            PipelineStage(
                model,
                dist.get_rank() + i * dist.get_world_size(),
                len(models) * dist.get_world_size(),
                torch.device("cpu"),
            )
            for i, model in enumerate(models)
        ]
    alone = len(models) == 1
    return {
        "model": modules[0] if alone else modules,
        "optimizer": optimizers[0] if alone else optimizers,
        "scheduler": schedulers[0],
        "step": seed,
    }


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Two groups: the norms learn faster, and do not decay."""
    named = list(model.named_parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for name, p in named if "norm" not in name]},
            {"params": [p for name, p in named if "norm" in name], "lr": 2 * lr, "weight_decay": 0},
        ],
        lr=lr,
    )


def train(state: dict[str, Any], steps: int = 2) -> None:
    """Steps with gradients that are made up, element by element, so that all kinds step alike."""
    optimizers = state["optimizer"]
    for step in range(steps):
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = parameter.detach() * (step + 1)
            optimizer.step()
            optimizer.zero_grad()
        state["scheduler"].step()


def parallelize(kind: str, model: Model) -> list[nn.Module]:
    """The modules that this rank has of a model under a parallelism: several are stages."""
    if kind == "plain":
        return [model]
    world, rank = dist.get_world_size(), dist.get_rank()
    if kind == "ddp":
        return [DistributedDataParallel(model)]
    if kind.startswith("fsdp1"):
        wrapped: nn.Module = FullyShardedDataParallel(
            model,
            use_orig_params=kind == "fsdp1",
            auto_wrap_policy=ModuleWrapPolicy({nn.LayerNorm}),
            device_id=torch.device("cpu"),
        )
        return [wrapped]
    if kind in ("pipeline", "interleaved"):
        mine = [rank, rank + world] if kind == "interleaved" else [rank]
        size = DEPTH // (world * len(mine))
        return [stage(model, range(i * size, (i + 1) * size)) for i in mine]
    shape = {"hsdp": (2, 2), "fsdp_tp": (2, 2), "pipeline_fsdp": (2, 2)}.get(kind, (world,))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    if kind == "pipeline_fsdp":
        half = DEPTH // 2
        model = stage(model, range(half * (rank // 2), half * (rank // 2 + 1)))
        fully_shard(model, mesh=mesh["b"])
    if kind in ("tp", "fsdp_tp"):
        tensor = mesh["b"] if kind == "fsdp_tp" else mesh
        for block in model.blocks.values():
            parallelize_module(block, tensor, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if kind in ("fsdp2", "fsdp2_uneven", "hsdp"):
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "fsdp_tp":
        fully_shard(model, mesh=mesh["a"])
    return [model]


def full(tensor: Tensor) -> Tensor:
    """All of a tensor, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
