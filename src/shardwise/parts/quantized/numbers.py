"""Convert 8-bit and 4-bit floats to float32, exactly.

torch 2.13 converts FP8 on the CPU one by one, about five times as slow as these operations. Both
read the bits of small floats as those of float16, whose exponents have another bias: the results
are smaller than the values by a power of two, which no rounding changes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

E4M3_FACTOR = 2.0**8
"""The value of a number in e4m3, divided by that of its bits in float16."""
E2M1_FACTOR = 2.0**14
_NAN = 0x7F
AT_ONCE = 1 << 20
"""The most numbers to convert at a time: 4 MiB in float32, for each thread."""


class Scratch(threading.local):
    """Memory in which each thread converts `AT_ONCE` numbers. New memory for each call is slower.

    Attributes:
        bits: 2 bytes for each number.
        values: 4 bytes for each number.
    """

    def __init__(self) -> None:
        self.bits = np.empty(AT_ONCE, np.int16)
        self.values = torch.empty(AT_ONCE, dtype=torch.float32, device="cpu")


def scale_fp8(
    numbers: Array,
    dtype: torch.dtype,
    factors: torch.Tensor,
    cuts: Sequence[int],
    scratch: Scratch,
) -> torch.Tensor:
    """Return numbers in FP8 times their scales, in float32, as one multiplication rounds them.

    Args:
        numbers: the numbers as bytes, contiguous.
        dtype: `float8_e4m3fn` or `float8_e5m2`.
        factors: positive scales in float32, which can be broadcast to the shape of the numbers; or,
            with `cuts`, which have a row for each row of blocks.
        cuts: the first row of each row of blocks, and the number of rows.
        scratch: memory, which the result uses until the next call of this thread.
    """
    bits = scratch.bits[: numbers.size].reshape(numbers.shape)
    values = scratch.values[: numbers.size].view(numbers.shape)
    shift = 8 if dtype == torch.float8_e5m2 else 7
    np.left_shift(numbers.view(np.int8), shift, out=bits, dtype=np.int16)
    if dtype == torch.float8_e5m2:
        values.copy_(torch.from_numpy(bits).view(torch.float16))
        return _multiply(values, factors, cuts)
    bits &= ~0x4000  # the sign fills the two highest bits
    values.copy_(torch.from_numpy(bits).view(torch.float16))
    scaled = factors * E4M3_FACTOR
    if float(scaled.max()) == math.inf:
        values *= E4M3_FACTOR
        scaled = factors
    _multiply(values, scaled, cuts)
    magnitudes = scratch.bits.view(np.uint8)[: numbers.size].reshape(numbers.shape)
    np.bitwise_and(numbers, _NAN, out=magnitudes)
    if magnitudes.max(initial=0) == _NAN:
        values[torch.from_numpy(magnitudes == _NAN)] = torch.nan
    return values


def _multiply(values: torch.Tensor, factors: torch.Tensor, cuts: Sequence[int]) -> torch.Tensor:
    """Multiply values by factors in place; see `scale_fp8`."""
    if not cuts:
        values *= factors
    for row, (low, high) in enumerate(pairwise(cuts)):
        values[..., low:high, :] *= factors[..., row : row + 1, :]
    return values


def unpack_fp4(numbers: Array) -> torch.Tensor:
    """Return the numbers in e2m1 of which each byte has two, in float32.

    Args:
        numbers: bytes, `(…, n, m)`.

    Returns:
        The numbers, `(…, 2 n, m)`. Rows 2 i and 2 i + 1 are the low and the high bits of row i.
    """
    wide = numbers.astype(np.uint16)
    *outer, rows, columns = numbers.shape
    bits = np.empty((*outer, rows, 2, columns), np.uint16)
    bits[..., 0, :] = (wide & 0x08) << 12 | (wide & 0x07) << 9
    bits[..., 1, :] = (wide & 0x80) << 8 | (wide & 0x70) << 5
    halves = torch.from_numpy(bits.view(np.float16)).view(*outer, 2 * rows, columns)
    return halves.to(torch.float32).mul_(E2M1_FACTOR)
