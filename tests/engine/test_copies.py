"""Files of which there are several copies: any that is intact serves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.engine.buffers import aligned_buffer
from shardwise.engine.data_reader import DataReader
from shardwise.errors import CorruptionError, StoreError
from shardwise.manifest.checksums import BLOCK
from shardwise.store.store import Buffer


class Copies:
    """A store of one file: copies that are gone are None."""

    def __init__(self, copies: list[bytes | None], size: int) -> None:
        self._copies = copies
        self.size = size
        self.copies = len(copies)

    def open(self, path: str) -> Copies:
        return self

    def read_at(self, offset: int, out: Buffer) -> int:
        first = next(i for i, each in enumerate(self._copies) if each is not None)
        return self.read_copy(first, offset, out)

    def copy_size(self, number: int) -> int:
        return len(self._copies[number] or b"")

    def read_copy(self, number: int, offset: int, out: Buffer) -> int:
        data = self._copies[number]
        if data is None:
            raise StoreError("this copy is gone")
        part = np.frombuffer(data[offset : offset + len(out)], np.uint8)
        out[: len(part)] = part
        return len(part)

    def close(self) -> None:
        pass


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("at", [5000, -4])
def test_an_intact_copy_is_found_behind_those_that_are_gone_or_damaged(
    tmp_path: Path, at: int
) -> None:
    """Whether bytes of a tensor are damaged, or the checksums."""
    sw.save(tmp_path / "c", {"t": torch.arange(100_000)})
    (file,) = sw.open(tmp_path / "c").layout.files
    data = (tmp_path / "c" / file.name).read_bytes()
    damaged = flipped(data, at)
    reader = DataReader(Copies([None, damaged, None, data], len(data)), file)
    assert reader.read(0, 65536, aligned_buffer(65536)).tobytes() == data[:65536]
    with pytest.raises(CorruptionError):
        DataReader(Copies([None, damaged], len(data)), file).read(0, 65536, aligned_buffer(65536))


def test_blocks_are_combined_from_copies_that_are_damaged_in_different_places(
    tmp_path: Path,
) -> None:
    sw.save(tmp_path / "c", {"t": torch.arange(100_000)})
    (file,) = sw.open(tmp_path / "c").layout.files
    data = (tmp_path / "c" / file.name).read_bytes()
    size = 6 * BLOCK
    copies = [
        flipped(flipped(data, 10), 3 * BLOCK + 10)[: 5 * BLOCK],  # has 1, 2 and 4
        None,
        flipped(flipped(data, BLOCK), 4 * BLOCK),  # has 0, 2, 3 and 5
    ]
    buffer = aligned_buffer(size)
    reader = DataReader(Copies(copies, 5 * BLOCK), file)
    assert reader.read(0, size, buffer).tobytes() == data[:size]
    copies[2] = flipped(copies[2] or b"", 3 * BLOCK + 20)
    with pytest.raises(CorruptionError):
        reader.read(0, size, buffer)
