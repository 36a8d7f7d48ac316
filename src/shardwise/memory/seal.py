"""Computes and verifies the checksums of files in memory, and keeps these files mapped.

Slots are reused, so the same files return. Mapping a file again costs more than its checksums,
because of a page fault for each page.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from shardwise.engine.buffers import map_pages
from shardwise.errors import CorruptionError
from shardwise.manifest.checksums import BLOCK, BlockTable, block_checksums, block_count, crc32
from shardwise.manifest.manifest import FileEntry
from shardwise.store.store import Buffer


def mapped(path: Path, size: int, *, writable: bool = False) -> Buffer:
    """Map a file and return its bytes.

    Raises:
        CorruptionError: the file has a different size.
    """
    fd = _opened(path, size, writable=writable)
    try:
        return map_pages(fd, 0, size, writable=writable)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class _Mapping:
    """An open file and its mapping, of the size that it had when it was mapped."""

    fd: int
    data: Buffer

    def close(self) -> None:
        os.close(self.fd)


class Mappings:
    """Files that stay mapped for as long as they exist. Threads may share them.

    The memory of a removed file is freed only when it is unmapped: call `unmap_removed` often.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], _Mapping] = {}

    def find(self, path: Path, size: int) -> Buffer:
        """Return a file's bytes, mapped and writable.

        Raises:
            CorruptionError: the file has a different size.
        """
        fd = _opened(path, size, writable=True)
        found = os.fstat(fd)
        key = found.st_dev, found.st_ino
        with self._lock:
            known = self._known.get(key)
            if known is not None and len(known.data) >= size:
                os.close(fd)
                return known.data[:size]
            try:
                data = map_pages(fd, 0, size, writable=True)
            except BaseException:
                os.close(fd)
                raise
            self._known[key] = _Mapping(fd, data)
            if known is not None:
                known.close()
        return data

    def unmap_removed(self) -> None:
        """Unmap files that were removed."""
        with self._lock:
            for key, known in list(self._known.items()):
                if not os.fstat(known.fd).st_nlink:
                    del self._known[key]
                    known.close()

    def close(self) -> None:
        """Unmap all files."""
        with self._lock:
            for known in self._known.values():
                known.close()
            self._known.clear()


def _opened(path: Path, size: int, *, writable: bool) -> int:
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
    found = os.fstat(fd).st_size
    if found != size:
        os.close(fd)
        raise CorruptionError(f"{path} has {found} bytes; expected {size} bytes, as staged")
    return fd


AT_A_TIME = 4 << 20


def seal(data: Buffer, entry: FileEntry) -> FileEntry:
    """Write a staged file's checksums to its end, and return its entry with their checksum.

    One thread computes them: blocks are so small that several threads would contend.

    Args:
        data: the file, mapped.
    """
    table = np.zeros(block_count(entry.checksums_at), "<u4")
    for low in range(0, entry.checksums_at, AT_A_TIME):
        sums = block_checksums(data[low : min(low + AT_A_TIME, entry.checksums_at)])
        table[low // BLOCK : low // BLOCK + len(sums)] = sums
    encoded = table.view(np.uint8)
    data[entry.checksums_at :] = encoded
    return msgspec.structs.replace(entry, checksums_crc32=crc32(encoded))


def is_intact(path: Path, entry: FileEntry) -> bool:
    """Return whether a file still has the checksums that it was sealed with."""
    try:
        return is_sealed(mapped(path, entry.size), entry)
    except (OSError, CorruptionError):
        return False


def is_sealed(data: Buffer, entry: FileEntry) -> bool:
    """Return whether a mapped file still has the checksums that it was sealed with."""
    encoded = data[entry.checksums_at :]
    if crc32(encoded) != entry.checksums_crc32:
        return False
    table = BlockTable(np.frombuffer(encoded.tobytes(), "<u4"))
    return not any(
        table.damaged(low // BLOCK, data[low : min(low + AT_A_TIME, entry.checksums_at)])
        for low in range(0, entry.checksums_at, AT_A_TIME)
    )
