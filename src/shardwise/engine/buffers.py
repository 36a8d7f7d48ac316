"""Page-aligned host buffers, and files in memory mapped in large pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from shardwise.store.store import Buffer

DEFAULT_STAGING_BYTES = 64 << 20
THREADS = 4
LARGEST_CHUNK = 8 << 20
SMALLEST_CHUNK = 1 << 20
LARGEST_READ = 2 << 20  # small enough to stay in the CPU cache until it is verified and copied
LARGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE, of Linux 6.1 and later
_FIXED = 0x10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """A pool of page-aligned buffers, one for each thread that moves bytes.

    Args:
        staging_bytes: bound on the host memory of all buffers together, in bytes; at least 1 MiB.

    Attributes:
        threads: the number of threads that move bytes at a time.
        chunk: the size of a buffer, in bytes.
        read_size: the longest single read from a local file, in bytes.

    Raises:
        ValueError: `staging_bytes` is less than 1 MiB.
    """

    def __init__(self, staging_bytes: int = DEFAULT_STAGING_BYTES) -> None:
        check_staging_bytes(staging_bytes)
        self.threads = max(1, min(THREADS, staging_bytes // SMALLEST_CHUNK))
        share = min(LARGEST_CHUNK, staging_bytes // self.threads)
        self.chunk = share // SMALLEST_CHUNK * SMALLEST_CHUNK
        self.read_size = min(self.chunk, LARGEST_READ)
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(self.threads):
            self._free.put(aligned_buffer(self.chunk))

    def reads(self, nbytes: int) -> int:
        """Return how many reads of `nbytes` bytes fit into the buffers at a time."""
        return max(1, min(2 * self.threads, self.threads * self.chunk // nbytes))

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """Lend a buffer of `chunk` bytes while the block runs."""
        buffer = self._free.get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)


def check_staging_bytes(staging_bytes: int) -> None:
    """Check the bound on the host memory of an arena.

    Raises:
        ValueError: `staging_bytes` is less than 1 MiB.
    """
    if staging_bytes < SMALLEST_CHUNK:
        raise ValueError(f"staging_bytes={staging_bytes}: expected at least {SMALLEST_CHUNK} bytes")


def aligned_buffer(size: int) -> Buffer:
    """Return page-aligned memory of `size` bytes, in large pages if the kernel supports them."""
    memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:size]


def map_pages(fd: int, low: int, high: int, *, writable: bool = False, now: bool = False) -> Buffer:
    """Map bytes `low:high` of a file into memory; `low` is a multiple of `LARGE`.

    A large page replaces 512 small pages, which makes mapping a file anew several times cheaper.
    The mapping is removed when the last reference to the result is dropped.

    Args:
        writable: map the bytes for writing too.
        now: load all pages at once, instead of each at its first use.

    Raises:
        OSError: the bytes cannot be mapped.
    """
    if low == high:
        return np.zeros(0, np.uint8)
    # Python's mmap does not align addresses to large pages: reserve one large page more.
    reserved = np.frombuffer(mmap.mmap(-1, high - low + LARGE, mmap.MAP_PRIVATE), np.uint8)
    start = -reserved.ctypes.data % LARGE
    found = reserved[start : start + high - low]
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | _FIXED | (mmap.MAP_POPULATE if now else 0)
    address = found.ctypes.data
    if _libc.mmap(address, high - low, access, flags, fd, low) != address:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    found.flags.writeable = writable
    return found


def allocate_pages(fd: int, size: int) -> None:
    """Allocate the pages of a file of `size` bytes, so that writes to it cannot run out of memory.

    Pages are large where possible. To save time, only one small page of each range is allocated
    before the kernel is asked for a large one: collapsing 512 small pages costs far more.

    Raises:
        OSError: there is not enough memory; the pages allocated so far are kept.
    """
    whole = size // LARGE * LARGE
    if whole and _enlarge(fd, 0, LARGE):
        _enlarge(fd, LARGE, whole)
    os.posix_fallocate(fd, 0, size)


def _enlarge(fd: int, low: int, high: int) -> bool:
    """Ask the kernel for large pages; return whether all pages are large.

    Older kernels, files on a disk and fragmented memory give only small pages.
    """
    for at in range(low, high, LARGE):
        os.posix_fallocate(fd, at, 1)
    found = map_pages(fd, low, high)
    return low == high or _libc.madvise(found.ctypes.data, high - low, _COLLAPSE) == 0
