"""A text that every machine has: the source of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def read_corpus() -> Tensor:
    """Return the source of all top-level modules, about 5 MB: one token for each byte."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(sources), dtype=torch.uint8)


def batch(corpus: Tensor, step: int, size: int, context: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a step, the same for every parallelism and every run."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(corpus) - context - 1, (size,), generator=generator)
    rows = torch.stack([corpus[start : start + context + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]
