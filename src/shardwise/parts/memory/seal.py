"""Computes and verifies the checksums of files in memory, and keeps the files mapped.

Slots are reused, so the agent needs the same files again and again. Files stay mapped, because the
page faults of a new mapping take longer than computing the checksums.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from pathlib import Path
from zlib import crc32

import msgspec
import numpy as np

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.engine.buffers import map_pages
from shardwise.kernel.errors import CorruptionError
from shardwise.kernel.manifest.checksums import BLOCK, block_checksums
from shardwise.kernel.manifest.manifest import FileEntry
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.files import opened
from shardwise.parts.memory.times import CHILD_TIMEOUT

CHUNK = 4 << 20
MOST_PROCESSES = 8
LEAST_BYTES_OF_PROCESS = 256 << 20
PR_SET_PDEATHSIG = 1
_NOTHING: Buffer = np.zeros(0, np.uint8)
log = logging.getLogger("shardwise.agent")
_libc = ctypes.CDLL(None)


def map_file(path: Path, size: int, *, writable: bool = False) -> Buffer:
    """Map a file and return its bytes.

    Raises:
        CorruptionError: the file has a different size.
    """
    with opened(path, os.O_RDWR if writable else os.O_RDONLY) as fd:
        _check_size(fd, path, size)
        return map_pages(fd, 0, size, writable=writable)


class MappedFiles:
    """Files that stay mapped as long as they exist. Threads may share this object.

    The memory of a removed file is freed only when the file is unmapped: call `unmap_removed`
    often.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By device and inode: an open file, and its mapping. The file may have grown since.
        self._known: dict[tuple[int, int], tuple[int, Buffer]] = {}

    def map(self, path: Path, size: int) -> Buffer:
        """Map a file, unless it is mapped already; return its bytes, which are writable.

        Raises:
            CorruptionError: the file has a different size.
        """
        with opened(path, os.O_RDWR) as fd, self._lock:
            _check_size(fd, path, size)
            status = os.fstat(fd)
            key = status.st_dev, status.st_ino
            known, data = self._known.get(key, (-1, _NOTHING))
            if known < 0 or len(data) < size:
                data = map_pages(fd, 0, size, writable=True)
                self._known[key] = os.dup(fd), data
                if known >= 0:
                    os.close(known)
        return data[:size]

    def unmap_removed(self) -> None:
        """Unmap files that were removed."""
        with self._lock:
            for key, (fd, _) in list(self._known.items()):
                if not os.fstat(fd).st_nlink:
                    del self._known[key]
                    os.close(fd)


def _check_size(fd: int, path: Path, size: int) -> None:
    actual = os.fstat(fd).st_size
    if actual != size:
        raise CorruptionError(
            f"{path} has {actual} bytes; expected {size}, as recorded when the file was staged; "
            "the file was cut off or replaced: restore another step"
        )


def seal(data: Buffer, entry: FileEntry, processes: int | None = None) -> FileEntry:
    """Write the checksums of a staged file to its end; return its entry, with `checksums_crc32`.

    Forked processes compute the checksums of large files: with such small blocks, several threads
    would often wait for each other.

    Args:
        data: the file, mapped; shared with forked processes.
        entry: the entry of the file.
        processes: the number of processes, this one included. None: half of the processors, at
            most 8, and no more than the file has blocks of 256 MiB.
    """
    end = entry.checksums_at
    if processes is None:
        processors = len(os.sched_getaffinity(0))
        processes = max(1, min(MOST_PROCESSES, processors // 2, end // LEAST_BYTES_OF_PROCESS))
    share = -(-end // (processes * BLOCK)) * BLOCK
    ranges = [(low, min(low + share, end)) for low in range(0, end, max(share, 1))]
    children = {each: _fork(data, end, *each) for each in ranges[1:]}
    for each in ranges[:1]:
        _write_checksums(data, end, *each)
    for each, child in children.items():
        if not _has_succeeded(child):
            _write_checksums(data, end, *each)
    return msgspec.structs.replace(entry, checksums_crc32=crc32(data[end:].data))


def _write_checksums(data: Buffer, end: int, low: int, high: int) -> None:
    """Write the checksums of bytes `low:high` into the table at `end`."""
    for start in range(low, high, CHUNK):
        sums = block_checksums(data[start : min(start + CHUNK, high)])
        at = end + start // BLOCK * sums.itemsize
        data[at : at + sums.nbytes] = sums.view(np.uint8)


def _fork(data: Buffer, end: int, low: int, high: int) -> int:
    """Write the checksums of a range in a forked process; return its id, or 0 if there is none."""
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError as error:
        log.warning("one process fewer computes checksums: %s", error)
        return 0
    if child:
        return child
    code = 1
    try:
        # This process holds the locks of the agent, and must not keep them longer than the agent.
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            _write_checksums(data, end, low, high)
            code = 0
    finally:
        os._exit(code)


def _has_succeeded(child: int) -> bool:
    """Wait for a forked process, and return whether it has succeeded. One that hangs is killed."""
    if not child:
        return False
    for _ in Deadline(CHILD_TIMEOUT).attempts(pause=0.001, longest_pause=0.01):
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return status == 0
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
