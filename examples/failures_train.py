"""One rank of the run that examples/failures.py breaks; it is told who it is as by torchrun."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Shape
from text import read_corpus
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from train import gradients

import shardwise as sw

COLUMNS = ("attention.query", "attention.key", "attention.value", "up")
ROWS = ("attention.out", "down")
MOMENTS = ("exp_avg", "exp_avg_sq")
PATIENCE = timedelta(seconds=60)


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=PATIENCE)
    journal = Journal(options.journal)

    model = GPT(Shape(blocks=options.blocks))
    mesh = parallelize(model, options.parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = read_corpus()
    state = {"model": model, "optimizer": optimizer, "rng": sw.RngState()}

    memory = None
    if options.address:  # a snapshot at every step, which survives the loss of a host
        memory = sw.Memory(every=1, parity=1, interface=options.address, when_full="wait")
    journal.write(event="ready")
    with sw.Checkpointer(options.root, every=options.every, memory=memory) as checkpointer:
        before, began = received(), time.monotonic()
        step = checkpointer.restore(state) or 0
        if report := checkpointer.last_restore:
            journal.write(
                event="restored",
                at=step,
                source=report.source,
                seconds=time.monotonic() - began,
                wanted=report.load.bytes_needed,
                received=received() - before,
                by_writer=by_writer(model, report) if report.source == "memory" else {},
                skipped=report.skipped,
            )
        while step < options.steps:
            loss = gradients(model, corpus, step, mesh)
            journal.write(step=step, loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            checkpointer.save(step, state)
            journal.write(event="saved", at=step)
    journal.write(event="ended")
    dist.destroy_process_group()


def parallelize(model: GPT, parallel: str) -> DeviceMesh:
    """Shard a model in place over all ranks: its parameters by rows, or each block's work."""
    world = dist.get_world_size()
    shape = (world, 1) if parallel == "fsdp" else (1, world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    if parallel == "fsdp":
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    else:
        plan = dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(ROWS, RowwiseParallel())
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], plan)
    return mesh


def by_writer(model: GPT, report: sw.RestoreReport) -> dict[int, int]:
    """Bytes of the state that this rank wanted, by the rank that had saved them.

    A restore does not say where its bytes came from; the boxes of the snapshot do.
    """
    (snapshot,) = Path("/dev/shm").glob(f"shardwise-*/runs/*/step-{report.step:08d}")
    checkpoint = sw.open(snapshot)
    tensors = checkpoint.tensors()
    found: Counter[int] = Counter()
    for name, parameter in model.named_parameters():
        mine = box(parameter)
        kinds = [f"model.{name}", *(f"optimizer.{name}.{kind}" for kind in MOMENTS)]
        for each in kinds:
            for stored, writer in checkpoint.boxes(each):
                if common := stored.intersect(mine):
                    found[writer] += common.size * tensors[each].dtype.itemsize
        ((_, writer),) = checkpoint.boxes(f"optimizer.{name}.step")
        found[writer] += tensors[f"optimizer.{name}.step"].dtype.itemsize
    return found


def box(parameter: Tensor) -> sw.Box:
    """The part of a parameter that this rank has."""
    shape, offset = list(parameter.shape), [0] * parameter.ndim
    if isinstance(parameter, DTensor):
        for placement in parameter.placements:
            if isinstance(placement, Shard):
                dim, world = placement.dim, dist.get_world_size()
                offset[dim] = min(-(-shape[dim] // world) * dist.get_rank(), shape[dim])
                shape[dim] = parameter.to_local().shape[dim]
    return sw.Box(tuple(offset), tuple(shape))


def received() -> int:
    """Bytes that have come over this host's cable."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[0])


class Journal:
    """Lines of JSON that say what happened, and when."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, **entry: object) -> None:
        self._file.write(json.dumps(entry | {"time": time.monotonic()}) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=("fsdp", "tp"), required=True)
    parser.add_argument("--steps", type=int, required=True, help="train until this step")
    parser.add_argument("--blocks", type=int, required=True, help="how deep the model is")
    parser.add_argument("--root", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--every", type=int, required=True, help="save every so many steps there")
    parser.add_argument("--address", help="keep snapshots in memory too; serve them here")
    parser.add_argument("--journal", type=Path, required=True, help="say there what happens")
    return parser.parse_args()


if __name__ == "__main__":
    main()
