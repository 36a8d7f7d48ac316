"""Remove leftovers: files of saves that were interrupted or replaced."""

from __future__ import annotations

from contextlib import ExitStack, suppress

from shardwise.errors import FormatError, StoreError
from shardwise.manifest.manifest import LARGEST_MANIFEST, decode_manifest
from shardwise.manifest.names import MANIFEST, is_lock_file, made_by_save
from shardwise.store import Store


def remove_leftovers(store: Store, *, own_lock: str | None = None) -> list[str]:
    """Remove the files of uncommitted and replaced saves from a directory.

    Files that no save made are kept. If another save is running in the directory, nothing is
    removed. If the directory becomes empty, it is removed too.

    Args:
        own_lock: the lock file of the caller's save, which is kept.

    Returns:
        The names of the removed files.
    """
    names = [name for name in store.list() if name != own_lock]
    removed = []
    with ExitStack() as locks:
        for name in filter(is_lock_file, names):
            if not locks.enter_context(store.hold(name, shared=False)):
                return []
        # All locks are held, so no running save can still commit one of the listed files.
        committed = _files_in_manifest(store)
        if committed is None:
            return []
        for name in names:
            if made_by_save(name) and name not in committed:
                store.delete(name)
                removed.append(name)
        if removed:
            with suppress(OSError):  # the directory is not empty
                store.remove()
    return removed


def _files_in_manifest(store: Store) -> set[str] | None:
    """Return the files that the manifest lists; None if the manifest cannot be read."""
    try:
        manifest = decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST))
    except FileNotFoundError:
        return set()
    except (FormatError, StoreError):
        return None
    return {file.name for file in manifest.files}
