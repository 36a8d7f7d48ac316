"""CRC-32 of every block of a data file.

The polynomial is zlib's, so that any language's standard library can check a file; isal computes
it at twenty times zlib's speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from isal import isal_zlib

BLOCK = 64 * 1024
"""Bytes that share one checksum: the unit in which data files are read."""

POLYNOMIAL = 0xEDB88320

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class FileChecksums:
    """CRC-32 of ranges of a file. `ranges` is `(n, 3)`: first byte, number of bytes, checksum."""

    file: str
    ranges: npt.NDArray[np.int64]


def crc32(data: bytes | memoryview | Bytes, before: int = 0) -> int:
    """CRC-32 as `zlib.crc32` computes it, continued from that of preceding bytes."""
    return isal_zlib.crc32(data, before)


def block_count(nbytes: int) -> int:
    """Return how many blocks cover this many bytes. The last may be short."""
    return -(-nbytes // BLOCK)


def block_checksums(data: Bytes) -> Words:
    """Return the checksum of each block of `data`, which starts at a block boundary."""
    view = data.data
    sums = [isal_zlib.crc32(view[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    return np.array(sums, np.uint32)


def damaged_blocks(data: Bytes, expected: Words) -> list[int]:
    """Return the indices of the blocks of `data` that do not match their checksums."""
    return np.flatnonzero(block_checksums(data) != expected).tolist()


class BlockTable:
    """The checksums of a file's blocks, which can verify a run of blocks at once.

    A call for each block would cost as much as the checksums themselves. The checksum of blocks
    `i:j` is the checksum of blocks `:j` XOR that of blocks `:i` extended by zeros of `j - i`
    blocks, as in zlib's `crc32_combine`.
    """

    def __init__(self, sums: Words) -> None:
        self._sums = sums
        upto = sums.astype(np.uint32)
        distance = 1
        while distance < len(upto):  # Hillis and Steele: data parallel algorithms, 1986
            upto[distance:] ^= _extended(upto[:-distance], distance)
            distance *= 2
        self._upto = upto
        self._before: dict[int, Words] = {}

    def damaged(self, first: int, data: Bytes) -> list[int]:
        """Return the damaged blocks of `data`, which begins with block `first` of the file."""
        whole = len(data) // BLOCK
        expected = self._sums[first : first + block_count(len(data))]
        if whole > 1 and crc32(data[: whole * BLOCK]) == self._of_run(first, whole):
            rest = data[whole * BLOCK :]
            return [whole + i for i in damaged_blocks(rest, expected[whole:])] if len(rest) else []
        return damaged_blocks(data, expected)

    def _of_run(self, first: int, count: int) -> int:
        if first + count > len(self._upto):
            return -1
        before = self._before.get(count)
        if before is None:  # for all blocks at once: most runs have the same length
            before = self._before[count] = _extended(self._upto, count)
        return int(self._upto[first + count - 1]) ^ (int(before[first - 1]) if first else 0)


def _extended(sums: Words, blocks: int) -> Words:
    """Return checksums extended by zeros of `blocks` blocks."""
    found = np.zeros(len(sums), np.uint32)
    for i, table in enumerate(_byte_tables(blocks)):
        found ^= table[(sums >> np.uint32(8 * i)) & np.uint32(0xFF)]
    return found


@cache
def _byte_tables(blocks: int) -> list[Words]:
    """Return the extension for each value of each byte of a checksum, in which it is linear."""
    tables = []
    for matrix in np.split(_zeros(8 * BLOCK * blocks), 4):
        table = np.zeros(1, np.uint32)
        for row in matrix:
            table = np.concatenate([table, table ^ row])
        tables.append(table)
    return tables


def _zeros(bits: int) -> Words:
    """Return the matrix over GF(2) that extends a checksum by `bits` zero bits."""
    found = np.array([1 << n for n in range(32)], np.uint32)
    for n in range(bits.bit_length()):
        if bits >> n & 1:
            found = _times(_zeros_doubled(n), found)
    return found


@cache
def _zeros_doubled(times: int) -> Words:
    """Return the matrix for `2 ** times` zero bits."""
    if not times:
        return np.array([POLYNOMIAL, *(1 << n for n in range(31))], np.uint32)
    half = _zeros_doubled(times - 1)
    return _times(half, half)


def _times(matrix: Words, rows: Words) -> Words:
    bits = (rows[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    product: Words = np.bitwise_xor.reduce(np.where(bits, matrix, np.uint32(0)), axis=1)
    return product
