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
    """A state of this parallelism: model, optimizer, scheduler, step."""
    torch.manual_seed(seed)
    models = _parallelize(kind, Model())
    optimizers = [
        torch.optim.AdamW(
            [
                {"params": [p for n, p in m.named_parameters() if "norm" not in n], "lr": 0.01},
                {"params": [p for n, p in m.named_parameters() if "norm" in n], "lr": 0.02},
            ]
            if kind != "fsdp1_flat"
            else m.parameters(),
            lr=0.01,
        )
        for m in models
    ]
    optimizers = [o for o in optimizers if any(g["params"] for g in o.param_groups)]
    modules: list[Any] = list(models)
    if kind in ("pipeline", "interleaved"):
        modules = [
            PipelineStage(m, i, DEPTH, torch.device("cpu"), group=dist.group.WORLD)
            for i, m in enumerate(models)
        ]
    alone = len(models) == 1
    return {
        "model": modules[0] if alone else modules,
        "optimizer": optimizers[0] if alone else optimizers,
        "step": seed,
    }


def train(state: dict[str, Any], steps: int = 2) -> None:
    """Steps whose gradients are made up, the same way for every parallelism of one mesh."""
    optimizers = state["optimizer"]
    for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
        for step in range(steps):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = (parameter.detach() * (step + 1)).sin()
            optimizer.step()
            optimizer.zero_grad()


def _parallelize(kind: str, model: Model) -> list[nn.Module]:
    if kind == "plain":
        return [model]
    world, rank = dist.get_world_size(), dist.get_rank()
    if kind == "ddp":
        return [DistributedDataParallel(model)]
    if kind.startswith("fsdp1"):
        wrapped: nn.Module = FullyShardedDataParallel(
            model, use_orig_params=kind == "fsdp1", device_id=torch.device("cpu")
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
