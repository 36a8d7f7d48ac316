"""Commit a save: lock its place and publish its manifest; and remove what other saves left behind.

*Leftovers* are the files of interrupted and replaced saves, and of removed checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import TypeVar

import msgspec

from shardwise.deadline import Deadline
from shardwise.decoding import prepare_decoding
from shardwise.errors import (
    CheckpointExistsError,
    FormatError,
    StoreError,
    StoreUnavailableError,
)
from shardwise.manifest.manifest import (
    LARGEST_MANIFEST,
    MANIFEST,
    REMOVED,
    Manifest,
    decode_manifest,
    is_file_of_save,
    is_lock_file,
    lock_file,
    names_of_checkpoint,
    save_id_of_file,
    save_id_of_telemetry,
)
from shardwise.manifest.validate import layout_of_manifest
from shardwise.store import Store, abort_uploads, publish_checked

MAX_PUBLICATION_SECONDS = 10.0
"""A lock can expire while its process pauses, but not within this time, in any store. If publishing
ends later than this after the last look at the data files, they are looked for once more."""
MOST_NAMES_SHOWN = 5
LOCK_TIMEOUT, LOCK_PAUSE = 1.0, 0.05  # seconds
REQUESTS_AT_ONCE = 16
MAX_REMOVED_BYTES = 1 << 12
Item = TypeVar("Item")
Result = TypeVar("Result")


@prepare_decoding
class _Removed(msgspec.Struct, frozen=True):
    """When a checkpoint was removed, in seconds since 1970."""

    removed_at: float


@contextmanager
def lock_save(store: Store, save_id: str, attempts: Iterable[object]) -> Iterator[bool]:
    """Lock the directory of a save while the block runs, and delete the lock file at its end.

    The lock keeps other processes from removing the files of the save before it is committed.

    Args:
        store: the directory.
        save_id: the id of the save, which is part of the name of the lock file.
        attempts: the lock is tried once for each item.

    Yields:
        Whether the directory is locked. It is not if another process holds this lock.
    """
    lock = lock_file(save_id)
    with ExitStack() as held:
        is_held = any(held.enter_context(store.lock(lock)) for _ in attempts)
        try:
            yield is_held
        finally:
            if is_held:
                with suppress(OSError):
                    store.delete(lock)


@contextmanager
def lock_for_publishing(
    store: Store,
    save_id: str,
    files: Collection[str],
    *,
    overwrite: bool,
    deadline: Deadline | None = None,
) -> Iterator[bool]:
    """Lock the directory of a save by agents while the block runs.

    The save may have begun before: an earlier agent may have ended in the middle of it.

    Args:
        store: the directory.
        save_id: the id of the save.
        files: the names of its data files.
        overwrite: whether to replace an existing checkpoint.
        deadline: the limit for waiting for the lock. By default, twice the expiry of locks, and one
            second. By then, the lock of a killed agent has expired, although servers round times to
            whole seconds. The further second is for a new Checkpointer, which briefly holds the
            lock while it looks for leftovers.

    Yields:
        Whether the save is published already.

    Raises:
        CheckpointExistsError: the directory has another checkpoint, which must not be overwritten.
        StoreUnavailableError: another process holds the lock, or requests took so long that there
            was one attempt only.
    """
    names = store.list()
    saved = saved_manifest(store) if MANIFEST in names else None
    is_published = saved is not None and saved.save_id == save_id
    if MANIFEST in names and not is_published and not overwrite:
        raise exists_error(store)
    if names and not any(name in names for name in files):
        remove_leftovers(store)
    deadline = deadline or Deadline(LOCK_TIMEOUT + 2 * store.traits.lock_expiry)
    attempts = deadline.attempts(pause=LOCK_PAUSE, longest_pause=LOCK_TIMEOUT)
    with lock_save(store, save_id, attempts) as is_held:
        if not is_held:
            raise StoreUnavailableError(
                f"{store}: cannot lock {lock_file(save_id)}, because another process holds "
                "it: an agent that persists this save, or a Checkpointer that looks for leftovers. "
                "The agent tries again; if this lasts, look for another agent with this root"
            )
        yield is_published


def commit_save(
    store: Store, save_id: str, manifest: bytes, files: Sequence[str], *, overwrite: bool
) -> None:
    """Publish the manifest of a save, which commits the save. The caller holds the save's lock.

    Then remove the files of a replaced checkpoint, and those that killed processes left incomplete.

    Args:
        store: the directory of the checkpoint.
        save_id: the id of the save.
        manifest: the encoded manifest.
        files: the names of the data files.
        overwrite: whether to replace an existing checkpoint.

    Raises:
        CheckpointExistsError: the directory has another checkpoint, and `overwrite` is False. The
            files of this save are removed.
        StoreError, OSError: files of the save were removed, or the manifest cannot be written.
    """
    try:
        names = publish_manifest(store, manifest, files, replace=overwrite)
    except FileExistsError as error:
        saved = saved_manifest(store)
        if saved is not None and saved.save_id == save_id:  # an agent that ended published it
            return
        if saved is not None:
            with suppress(OSError):  # the next save here removes them
                map_in_threads(store.delete, files)
        raise exists_error(store) from error
    if overwrite or len(names) > len(files) + 1:  # more than the files and the lock of this save
        remove_leftovers(store, own_lock=lock_file(save_id))


def check_readable(manifest: bytes, store: Store) -> None:
    """Check a manifest as a load would, while nothing is committed.

    Raises:
        FormatError: the manifest is wrong.
    """
    try:
        layout_of_manifest(decode_manifest(manifest))
    except FormatError as error:
        raise FormatError(
            f"{store}: nothing was committed, because the planned manifest is wrong: {error}. This "
            "is a bug of shardwise: report it, with the shapes and placements of these tensors"
        ) from error


def saved_manifest(store: Store) -> Manifest | None:
    """Return the manifest in a directory; None if it is missing or damaged."""
    with suppress(FileNotFoundError, NotADirectoryError, FormatError):
        return decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST))
    return None


def exists_error(store: Store) -> CheckpointExistsError:
    """Return the error for a save to a directory that has a checkpoint."""
    return CheckpointExistsError(
        f"Checkpoint already exists: {store}: to continue its run, call restore before the first "
        "save; otherwise save elsewhere, or pass overwrite=True to replace it"
    )


def publish_manifest(
    store: Store,
    manifest: bytes,
    files: Collection[str],
    *,
    replace: bool,
    clock: Callable[[], float] = time.monotonic,
) -> list[str]:
    """Publish the manifest of a save, and return the names that the directory had before.

    The caller holds the lock of the save. A lock can expire if this process was stopped, or if the
    storage did not answer for long. Then another process may have removed the files of the save.

    Args:
        store: the directory of the checkpoint.
        manifest: the encoded manifest.
        files: the names of the data files.
        replace: whether to replace an existing checkpoint.
        clock: a monotonic clock, in seconds.

    Raises:
        FileExistsError: there is another checkpoint, and `replace` is False.
        StoreUnavailableError: files of the save were removed. Nothing is committed. In a save by
            agents, an agent copies the files again.
    """
    checked_at: float | None = None
    names: list[str] = []

    def check() -> None:
        nonlocal checked_at, names
        is_first, checked_at = checked_at is None, clock()
        names = store.list()
        if is_first and MANIFEST in names and not replace:
            raise FileExistsError(f"{store} has a manifest")
        _refuse_missing(store, files, names)

    try:
        publish_checked(store, MANIFEST, manifest, replace=replace, check=check)
        if clock() - (checked_at or 0.0) > MAX_PUBLICATION_SECONDS:
            try:
                _refuse_missing(store, files, store.list())
            except _FilesRemovedError:
                with suppress(OSError):
                    store.delete(MANIFEST)
                raise
    except _FilesRemovedError as error:
        raise StoreUnavailableError(str(error)) from None
    return names


class _FilesRemovedError(StoreError):
    """Files of a save were removed. Unlike after other failures of a store, another attempt is of
    no use."""


def _refuse_missing(store: Store, files: Collection[str], names: Collection[str]) -> None:
    missing = sorted(set(files) - set(names))
    if missing:
        more = len(missing) - MOST_NAMES_SHOWN
        raise _FilesRemovedError(
            f"{store}: cannot commit this save, because another process removed files of it: "
            f"{', '.join(missing[:MOST_NAMES_SHOWN])}{f' and {more} more' if more > 0 else ''}. "
            "Other processes do this only if this process did not reach the storage for long, or "
            "was stopped; save again"
        )


def remove_leftovers(
    store: Store, *, own_lock: str = "", names: Sequence[str] | None = None
) -> list[str]:
    """Remove the files of uncommitted, replaced and removed checkpoints from a directory.

    Files that no save made are kept. If another save is running in the directory, or processes may
    still read a checkpoint that was removed from it, nothing is removed. If the directory becomes
    empty, it is removed too.

    Args:
        own_lock: the lock file of the caller's save, which is kept.
        names: an earlier listing of the directory. Default: list it now.

    Returns:
        The names of the removed files.
    """
    names = store.list() if names is None else names
    ours = [name for name in names if is_file_of_save(name) and name != own_lock]
    if not ours:
        return []
    saves = {save_id_of_file(name) or save_id_of_telemetry(name) for name in ours}
    if MANIFEST in names and len(saves) == 1 and None not in saves:
        return []  # the files of one checkpoint
    with ExitStack() as locks:
        for name in filter(is_lock_file, names):
            if name != own_lock and not locks.enter_context(store.lock(name)):
                return []
        if REMOVED in ours and _may_be_read(store):
            return []
        # All locks are held, so no running save can still commit one of the listed files.
        committed = _files_in_manifest(store)
        if committed is None:
            return []
        removed = [name for name in ours if name not in committed]
        # Delete the mark of a removed checkpoint last. If the removal is interrupted, the next one
        # finds the mark, and continues.
        map_in_threads(store.delete, [name for name in removed if name != REMOVED])
        if REMOVED in removed:
            store.delete(REMOVED)
        if removed:
            with suppress(OSError):  # the directory is not empty, so it stays
                store.delete("")  # the directory itself
    return removed


def remove_leftovers_below(root: Store, directories: Sequence[str]) -> None:
    """Remove the leftovers in the directories of a root, and then the empty directories.

    Where that is not permitted, they stay.
    """

    def clean(name: str) -> None:
        store = root.at(name)
        with suppress(OSError):
            names = store.list()
            remove_leftovers(store, names=names)
            if MANIFEST not in names:
                store.delete("")  # fails unless the directory is empty

    map_in_threads(clean, directories)
    abort_uploads(root)


def mark_as_removed(store: Store, removed_at: float) -> None:
    """Record in a directory that its checkpoint is removed, so that its files stay for a while.

    Processes that cannot lock the checkpoint may still read the files.

    Args:
        removed_at: the present time, in seconds since 1970.
    """
    store.publish(REMOVED, msgspec.json.encode(_Removed(removed_at)), replace=True)


def map_in_threads(work: Callable[[Item], Result], items: Collection[Item]) -> list[Result]:
    """Return the result of `work` for each item, in order. Many items are worked on at a time."""
    if len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(REQUESTS_AT_ONCE, "shardwise-requests") as pool:
        return list(pool.map(work, items))


def _may_be_read(store: Store) -> bool:
    """Return whether a checkpoint was removed so recently that it may still be read."""
    try:
        data = store.read(REMOVED, limit=MAX_REMOVED_BYTES)
        removed_at = msgspec.json.decode(data, type=_Removed).removed_at
    except (FileNotFoundError, msgspec.DecodeError):
        return False
    return abs(time.time() - removed_at) < store.traits.reading_grace


def _files_in_manifest(store: Store) -> set[str] | None:
    """Return the files of the checkpoint; None if the manifest cannot be read."""
    try:
        manifest = decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST))
    except FileNotFoundError:
        return set()
    except (FormatError, StoreError):
        return None
    return names_of_checkpoint(manifest)
