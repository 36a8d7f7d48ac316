"""Train a small GPT under any parallelism, and go on where another run stopped.

torchrun --standalone --nproc-per-node 4 examples/train.py --parallel fsdp --root runs/a
torchrun --standalone --nproc-per-node 2 examples/train.py --parallel tp --root runs/a
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everyone calls it
from gpt import GPT, Shape
from text import batch, read_corpus
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise as sw

BATCH = 8
TENSOR_PARALLEL = {"none": 1, "fsdp": 1, "tp": 2, "fsdp_tp": 2}


def parallelize(model: GPT, parallel: str) -> DeviceMesh | None:
    """Shard a model in place; returns the mesh, data-parallel × tensor-parallel."""
    if parallel == "none":
        return None
    tensor = TENSOR_PARALLEL[parallel]
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor")
    )
    if tensor > 1:
        columns = ("attention.query", "attention.key", "attention.value", "up")
        plan = dict.fromkeys(columns, ColwiseParallel())
        plan |= {"attention.out": RowwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], plan)
    if parallel.startswith("fsdp"):
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return mesh


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor, step: int, part: slice
) -> torch.Tensor:
    """One step on this rank's part of the batch; returns its loss before the step."""
    inputs, targets = batch(data, step, BATCH, Shape.context)
    loss = F.cross_entropy(model(inputs[part]).flatten(0, 1), targets[part].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT(Shape())
    mesh = parallelize(model, options.parallel)
    replicas, replica = (mesh["data"].size(), mesh["data"].get_local_rank()) if mesh else (1, 0)
    part = slice(BATCH // replicas * replica, BATCH // replicas * (replica + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = read_corpus()

    state = {"model": model, "optimizer": optimizer, "rng": sw.RngState()}
    with sw.Checkpointer(options.root, keep=sw.Keep(last=3), every=options.every) as checkpointer:
        step = checkpointer.restore(state) or 0
        log_restore(options, checkpointer.last_restore)
        while step < options.steps:
            loss = train_step(model, optimizer, data, step, part)
            if mesh:
                dist.all_reduce(loss, dist.ReduceOp.SUM, mesh["data"].get_group())
            log(options, step=step, loss=loss.item() / replicas)
            step += 1
            if step == options.die_at and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            saved = checkpointer.save(step, state)
            if saved is not None:
                log_save(options, saved.result())
    dist.destroy_process_group()


def log(options: argparse.Namespace, **entry: object) -> None:
    """A line of JSON, by rank 0."""
    if dist.get_rank() == 0 and options.journal:
        with options.journal.open("a") as file:
            print(json.dumps(entry | {"parallel": options.parallel}), file=file)


def log_save(options: argparse.Namespace, report: sw.SaveReport) -> None:
    log(
        options,
        event="save",
        at=report.step,
        world=dist.get_world_size(),
        bytes=report.bytes_total,
        files=report.files,
        seconds=report.seconds["total"],
    )


def log_restore(options: argparse.Namespace, report: sw.RestoreReport | None) -> None:
    if report is None:
        return
    read = torch.tensor(report.load.bytes_read)
    dist.all_reduce(read)
    log(
        options,
        event="load",
        at=report.step,
        world=dist.get_world_size(),
        bytes=int(read),
        files=report.load.files,
        seconds=report.load.seconds["total"],
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=TENSOR_PARALLEL, default="none")
    parser.add_argument("--steps", type=int, default=60, help="train until this step")
    parser.add_argument("--root", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--every", type=int, default=5, help="save every so many steps")
    parser.add_argument("--die-at", type=int, help="rank 1 kills itself at this step")
    parser.add_argument("--journal", type=Path, help="append a line of JSON for every step here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
