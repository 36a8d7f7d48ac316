"""Leads a save through its stages: the work of the agent on the node of rank 0.

The leader has the pending manifest. It requests each stage from the other nodes by a record, waits
for their records that the stage is done, and writes the outcome to all nodes. A stage that fails
has an outcome too. If storage does not answer, the action raises, and the agent tries it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

from shardwise.engine.commit import commit_save, lock_for_publishing
from shardwise.errors import ShardwiseError, StoreError, StoreUnavailableError
from shardwise.manifest.manifest import (
    MANIFEST,
    FileEntry,
    complete_manifest,
    decode_manifest,
    step_directory,
)
from shardwise.memory import records
from shardwise.memory.decide import Action
from shardwise.memory.files import read_record, write_record
from shardwise.memory.home import ABANDONED_MARKER, Run, SnapshotDirectory
from shardwise.memory.lineage import read_lineage
from shardwise.memory.options import Tls
from shardwise.memory.records import (
    AgentInfo,
    PendingManifest,
    PersistRequest,
    Retry,
    StageOutcome,
)
from shardwise.memory.remote.assembled import AssembledStore
from shardwise.memory.remote.search import Search, list_own_files
from shardwise.memory.remote.snapshot_nodes import Nodes, run_on_nodes
from shardwise.store import Store, open_store
from shardwise.tiers.copy_file import FileCopier

T = TypeVar("T")
log = logging.getLogger("shardwise.agent")
RESCUE_TIMEOUT = 5.0
"""Seconds to wait for a node that does not answer, during a rescue."""
LONGEST_OUTAGE = 86400.0
"""Seconds for which a stage is tried again while the storage does not answer."""
READ_THREADS = 2
MOST_STORES = 16


class OpenedStores:
    """The stores that an agent has opened, by URL. Threads may share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, Store] = {}

    @contextmanager
    def open(self, url: str) -> Iterator[Store]:
        """Open a store, and keep it open for later calls, unless the block raises.

        After a failure, the store is opened again, because it may have to read other credentials.

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


@dataclass(frozen=True, slots=True)
class Leader:
    """Performs the actions of the node that leads a save.

    Attributes:
        node: the name of this node.
        tls: certificates for connections to other nodes.
        stores: the stores that the agent has opened.
    """

    node: str
    tls: Tls | None = None
    stores: OpenedStores = field(default_factory=OpenedStores)

    def perform(self, action: Action) -> None:
        """Do the work of a stage (commit, protect or persist), and write its outcome to all nodes.

        After a rescue, another node than the node of rank 0 can persist.
        """
        place, stage = action.place, action.kind
        try:
            pending = read_pending_manifest(action)
        except StoreError as error:
            self._record_damage(action, stage, error)
            return
        infos = agents_of(pending, place.run)
        is_rescue = place.has(records.save_record("rescue", pending.save_id))
        wait = min(pending.wait, RESCUE_TIMEOUT) if is_rescue else pending.wait
        with closing(Nodes(place, infos, self.node, wait, self.tls)) as nodes:
            save = _LeaderSave(place, pending, nodes, self)
            work: Callable[[], int] = getattr(save, stage)
            done = try_stage(place, stage, pending.save_id, self.node, work)
            nodes.write_to_all(records.save_record(stage, pending.save_id, "all"), done)

    def _record_damage(self, action: Action, stage: str, error: StoreError) -> None:
        """Record on all nodes that a stage failed, because the pending manifest is damaged.

        Raises:
            StoreError: the record was removed, or other nodes do not answer.
        """
        place = action.place
        if not place.has(records.save_record("pending", action.save_id)):
            raise error
        failure = _log_failure(place, error)
        done = StageOutcome(save_id=action.save_id, stage=stage, failure=failure, node=self.node)
        infos = place.run.known_nodes()
        with closing(Nodes(place, infos, self.node, RESCUE_TIMEOUT, self.tls)) as nodes:
            nodes.write_to_all(records.save_record(stage, action.save_id, "all"), done)


@dataclass(frozen=True, slots=True)
class _LeaderSave:
    """A save that this node leads. Each method does the work of a stage, and returns its bytes.

    Attributes:
        nodes: connections to the nodes of the save.
    """

    place: SnapshotDirectory
    pending: PendingManifest
    nodes: Nodes
    leader: Leader

    def commit(self) -> int:
        """Collect the entries of all files, and write the manifest to all nodes."""
        files_of = self._files_by_node()

        def collect_entries(node: str) -> dict[str, FileEntry]:
            return {
                name: self.nodes.wait_for_record(
                    node,
                    records.file_record(name, "entry"),
                    FileEntry,
                    failure_name=records.file_record(name, "failed"),
                )
                for name in files_of[node]
            }

        entries_of = run_on_nodes(files_of, collect_entries)
        entries = [entries_of[node][name] for name, node in self.pending.files]
        manifest = complete_manifest(self.pending.manifest.encode(), entries)
        # Write to this node first: the commit here must not wait for a lost node whose files are
        # not needed.
        self.nodes.write(self.leader.node, MANIFEST, manifest)
        pending_copy = records.save_record("pending", self.pending.save_id, "copy"), self.pending
        self.nodes.write_to_others(pending_copy, (MANIFEST, manifest))
        return sum(each.size for each in entries)

    def protect(self) -> int:
        """Have all nodes make the requested copies or parity."""
        if not (self.pending.copies or self.pending.parity):
            return 0
        save_id = self.pending.save_id
        request = StageOutcome(save_id=save_id, stage="protect", node=self.leader.node)
        self.nodes.write_to_all(records.save_record("protect", save_id), request)
        outcome_of = run_on_nodes(
            [info.node for info in self.pending.nodes],
            lambda node: self._wait_for_node("protect", node),
        )
        return _total_bytes(outcome_of)

    def persist(self) -> int:
        """Have all nodes copy their files to storage, and publish the manifest there."""
        save_id, overwrite = self.pending.save_id, self.pending.overwrite
        names = [name for name, _ in self.pending.files]
        with self.leader.stores.open(self.pending.storage.root) as root:
            store = root.at(step_directory(self.place.step))
            with lock_for_publishing(store, save_id, names, overwrite=overwrite) as is_published:
                copied = 0 if is_published else self._copy_files(store)
                manifest = self.place.read_manifest(save_id)
                if not is_published:
                    self._refuse_superseded(root)
                commit_save(store, save_id, manifest, names, overwrite=overwrite)
        if self.pending.storage.is_needed:
            request = records.save_record(records.REMOVE_OLD, save_id)
            write_record(self.place.path / request, self.pending.storage)
        return copied

    def _refuse_superseded(self, root: Store) -> None:
        """Raise if the run was resumed from an older step while this snapshot was persisted."""
        step = self.place.step
        try:
            lineage = read_lineage(root)
        except StoreUnavailableError:
            raise
        except StoreError as error:
            log.warning("cannot tell whether step %d is superseded: %s", step, error)
            return
        is_same_run = lineage is not None and lineage.run == self.place.run.name
        if lineage is not None and is_same_run and lineage.supersedes(step, self.pending.epoch):
            raise StoreError(
                f"step {step} is not persisted to {root}: meanwhile, run {lineage.run} was resumed "
                "from an older step; it will save this step again"
            )

    def _copy_files(self, store: Store) -> int:
        """Have each node copy its files to storage, then copy the files that are still missing."""
        files_of = self._files_by_node()
        # Send all requests before waiting for any node.
        reached = run_on_nodes(
            files_of,
            lambda node: self._unless_lost(node, lambda: self._request_copy(node, files_of[node])),
        )
        outcome_of = run_on_nodes(
            [node for node in files_of if reached[node]],
            lambda node: self._unless_lost(node, lambda: self._wait_for_node("persist", node)),
        )
        copied = {node: done for node, done in outcome_of.items() if done is not None}
        nbytes = _total_bytes(copied)
        outcome = records.save_record("commit", self.pending.save_id, "all")
        commit = self.nodes.wait_for_record(self.leader.node, outcome, StageOutcome)
        if commit.failure:
            raise StoreError(
                f"step {self.place.step} cannot be persisted, because its commit failed: "
                f"{commit.failure}; save the step again"
            )
        # If an earlier attempt lost its lock in an outage, its files may have been removed.
        stored = set(store.list())
        names = [
            name
            for node in files_of
            for name in files_of[node]
            if node not in copied or name not in stored
        ]
        if names:
            nbytes += self._copy_files_of_lost_nodes(names, store)
        return nbytes

    def _copy_files_of_lost_nodes(self, names: Collection[str], store: Store) -> int:
        """Copy files to storage from their copies or parity on other nodes; return the bytes.

        Raises:
            StoreError: no reachable nodes have the files; says which and why.
            CorruptionError: the bytes differ from those that were committed.
        """
        run, step, node, tls = self.place.run, self.place.step, self.leader.node, self.leader.tls
        manifest = decode_manifest(self.place.read_file(MANIFEST))
        entries = [entry for entry in manifest.files if entry.name in names]
        known = {info.node: info for info in agents_of(self.pending, run)}
        search = Search(run, node, [list_own_files(run, node)], known, tls)
        search.ask()
        assembly = search.choose_snapshot(step)
        if assembly.step is None:
            reasons = "; ".join(reason for _, reason in assembly.skipped)
            raise StoreError(
                f"step {step}: the files of lost nodes cannot be persisted: {reasons}; save a "
                "newer step"
            )
        copier = FileCopier(self.pending.budget)
        with closing(AssembledStore(assembly, run, node, tls, threads=READ_THREADS)) as source:
            for entry in entries:
                copier.copy(source, entry, store)
        return sum(entry.size for entry in entries)

    def _request_copy(self, node: str, files: list[str]) -> bool:
        """Request that a node copies its files to storage; return True."""
        request = PersistRequest(
            save_id=self.pending.save_id,
            root=self.pending.storage.root,
            files=files,
            budget=self.pending.budget,
            wait=self.pending.wait,
        )
        self.nodes.write(node, records.save_record("persist", self.pending.save_id), request)
        return True

    def _unless_lost(self, node: str, work: Callable[[], T]) -> T | None:
        """Return the result of `work`; None if the node is lost."""
        try:
            return work()
        except StoreError as error:
            self.place.refuse_abandoned()
            log.warning("node %s is lost: %s", node, error)
            return None

    def _wait_for_node(self, stage: str, node: str) -> StageOutcome:
        """Wait until a node has done its part of a stage."""
        save_id = self.pending.save_id
        done, request = (
            records.save_record(stage, save_id, "done"),
            records.save_record(stage, save_id),
        )
        return self.nodes.wait_for_record(node, done, StageOutcome, request_name=request)

    def _files_by_node(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, node in self.pending.files:
            found.setdefault(node, []).append(name)
        return found


def _total_bytes(outcome_of: dict[str, StageOutcome]) -> int:
    """Return the bytes of all nodes' parts of a stage.

    Raises:
        StoreError: a node's part failed.
    """
    for node, done in outcome_of.items():
        if done.failure:
            raise StoreError(f"node {node}: {done.failure}")
    return sum(done.bytes for done in outcome_of.values())


def read_pending_manifest(action: Action) -> PendingManifest:
    """Return the pending manifest of a save, or the followers' copy of it.

    Raises:
        StoreError: this node has neither, because the snapshot is being removed.
    """
    for pending in action.place.pending_manifests():
        if pending.save_id == action.save_id:
            return pending
    raise StoreError(
        f"{action.place.path}: the pending manifest of save {action.save_id} was removed or is "
        "damaged, so the save cannot be completed: save again"
    )


def agents_of(pending: PendingManifest, run: Run) -> list[AgentInfo]:
    """Return the agents of a snapshot's nodes, with the newest address that this node knows."""
    if len(pending.nodes) == 1:  # only this node
        return pending.nodes
    manifests = [pending, *run.pending_manifests()]
    newest = {info.node: info for each in manifests for info in each.nodes}
    return [newest[info.node] for info in pending.nodes]


def try_stage(
    place: SnapshotDirectory, stage: str, save_id: str, node: str, work: Callable[[], int]
) -> StageOutcome:
    """Do the work of a stage on a node, and return its outcome. If the work fails, log why.

    Args:
        work: does the work, and returns the number of bytes processed.

    Raises:
        StoreUnavailableError: the storage does not answer, so the agent must try again. After
            `LONGEST_OUTAGE` seconds, this counts as a failure.
    """
    start = time.monotonic()
    nbytes, failure = 0, ""
    try:
        nbytes = work()
    except Exception as error:
        is_outage = isinstance(error, StoreUnavailableError)
        if is_outage and _record_retry(place, stage, save_id, str(error)):
            raise
        failure = _log_failure(place, error)
    (place.path / records.save_record(stage, save_id, "retry")).unlink(missing_ok=True)
    seconds = time.monotonic() - start
    return StageOutcome(
        save_id=save_id, stage=stage, seconds=seconds, bytes=nbytes, failure=failure, node=node
    )


def _record_retry(place: SnapshotDirectory, stage: str, save_id: str, failure: str) -> bool:
    """Record why a stage is tried again; return False if the attempts took too long."""
    path, now = place.path / records.save_record(stage, save_id, "retry"), time.time()
    with suppress(StoreError):
        earlier = read_record(path, Retry)
        since = now if earlier is None else earlier.since
        if now - since > LONGEST_OUTAGE:
            return False
        attempts = 1 if earlier is None else earlier.attempts + 1
        if stage != records.REMOVE_OLD:  # its snapshot may be freed, except for the request itself
            retry = Retry(
                save_id=save_id, stage=stage, failure=failure, since=since, attempts=attempts
            )
            write_record(path, retry)
    return True


def _log_failure(place: SnapshotDirectory, error: Exception) -> str:
    """Log a failure, and return it as text."""
    level = logging.INFO if place.has(ABANDONED_MARKER) else logging.ERROR
    is_expected = isinstance(error, (ShardwiseError, OSError))
    log.log(level, "%s: %s", type(error).__name__, error, exc_info=not is_expected)
    return f"{type(error).__name__}: {error}"
