"""Commit a save: publish its manifest, unless files of the save were removed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress

from shardwise.errors import StoreError, StoreUnavailableError
from shardwise.manifest.names import MANIFEST
from shardwise.store import Store, publish_checked

MAX_PUBLICATION_SECONDS = 10.0
"""The lock of a save survives a pause of this length, in every store, between looking for its files
and the end of one attempt to publish."""
MOST_NAMES_SHOWN = 5


def publish_manifest(
    store: Store,
    manifest: bytes,
    files: Collection[str],
    *,
    replace: bool,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Publish the manifest of a save. The caller holds the lock of the save.

    A lock can expire if this process was stopped, or if the storage did not answer for long. Then
    another process may have removed the files of the save.

    Args:
        store: the directory of the checkpoint.
        manifest: the encoded manifest.
        files: the names of the data files.
        replace: whether to replace an existing checkpoint.
        clock: a monotonic clock, in seconds.

    Raises:
        FileExistsError: there is another checkpoint, and `replace` is False.
        StoreUnavailableError: files of the save were removed. Nothing is committed. An agent copies
            the files again.
    """
    checked_at: float | None = None

    def check() -> None:
        nonlocal checked_at
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


class _FilesRemovedError(StoreError):
    """Files of a save were removed. Unlike other failures of a store, trying again is no use."""


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
