"""The actions of an agent, except those of the node that leads a save (`lead.py`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.engine.root import Root
from shardwise.kernel.errors import ShardwiseError, StoreError
from shardwise.kernel.manifest.manifest import FileEntry
from shardwise.kernel.store import Store, open_store
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory import records
from shardwise.parts.memory.agent.lead import (
    OpenedStores,
    agents_of,
    read_pending_manifest,
    try_stage,
)
from shardwise.parts.memory.agent.mirrors import set_mirror_task
from shardwise.parts.memory.agent.protect import protect_others
from shardwise.parts.memory.decide import REPLACED, Action, RunAction
from shardwise.parts.memory.files import read_record, write_record
from shardwise.parts.memory.home import POLL_PAUSE, SnapshotDirectory
from shardwise.parts.memory.lineage import read_lineage
from shardwise.parts.memory.observe import Observer
from shardwise.parts.memory.options import Tls
from shardwise.parts.memory.rank_liveness import copying_ranks, is_rank_alive
from shardwise.parts.memory.reclaim import free_replaced, free_saves, free_unattended
from shardwise.parts.memory.records import (
    PendingManifest,
    StagedFile,
    StageOutcome,
    StageRequest,
)
from shardwise.parts.memory.remote.snapshot_nodes import Nodes
from shardwise.parts.memory.remote.subtrees import (
    RequestSender,
    SubtreeRequest,
    connect,
    request_for_outcome,
    request_for_stage,
)
from shardwise.parts.memory.replies import Replies, combine_replies
from shardwise.parts.memory.seal import MappedFiles, seal
from shardwise.parts.memory.view import RootView, tell
from shardwise.parts.tiers.copying import FileCopier
from shardwise.parts.tiers.options import StorageTask

log = logging.getLogger("shardwise.agent")
Record = TypeVar("Record")
FILES_AT_ONCE = 2
RESCUE_REQUEST_TIMEOUT = 0.5
LIVENESS_PERIOD = 0.05
"""Seconds between two looks whether the ranks are alive whose copies are waited for."""
MOST_RESCUERS = 32
Done = tuple[int, dict[int, FileEntry]]
"""The bytes that a node processed; and, in a commit, the entries of its files by index."""


@dataclass(frozen=True, slots=True)
class Follower:
    """Performs the actions that every node does for its own files.

    The leader of a save requests all of them except `seal` and `rescue`.

    Attributes:
        node: the name of this node.
        mapped_files: the mappings of its files.
        tls: certificates for connections to other nodes.
        stores: the stores that the agent has opened.
    """

    node: str
    mapped_files: MappedFiles
    tls: Tls | None = None
    stores: OpenedStores = field(default_factory=OpenedStores)

    def seal(self, action: Action) -> None:
        """Compute the checksums of the files that this node's ranks staged.

        If the record of a file is damaged, record that the file could not be staged.
        """
        place = action.place
        for name in action.names:
            try:
                staged = read_record(place.path / records.file_record(name, "staged"), StagedFile)
            except StoreError as error:
                done = StageOutcome(save_id=action.save_id, stage="stage", failure=str(error))
                write_record(place.path / records.file_record(name, "failed"), done)
                continue
            if staged is not None and not place.has(records.file_record(name, "entry")):
                data = self.mapped_files.map(place.path / name, staged.file.size)
                write_record(
                    place.path / records.file_record(name, "entry"), seal(data, staged.file)
                )

    def collect(self, action: Action) -> None:
        """Collect the entries of this node's files, as soon as they are sealed."""
        self._fulfil_request(action, "commit", self._collect_entries)

    def copy(self, action: Action) -> None:
        """Copy this node's files to storage."""
        self._fulfil_request(action, "persist", self._copy_files)

    def protect_others(self, action: Action) -> None:
        """Make the copies or parity that this node stores for others."""

        def make_copies_or_parity(
            place: SnapshotDirectory, pending: PendingManifest, wait: float
        ) -> Done:
            # The outcome of the commit, which brings the manifest, travels at the same time.
            outcome = records.save_record("commit", pending.save_id, "all")
            place.wait_for(outcome, Deadline(wait))
            infos = agents_of(pending, place.run)
            with closing(Nodes(place, infos, self.node, pending.wait, self.tls)) as nodes:
                return nodes.retry(
                    lambda: protect_others(place, pending, nodes, self.node, self.mapped_files)
                ), {}

        self._fulfil_request(action, "protect", make_copies_or_parity)

    def tell(self, action: Action) -> None:
        """Tell the nodes below this node how a stage has ended."""
        place, save_id = action.place, action.save_id
        stage = next(each for each in records.TOLD_STAGES if tell(each) == action.kind)
        pending = read_pending_manifest(action)
        done = _read_existing(place.path / records.save_record(stage, save_id, "all"), StageOutcome)
        request = request_for_outcome(place, pending, stage, done, pending.wait)
        with self._sending(place, request) as replies:
            told = replies()
        if told.lost:
            log.warning(
                "step %d: some nodes do not know the outcome of %s: %s",
                place.step,
                stage,
                "; ".join(told.lost.values()),
            )
        name = records.save_record(stage, save_id, "told")
        write_record(place.path / name, told.encode(save_id, stage))

    def remove_old(self, action: Action) -> None:
        """Remove old checkpoints from storage. Stop if the request is withdrawn.

        Publishing does not wait for the removal: freeing the blocks of a large file can take a
        third of the time that writing the file took.
        """
        name = records.save_record(records.REMOVE_OLD, action.save_id)

        def remove(task: StorageTask) -> int:
            if task.mirror is not None:
                set_mirror_task(action.place.run, task)
                action.place.run.wake_agent()
            else:
                with self.stores.open(task.root) as root:
                    task.remove_old(root, lambda: action.place.has(name))
            return 0  # bytes

        path = action.place.path
        done = try_stage(
            action.place,
            records.REMOVE_OLD,
            action.save_id,
            self.node,
            lambda: remove(_read_existing(path / name, StorageTask)),
        )
        write_record(path / records.save_record(records.REMOVE_OLD, action.save_id, "all"), done)

    def rescue(self, action: Action) -> None:
        """Request to persist a snapshot that was for memory only.

        Ask the leader first, then the first other nodes and this node, until a node accepts.
        """
        place = action.place
        log.warning("%s: persisting step %d", action.why, place.step)
        pending = read_pending_manifest(action)
        request = StageOutcome(save_id=pending.save_id, stage="rescue", node=self.node)
        infos = agents_of(pending, place.run)
        with closing(Nodes(place, infos, self.node, RESCUE_REQUEST_TIMEOUT, self.tls)) as nodes:
            others = [info.node for info in pending.nodes[:MOST_RESCUERS]]
            for node in dict.fromkeys([pending.leader, *others, self.node]):
                try:
                    nodes.write(node, records.save_record("rescue", pending.save_id), request)
                except StoreError as error:
                    log.warning("node %s: %s", node, error)
                    continue
                # This agent's own record: the rescue was requested, so it is not requested again.
                write_record(place.path / records.save_record("called", pending.save_id), request)
                return

    def _collect_entries(
        self, place: SnapshotDirectory, pending: PendingManifest, wait: float
    ) -> Done:
        """Wait until this node's files are sealed, and return their entries."""
        deadline = Deadline(wait)
        entries = {}
        for index, (name, node) in enumerate(pending.files):
            if node == self.node:
                entry, failure = (records.file_record(name, kind) for kind in ("entry", "failed"))
                place.wait_for(entry, deadline, failure_name=failure)
                entries[index] = _read_existing(place.path / entry, FileEntry)
        return sum(each.size for each in entries.values()), entries

    def _copy_files(self, place: SnapshotDirectory, pending: PendingManifest, wait: float) -> Done:
        """Copy several files at a time to storage, each while its rank copies it into memory."""
        copier = FileCopier(pending.budget)

        def copy(name: str, store: Store) -> int:
            incoming = _IncomingFile(place, name, pending.wait, self.mapped_files)
            copier.copy_from_memory(incoming.data, incoming.entry, store, incoming.wait_for)
            return incoming.entry.size

        with (
            self.stores.open(pending.storage.root) as root,
            ThreadPoolExecutor(FILES_AT_ONCE, "shardwise-files") as pool,
        ):
            store = Root(root).at(place.step).store
            names = [name for name, node in pending.files if node == self.node]
            return sum(pool.map(lambda name: copy(name, store), names)), {}

    def _fulfil_request(
        self,
        action: Action,
        stage: str,
        work: Callable[[SnapshotDirectory, PendingManifest, float], Done],
    ) -> None:
        """Ask the nodes below this node, do this node's part of a stage, and write the reply.

        Args:
            work: does this node's part. It takes the snapshot, its pending manifest, and how many
                seconds to wait for what is missing.
        """
        place, save_id = action.place, action.save_id
        entries: dict[int, FileEntry] = {}
        done: StageOutcome | None = None

        def work_on_part() -> int:
            nonlocal entries
            nbytes, entries = work(place, pending, request.wait)
            return nbytes

        try:
            path = place.path / records.save_record(stage, save_id)
            request = _read_existing(path, StageRequest)
            pending = _wait_for_pending_manifest(action, request.wait)
            index = [info.node for info in pending.nodes].index(self.node)
        except (StoreError, ValueError) as error:
            log.error("%s: %s", stage, error)
            replies = Replies(failures={self.node: str(error)})
        else:
            with self._sending(place, request_for_stage(pending, stage, request.wait)) as others:
                done = try_stage(place, stage, save_id, self.node, work_on_part)
                ended_at = time.time()
                own = Replies.of_node(index, done.bytes, entries)
                if done.failure:
                    own = Replies(failures={self.node: done.failure})
                replies = combine_replies([own, others()], pending)
        reply = replies.encode(save_id, stage)
        if done is not None:
            reply = msgspec.structs.replace(reply, own=done, own_ended_at=ended_at)
        write_record(place.path / records.save_record(stage, save_id, "done"), reply)

    @contextmanager
    def _sending(
        self, place: SnapshotDirectory, request: SubtreeRequest
    ) -> Iterator[Callable[[], Replies]]:
        """Ask the nodes below this node while the block runs.

        Yields:
            A function that waits for the replies and returns them.
        """
        children = request.tree.children(self.node)
        if not children:
            yield Replies
            return
        infos = agents_of(request.pending, place.run)
        with (
            closing(connect(place, infos, self.node, request, self.tls)) as nodes,
            ThreadPoolExecutor(1, "shardwise-requests") as pool,
        ):
            sender = RequestSender(nodes, request)
            replies = pool.submit(sender.send, children)
            try:
                yield replies.result
            except BaseException:
                sender.stop()
                raise


class _IncomingFile:
    """A data file that a rank of this node copies into memory, or has copied.

    Args:
        place: the snapshot.
        name: the name of the file.
        wait: seconds to wait for a rank that is not copying, and for the checksums.
        mapped_files: the mappings of this node's files.

    Raises:
        StoreError: the rank has failed, or has not begun in time, or the snapshot is abandoned.

    Attributes:
        entry: the file's entry, without checksums.
        data: the file, mapped. Bytes that the rank has not copied yet are undefined.
    """

    def __init__(
        self, place: SnapshotDirectory, name: str, wait: float, mapped_files: MappedFiles
    ) -> None:
        self._place, self._name, self._wait, self._copied = place, name, wait, 0
        for _ in self._attempts():
            if (found := self._find(mapped_files)) is not None:
                self.entry, self.data = found
                return

    def _find(self, mapped_files: MappedFiles) -> tuple[FileEntry, Buffer] | None:
        """Return the entry and the mapping, in the snapshot or in the slot that is being filled."""
        if self._place.has(self._name):
            staged = _read_existing(self._place.path / self._record("staged"), StagedFile)
            return staged.file, mapped_files.map(self._place.path / self._name, staged.file.size)
        if (copying := self._read_progress()) is None:
            return None
        with suppress(FileNotFoundError):  # the rank has just moved it
            slot = self._place.run.free_directory / copying.slot
            return copying.file, mapped_files.map(slot, copying.file.size)
        return None

    def wait_for(self, nbytes: int) -> None:
        """Wait until the first bytes of the file are final. At its end are the checksums.

        Raises:
            StoreError: as for the constructor; or the rank was lost.
        """
        if self._copied < nbytes:
            for _ in self._attempts():
                if self._place.has(self._name):
                    self._copied = self.entry.size
                elif (copying := self._read_progress()) is not None:
                    self._copied = copying.copied
                if self._copied >= nbytes:
                    break
        if nbytes > self.entry.checksums_at:
            for _ in self._attempts():
                if self._place.has(self._record("entry")):
                    break

    def _record(self, kind: str) -> str:
        return records.file_record(self._name, kind)

    def _read_progress(self) -> StagedFile | None:
        with suppress(StoreError):  # damaged: only the whole file counts
            return read_record(self._place.path / self._record("copying"), StagedFile)
        return None

    def _attempts(self) -> Iterator[None]:
        """Yield while live ranks of this node copy, and `wait` seconds longer; and then raise.

        Lost ranks are not waited for, because the agent may have to rescue an older snapshot.
        """
        place, save_id = self._place, records.save_id_in_name(self._name)
        deadline, look = Deadline(self._wait), Deadline(0.0)
        lost = False
        while not (lost or deadline.has_passed()):
            is_due = look.has_passed()  # look at the ranks before their files
            ranks = copying_ranks(place, save_id) if is_due else {}
            is_own_lost = is_due and not is_rank_alive(place.run, records.rank_in_name(self._name))
            yield
            place.refuse_abandoned()
            failed = read_record(place.path / self._record("failed"), StageOutcome)
            if failed is not None:
                raise StoreError(failed.failure)
            if is_due:
                look = Deadline(LIVENESS_PERIOD)
                lost = (is_own_lost and not place.has(self._name)) or False in ranks.values()
            if ranks:
                deadline = Deadline(self._wait)
            time.sleep(POLL_PAUSE)
        raise StoreError(
            f"{place.path / self._name} is incomplete: its rank, or another rank of this node that "
            "copies its part of the save, has ended or is too slow; see their logs, or pass a "
            "larger Memory(wait=…)"
        )


def _wait_for_pending_manifest(action: Action, seconds: float) -> PendingManifest:
    """Return the pending manifest of a save, which comes with the request to commit the save.

    The request to persist it travels at the same time, and may arrive earlier.

    Raises:
        StoreError: it did not come in time.
    """
    place, kinds = action.place, records.PENDING_KINDS
    names = [records.save_record("pending", action.save_id, kind) for kind in kinds]
    if not any(map(place.has, names)):
        place.wait_for(names[-1], Deadline(seconds))
    return read_pending_manifest(action)


def _read_existing(path: Path, record_type: type[Record]) -> Record:
    record = read_record(path, record_type)
    if record is None:
        raise StoreError(
            f"the record {path} was removed, because the snapshot was freed before this stage "
            "ended: if you need this step in storage, save it again"
        )
    return record


def free(action: Action) -> None:
    """Free the memory of a snapshot, or of some of its saves.

    Raises:
        SnapshotInUse: the snapshot is in use.
    """
    if action.names:
        free_saves(action.place, action.names)
    elif action.why == REPLACED:
        free_replaced(action.place)
    else:
        free_unattended(action.place)
        step = action.place.step
        log.info("run %s: freed step %d: %s", action.place.run.name, step, action.why)


def look_up_root(action: RunAction, observer: Observer) -> None:
    """Read the root of a run without trainers, and pass the result to the observer.

    If the root cannot be read, the observer keeps the earlier result, with `is_reachable=False`.
    """
    run, now = action.run, observer.clock()
    earlier = observer.run(run).root or RootView(read_at=now)
    try:
        path = run.root()
        store = None if path is None else open_store(path)
        lineage = None if store is None else read_lineage(store)
        if lineage is not None and lineage.run != run.name:
            lineage = None
        reads_steps = action.reads_steps and lineage is not None
        steps = Root(store).steps() if store is not None and reads_steps else []
        found = RootView(
            read_at=now,
            is_reachable=store is not None,
            lineage=lineage,
            newest_step=max(steps, default=None),
            has_read_steps=reads_steps,
        )
    except (ShardwiseError, OSError, ValueError) as error:
        log.info("run %s: cannot read its root: %s", run.name, error)
        found = replace(earlier, read_at=now, is_reachable=False)
    observer.set_root(run, found)
