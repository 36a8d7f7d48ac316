"""Train the GPT with DeepSpeed, with any ZeRO stage or a pipeline, and resume from any other.

DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 4 \\
    examples/reshape_deepspeed.py --stages 2 --zero 1 --root runs/a --steps 20
DS_ACCELERATOR=cpu torchrun --standalone --nproc-per-node 3 \\
    examples/reshape_deepspeed.py --zero 3 --root runs/a --steps 40
python examples/train.py --root runs/a --steps 60
"""

from __future__ import annotations

import argparse
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from gpt import GPT, Shape
from journal import Journal
from text import read_corpus
from torch import Tensor
from training import BATCH, cross_entropy, die_at_step, make_parser, part_of_batch

import shardwise as sw

MICRO_BATCHES = 2  # per pipeline, so that both stages have work


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # Do not use DeepSpeed's shared-memory operator: it takes a minute to compile.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    journal = Journal(options.journal)

    engine = make_engine(GPT(Shape(blocks=options.blocks)), options.zero, options.stages)
    train_step = train_step_of_pipeline if options.stages > 1 else train_step_of_engine
    corpus = read_corpus()

    state = {"model": engine, "optimizer": engine.optimizer, "rng": sw.RngState()}
    keep = sw.Keep(last=3)
    with sw.Checkpointer(
        options.root, keep=keep, save_every=options.every, memory=None
    ) as checkpointer:
        step = checkpointer.restore(state) or 0
        journal.restored(checkpointer.last_restore)
        if options.again:
            sw.save(options.again, state)
        while step < options.steps:
            loss = train_step(engine, corpus, step)
            journal.loss(step, loss)
            step += 1
            die_at_step(options, step)
            journal.saved(checkpointer.save(step, state))

    dist.destroy_process_group()


def make_engine(model: GPT, zero: int, stages: int) -> Any:
    """Return a DeepSpeed engine for the model, with the given ZeRO and pipeline stages."""
    micro_batches = 1
    if stages > 1:
        micro_batches = MICRO_BATCHES
        model = PipelineModule(
            list(model),
            num_stages=stages,
            loss_fn=cross_entropy,
            activation_checkpoint_interval=0,
        )
    replicas = dist.get_world_size() // stages
    config = {
        "train_micro_batch_size_per_gpu": BATCH // replicas // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train_step_of_engine(engine: Any, corpus: Tensor, step: int) -> float:
    """Train a step on this rank's part of the batch; return the mean loss of the whole batch."""
    parts = dist.get_world_size()
    inputs, targets = part_of_batch(corpus, step, dist.get_rank(), parts)
    loss = cross_entropy(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    mean = loss.detach() / parts
    dist.all_reduce(mean)
    return mean.item()


def train_step_of_pipeline(engine: Any, corpus: Tensor, step: int) -> float:
    """Train a step in micro-batches; return the mean loss of the whole batch."""
    grid = engine.grid
    part = part_of_batch(corpus, step, grid.get_data_parallel_id(), grid.data_parallel_size)
    inputs, targets = (tokens.chunk(MICRO_BATCHES) for tokens in part)
    return engine.train_batch(zip(inputs, targets, strict=True)).item()


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), default=0, help="ZeRO stage")
    parser.add_argument("--stages", type=int, default=1, help="pipeline stages")
    return parser.parse_args()


if __name__ == "__main__":
    main()
