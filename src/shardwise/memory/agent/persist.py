"""Files of a snapshot to storage: straight from the memory that they lie in."""

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
    """Spreads bytes over time: at most `budget` a second, or as many as there are if None.

    Threads may share it.
    """

    def __init__(self, budget: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._clock = clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def seconds_for(self, nbytes: int) -> float:
        """Account for so many bytes; how long to wait before they may go."""
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
    """Copy a staged file, and make it durable. One of this name that was begun before goes first.

    Args:
        data, staged: the file, mapped, and its entry: checksums may be missing from both.
        sealed: returns when the file has its checksums, which lie at its end and are copied last.

    Raises:
        OSError: the storage refused; what was written is removed again where that is possible.
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
    """A file that the block writes, in place of one that was begun before.

    Raises:
        OSError: the storage refused; what was written is removed again where that is possible.
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
    """The part itself, or a copy with zeros after it where it ends unaligned."""
    whole = -(-len(part) // alignment) * alignment
    if whole == len(part):
        return part
    padded = aligned_buffer(whole)
    padded[: len(part)] = part
    return padded
