"""Page-aligned host buffers, and files in memory that are mapped in huge pages."""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from shardwise.kernel.store import StoreTraits
from shardwise.kernel.store.store import FILE_SYSTEM, Buffer

DEFAULT_STAGING_BYTES = FILE_SYSTEM.staging_bytes
LARGEST_BUFFER = 8 << 20
SMALLEST_BUFFER = 1 << 20
HUGE_PAGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE; Linux 6.1 and later
_FIXED = 0x10  # MAP_FIXED

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Arena:
    """A pool of page-aligned buffers, one for each thread that moves bytes.

    Args:
        staging_bytes: bound on the host memory of all buffers together, in bytes; at least 1 MiB.
            None for the bound of `traits`.
        traits: the traits of the store that is read or written. Default: of a file system.

    Attributes:
        traits: as above.
        threads: the number of threads that move bytes at a time.
        buffer_size: the size of each buffer, in bytes.
        read_size: the longest single read from storage, in bytes.

    Raises:
        ValueError: `staging_bytes` is less than 1 MiB.
    """

    def __init__(self, staging_bytes: int | None = None, traits: StoreTraits = FILE_SYSTEM) -> None:
        staging_bytes = traits.staging_bytes if staging_bytes is None else staging_bytes
        if staging_bytes < SMALLEST_BUFFER:
            raise ValueError(
                f"staging_bytes={staging_bytes}: expected at least {SMALLEST_BUFFER} bytes (1 MiB)"
            )
        self.traits = traits
        self.threads = max(1, min(traits.read_threads, staging_bytes // SMALLEST_BUFFER))
        share = min(LARGEST_BUFFER, staging_bytes // self.threads)
        self.buffer_size = share // SMALLEST_BUFFER * SMALLEST_BUFFER
        self.read_size = min(self.buffer_size, traits.read_bytes)
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(self.threads):
            self._free.put(aligned_buffer(self.buffer_size))

    def threads_of(self, ranks_on_node: int) -> int:
        """Return the number of threads of each rank if all ranks of its node read together."""
        requests = self.traits.node_requests
        return (
            self.threads
            if requests is None
            else max(1, min(self.threads, requests // ranks_on_node))
        )

    def max_concurrent_reads(self, nbytes: int, ranks_on_node: int) -> int:
        """Return how many reads of `nbytes` bytes fit into the buffers at the same time."""
        threads = self.threads_of(ranks_on_node)
        return max(1, min(2 * threads, threads * self.buffer_size // nbytes))

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """Lend a buffer of `buffer_size` bytes while the block runs."""
        buffer = self._free.get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)


def aligned_buffer(size: int) -> Buffer:
    """Return page-aligned memory of `size` bytes, in huge pages if the kernel supports them."""
    memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:size]


def map_pages(
    fd: int, low: int, high: int, *, writable: bool = False, populate: bool = False
) -> Buffer:
    """Map a range of a file into memory, in huge pages where possible.

    A huge page replaces 512 normal pages, which makes it several times cheaper to map a file
    again. The mapping ends when the last reference to the result is dropped.

    Args:
        fd: the file.
        low, high: the range in bytes; `low` is a multiple of `HUGE_PAGE`.
        writable: map the bytes for writing too.
        populate: load all pages immediately, instead of each page at its first use.

    Raises:
        OSError: the bytes cannot be mapped.
    """
    if low == high:
        return np.zeros(0, np.uint8)
    # Python's mmap does not align addresses to huge pages, so reserve one huge page more.
    reserved = np.frombuffer(mmap.mmap(-1, high - low + HUGE_PAGE, mmap.MAP_PRIVATE), np.uint8)
    start = -reserved.ctypes.data % HUGE_PAGE
    pages = reserved[start : start + high - low]
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | _FIXED | (mmap.MAP_POPULATE if populate else 0)
    address = pages.ctypes.data
    if _libc.mmap(address, high - low, access, flags, fd, low) != address:
        code = ctypes.get_errno()
        file = f"/proc/self/fd/{fd}"
        with suppress(OSError):
            file = os.readlink(file)
        raise OSError(code, f"cannot map bytes {low}:{high} into memory: {os.strerror(code)}", file)
    pages.flags.writeable = writable
    return pages


def allocate_pages(fd: int, size: int) -> None:
    """Allocate all pages of a file in memory, so that later writes cannot run out of memory.

    Pages are huge where possible. For each 2 MiB of the file, the function allocates one normal
    page, and asks the kernel to turn the 2 MiB into a huge page. Allocating all 512 normal pages
    first would take far longer.

    Args:
        fd: the file.
        size: the size of the file, in bytes.

    Raises:
        OSError: there is too little memory. The pages that were allocated so far are kept.
    """
    huge_end = size // HUGE_PAGE * HUGE_PAGE
    if huge_end and _allocate_huge_pages(fd, 0, HUGE_PAGE):
        _allocate_huge_pages(fd, HUGE_PAGE, huge_end)
    os.posix_fallocate(fd, 0, size)


def _allocate_huge_pages(fd: int, low: int, high: int) -> bool:
    """Ask the kernel for huge pages. Return whether all pages of the range are huge now.

    Older kernels, files on a disk and fragmented memory give only normal pages.
    """
    for offset in range(low, high, HUGE_PAGE):
        os.posix_fallocate(fd, offset, 1)
    pages = map_pages(fd, low, high)
    return low == high or _libc.madvise(pages.ctypes.data, high - low, _COLLAPSE) == 0
