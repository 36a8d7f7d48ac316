"""Real text that is always there: the source of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def read_corpus() -> Tensor:
    """All top-level modules, end to end, about 5 MB: a token for each byte."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(sources), dtype=torch.uint8)


def batch(corpus: Tensor, step: int, size: int, context: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of a step: the same for every parallelism and every run."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(corpus) - context - 1, (size,), generator=generator)
    rows = torch.stack([corpus[start : start + context + 1] for start in starts]).long()
    return rows[:, :-1], rows[:, 1:]
