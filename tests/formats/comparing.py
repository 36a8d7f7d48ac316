"""Compare nested states byte for byte."""

from __future__ import annotations

from typing import Any

import torch


def assert_same(read: Any, expected: Any) -> None:
    """Fail if values differ, or if tensors differ in dtype, shape or bytes."""
    if isinstance(expected, torch.Tensor):
        assert (read.dtype, read.shape) == (expected.dtype, expected.shape)
        raw = [x.contiguous().reshape(-1).view(torch.uint8) for x in (read, expected.detach())]
        assert torch.equal(*raw)
    elif isinstance(expected, dict):
        assert list(read) == list(expected)
        for key in expected:
            assert_same(read[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(read) == len(expected)
        for one, other in zip(read, expected, strict=True):
            assert_same(one, other)
    else:
        assert read == expected
