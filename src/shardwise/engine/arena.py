"""Buffers that are allocated and touched once, handed out and given back."""

from __future__ import annotations

import mmap
import queue
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from shardwise.store.store import Buffer

DEFAULT_STAGING_BYTES = 64 << 20
THREADS = 4
LARGEST_CHUNK = 8 << 20
SMALLEST_CHUNK = 1 << 20
LARGEST_READ = 2 << 20  # verified and copied while it is in the cache


class Arena:
    """At most `staging_bytes` bytes of page-aligned buffers, one for each thread that moves bytes.

    Args:
        staging_bytes: bound on the host memory of all buffers together, in bytes; at least 1 MiB.

    Attributes:
        threads: how many move bytes at a time.
        chunk: bytes of a buffer.
        read_size: the longest single read, in bytes, of what is near.

    Raises:
        ValueError: `staging_bytes` is smaller than that.
    """

    def __init__(self, staging_bytes: int = DEFAULT_STAGING_BYTES) -> None:
        if staging_bytes < SMALLEST_CHUNK:
            raise ValueError(
                f"staging_bytes is {staging_bytes} bytes; at least {SMALLEST_CHUNK} needed"
            )
        self.threads = max(1, min(THREADS, staging_bytes // SMALLEST_CHUNK))
        share = min(LARGEST_CHUNK, staging_bytes // self.threads)
        self.chunk = share // SMALLEST_CHUNK * SMALLEST_CHUNK
        self.read_size = min(self.chunk, LARGEST_READ)
        self._free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(self.threads):
            self._free.put(aligned_buffer(self.chunk))

    def reads(self, nbytes: int) -> int:
        """How many reads of so many bytes may be held at a time."""
        return max(1, min(2 * self.threads, self.threads * self.chunk // nbytes))

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """A buffer of `chunk` bytes, for as long as the block runs."""
        buffer = self._free.get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)


def aligned_buffer(size: int) -> Buffer:
    """Page-aligned memory of this many bytes, in large pages where they are to be had."""
    memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:size]
