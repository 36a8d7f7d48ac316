"""Persists a snapshot: copies its files to storage, publishes it, and removes old checkpoints."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager

from shardwise.deadline import Deadline
from shardwise.engine.commit import is_published, lock_save, remove_leftovers
from shardwise.errors import (
    StoreError,
    StoreUnavailableError,
)
from shardwise.manifest.manifest import decode_manifest
from shardwise.manifest.names import MANIFEST, lock_file
from shardwise.memory.home import SnapshotDirectory
from shardwise.memory.options import Tls
from shardwise.memory.records import AgentInfo, PendingManifest
from shardwise.memory.remote.assembled import AssembledStore
from shardwise.memory.remote.search import Search, list_own_files
from shardwise.store import Store, open_store
from shardwise.tiers.copy_file import Throttle, copy_verified

READ_THREADS = 2
MOST_STORES = 16
LOCK_TIMEOUT = 1.0
LOCK_PAUSE = 0.05


class OpenedStores:
    """The stores that an agent has opened, by URL. Threads may share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, Store] = {}

    @contextmanager
    def open(self, url: str) -> Iterator[Store]:
        """Open a store, and keep it open for later calls, unless the block raises.

        After a failure, the store is opened anew: it may have to read other credentials.

        Raises:
            StoreError: as for `open_store`.
        """
        with self._lock:
            store = self._stores.pop(url, None)
        store = store or open_store(url)
        yield store
        with self._lock:
            self._stores[url] = store
            while len(self._stores) > MOST_STORES:
                del self._stores[next(iter(self._stores))]


def copy_files_of_lost_nodes(
    place: SnapshotDirectory,
    names: Iterable[str],
    infos: list[AgentInfo],
    node: str,
    tls: Tls | None,
    store: Store,
    throttle: Throttle,
) -> int:
    """Copy files of lost nodes to storage, from their copies or parity on other nodes.

    Args:
        place: the committed snapshot on this node.
        names: the names of the files.
        infos: the known agents of the snapshot's nodes.
        node: the name of this node.

    Returns:
        The bytes copied.

    Raises:
        StoreError: no reachable nodes have the files; says which and why.
        CorruptionError: the bytes differ from those that were committed.
    """
    manifest = decode_manifest(place.read_file(MANIFEST))
    entries = {entry.name: entry for entry in manifest.files}
    known = {info.node: info for info in infos}
    search = Search(place.run, node, [list_own_files(place.run, node)], known, tls)
    search.ask()
    assembly = search.choose_snapshot(place.step)
    if assembly.step is None:
        reasons = "; ".join(reason for _, reason in assembly.skipped)
        raise StoreError(
            f"step {place.step}: the files of lost nodes cannot be persisted: {reasons}; save a "
            "newer step"
        )
    total = 0
    with closing(AssembledStore(assembly, place.run, node, tls, threads=READ_THREADS)) as source:
        for name in names:
            copy_verified(source, entries[name], store, throttle)
            total += entries[name].size
    return total


@contextmanager
def lock_for_publishing(
    pending: PendingManifest, store: Store, deadline: Deadline | None = None
) -> Iterator[bool]:
    """Lock the directory of a step in storage while the block runs.

    Args:
        store: the directory.
        deadline: the limit for waiting for the lock. By default, twice the expiry of locks, and one
            second. By then, the lock of a killed agent has expired, although servers round times to
            whole seconds. The further second is for a new Checkpointer, which briefly holds the
            lock while it looks for leftovers.

    Yields:
        Whether the save is published already. An earlier agent may have published it, and ended
        before it wrote the outcome.

    Raises:
        CheckpointExistsError: the directory has another checkpoint, which must not be overwritten.
        StoreUnavailableError: another process holds the lock, or requests took so long that there
            was one attempt only.
    """
    names = store.list()
    has_ended = is_published(store, pending.save_id, names, overwrite=pending.overwrite)
    has_begun = any(name in names for name, _ in pending.files)
    if names and not has_begun:
        remove_leftovers(store)
    deadline = deadline or Deadline(LOCK_TIMEOUT + 2 * store.traits.lock_expiry)
    attempts = deadline.attempts(pause=LOCK_PAUSE, longest_pause=LOCK_TIMEOUT)
    with lock_save(store, pending.save_id, attempts) as is_held:
        if not is_held:
            raise StoreUnavailableError(
                f"{store}: cannot lock {lock_file(pending.save_id)}, because another process holds "
                "it: an agent that persists this save, or a Checkpointer that looks for leftovers. "
                "The agent tries again; if this lasts, look for another agent with this root"
            )
        yield has_ended
