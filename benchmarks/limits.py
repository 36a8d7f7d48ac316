"""The machine's own limits: copies, direct writes and reads. Also controls the page cache."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

CHUNK = 8 << 20
THREADS = 2


def make_copier(tensors: Iterable[torch.Tensor], threads: int) -> Callable[[], np.ndarray]:
    """Return a function that copies the tensors into memory that was touched before.

    It returns that memory.
    """
    sources = [each.contiguous().view(-1).view(torch.uint8).numpy() for each in tensors]
    ends = np.cumsum([len(each) for each in sources]).tolist()
    out = np.frombuffer(mmap.mmap(-1, ends[-1]), np.uint8)
    out[:] = 0
    targets = [out[end - len(each) : end] for each, end in zip(sources, ends, strict=True)]
    pool = ThreadPoolExecutor(threads)

    def copy() -> np.ndarray:
        list(pool.map(np.copyto, targets, sources))
        return out

    return copy


def direct_write(path: Path, nbytes: int) -> None:
    """Write a new file with direct I/O from page-aligned memory, and sync it."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)
    try:
        _in_chunks(nbytes, lambda buffer, at: os.pwrite(fd, buffer, at))
        os.fsync(fd)
    finally:
        os.close(fd)


def direct_read(path: Path, nbytes: int) -> None:
    """Read a file with direct I/O into page-aligned memory."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _in_chunks(nbytes, lambda buffer, at: os.preadv(fd, [buffer], at))
    finally:
        os.close(fd)


def _in_chunks(nbytes: int, move: Callable[[memoryview, int], int]) -> None:
    """Move all chunks with several threads, each with its own buffer."""

    def work(thread: int) -> None:
        buffer = memoryview(mmap.mmap(-1, CHUNK))
        for at in range(thread * CHUNK, nbytes, THREADS * CHUNK):
            size = min(CHUNK, nbytes - at)
            if move(buffer[:size], at) != size:
                raise OSError(f"read or wrote fewer than {size} bytes at offset {at}")

    with ThreadPoolExecutor(THREADS) as pool:
        for job in [pool.submit(work, thread) for thread in range(THREADS)]:
            job.result()


def sync_files(directory: Path, rank: int, world: int) -> None:
    """Sync this rank's part of the files below a directory."""
    for path in [*_files(directory), directory][rank::world]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def drop_files_from_cache(directory: Path) -> None:
    """Drop files from the page cache; they must be synced."""
    for path in _files(directory):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_files_into_cache(directory: Path) -> None:
    """Read files into the page cache."""
    for path in _files(directory):
        with path.open("rb", buffering=0) as file:
            while file.read(CHUNK):
                pass


def bytes_read() -> int:
    """Return the bytes that this process and its exited children have read, cached or not."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def _files(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]
