"""CRC-32 of every block of a data file.

The polynomial is zlib's, so that any language's standard library can check a file; isal computes
it at twenty times zlib's speed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

BLOCK = 64 * 1024
"""Bytes that share one checksum: the unit in which data files are read."""

Bytes = npt.NDArray[np.uint8]


def crc32(data: bytes | memoryview | Bytes) -> int:
    """CRC-32 as `zlib.crc32` computes it."""
    return isal_zlib.crc32(data)


def block_count(nbytes: int) -> int:
    """How many blocks cover this many bytes; the last may be short."""
    return -(-nbytes // BLOCK)


def block_checksums(data: Bytes) -> npt.NDArray[np.uint32]:
    """The checksum of each block of `data`, which starts at a block's boundary."""
    view = data.data
    sums = [isal_zlib.crc32(view[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    return np.array(sums, np.uint32)


def damaged_blocks(data: Bytes, expected: npt.NDArray[np.uint32]) -> list[int]:
    """Which blocks of `data` do not have their expected checksum."""
    return np.flatnonzero(block_checksums(data) != expected).tolist()
