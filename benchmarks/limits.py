"""The machine's own limits: copies, direct writes and reads. Also controls the page cache."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

CHUNK = 8 << 20
READ_CHUNK = 2 << 20
WRITE_THREADS = 2
READ_THREADS = 4
COLLAPSE = 25
"""MADV_COLLAPSE of Linux 6.1, which Python has no name for."""


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
    """Write a new file with direct I/O, again and again from the same chunk, and sync it."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)
    try:
        _in_chunks(nbytes, CHUNK, WRITE_THREADS, lambda data, at: os.pwrite(fd, data, at))
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def filled_memory(path: Path, nbytes: int) -> Iterator[memoryview]:
    """Create a file in a memory file system, in huge pages where Linux allows it, and map it.

    It is deleted at the end.
    """
    try:
        with path.open("x+b") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            memory = mmap.mmap(file.fileno(), nbytes)
        np.frombuffer(memory, np.uint8)[:] = 1
        with suppress(OSError):  # older systems keep small pages
            memory.madvise(COLLAPSE)
        yield memoryview(memory)
    finally:
        path.unlink(missing_ok=True)


def direct_write_from(path: Path, source: memoryview) -> None:
    """Write a new file with direct I/O from page-aligned memory that has all bytes, and sync it."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)

    def write(at: int) -> None:
        if os.pwrite(fd, source[at : at + CHUNK], at) != min(CHUNK, len(source) - at):
            raise OSError(f"wrote fewer bytes than asked to, at offset {at} of {path}")

    try:
        with ThreadPoolExecutor(WRITE_THREADS) as pool:
            list(pool.map(write, range(0, len(source), CHUNK)))
        os.fsync(fd)
    finally:
        os.close(fd)


def direct_read(path: Path, nbytes: int) -> None:
    """Read a file with direct I/O into page-aligned memory."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _in_chunks(nbytes, READ_CHUNK, READ_THREADS, lambda out, at: os.preadv(fd, [out], at))
    finally:
        os.close(fd)


def _in_chunks(
    nbytes: int, chunk: int, threads: int, move: Callable[[memoryview, int], int]
) -> None:
    """Move all chunks with several threads, each with its own buffer in large pages."""

    def work(thread: int) -> None:
        memory = mmap.mmap(-1, chunk, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)  # then the kernel makes fewer and longer requests
        buffer = memoryview(memory)
        for at in range(thread * chunk, nbytes, threads * chunk):
            size = min(chunk, nbytes - at)
            if move(buffer[:size], at) != size:
                raise OSError(f"read or wrote fewer than {size} bytes at offset {at}")

    with ThreadPoolExecutor(threads) as pool:
        for job in [pool.submit(work, thread) for thread in range(threads)]:
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
    fields = dict(
        line.split(": ") for line in Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    )
    return int(fields["rchar"])


def _files(directory: Path) -> list[Path]:
    return [path for path in sorted(directory.rglob("*")) if path.is_file()]
