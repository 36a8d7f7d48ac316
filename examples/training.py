"""What the training scripts share: options, batches, the loss, and the death of a rank."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - as everyone calls it
from gpt import Shape
from text import batch
from torch import Tensor

BATCH = 12  # samples of all ranks together; divisible by 1, 2, 3 and 4 ranks


def make_parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all scripts have."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--blocks", type=int, default=Shape.blocks, help="number of transformer blocks"
    )
    parser.add_argument("--steps", type=int, default=60, help="train until this step")
    parser.add_argument("--root", type=Path, required=True, help="directory of checkpoints")
    parser.add_argument("--every", type=int, default=5, help="steps between saves")
    parser.add_argument("--again", type=Path, help="save the restored state to this directory, too")
    parser.add_argument("--die-at", type=int, help="rank 1 kills itself at this step")
    parser.add_argument(
        "--journal", type=Path, help="append the losses to this file, instead of printing them"
    )
    return parser


def part_of_batch(corpus: Tensor, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Return one replica's part of the inputs and targets of a step."""
    inputs, targets = batch(corpus, step, BATCH, Shape.context)
    return inputs.chunk(parts)[part], targets.chunk(parts)[part]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def die_at_step(options: argparse.Namespace, step: int) -> None:
    """Kill rank 1 at the step of `--die-at`, by SIGKILL, like the kernel's out-of-memory killer."""
    if step == options.die_at and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
