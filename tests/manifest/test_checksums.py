"""Checksums of blocks: zlib's, and no altered byte goes unseen."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.manifest.checksums import (
    BLOCK,
    BlockTable,
    block_checksums,
    block_count,
    crc32,
    find_damaged_blocks,
)


@given(st.binary(max_size=300))
def test_the_checksum_is_that_of_zlib(data: bytes) -> None:
    assert crc32(data) == zlib.crc32(data)


@given(st.integers(0, 3 * BLOCK), st.integers(0, 2**32))
def test_an_altered_byte_is_found_in_its_block(size: int, where: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    sums = block_checksums(data)
    assert len(sums) == block_count(size)
    assert find_damaged_blocks(data, sums) == []
    if size:
        data[where % size] ^= 1 << where % 8
        assert find_damaged_blocks(data, sums) == [where % size // BLOCK]


def test_a_short_last_block_is_covered() -> None:
    data = np.ones(BLOCK + 1, np.uint8)
    assert block_checksums(data).tolist() == [zlib.crc32(data[:BLOCK]), zlib.crc32(data[BLOCK:])]


@given(st.integers(0, 6 * BLOCK), st.data())
def test_a_run_of_blocks_is_verified_as_its_blocks_are(size: int, data: st.DataObject) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    table = BlockTable(block_checksums(content))
    first = data.draw(st.integers(0, block_count(size)))
    last = data.draw(st.integers(first, block_count(size)))
    part = content[first * BLOCK : last * BLOCK]
    assert table.find_damaged(first, part) == []
    if len(part):
        where = data.draw(st.integers(0, len(part) - 1))
        part[where] ^= data.draw(st.integers(1, 255))
        assert table.find_damaged(first, part) == [where // BLOCK]


def test_more_than_the_table_covers_is_damaged() -> None:
    content = np.ones(4 * BLOCK, np.uint8)
    table = BlockTable(block_checksums(content[: 2 * BLOCK]))
    with pytest.raises(ValueError, match="shape"):
        table.find_damaged(0, content)
