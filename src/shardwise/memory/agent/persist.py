"""Copies files of a snapshot to storage, straight from memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from shardwise.engine.buffers import aligned_buffer
from shardwise.manifest.manifest import FileEntry
from shardwise.store import Store, WritableFile
from shardwise.store.store import Buffer

CHUNK = 8 << 20
THREADS = 4


class Throttle:
    """Limits copying to `budget` bytes per second; no limit if None. Threads may share it."""

    def __init__(self, budget: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._clock = clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def seconds_for(self, nbytes: int) -> float:
        """Account for `nbytes`, and return how long to wait before copying them."""
        if self._budget is None:
            return 0.0
        with self._lock:
            now = self._clock()
            wait = max(0.0, self._free_at - now)
            self._free_at = max(now, self._free_at) + nbytes / self._budget
            return wait


def copy_to_store(
    data: Buffer, staged: FileEntry, store: Store, throttle: Throttle, sealed: Callable[[], None]
) -> None:
    """Copy a staged file durably. An incomplete file of the same name is replaced.

    Args:
        data, staged: the mapped file and its entry; both may lack the checksums.
        sealed: a function that returns once the checksums are at the file's end. They are copied
            last.

    Raises:
        OSError: the storage failed. What was written is removed if possible.
    """
    with (
        made_durable(store, staged) as file,
        ThreadPoolExecutor(THREADS, "shardwise-persist") as pool,
    ):
        jobs = []
        last = staged.checksums_at // CHUNK * CHUNK
        for low in range(0, staged.size, CHUNK):
            if low == last:
                sealed()
            part = data[low : low + CHUNK]
            time.sleep(throttle.seconds_for(len(part)))
            jobs.append(pool.submit(file.write_at, low, aligned(part, store.alignment)))
        for job in jobs:
            job.result()


@contextmanager
def made_durable(store: Store, entry: FileEntry) -> Iterator[WritableFile]:
    """Create a file for the block to write, replacing an incomplete one; sync it at the end.

    Raises:
        OSError: the storage failed. What was written is removed if possible.
    """
    store.delete(entry.name)
    file = store.create(entry.name, entry.size)
    try:
        yield file
        file.commit()
    except BaseException:
        with suppress(OSError):
            store.delete(entry.name)
        raise
    finally:
        file.close()


def aligned(part: Buffer, alignment: int) -> Buffer:
    """Return the part, or a zero-padded copy if its end is not aligned."""
    whole = -(-len(part) // alignment) * alignment
    if whole == len(part):
        return part
    padded = aligned_buffer(whole)
    padded[: len(part)] = part
    return padded
