"""Copy a checkpoint to a mirror: data files first, the manifest last, every block verified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from shardwise.engine.commit import publish_manifest
from shardwise.engine.copy_file import Throttle, copy_verified, is_intact
from shardwise.engine.leftovers import remove_leftovers
from shardwise.errors import FormatError, StoreError
from shardwise.manifest.manifest import LARGEST_MANIFEST, FileEntry, Manifest, decode_manifest
from shardwise.manifest.names import MANIFEST, lock_file
from shardwise.store import Store

FILES_AT_ONCE = 4


class CheckpointInUse(StoreError):  # noqa: N818
    """Another process removes, replaces or copies the checkpoint; the caller can try again."""


def copy_checkpoint(
    source: Store,
    target: Store,
    throttle: Throttle,
    copied: set[str],
    before_chunk: Callable[[], object] = lambda: None,
) -> tuple[Manifest, int]:
    """Copy the checkpoint in one directory to another directory, and replace another save there.

    A file that is there already, complete and intact, is not sent again. If this process is killed,
    the target has either its previous checkpoint or this one, and another call continues.

    Args:
        source: the directory with the checkpoint. It is locked, so that retention waits.
        target: the directory for the copy.
        throttle: limits the bytes per second.
        copied: the names of files that this process has copied, which need no check. Names are
            added.
        before_chunk: called before each chunk. If it raises, the copy ends.

    Returns:
        The manifest, and the bytes that were sent.

    Raises:
        CorruptionError: the source is damaged.
        FileNotFoundError: the source has no manifest.
        CheckpointInUse: the source is being removed, or another process copies it.
        OSError: a store failed.
    """
    with source.hold(MANIFEST, shared=True) as held:
        if not held:
            raise CheckpointInUse(f"{source} is being removed or replaced, so it was not copied")
        data = source.read(MANIFEST, limit=LARGEST_MANIFEST)
        try:
            manifest = decode_manifest(data)
        except FormatError as error:
            raise FormatError(f"{source}: {error}") from error
        with _locked(target, lock_file(manifest.save_id)):
            present = set(target.list())

            def copy(entry: FileEntry, check: Callable[[], object]) -> int:
                is_present = entry.name in present
                if is_present and (
                    entry.name in copied or is_intact(target, entry, throttle, check)
                ):
                    copied.add(entry.name)
                    return 0
                copy_verified(source, entry, target, throttle, check)
                copied.add(entry.name)
                return entry.size

            nbytes = _copy_all(manifest.files, copy, before_chunk)
            target.sync()
            if saved_manifest(target) != manifest:
                files = [file.name for file in manifest.files]
                publish_manifest(target, data, files, replace=MANIFEST in present)
            _remove_replaced(target, lock_file(manifest.save_id))
        return manifest, nbytes


def _copy_all(
    files: Sequence[FileEntry],
    copy: Callable[[FileEntry, Callable[[], object]], int],
    before_chunk: Callable[[], object],
) -> int:
    """Copy several files at a time, and return the bytes. If a copy fails, the others end too."""
    failed = threading.Event()

    def check() -> None:
        before_chunk()
        if failed.is_set():
            raise StoreError("the copy of another file of this checkpoint has failed")

    with ThreadPoolExecutor(FILES_AT_ONCE, "shardwise-mirror") as pool:
        copies = [pool.submit(copy, entry, check) for entry in files]
        try:
            return sum(each.result() for each in copies)
        except BaseException:
            failed.set()
            pool.shutdown(cancel_futures=True)
            raise


def _remove_replaced(target: Store, own_lock: str) -> None:
    with suppress(OSError):  # the mirror may refuse to delete; then the files of older saves stay
        remove_leftovers(target, own_lock=own_lock)


@contextmanager
def _locked(target: Store, lock: str) -> Iterator[None]:
    """Hold a lock, so that neither another copy nor a save removes the files of this one."""
    with target.hold(lock, shared=False) as held:
        if not held:
            raise CheckpointInUse(
                f"{target}: another process copies this checkpoint (it holds the lock {lock})"
            )
        try:
            yield
        finally:
            with suppress(OSError):
                target.delete(lock)


def saved_manifest(store: Store) -> Manifest | None:
    """Return the manifest in a directory; None if it is missing or damaged."""
    with suppress(FileNotFoundError, NotADirectoryError, FormatError):
        return decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST))
    return None
