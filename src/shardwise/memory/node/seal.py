"""Checksums of staged files, taken by the agent where the training does not wait for them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from shardwise.errors import CorruptionError
from shardwise.manifest.checksums import BLOCK, BlockTable, block_checksums, block_count, crc32
from shardwise.manifest.manifest import FileEntry
from shardwise.memory.node.pages import map_pages
from shardwise.store.store import Buffer

AT_A_TIME = 4 << 20
THREADS = 2


def mapped(path: Path, size: int, *, writable: bool = False) -> Buffer:
    """A file's bytes, where they lie.

    Raises:
        CorruptionError: it has not this size.
    """
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
    fd = os.open(path, flags)
    try:
        found = os.fstat(fd).st_size
        if found != size:
            raise CorruptionError(f"{path} has {found} bytes where {size} were staged")
        return map_pages(fd, 0, size, writable=writable)
    finally:
        os.close(fd)


def seal(path: Path, entry: FileEntry) -> FileEntry:
    """Write a staged file's checksums to its end; its entry, with the checksum of these.

    Raises:
        CorruptionError: the file has not the size that was staged.
    """
    data = mapped(path, entry.size, writable=True)
    table = np.zeros(block_count(entry.checksums_at), "<u4")

    def take(low: int) -> None:
        sums = block_checksums(data[low : min(low + AT_A_TIME, entry.checksums_at)])
        table[low // BLOCK : low // BLOCK + len(sums)] = sums

    with ThreadPoolExecutor(THREADS, "shardwise-seal") as pool:
        list(pool.map(take, range(0, entry.checksums_at, AT_A_TIME)))
    encoded = table.view(np.uint8)
    data[entry.checksums_at :] = encoded
    return msgspec.structs.replace(entry, checksums_crc32=crc32(encoded))


def is_intact(path: Path, entry: FileEntry) -> bool:
    """Whether a sealed file is what it was when it was sealed."""
    try:
        data = mapped(path, entry.size)
    except (OSError, CorruptionError):
        return False
    encoded = data[entry.checksums_at :]
    if crc32(encoded) != entry.checksums_crc32:
        return False
    table = BlockTable(np.frombuffer(encoded.tobytes(), "<u4"))
    return not any(
        table.damaged(low // BLOCK, data[low : min(low + AT_A_TIME, entry.checksums_at)])
        for low in range(0, entry.checksums_at, AT_A_TIME)
    )
