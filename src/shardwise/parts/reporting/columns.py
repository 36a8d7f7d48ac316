"""Compress the numbers of telemetry into a text that the page of a report can contain.

A column of durations is stored as 16-bit numbers and a scale: a duration of 12.3456789 s beside one
of 31 s is kept to half a millisecond. Small numbers are kept exactly. All columns of an operation
are compressed together, by gzip, which browsers can decompress themselves. A save of 16,384 ranks
with eight stages takes 0.5 to 1 MB.
"""

from __future__ import annotations

import base64
import gzip
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.kernel.boxes.box import IntArray

LARGEST = 2**16 - 1
NONE = LARGEST
"""Stands for a missing number, such as the start of a stage that has not run."""


@dataclass(frozen=True, slots=True)
class Column:
    """Where a column is in the packed bytes, in 16-bit numbers, and the scale of its numbers.

    If all numbers of a column are equal, it is not in the bytes, and `at` is None.
    """

    at: int | None
    length: int
    scale: float
    first: int


class Packer:
    """Collects columns."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._length = 0

    def add(self, values: IntArray, exists: npt.NDArray[np.bool_] | None = None) -> Column:
        """Add a column of numbers from 0.

        Args:
            exists: which numbers are not missing. Default: all.
        """
        known = values if exists is None else np.where(exists, values, 0)
        largest = int(known.max(initial=0))
        scale = 1.0 if largest < LARGEST else largest / (LARGEST - 1)
        numbers = np.rint(known / scale).astype("<u2")
        if exists is not None:
            numbers[~exists] = NONE
        return self._append(numbers, scale)

    def add_exact(self, values: IntArray) -> tuple[Column, Column]:
        """Add a column of numbers below 2**32 that must not be rounded, as two columns.

        The first one has the lower 16 bits. The second one is usually 0, so it takes no space. -1
        stands for a missing number.
        """
        known = np.where(values < 0, 2**32 - 1, np.minimum(values, 2**32 - 2))
        low, high = ((known >> shift & LARGEST).astype("<u2") for shift in (0, 16))
        return self._append(low, 1.0), self._append(high, 1.0)

    def _append(self, numbers: npt.NDArray[np.uint16], scale: float) -> Column:
        if len(numbers) and (numbers == numbers[0]).all():
            return Column(None, len(numbers), scale, int(numbers[0]))
        self._parts.append(numbers.tobytes())
        self._length += len(numbers)
        return Column(self._length - len(numbers), len(numbers), scale, 0)

    def text(self) -> str:
        """Return all columns as base64 of gzip."""
        data = gzip.compress(b"".join(self._parts), compresslevel=9, mtime=0)
        return base64.b64encode(data).decode("ascii")
