"""Copies a checkpoint to a mirror: data files first, the manifest last, every block verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from shardwise.engine.commit import lock_save, publish_manifest, remove_leftovers, saved_manifest
from shardwise.errors import FormatError, StoreError
from shardwise.manifest.manifest import (
    LARGEST_MANIFEST,
    LARGEST_TELEMETRY,
    MANIFEST,
    FileEntry,
    Manifest,
    decode_manifest,
    lock_file,
    telemetry_file,
)
from shardwise.store import Store, lock_for_reading
from shardwise.tiers.copy_file import FileCopier

FILES_AT_ONCE = 4


def copy_checkpoint(
    source: Store,
    target: Store,
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
    with lock_for_reading(source, MANIFEST) as held:
        if not held:
            raise StoreError(
                f"{source} is being removed or replaced, so it was not copied: this is no fault; "
                "if the checkpoint is still there later, copy it again"
            )
        data = source.read(MANIFEST, limit=LARGEST_MANIFEST)
        try:
            manifest = decode_manifest(data)
        except FormatError as error:
            raise FormatError(f"{source}: {error}") from error
        own_lock = lock_file(manifest.save_id)
        # The lock keeps other processes from removing the files that this one copies.
        with lock_save(target, manifest.save_id, range(1)) as is_held:
            if not is_held:
                raise StoreError(
                    f"{target}: another process copies this checkpoint (it holds the lock "
                    f"{own_lock})"
                )
            present = set(target.list())
            missing = [entry for entry in manifest.files if entry.name not in present]
            _copy_all(missing, source, target, copier, before_chunk)
            if saved_manifest(target) != manifest:
                files = [file.name for file in manifest.files]
                publish_manifest(target, data, files, replace=MANIFEST in present)
            _copy_telemetry(source, target, telemetry_file(manifest.save_id))
            with suppress(OSError):  # the mirror may refuse to delete; then older saves stay
                remove_leftovers(target, own_lock=own_lock)
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
