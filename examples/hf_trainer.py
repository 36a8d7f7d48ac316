"""Train with the transformers Trainer, and save its checkpoints with shardwise.

The trainer resumes from these checkpoints on any number of ranks, and also from checkpoints that
the original Trainer saved. docs/howto/trainer.md describes the options.

python examples/hf_trainer.py --output runs/trainer --steps 20
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --output runs/trainer --steps 40
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from shardwise.integrations.transformers import ShardwiseTrainer


def make_trainer(trainer_class: type[Trainer], output: str, steps: int) -> Trainer:
    """Return a trainer for a tiny GPT-2 on random tokens."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.randint(64, (256, 16))
    arguments = TrainingArguments(
        output_dir=output,
        max_steps=steps,
        per_device_train_batch_size=8 // int(os.environ.get("WORLD_SIZE", "1")),
        save_steps=5,
        lr_scheduler_type="constant",  # others depend on max_steps
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    return trainer_class(GPT2LMHeadModel(config), arguments, train_dataset=dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, help="directory of checkpoints")
    parser.add_argument("--steps", type=int, default=20, help="train until this step")
    options = parser.parse_args()
    newest = get_last_checkpoint(options.output) if os.path.isdir(options.output) else None
    make_trainer(ShardwiseTrainer, options.output, options.steps).train(newest)


if __name__ == "__main__":
    main()
