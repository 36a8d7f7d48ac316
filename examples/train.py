"""Train a small GPT under any parallelism, and go on where another run stopped.

torchrun --standalone --nproc-per-node 4 examples/train.py --parallel fsdp --root runs/a
torchrun --standalone --nproc-per-node 2 examples/train.py --parallel tp --root runs/a
python examples/train.py --root runs/a
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
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise as sw

BATCH = 16
TENSOR_PARALLEL = {"none": 1, "fsdp": 1, "tp": 2, "fsdp_tp": 2}


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")

    model = GPT(Shape())
    mesh = parallelize(model, options.parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = read_corpus()

    state = {"model": model, "optimizer": optimizer, "rng": sw.RngState()}
    with sw.Checkpointer(options.root, keep=sw.Keep(last=3), every=options.every) as checkpointer:
        step = checkpointer.restore(state) or 0
        log_load(options, checkpointer.last_restore)
        while step < options.steps:
            loss = gradients(model, corpus, step, mesh)
            log(options, step=step, loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == options.die_at and rank_and_world()[0] == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            log_save(options, checkpointer.save(step, state))

    if dist.is_initialized():
        dist.destroy_process_group()


def parallelize(model: GPT, parallel: str) -> DeviceMesh | None:
    """Shard a model in place; returns the mesh of data-parallel × tensor-parallel ranks."""
    if parallel == "none":
        return None
    tensor = TENSOR_PARALLEL[parallel]
    shape = (dist.get_world_size() // tensor, tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    if "tp" in parallel:
        columns = ("attention.query", "attention.key", "attention.value", "up")
        rows = ("attention.out", "down")
        plan = dict.fromkeys(columns, ColwiseParallel()) | dict.fromkeys(rows, RowwiseParallel())
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], plan)
    if "fsdp" in parallel:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return mesh


def gradients(model: GPT, corpus: Tensor, step: int, mesh: DeviceMesh | None) -> float:
    """Gradients of a step from this rank's part of its batch; the mean loss of the whole batch."""
    parts, part = (mesh["data"].size(), mesh["data"].get_local_rank()) if mesh else (1, 0)
    inputs, targets = (
        tokens.chunk(parts)[part] for tokens in batch(corpus, step, BATCH, Shape.context)
    )
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    mean = loss.detach() / parts
    if mesh:
        dist.all_reduce(mean, group=mesh["data"].get_group())
    return mean.item()


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def log(options: argparse.Namespace, **entry: object) -> None:
    """A line of JSON, by rank 0."""
    rank, world = rank_and_world()
    if rank == 0 and options.journal:
        with options.journal.open("a") as file:
            print(json.dumps(entry | {"parallel": options.parallel, "world": world}), file=file)


def log_save(options: argparse.Namespace, handle: sw.SaveHandle | None) -> None:
    if handle is None:
        return
    report = handle.result()
    log(
        options,
        event="save",
        at=report.step,
        bytes=report.bytes_total,
        files=report.files,
        seconds=report.seconds["total"],
    )


def log_load(options: argparse.Namespace, report: sw.RestoreReport | None) -> None:
    if report is None:
        return
    read = torch.tensor(report.load.bytes_read)
    if dist.is_initialized():
        dist.all_reduce(read)
    log(
        options,
        event="load",
        at=report.step,
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
