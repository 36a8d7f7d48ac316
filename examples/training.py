"""What all trainings share: their options, their batches, and how one of their ranks dies."""

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

BATCH = 12  # of all ranks together, whatever their number: 1, 2, 3 and 4 have equal parts


def parser_of(doc: str) -> argparse.ArgumentParser:
    """The options that all have."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=Shape.blocks, help="how deep the model is")
    parser.add_argument("--steps", type=int, default=60, help="train until this step")
    parser.add_argument("--root", type=Path, required=True, help="where checkpoints go")
    parser.add_argument("--every", type=int, default=5, help="save every so many steps")
    parser.add_argument("--again", type=Path, help="save there, at once, what was restored")
    parser.add_argument("--die-at", type=int, help="rank 1 kills itself at this step")
    parser.add_argument("--journal", type=Path, help="append a line of JSON for every step here")
    return parser


def part_of_batch(corpus: Tensor, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one of so many replicas: together they have those of the step."""
    inputs, targets = batch(corpus, step, BATCH, Shape.context)
    return inputs.chunk(parts)[part], targets.chunk(parts)[part]


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def die_if_asked(options: argparse.Namespace, step: int) -> None:
    """Rank 1 kills itself by SIGKILL, as the kernel does when memory runs out."""
    if step == options.die_at and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
