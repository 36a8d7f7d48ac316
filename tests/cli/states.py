"""Small checkpoints for the tests of commands: of one rank and of four."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw

LAYERS = 4
DIM = 8


class Block(nn.Module):
    """One of several equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)


class Model(nn.Module):
    """An embedding, layers, and a head that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, 32, bias=False)
        self.head.weight = self.embed.weight


def state(step: int, **more: object) -> dict[str, object]:
    """Return the state of one rank at a step; the model is always the same."""
    torch.manual_seed(0)
    return {
        "model": Model(),
        "sched": {"lr": 0.5, "betas": (0.9, 0.95), "name": "cosine"},
        "rng": sw.PerRank({"seed": 3}),
        "step": step,
        **more,
    }


def save_steps(root: Path, *steps: int) -> None:
    """Save these steps below a root, each with its loss."""
    with sw.Checkpointer(root, memory=None) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step), metrics={"loss": 1 / step})


def save_sharded(place: Path) -> None:
    """Save on four ranks: a two-by-two grid, rows, a line, and a cube that is split in three
    dimensions.
    """
    rank = dist.get_rank()
    top, left = divmod(rank, 2)
    grid = torch.arange(48.0).reshape(6, 8)
    part = sw.Box((3 * top, 4 * left), (3, 4))
    corners = [sw.Box((top, left, depth), (1, 1, 1)) for depth in (0, 1)]
    sw.save(
        place,
        {
            "grid": sw.Shards((6, 8), torch.float32, [(part, grid[part.slices()].clone())]),
            "rows": shard((8, 6), sw.Box((2 * rank, 0), (2, 6)), rank),
            "line": shard((40,), sw.Box((10 * rank,), (10,)), rank),
            "cube": sw.Shards(
                (2, 2, 2), torch.float32, [(corner, torch.ones(1, 1, 1)) for corner in corners]
            ),
            "many": sw.Shards(
                (400,),
                torch.float32,
                [(sw.Box((i,), (1,)), torch.ones(1)) for i in range(rank, 400, 4)],
            ),
            "seed": sw.PerRank(rank),
        },
        step=7,
    )


def shard(shape: tuple[int, ...], box: sw.Box, value: float) -> sw.Shards:
    """Return a box of a float32 tensor that is filled with one value."""
    return sw.Shards(shape, torch.float32, [(box, torch.full(box.shape, float(value)))])
