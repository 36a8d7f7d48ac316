"""Copy data files to a store: from memory, or verified from another store."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager

from shardwise.engine.buffers import aligned_buffer
from shardwise.engine.data_reader import DataReader
from shardwise.errors import CorruptionError
from shardwise.manifest.checksums import crc32
from shardwise.manifest.layout import StoredFile
from shardwise.manifest.manifest import FileEntry
from shardwise.store import Files, Store, WritableFile
from shardwise.store.store import Buffer

CHUNK = 8 << 20
WRITE_THREADS = 4


class FileCopier:
    """Copies data files, at most `budget` bytes per second. Threads may share a copier.

    Args:
        budget: the limit for all copies together; None for no limit.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, budget: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._clock = clock
        self._free_at = clock()
        self._lock = threading.Lock()

    def seconds_for(self, nbytes: int) -> float:
        """Reserve time for `nbytes`, and return the seconds to wait before copying them."""
        if self._budget is None:
            return 0.0
        with self._lock:
            now = self._clock()
            wait = max(0.0, self._free_at - now)
            self._free_at = max(now, self._free_at) + nbytes / self._budget
            return wait

    def copy(
        self,
        source: Files,
        entry: FileEntry,
        store: Store,
        before_chunk: Callable[[], object] = lambda: None,
    ) -> None:
        """Copy a data file from other files, and verify every block while it is copied.

        Args:
            source: the files of the checkpoint.
            entry: the file's entry in the manifest.
            store: the place of the copy. An incomplete or damaged file of this name is replaced.
            before_chunk: called before each chunk. If it raises, the copy ends.

        Raises:
            CorruptionError: the bytes in `source` differ from those that were saved.
            OSError: the storage failed. The incomplete copy is removed if possible.
        """
        # The copy includes the header and the table of checksums, so the file is read directly, and
        # a `DataReader` only verifies the chunks.
        buffer = aligned_buffer(CHUNK)
        table_crc32 = 0
        with (
            closing(
                DataReader(source, StoredFile(entry.name, entry.size, entry=entry))
            ) as verifier,
            closing(source.open(entry.name)) as file,
            _create_durably(store, entry) as copy,
        ):
            for low in range(0, entry.size, CHUNK):
                before_chunk()
                chunk = buffer[: min(CHUNK, entry.size - low)]
                time.sleep(self.seconds_for(len(chunk)))
                if file.read_at(low, chunk) < len(chunk):
                    raise CorruptionError(
                        f"{entry.name} in {source} was truncated while it was copied: it has fewer "
                        f"than {low + len(chunk)} bytes; find out what else writes there"
                    )
                verifier.verify(low, chunk[: max(0, entry.checksums_at - low)])
                table_crc32 = crc32(chunk[max(0, entry.checksums_at - low) :], table_crc32)
                copy.write_at(low, _pad(chunk, store.traits.alignment))
            if table_crc32 != entry.checksums_crc32:
                raise CorruptionError(
                    f"{entry.name} in {source}: its checksums changed while it was copied; find "
                    "out what else writes there, and copy again"
                )

    def copy_from_memory(
        self, data: Buffer, entry: FileEntry, store: Store, wait_for: Callable[[int], None]
    ) -> None:
        """Copy a data file from memory, without verifying it, while it is being filled.

        Args:
            data: the bytes of the file.
            entry: the file's entry, with or without checksums.
            store: the place of the copy. An incomplete file of this name is replaced.
            wait_for: `wait_for(n)` returns once the first n bytes of `data` are final. It is called
                with ever larger numbers. If it raises, the copy ends.

        Raises:
            OSError: the storage failed. The incomplete copy is removed if possible.
        """
        with _create_durably(store, entry) as copy:
            pool = ThreadPoolExecutor(WRITE_THREADS, "shardwise-persist")
            try:
                writes = deque[Future[None]]()
                for low in range(0, entry.size, CHUNK):
                    wait_for(min(low + CHUNK, entry.size))
                    chunk = data[low : low + CHUNK]
                    time.sleep(self.seconds_for(len(chunk)))
                    padded = _pad(chunk, store.traits.alignment)
                    writes.append(pool.submit(copy.write_at, low, padded))
                    if len(writes) > 2 * WRITE_THREADS:
                        writes.popleft().result()
                for write in writes:
                    write.result()
            finally:  # after a failure, an older snapshot may have to be written at once
                pool.shutdown(cancel_futures=True)


@contextmanager
def _create_durably(store: Store, entry: FileEntry) -> Iterator[WritableFile]:
    """Create a file, which the `with` block writes. It appears at the end, or replaces an old one.

    Raises:
        OSError: the storage failed. An existing file stays.
    """
    file = store.create(entry.name, entry.size, replace=True)
    try:
        yield file
        file.commit()
    finally:
        file.close()


def _pad(chunk: Buffer, alignment: int) -> Buffer:
    """Return a chunk, padded with zeros to a multiple of `alignment` bytes if necessary."""
    padded_length = -(-len(chunk) // alignment) * alignment
    if padded_length == len(chunk):
        return chunk
    padded = aligned_buffer(padded_length)
    padded[: len(chunk)] = chunk
    return padded
