"""Publishes a snapshot as a checkpoint in storage, and removes old checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from shardwise.engine.leftovers import collect_leftovers
from shardwise.errors import CheckpointExistsError, FormatError, StoreError
from shardwise.manifest.manifest import LARGEST_MANIFEST, decode_manifest
from shardwise.manifest.names import MANIFEST, lock_file, step_directory
from shardwise.memory.records import PendingManifest, Retain
from shardwise.retention import apply_retention, decode_keep
from shardwise.store import Store, open_store

LOCK_ATTEMPTS, BETWEEN_ATTEMPTS = 20, 0.05


@dataclass(frozen=True, slots=True)
class Publication:
    """The locked place of a save in storage.

    Attributes:
        is_published: whether a previous agent has published this save without recording it.
    """

    store: Store
    pending: PendingManifest
    is_published: bool

    def finish(self, manifest: bytes) -> None:
        """Publish the checkpoint, unless it is published.

        Raises:
            CheckpointExistsError: another save was published there meanwhile.
        """
        missing = {name for name, _ in self.pending.files} - set(self.store.list())
        if missing:
            raise StoreError(
                f"{self.store}: removed after they were copied: {', '.join(sorted(missing))}"
            )
        if not self.is_published:
            self._publish(manifest)
        if self.pending.overwrite:
            collect_leftovers(self.store, own_lock=lock_file(self.pending.save_id))

    def _publish(self, manifest: bytes) -> None:
        try:
            self.store.publish(MANIFEST, manifest, replace=self.pending.overwrite)
        except FileExistsError as error:
            raise CheckpointExistsError(f"{self.store} already contains a checkpoint") from error


@contextmanager
def publication(pending: PendingManifest) -> Iterator[Publication]:
    """Lock a step's place in storage while the block runs.

    Raises:
        CheckpointExistsError: the place holds another checkpoint, which must not be overwritten.
        StoreError: another agent holds the lock.
    """
    store = open_store(pending.root).at(step_directory(pending.step))
    names = store.list()
    published = MANIFEST in names and _save_at(store) == pending.save_id
    if not pending.overwrite and MANIFEST in names and not published:
        raise CheckpointExistsError(f"{store} already contains a checkpoint")
    if not any(name in names for name, _ in pending.files):  # otherwise a previous agent has begun
        collect_leftovers(store)
    with ExitStack() as cleanup:
        if not _locked(store, lock_file(pending.save_id), cleanup):
            raise StoreError(f"{store}: another agent is persisting this save")
        try:
            yield Publication(store, pending, published)
        finally:
            with suppress(OSError):
                store.delete(lock_file(pending.save_id))


def _locked(store: Store, lock: str, cleanup: ExitStack) -> bool:
    """Lock a save until `cleanup` is closed; return False if the lock is taken. A Checkpointer that
    is
    being opened holds the lock for a moment, while it looks for leftovers.
    """
    for attempt in range(LOCK_ATTEMPTS):
        if attempt:
            time.sleep(BETWEEN_ATTEMPTS)
        if cleanup.enter_context(store.hold(lock, shared=False)):
            return True
    return False


def retention_of(pending: PendingManifest) -> Retain | None:
    """Return the request to remove old checkpoints; None if the root keeps all checkpoints."""
    if not decode_keep(pending.keep).removes:
        return None
    return Retain(
        save_id=pending.save_id,
        step=pending.step,
        root=pending.root,
        keep=pending.keep,
        damaged=pending.damaged,
    )


def retain(request: Retain, is_wanted: Callable[[], bool]) -> int:
    """Remove the checkpoints that a root no longer keeps; return how many.

    Freeing the blocks of a large file can take a third of the time of writing it, so this is not
    part
    of publishing.

    Args:
        is_wanted: called before each removal; if it returns False, the remaining ones are kept.
    """
    removed = apply_retention(
        open_store(request.root),
        decode_keep(request.keep),
        newest=request.step,
        damaged=frozenset(request.damaged),
        is_wanted=is_wanted,
    )
    return len(removed)


def _save_at(store: Store) -> str | None:
    """Return the save that is published in a place; None if its manifest is unreadable."""
    try:
        return decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST)).save_id
    except (FileNotFoundError, FormatError):
        return None
