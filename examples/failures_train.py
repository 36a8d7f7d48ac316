"""Train one rank of the run of examples/failures.py, with the variables that torchrun sets."""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Shape
from text import read_corpus
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from train import compute_gradients

import shardwise as sw

COLUMNS = ("attention.query", "attention.key", "attention.value", "up")
ROWS = ("attention.out", "down")
PATIENCE = timedelta(seconds=60)


def main() -> None:
    options = parse_arguments()
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
    if options.address:  # take a snapshot at every step that survives the loss of a host
        memory = sw.Memory(snapshot_every=1, parity=1, interface=options.address, when_full="wait")
    journal.write(event="ready")
    with sw.Checkpointer(options.root, save_every=options.every, memory=memory) as checkpointer:
        before, began = received_bytes(), time.monotonic()
        step = checkpointer.restore(state) or 0
        if report := checkpointer.last_restore:
            journal.write(
                event="restored",
                at=step,
                source=report.source,
                seconds=time.monotonic() - began,
                read=report.load.bytes_read,
                received=received_bytes() - before,
                origins=report.origins,
                skipped=report.skipped,
                phases=report.seconds,
            )
        while step < options.steps:
            loss = compute_gradients(model, corpus, step, mesh)
            journal.write(step=step, loss=loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            checkpointer.save(step, state)
            journal.write(event="saved", at=step)
    journal.write(event="ended")
    dist.destroy_process_group()


def parallelize(model: GPT, parallel: str) -> DeviceMesh:
    """Shard a model in place over all ranks, by FSDP or by tensor parallelism."""
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


def received_bytes() -> int:
    """Return the bytes that this host has received over the network."""
    lines = Path("/proc/self/net/dev").read_text(encoding="utf-8").splitlines()
    (line,) = (line for line in lines if line.strip().startswith("eth0:"))
    return int(line.split(":")[1].split()[0])


class Journal:
    """A file of JSON lines, one for each event, with its time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, **entry: object) -> None:
        self._file.write(json.dumps(entry | {"time": time.monotonic()}) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=("fsdp", "tp"), required=True)
    parser.add_argument("--steps", type=int, required=True, help="train until this step")
    parser.add_argument("--blocks", type=int, required=True, help="number of transformer blocks")
    parser.add_argument("--root", type=Path, required=True, help="directory of checkpoints")
    parser.add_argument("--every", type=int, required=True, help="steps between checkpoints")
    parser.add_argument(
        "--address", help="also keep snapshots in memory; serve them at this address"
    )
    parser.add_argument("--journal", type=Path, required=True, help="path of the journal")
    return parser.parse_args()


if __name__ == "__main__":
    main()
