"""Train a small GPT under any parallelism, and resume where another run stopped.

torchrun --standalone --nproc-per-node 4 \\
    examples/train.py --parallel fsdp --root runs/a --steps 20
torchrun --standalone --nproc-per-node 2 \\
    examples/train.py --parallel tp --root runs/a --steps 40
python examples/train.py --root runs/a --steps 60
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from gpt import GPT, Shape
from journal import Journal
from text import read_corpus
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from training import cross_entropy, die_at_step, make_parser, part_of_batch

import shardwise as sw

TENSOR_PARALLEL = {"none": 1, "fsdp": 1, "tp": 2, "fsdp_tp": 2}


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    journal = Journal(options.journal)

    model = GPT(Shape(blocks=options.blocks))
    mesh = parallelize(model, options.parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = read_corpus()

    state = {"model": model, "optimizer": optimizer, "rng": sw.RngState()}
    keep = sw.Keep(last=3)
    memory = None if options.wait else sw.Memory(snapshot_every=0, slots=1)  # for staging only
    with sw.Checkpointer(
        options.root, keep=keep, save_every=options.every, memory=memory
    ) as checkpointer:
        step = checkpointer.restore(state) or 0
        journal.restored(checkpointer.last_restore)
        if options.again:
            sw.save(options.again, state)
        while step < options.steps:
            loss = compute_gradients(model, corpus, step, mesh)
            journal.loss(step, loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            die_at_step(options, step)
            journal.saved(checkpointer.save(step, state))

    if dist.is_initialized():
        dist.destroy_process_group()


def parallelize(model: GPT, parallel: str) -> DeviceMesh | None:
    """Shard a model in place; return the mesh of data-parallel × tensor-parallel ranks."""
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


def compute_gradients(model: GPT, corpus: Tensor, step: int, mesh: DeviceMesh | None) -> float:
    """Compute the gradients of this rank's part of a batch; return the mean loss of the batch."""
    parts, part = (mesh["data"].size(), mesh["data"].get_local_rank()) if mesh else (1, 0)
    inputs, targets = part_of_batch(corpus, step, part, parts)
    loss = cross_entropy(model(inputs), targets)
    loss.backward()
    mean = loss.detach() / parts
    if mesh:
        dist.all_reduce(mean, group=mesh["data"].get_group())
    return mean.item()


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--parallel", choices=TENSOR_PARALLEL, default="none")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="wait for each save, instead of saving in the background",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
