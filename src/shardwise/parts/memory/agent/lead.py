"""Leads a save through its stages: the work of the agent on the node of rank 0.

The leader has the pending manifest. It requests each stage from the top of the tree of nodes, which
is its own node, waits for the combined reply, and writes the outcome to its node. From there, the
outcome travels down the tree too (`actions.py`). A stage that fails has an outcome too. If storage
does not answer, the action raises, and the agent tries it again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field

import msgspec

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.engine.root import Root
from shardwise.kernel.errors import ShardwiseError, StoreError, StoreUnavailableError
from shardwise.kernel.manifest.manifest import (
    FileEntry,
    complete_manifest,
)
from shardwise.kernel.store import Store, open_store
from shardwise.parts.memory import records
from shardwise.parts.memory.decide import Action
from shardwise.parts.memory.files import encode_record, read_record, write_record
from shardwise.parts.memory.home import ABANDONED_MARKER, Run, SnapshotDirectory
from shardwise.parts.memory.lineage import RootClaim, read_lineage
from shardwise.parts.memory.node_tree import NodeTree
from shardwise.parts.memory.options import Tls
from shardwise.parts.memory.records import AgentInfo, PendingManifest, Retry, StageOutcome
from shardwise.parts.memory.redundancy.placement import plan_protection
from shardwise.parts.memory.remote.assembled import AssembledStore
from shardwise.parts.memory.remote.search import Search, list_own_files
from shardwise.parts.memory.remote.snapshot_nodes import Nodes
from shardwise.parts.memory.remote.subtrees import (
    RequestSender,
    SubtreeRequest,
    connect,
    request_for_outcome,
    request_for_stage,
)
from shardwise.parts.memory.replies import Replies
from shardwise.parts.tiers.copying import FileCopier
from shardwise.parts.tiers.options import StorageTask

log = logging.getLogger("shardwise.agent")
RESCUE_TIMEOUT = 5.0
"""Seconds to wait for a node that does not answer, during a rescue."""
LONGEST_OUTAGE = 86400.0
"""Seconds for which a stage is tried again while the storage does not answer."""
READ_THREADS = 2
MOST_STORES = 16
MOST_FAILURES_SHOWN = 3


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
        """Do the work of a stage (commit, protect or persist), and write its outcome.

        After a rescue, another node than the node of rank 0 can persist.
        """
        place, stage = action.place, action.kind
        try:
            pending = read_pending_manifest(action)
        except StoreError as error:
            self._record_damage(action, stage, error)
            return
        save = _LeaderSave(place, pending, self)
        work: Callable[[], int] = getattr(save, stage)
        done = try_stage(place, stage, pending.save_id, self.node, work)
        name = records.save_record(stage, pending.save_id, "all")
        if self.node != pending.leader:
            save.tell(stage, done)
        write_record(place.path / name, done)
        place.run.wake_agent()

    def _record_damage(self, action: Action, stage: str, error: StoreError) -> None:
        """Record on all nodes that a stage failed, because the pending manifest is damaged.

        Without it, the nodes do not know the tree, so this node writes to each of them.

        Raises:
            StoreError: the record was removed.
        """
        place = action.place
        if not place.has(records.save_record("pending", action.save_id)):
            raise error
        failure = _log_failure(place, error)
        done = StageOutcome(save_id=action.save_id, stage=stage, failure=failure, node=self.node)
        name = records.save_record(stage, action.save_id, "all")
        infos = place.run.known_nodes()
        pending = PendingManifest(
            save_id=action.save_id,
            step=place.step,
            manifest="",
            files=[],
            nodes=infos,
            leader=self.node,
            storage=StorageTask(root=""),
        )
        others = [info.node for info in infos if info.node != self.node]
        request = SubtreeRequest(
            pending,
            stage,
            NodeTree((self.node, *others), max(1, len(others))),
            lambda _: ((name, encode_record(done)),),
            name,
            records.save_record(stage, action.save_id, "told"),
            RESCUE_TIMEOUT,
            needs_no_reply=True,
        )
        with closing(Nodes(place, infos, self.node, RESCUE_TIMEOUT, self.tls)) as nodes:
            RequestSender(nodes, request).send(others)
        write_record(place.path / name, done)


@dataclass(frozen=True, slots=True)
class _LeaderSave:
    """A save that this node leads. Each method does the work of a stage, and returns its bytes."""

    place: SnapshotDirectory
    pending: PendingManifest
    leader: Leader

    def commit(self) -> int:
        """Collect the entries of all files, and write the manifest to this node."""
        replies = self._ask("commit")
        entries_of = replies.file_entries(self.pending)
        if replies.failures or len(entries_of) < len(self.pending.files):
            raise StoreError(_describe_failures(replies))
        entries = [entries_of[name] for name, _ in self.pending.files]
        manifest = complete_manifest(self.pending.manifest.encode(), entries)
        write_record(self.place.manifest_path, manifest)
        return sum(each.size for each in entries)

    def protect(self) -> int:
        """Have all nodes make the requested copies or parity."""
        if not (self.pending.copies or self.pending.parity):
            return 0
        replies = self._ask("protect")
        if replies.failures or len(replies.nodes) < len(self.pending.nodes):
            raise StoreError(_describe_failures(replies))
        return int(replies.nbytes.sum())

    def persist(self) -> int:
        """Have all nodes copy their files to storage, and publish the manifest there."""
        save_id, overwrite = self.pending.save_id, self.pending.overwrite
        names = [name for name, _ in self.pending.files]
        with self.leader.stores.open(self.pending.storage.root) as root:
            directory = Root(root).at(self.place.step)
            with directory.lock_for_publishing(save_id, names, overwrite=overwrite) as is_published:
                copied = 0 if is_published else self._copy_files(directory.store)
                manifest, _ = self.place.read_manifest(save_id)
                if not is_published:
                    directory.check_readable(manifest)
                    self._refuse_superseded(root)
                directory.commit(save_id, manifest, names, overwrite=overwrite)
        if self.pending.storage.is_needed:
            request = records.save_record(records.REMOVE_OLD, save_id)
            write_record(self.place.path / request, self.pending.storage)
        return copied

    def tell(self, stage: str, done: StageOutcome) -> None:
        """Tell the top of the tree how a stage has ended, which is not this node."""
        wait = min(self.pending.wait, RESCUE_TIMEOUT)
        request = request_for_outcome(self.place, self.pending, stage, done, wait)
        self._send_to_top(request)

    def _ask(self, stage: str) -> Replies:
        """Request a stage from all nodes that take part in it, and return the combined replies."""
        wait = min(self.pending.wait, RESCUE_TIMEOUT) if self._is_rescue() else self.pending.wait
        return self._send_to_top(request_for_stage(self.pending, stage, wait))

    def _is_rescue(self) -> bool:
        """Return whether an agent has requested to persist this save, because a trainer was lost.

        At the normal end of a run, rank 0 requests it, without the name of a node.
        """
        name = records.save_record("rescue", self.pending.save_id)
        with suppress(StoreError):  # a damaged record shortens no wait
            request = read_record(self.place.path / name, StageOutcome)
            return request is not None and bool(request.node)
        return False

    def _send_to_top(self, request: SubtreeRequest) -> Replies:
        infos = agents_of(self.pending, self.place.run)
        with closing(connect(self.place, infos, self.leader.node, request, self.leader.tls)) as to:
            return RequestSender(to, request).send([request.tree.top])

    def _refuse_superseded(self, root: Store) -> None:
        """Raise if the run was resumed from an older step while this snapshot was persisted, or if
        another job has taken the root over without resuming this run. Claim the root if the trainer
        has not done so."""
        step = self.place.step
        try:
            lineage = read_lineage(root)
        except StoreUnavailableError:
            raise
        except StoreError as error:
            log.warning("cannot tell whether step %d is superseded: %s", step, error)
            return
        if lineage is None or lineage.run != self.place.run.name:
            return
        if lineage.epoch == self.pending.epoch:
            RootClaim.take_for(root, lineage, self.pending.owner, self.pending.previous_owner)
        if lineage.supersedes(step, self.pending.epoch):
            raise StoreError(
                f"step {step} is not persisted to {root}: meanwhile, run {lineage.run} was resumed "
                "from an older step; it will save this step again. If another job has restored it, "
                "stop this job; if the other job only reads, let it use sw.load or memory=None"
            )

    def _copy_files(self, store: Store) -> int:
        """Have each node copy its files to storage, then copy the files that are still missing."""
        replies = self._ask("persist")
        if replies.failures:
            raise StoreError(_describe_failures(replies))
        copied = replies.names_of_nodes(self.pending)
        nbytes = int(replies.nbytes.sum())
        outcome = records.save_record("commit", self.pending.save_id, "all")
        self.place.wait_for(outcome, Deadline(self.pending.wait))
        commit = read_record(self.place.path / outcome, StageOutcome)
        if commit is not None and commit.failure:
            raise StoreError(
                f"step {self.place.step} cannot be persisted, because its commit failed: "
                f"{commit.failure}; save the step again"
            )
        # If an earlier attempt lost its lock in an outage, its files may have been removed.
        stored = set(store.list())
        names = [
            name for name, node in self.pending.files if node not in copied or name not in stored
        ]
        if names:
            log.warning("%d files are copied for their nodes: %s", len(names), replies.lost)
            nbytes += self._copy_files_of_lost_nodes(names, store)
        return nbytes

    def _copy_files_of_lost_nodes(self, names: Collection[str], store: Store) -> int:
        """Copy files to storage from their copies or parity on other nodes; return the bytes.

        Raises:
            StoreError: no reachable nodes have the files; says which and why.
            CorruptionError: the bytes differ from those that were committed.
        """
        run, step, node, tls = self.place.run, self.place.step, self.leader.node, self.leader.tls
        _, manifest = self.place.read_manifest(self.pending.save_id)
        entries = [entry for entry in manifest.files if entry.name in names]
        holders = self._find_holders(names, manifest.files)
        infos = {info.node: info for info in agents_of(self.pending, run) if info.node in holders}
        own = msgspec.structs.replace(list_own_files(run, node), known_nodes=[])
        search = Search(run, node, [own], infos, tls, only=names)
        search.ask(follows=False)
        locations = search.choose_snapshot(step)
        if locations.step is None:
            reasons = "; ".join(reason for _, reason in locations.skipped)
            raise StoreError(
                f"step {step}: the files of nodes that do not answer cannot be persisted: "
                f"{reasons}; save a newer step. If the training has ended, the snapshot stays in "
                "the memory of its nodes for a day: resume or end their agents, start the training "
                f"again, and after restore(), save({step}, state, force=True) persists it"
            )
        copier = FileCopier(self.pending.budget)
        with closing(AssembledStore(locations, run, node, tls, threads=READ_THREADS)) as source:
            for entry in entries:
                copier.copy(source, entry, store)
        return sum(entry.size for entry in entries)

    def _find_holders(self, names: Collection[str], files: Sequence[FileEntry]) -> set[str]:
        """Return the nodes that may have files: their own nodes, and those that protect them."""
        holders = {node for name, node in self.pending.files if name in names}
        for group in plan_protection(self.pending, files).groups:
            if any(name in names for member in group.members for name, _ in member.files):
                holders |= {member.node for member in group.members}
        return holders


def _describe_failures(replies: Replies) -> str:
    """Return which nodes did not do their part of a stage, and why."""
    reasons = [f"node {node}: {failure}" for node, failure in replies.failures.items()]
    reasons += replies.lost.values()
    shown = "; ".join(reasons[:MOST_FAILURES_SHOWN])
    more = len(reasons) - MOST_FAILURES_SHOWN
    return f"{shown}; and {more} more" if more > 0 else shown or "some nodes did not reply"


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
    except Exception as error:  # any error: the outcome must say it, or the save is never completed
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
