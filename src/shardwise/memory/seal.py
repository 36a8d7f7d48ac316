"""Files of a node as they lie in memory, mapped once: slots go round, and come back as they were.

Mapping a file anew costs more than a checksum of it, as each of its pages has to be found again.
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
    """A file's bytes, where they lie.

    Raises:
        CorruptionError: it has not this size.
    """
    fd = _opened(path, size, writable=writable)
    try:
        return map_pages(fd, 0, size, writable=writable)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A file, open and mapped, as long as it was when it was found first."""

    fd: int
    data: Buffer

    def close(self) -> None:
        os.close(self.fd)


class Mappings:
    """Files that stay mapped for as long as they exist. Threads may share them.

    The memory of a file that was removed is given back only when its mapping is: `let_go` is to be
    called often.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], _Mapping] = {}

    def find(self, path: Path, size: int) -> Buffer:
        """A file's bytes, where they lie; they can be written.

        Raises:
            CorruptionError: it has not this size.
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

    def let_go(self) -> None:
        """Unmap files that were removed."""
        with self._lock:
            for key, known in list(self._known.items()):
                if not os.fstat(known.fd).st_nlink:
                    del self._known[key]
                    known.close()

    def close(self) -> None:
        """Unmap all."""
        with self._lock:
            for known in self._known.values():
                known.close()
            self._known.clear()


def _opened(path: Path, size: int, *, writable: bool) -> int:
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
    found = os.fstat(fd).st_size
    if found != size:
        os.close(fd)
        raise CorruptionError(f"{path} has {found} bytes where {size} were staged")
    return fd


AT_A_TIME = 4 << 20


def seal(data: Buffer, entry: FileEntry) -> FileEntry:
    """Write a staged file's checksums to its end; its entry, with the checksum of these.

    By one thread: blocks are so small that several would wait for each other all the time.

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
    """Whether a sealed file is what it was when it was sealed."""
    try:
        return is_sealed(mapped(path, entry.size), entry)
    except (OSError, CorruptionError):
        return False


def is_sealed(data: Buffer, entry: FileEntry) -> bool:
    """The same of a file that is mapped."""
    encoded = data[entry.checksums_at :]
    if crc32(encoded) != entry.checksums_crc32:
        return False
    table = BlockTable(np.frombuffer(encoded.tobytes(), "<u4"))
    return not any(
        table.damaged(low // BLOCK, data[low : min(low + AT_A_TIME, entry.checksums_at)])
        for low in range(0, entry.checksums_at, AT_A_TIME)
    )
