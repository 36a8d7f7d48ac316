"""CRC-32 checksums of the blocks of a data file.

The polynomial is zlib's, so that the standard libraries of most languages can check a file. The
library isal computes it twenty times as fast as zlib; its `crc32` is called like `zlib.crc32`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32 as crc32

BLOCK = 64 * 1024
"""The size of a block in bytes. Each block has a checksum, and reads consist of whole blocks."""

POLYNOMIAL = 0xEDB88320

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class FileChecksums:
    """CRC-32 checksums of ranges of a file.

    Attributes:
        file: the name of the file.
        ranges: the first byte, the number of bytes and the checksum of each range, `(n, 3)`.
    """

    file: str
    ranges: npt.NDArray[np.int64]


def add_checksum(fields: bytes) -> bytes:
    """Return a JSON object whose last field is a checksum of all bytes before this field.

    Args:
        fields: the beginning of the object, up to and including the last comma.
    """
    return fields + b'"crc32":%d}\n' % crc32(fields)


def verify_checksum(data: bytes) -> bytes:
    """Verify the checksum at the end of a JSON object, and return the bytes before it.

    Raises:
        ValueError: the checksum is missing or does not match. The message says which.
    """
    fields, marker, tail = data.rpartition(b'"crc32":')
    if not marker or not tail.endswith(b"}\n") or not tail[:-2].isdigit():
        raise ValueError("truncated: the checksum at its end is missing")
    if len(tail) > 12 or int(tail[:-2]) != crc32(fields):
        raise ValueError("altered: its checksum does not match")
    return fields


def block_count(nbytes: int) -> int:
    """Return the number of blocks of a file with this many bytes. The last block may be shorter."""
    return -(-nbytes // BLOCK)


def block_checksums(data: Bytes) -> Words:
    """Return the little-endian checksum of each block of `data`, which starts at a boundary."""
    view = data.data
    sums = [crc32(view[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]
    return np.array(sums, "<u4")


class BlockTable:
    """The checksums of a file's blocks, which can verify several consecutive blocks at once.

    A separate call for each block would cost as much as the checksums themselves. The checksum of
    blocks `i:j` is the XOR of two checksums: of blocks `:j`, and of blocks `:i` followed by `j - i`
    blocks of zeros. zlib's `crc32_combine` uses the same equation.
    """

    def __init__(self, sums: Words) -> None:
        self._sums = sums
        up_to = sums.astype(np.uint32)
        distance = 1
        while distance < len(up_to):  # Hillis and Steele: data parallel algorithms, 1986
            up_to[distance:] ^= _append_zero_blocks(up_to[:-distance], distance)
            distance *= 2
        self._checksum_up_to = up_to
        self._shifted_checksums: dict[int, Words] = {}

    def find_damaged(self, first: int, data: Bytes) -> list[int]:
        """Return the indices of damaged blocks, relative to `first`.

        Args:
            first: the index of the first block of `data` in the file.
            data: consecutive blocks. The last block may be shorter.
        """
        whole, intact = len(data) // BLOCK, 0
        if whole > 1 and crc32(data[: whole * BLOCK]) == self._checksum_of_run(first, whole):
            intact = whole
            if len(data) == whole * BLOCK:
                return []
        expected = self._sums[first + intact : first + block_count(len(data))]
        is_damaged = block_checksums(data[intact * BLOCK :]) != expected
        return (intact + np.flatnonzero(is_damaged)).tolist()

    def _checksum_of_run(self, first: int, count: int) -> int:
        if first + count > len(self._checksum_up_to):
            return -1
        shifted = self._shifted_checksums.get(count)
        if shifted is None:  # for all blocks at once: most runs have the same length
            shifted = self._shifted_checksums[count] = _append_zero_blocks(
                self._checksum_up_to, count
            )
        return int(self._checksum_up_to[first + count - 1]) ^ (
            int(shifted[first - 1]) if first else 0
        )


def _append_zero_blocks(sums: Words, blocks: int) -> Words:
    """Return the checksums of the same data followed by `blocks` blocks of zeros."""
    found = np.zeros(len(sums), np.uint32)
    for i, table in enumerate(_byte_tables(blocks)):
        found ^= table[(sums >> np.uint32(8 * i)) & np.uint32(0xFF)]
    return found


@cache
def _byte_tables(blocks: int) -> list[Words]:
    """Return the result of appending zero blocks, for each value of each byte of a checksum.

    The operation is linear, so that the results of the four bytes can be combined by XOR.
    """
    tables = []
    for matrix in np.split(_zero_bits_matrix(8 * BLOCK * blocks), 4):
        table = np.zeros(1, np.uint32)
        for row in matrix:
            table = np.concatenate([table, table ^ row])
        tables.append(table)
    return tables


def _zero_bits_matrix(bits: int) -> Words:
    """Return the matrix over GF(2) that appends `bits` zero bits to a checksum."""
    found = np.array([1 << n for n in range(32)], np.uint32)
    for n in range(bits.bit_length()):
        if bits >> n & 1:
            found = _multiply(_power_matrix(n), found)
    return found


@cache
def _power_matrix(times: int) -> Words:
    """Return the matrix that appends `2 ** times` zero bits."""
    if not times:
        return np.array([POLYNOMIAL, *(1 << n for n in range(31))], np.uint32)
    half = _power_matrix(times - 1)
    return _multiply(half, half)


def _multiply(matrix: Words, rows: Words) -> Words:
    bits = (rows[:, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)
    product: Words = np.bitwise_xor.reduce(np.where(bits, matrix, np.uint32(0)), axis=1)
    return product
