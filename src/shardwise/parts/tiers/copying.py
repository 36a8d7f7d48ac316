"""Copy data files to a store, from memory or verified from another store; and whole checkpoints."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

from shardwise.kernel.engine.buffers import aligned_buffer
from shardwise.kernel.engine.checkpoint_directory import CheckpointDirectory
from shardwise.kernel.engine.data_reader import DataReader
from shardwise.kernel.errors import CorruptionError, StoreError
from shardwise.kernel.manifest.checksums import crc32
from shardwise.kernel.manifest.layout import StoredFile
from shardwise.kernel.manifest.manifest import (
    LARGEST_TELEMETRY,
    FileEntry,
    Manifest,
    lock_file,
    telemetry_file,
)
from shardwise.kernel.store import Files, Store, WritableFile
from shardwise.kernel.store.store import Buffer

CHUNK = 8 << 20
WRITE_THREADS = 4
FILES_AT_ONCE = 4


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


def copy_checkpoint(
    source: CheckpointDirectory,
    target: CheckpointDirectory,
    copier: FileCopier,
    before_chunk: Callable[[], object] = lambda: None,
) -> tuple[Manifest, int]:
    """Copy the checkpoint in one directory to another directory, and replace another save there.

    A file that the target has is not sent again: files appear there when they are complete. If this
    process is killed, the target has either its previous checkpoint or the new one. Another call
    continues the copy.

    Args:
        source: the directory with the checkpoint. It is locked, so that retention waits.
        target: the directory for the copy.
        copier: copies the files.
        before_chunk: called before each chunk. If this function raises, the copy ends.

    Returns:
        The manifest, and the bytes that were sent.

    Raises:
        CorruptionError: the source is damaged.
        FileNotFoundError: the source has no manifest.
        StoreError: the source is being removed, or another process copies it.
        OSError: a store failed.
    """
    with source.lock_for_reading() as held:
        if not held:
            raise StoreError(
                f"{source} is being removed or replaced, so it was not copied: this is no fault; "
                "if the checkpoint is still there later, copy it again"
            )
        data = source.read()
        manifest = source.decode(data)
        # The lock keeps other processes from removing the files that this one copies.
        with target.lock(manifest.save_id) as is_held:
            if not is_held:
                raise StoreError(
                    f"{target}: another process copies this checkpoint (it holds the lock "
                    f"{lock_file(manifest.save_id)})"
                )
            present = set(target.store.list())
            missing = [entry for entry in manifest.files if entry.name not in present]
            _copy_all(missing, source.store, target.store, copier, before_chunk)
            if target.saved() != manifest:
                files = [file.name for file in manifest.files]
                target.publish(data, files, replace=target.state(present) == "committed")
            _copy_telemetry(source.store, target.store, telemetry_file(manifest.save_id))
            with suppress(OSError):  # the mirror may refuse to delete; then older saves stay
                target.remove_leftovers(own_save=manifest.save_id)
        return manifest, sum(entry.size for entry in missing)


def _copy_telemetry(source: Store, target: Store, name: str) -> None:
    """Copy the telemetry of a save, if it exists; losing it changes nothing else."""
    with suppress(OSError):
        if name not in target.list():
            target.publish(name, source.read(name, limit=LARGEST_TELEMETRY), replace=True)


def _copy_all(
    files: Sequence[FileEntry],
    source: Store,
    target: Store,
    copier: FileCopier,
    before_chunk: Callable[[], object],
) -> None:
    """Copy files, several at a time. If one copy fails, all copies end."""
    failed = threading.Event()

    def check() -> None:
        before_chunk()
        if failed.is_set():
            raise StoreError("the copy of another file of this checkpoint has failed")

    def copy(entry: FileEntry) -> None:
        copier.copy(source, entry, target, check)

    with ThreadPoolExecutor(FILES_AT_ONCE, "shardwise-mirror") as pool:
        copies = [pool.submit(copy, entry) for entry in files]
        try:
            for each in copies:
                each.result()
        except BaseException:
            failed.set()
            pool.shutdown(cancel_futures=True)
            raise
