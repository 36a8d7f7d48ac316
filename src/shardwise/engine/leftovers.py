"""Remove leftovers: files of interrupted and replaced saves, and of removed checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TypeVar

import msgspec

from shardwise.decoding import prepare_decoding
from shardwise.errors import FormatError, StoreError
from shardwise.manifest.manifest import LARGEST_MANIFEST, decode_manifest
from shardwise.manifest.names import (
    MANIFEST,
    REMOVED,
    is_file_of_save,
    is_lock_file,
    save_id_of_file,
)
from shardwise.store import Store, abort_uploads

REQUESTS_AT_ONCE = 16
MAX_REMOVED_BYTES = 1 << 12
Item = TypeVar("Item")
Result = TypeVar("Result")


@prepare_decoding
class _Removed(msgspec.Struct, frozen=True):
    """When a checkpoint was removed, in seconds since 1970."""

    removed_at: float


def remove_leftovers(store: Store, *, own_lock: str | None = None) -> list[str]:
    """Remove the files of uncommitted, replaced and removed checkpoints from a directory.

    Files that no save made are kept. If another save is running in the directory, or processes may
    still read a checkpoint that was removed from it, nothing is removed. If the directory becomes
    empty, it is removed too.

    Args:
        own_lock: the lock file of the caller's save, which is kept.

    Returns:
        The names of the removed files.
    """
    return _remove_leftovers(store, [name for name in store.list() if name != own_lock])


def _remove_leftovers(store: Store, names: Sequence[str]) -> list[str]:
    """Remove those of the named files that are leftovers. The names are an earlier listing."""
    ours = [name for name in names if is_file_of_save(name)]
    if not ours or _is_one_checkpoint(names, ours):
        return []
    removed = []
    with ExitStack() as locks:
        for name in filter(is_lock_file, names):
            if not locks.enter_context(store.lock(name)):
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
            _remove_leftovers(store, names)
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


def _is_one_checkpoint(names: Collection[str], ours: Collection[str]) -> bool:
    """Return whether there is a manifest, and all other files of saves are of one save."""
    saves = {save_id_of_file(name) for name in ours}
    return MANIFEST in names and len(saves) == 1 and None not in saves


def _may_be_read(store: Store) -> bool:
    """Return whether a checkpoint was removed so recently that it may still be read."""
    try:
        data = store.read(REMOVED, limit=MAX_REMOVED_BYTES)
        removed_at = msgspec.json.decode(data, type=_Removed).removed_at
    except (FileNotFoundError, msgspec.DecodeError):
        return False
    return abs(time.time() - removed_at) < store.traits.reading_grace


def _files_in_manifest(store: Store) -> set[str] | None:
    """Return the files that the manifest lists; None if the manifest cannot be read."""
    try:
        manifest = decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST))
    except FileNotFoundError:
        return set()
    except (FormatError, StoreError):
        return None
    return {file.name for file in manifest.files}
