"""Computes and verifies the checksums of files in memory, and keeps the files mapped.

Slots are reused, so the agent needs the same files again and again. Files stay mapped, because the
page faults of a new mapping take longer than computing the checksums.
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
from shardwise.manifest.checksums import BLOCK, block_checksums, crc32
from shardwise.manifest.manifest import FileEntry
from shardwise.store.local_files import open_regular
from shardwise.store.store import Buffer

CHUNK = 4 << 20


def map_file(path: Path, size: int, *, writable: bool = False) -> Buffer:
    """Map a file and return its bytes.

    Raises:
        CorruptionError: the file has a different size.
    """
    fd = _open_checked(path, size, writable=writable)
    try:
        return map_pages(fd, 0, size, writable=writable)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class _MappedFile:
    """An open file and its mapping. The file may have grown after it was mapped."""

    fd: int
    data: Buffer

    def close(self) -> None:
        os.close(self.fd)


class MappedFiles:
    """Files that stay mapped as long as they exist. Threads may share this object.

    The memory of a removed file is freed only when the file is unmapped: call `unmap_removed`
    often.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[int, int], _MappedFile] = {}

    def map(self, path: Path, size: int) -> Buffer:
        """Map a file, unless it is mapped already; return its bytes, which are writable.

        Raises:
            CorruptionError: the file has a different size.
        """
        fd = _open_checked(path, size, writable=True)
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
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
            self._known[key] = _MappedFile(fd, data)
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


def _open_checked(path: Path, size: int, *, writable: bool) -> int:
    fd = open_regular(path, os.O_RDWR if writable else os.O_RDONLY)
    actual = os.fstat(fd).st_size
    if actual != size:
        os.close(fd)
        raise CorruptionError(
            f"{path} has {actual} bytes; expected {size}, as recorded when the file was staged; "
            "the file was cut off or replaced: restore another step"
        )
    return fd


def seal(data: Buffer, entry: FileEntry) -> FileEntry:
    """Write the checksums of a staged file to its end; return its entry, with `checksums_crc32`.

    Args:
        data: the file, mapped.
        entry: the entry of the file.
    """
    end = entry.checksums_at
    for low in range(0, end, CHUNK):
        sums = block_checksums(data[low : min(low + CHUNK, end)]).astype("<u4")
        at = end + low // BLOCK * sums.itemsize
        data[at : at + sums.nbytes] = sums.view(np.uint8)
    return msgspec.structs.replace(entry, checksums_crc32=crc32(data[end:].tobytes()))
