"""Save the checkpoints of the transformers Trainer with shardwise, for sharded models as well.

The trainer resumes from these checkpoints on any number of ranks, and also from checkpoints that
the original Trainer saved.

python examples/hf_trainer.py --output runs/trainer --steps 20
torchrun --standalone --nproc-per-node 2 examples/hf_trainer.py --output runs/trainer --steps 40
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import shardwise as sw


class ShardwiseTrainer(Trainer):
    """A Trainer that saves with shardwise; other files (trainer_state.json) are saved as usual."""

    def everything(self) -> dict[str, object]:
        """Return the state to save: everything but the Trainer's own counters."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.lr_scheduler,
            "rng": sw.RngState(),
        }

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        sw.save(shardwise_dir(output_dir), self.everything(), step=self.state.global_step)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not _internal_call:  # in a checkpoint, the model is saved with the optimizer
            super().save_model(output_dir)

    def _save_rng_state(self, output_dir: str) -> None:
        pass  # saved with the optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and os.path.isdir(shardwise_dir(checkpoint)):
            sw.load(shardwise_dir(checkpoint), self.everything(), skip=["rng"])
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if not os.path.isdir(shardwise_dir(checkpoint)):  # otherwise loaded with the optimizer
            super()._load_from_checkpoint(checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and os.path.isdir(shardwise_dir(checkpoint)):
            sw.load(shardwise_dir(checkpoint), {"rng": sw.RngState()})
        else:
            super()._load_rng_state(checkpoint)


def shardwise_dir(checkpoint: str) -> str:
    """Return the directory of shardwise's checkpoint inside the Trainer's."""
    return os.path.join(checkpoint, "shardwise")


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
        per_device_train_batch_size=4,
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
