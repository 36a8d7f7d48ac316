"""Train a small GPT with Megatron-Core under any parallelism, and resume from any other.

torchrun --standalone --nproc-per-node 8 \\
    examples/reshape_megatron.py --tensor 2 --pipeline 2 --root runs/a --steps 20
torchrun --standalone --nproc-per-node 3 examples/reshape_megatron.py --root runs/a --steps 40

The remaining ranks are data-parallel and shard the optimizer state.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import megatron_on_cpu
import torch
import torch.distributed as dist
from gpt import Shape
from journal import Journal
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from text import read_corpus
from torch import Tensor
from training import BATCH, die_at_step, make_parser, part_of_batch

import shardwise as sw

MICRO_BATCHES = 2  # per replica, so that all stages have work


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(options.tensor, options.pipeline)
    megatron_on_cpu.seed_model_parallel(0)
    journal = Journal(options.journal)

    model = make_model(Shape(blocks=options.blocks), options.tensor, options.pipeline)
    adam = OptimizerConfig(lr=1e-3, weight_decay=0.01, use_distributed_optimizer=True)
    optimizer = get_megatron_optimizer(adam, [model])
    corpus = read_corpus()

    state = {"model": model, "optimizer": optimizer, "rng": sw.RngState()}
    keep = sw.Keep(last=3)
    with sw.Checkpointer(
        options.root, keep=keep, save_every=options.every, memory=None
    ) as checkpointer:
        step = checkpointer.restore(state) or 0
        journal.restored(checkpointer.last_restore)
        if options.again:
            sw.save(options.again, state)
        while step < options.steps:
            loss = train_step(model, optimizer, corpus, step)
            journal.loss(step, loss)
            step += 1
            die_at_step(options, step)
            journal.saved(checkpointer.save(step, state))

    dist.destroy_process_group()


def make_model(shape: Shape, tensor: int, pipeline: int) -> DistributedDataParallel:
    """Return this rank's part of the model."""
    config = TransformerConfig(
        num_layers=shape.blocks,
        hidden_size=shape.width,
        num_attention_heads=shape.heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.context,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
    return DistributedDataParallel(config, ddp, model)


def train_step(
    model: DistributedDataParallel, optimizer: MegatronOptimizer, corpus: Tensor, step: int
) -> float:
    """Train a step on this replica's part of the batch; return the mean loss of the whole batch."""
    replica = parallel_state.get_data_parallel_rank()
    replicas = parallel_state.get_data_parallel_world_size()
    inputs, targets = part_of_batch(corpus, step, replica, replicas)
    micro_batches = zip(inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True)

    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_with_loss,
        data_iterator=micro_batches,
        model=model,
        num_microbatches=MICRO_BATCHES,
        seq_length=Shape.context,
        micro_batch_size=BATCH // replicas // MICRO_BATCHES,
        forward_only=False,
    )
    optimizer.step()
    return mean_of_losses(losses)


def forward_with_loss(
    micro_batches: Iterator[tuple[Tensor, Tensor]], model: DistributedDataParallel
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Return a stage's output for a micro-batch, and the function that computes the loss."""
    tokens, targets = next(micro_batches)
    positions = torch.arange(Shape.context).expand_as(tokens)
    future = torch.ones(1, 1, Shape.context, Shape.context, dtype=torch.bool).triu(1)
    output = model(tokens, positions, future, labels=targets)
    return output, lambda each: (each.mean(), each.detach().mean())


def mean_of_losses(losses: list[Tensor]) -> float:
    """Return the mean loss of all micro-batches; only ranks of the last stage have losses."""
    known = dist.get_world_size() // parallel_state.get_pipeline_model_parallel_world_size()
    mean = sum(losses, torch.zeros(())) / MICRO_BATCHES / known
    dist.all_reduce(mean)
    return mean.item()


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    return parser.parse_args()


if __name__ == "__main__":
    main()
