"""What crashed and replaced saves leave behind, and how it goes."""

from __future__ import annotations

from contextlib import ExitStack, suppress

from shardwise.errors import FormatError, StoreError
from shardwise.manifest.manifest import LARGEST_MANIFEST, decode_manifest
from shardwise.manifest.names import MANIFEST, is_lock_file, made_by_save
from shardwise.store import Store


def collect_leftovers(store: Store, *, own_lock: str | None = None) -> list[str]:
    """Remove files of saves that were not committed, or were replaced, from a directory.

    Nothing is removed where a save is under way, nor any file that no save has made. A directory
    that is empty then goes too.

    Args:
        own_lock: the lock of the caller's own save, which is no obstacle, and stays.

    Returns:
        The names that were removed.
    """
    names = [name for name in store.list() if name != own_lock]
    removed = []
    with ExitStack() as locks:
        for name in filter(is_lock_file, names):
            if not locks.enter_context(store.hold(name, shared=False)):
                return []
        # Only now, when whoever wrote a file that is listed has published it, or never will.
        committed = _committed_files(store)
        if committed is None:
            return []
        for name in names:
            if made_by_save(name) and name not in committed:
                store.delete(name)
                removed.append(name)
        if removed:
            with suppress(OSError):  # it is not empty
                store.remove()
    return removed


def _committed_files(store: Store) -> set[str] | None:
    """The files that the manifest names, if there is one; None if it cannot be read."""
    try:
        manifest = decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST))
    except FileNotFoundError:
        return set()
    except (FormatError, StoreError):
        return None
    return {file.name for file in manifest.files}
