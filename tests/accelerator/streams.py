"""Work on CUDA streams that takes a chosen time, for tests of the order of copies."""

from __future__ import annotations

import torch

CYCLES_PER_MILLISECOND = 1_900_000


def occupy(milliseconds: float = 200) -> None:
    """Queue a kernel on the current stream that only takes time."""
    torch.cuda._sleep(int(milliseconds * CYCLES_PER_MILLISECOND))
