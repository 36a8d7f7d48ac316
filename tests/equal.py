"""Compare tensors bit by bit."""

from __future__ import annotations

import torch


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have equal dtypes, shapes and bits, also in NaNs."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)))
