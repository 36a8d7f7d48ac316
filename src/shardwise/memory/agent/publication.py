"""A snapshot becomes a checkpoint in storage: its step taken possession of, and published."""

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
    """A step's place in storage, locked for one save.

    Attributes:
        is_published: whether an agent before has published this save, and could not tell of it.
    """

    store: Store
    pending: PendingManifest
    is_published: bool

    def finish(self, manifest: bytes) -> None:
        """Publish, if that is not done.

        Raises:
            CheckpointExistsError: another save has published there meanwhile.
        """
        missing = {name for name, _ in self.pending.files} - set(self.store.list())
        if missing:
            raise StoreError(f"{self.store}: {', '.join(sorted(missing))} disappeared again")
        if not self.is_published:
            self._publish(manifest)
        if self.pending.overwrite:
            collect_leftovers(self.store, own_lock=lock_file(self.pending.save_id))

    def _publish(self, manifest: bytes) -> None:
        try:
            self.store.publish(MANIFEST, manifest, replace=self.pending.overwrite)
        except FileExistsError as error:
            raise CheckpointExistsError(f"{self.store} holds a checkpoint already") from error


@contextmanager
def publication(pending: PendingManifest) -> Iterator[Publication]:
    """Take possession of a step's place in storage while the block runs.

    Raises:
        CheckpointExistsError: there is another checkpoint, and it is not to be overwritten.
        StoreError: the place cannot be locked.
    """
    store = open_store(pending.root).at(step_directory(pending.step))
    names = store.list()
    published = MANIFEST in names and _save_at(store) == pending.save_id
    if not pending.overwrite and MANIFEST in names and not published:
        raise CheckpointExistsError(f"{store} holds a checkpoint already")
    if not any(name in names for name, _ in pending.files):  # else an agent before has begun this
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
    """Lock a save until `cleanup` is closed; whether that could be. A Checkpointer that is opened
    just now looks for leftovers, and has the lock for a moment."""
    for attempt in range(LOCK_ATTEMPTS):
        if attempt:
            time.sleep(BETWEEN_ATTEMPTS)
        if cleanup.enter_context(store.hold(lock, shared=False)):
            return True
    return False


def retention_of(pending: PendingManifest) -> Retain | None:
    """What is to be removed once it is published; None if checkpoints below its root are kept for
    ever."""
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
    """Remove what is no longer kept below a root; how many checkpoints.

    Freeing the blocks of a large file can take as long as a third of writing it, so this is no
    part of publishing.

    Args:
        is_wanted: asked before each is removed; if it is not, all others stay.
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
    """The save that is published in a place; None if it cannot be told."""
    try:
        return decode_manifest(store.read(MANIFEST, limit=LARGEST_MANIFEST)).save_id
    except (FileNotFoundError, FormatError):
        return None
