"""Remove the files that interrupted and replaced saves leave behind."""

from __future__ import annotations

from contextlib import ExitStack, suppress

from shardwise.errors import FormatError, StoreError
from shardwise.manifest.manifest import LARGEST_MANIFEST, decode_manifest
from shardwise.manifest.names import MANIFEST, is_lock_file, made_by_save
from shardwise.store import Store


def collect_leftovers(store: Store, *, own_lock: str | None = None) -> list[str]:
    """Remove the files of uncommitted and replaced saves from a directory.

    Files that no save made are kept. If a save is running in the directory, nothing is removed. A
    directory that becomes empty is removed too.

    Args:
        own_lock: the lock file of the caller's own save, which is ignored and kept.

    Returns:
        The names of the removed files.
    """
    names = [name for name in store.list() if name != own_lock]
    removed = []
    with ExitStack() as locks:
        for name in filter(is_lock_file, names):
            if not locks.enter_context(store.hold(name, shared=False)):
                return []
        # The locks are held: no writer of a listed file can still commit it.
        committed = _committed_files(store)
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


def _committed_files(store: Store) -> set[str] | None:
    """Return the files in the manifest, if there is one; None if it cannot be read."""
    try:
        manifest = decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST))
    except FileNotFoundError:
        return set()
    except (FormatError, StoreError):
        return None
    return {file.name for file in manifest.files}
