"""The actions of an agent, except those of the node that leads a save (`lead.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from shardwise.deadline import Deadline
from shardwise.errors import ShardwiseError, StoreError
from shardwise.manifest.manifest import step_directory
from shardwise.memory import records
from shardwise.memory.agent.lead import (
    OpenedStores,
    agents_of,
    read_pending_manifest,
    try_stage,
)
from shardwise.memory.agent.mirrors import set_mirror_task
from shardwise.memory.agent.protect import protect_others
from shardwise.memory.decide import REPLACED, Action, RunAction
from shardwise.memory.files import read_record, write_record
from shardwise.memory.home import SnapshotDirectory
from shardwise.memory.lineage import read_lineage
from shardwise.memory.observe import Observer
from shardwise.memory.options import Tls
from shardwise.memory.reclaim import free_replaced, free_saves, free_unattended
from shardwise.memory.records import (
    PersistRequest,
    StagedFile,
    StageOutcome,
)
from shardwise.memory.remote.snapshot_nodes import Nodes
from shardwise.memory.seal import MappedFiles, seal
from shardwise.memory.view import RootView
from shardwise.retention import committed_steps
from shardwise.store import Store, open_store
from shardwise.tiers.copy_file import FileCopier
from shardwise.tiers.options import StorageTask

log = logging.getLogger("shardwise.agent")
Record = TypeVar("Record")
FILES_AT_ONCE = 2
RESCUE_REQUEST_TIMEOUT = 0.5


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

    def copy(self, action: Action) -> None:
        """Copy this node's files to storage."""
        self._fulfil_request(
            action,
            "persist",
            PersistRequest,
            lambda request: self._copy_files(action.place, request),
        )

    def protect_others(self, action: Action) -> None:
        """Make the copies or parity that this node stores for others."""
        place = action.place

        def make_copies_or_parity(_: StageOutcome) -> int:
            pending = read_pending_manifest(action)
            infos = agents_of(pending, place.run)
            with closing(Nodes(place, infos, self.node, pending.wait, self.tls)) as nodes:
                return nodes.retry(
                    lambda: protect_others(place, pending, nodes, self.node, self.mapped_files)
                )

        self._fulfil_request(action, "protect", StageOutcome, make_copies_or_parity)

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

        self._fulfil_request(
            action,
            records.REMOVE_OLD,
            StorageTask,
            remove,
            kind="all",
        )

    def rescue(self, action: Action) -> None:
        """Request to persist a snapshot that was for memory only.

        Ask the leader first, then the other nodes, including this node, until a node accepts.
        """
        place = action.place
        log.warning("%s: persisting step %d", action.why, place.step)
        pending = read_pending_manifest(action)
        request = StageOutcome(save_id=pending.save_id, stage="rescue", node=self.node)
        infos = agents_of(pending, place.run)
        with closing(Nodes(place, infos, self.node, RESCUE_REQUEST_TIMEOUT, self.tls)) as nodes:
            for node in dict.fromkeys([pending.leader, *(info.node for info in pending.nodes)]):
                try:
                    nodes.write(node, records.save_record("rescue", pending.save_id), request)
                except StoreError as error:
                    log.warning("node %s: %s", node, error)
                    continue
                # This agent's own record: the rescue was requested, so it is not requested again.
                write_record(place.path / records.save_record("called", pending.save_id), request)
                return

    def _copy_files(self, place: SnapshotDirectory, request: PersistRequest) -> int:
        """Copy several files at a time to storage, each as soon as it is staged."""
        copier = FileCopier(request.budget)

        def copy(name: str, store: Store) -> int:
            deadline = Deadline(request.wait)
            # The record of a staged file is valid only once the file exists.
            place.wait_for(name, deadline, failure_name=records.file_record(name, "failed"))
            entry = _read_existing(
                place.path / records.file_record(name, "staged"), StagedFile
            ).file
            data = self.mapped_files.map(place.path / name, entry.size)

            def wait_until_sealed() -> None:
                place.wait_for(records.file_record(name, "entry"), deadline)

            copier.copy_from_memory(data, entry, store, wait_until_sealed)
            return entry.size

        with (
            self.stores.open(request.root) as root,
            ThreadPoolExecutor(FILES_AT_ONCE, "shardwise-files") as pool,
        ):
            store = root.at(step_directory(place.step))
            return sum(pool.map(lambda name: copy(name, store), request.files))

    def _fulfil_request(
        self,
        action: Action,
        stage: str,
        record_type: type[Record],
        work: Callable[[Record], int],
        kind: records.RecordKind = "done",
    ) -> None:
        """Read a leader's request, do the work, and record the result.

        Args:
            record_type: the type of the request.
            work: takes the request, and returns the number of bytes processed.
            kind: the kind of the record that gets the result.
        """
        place, save_id = action.place, action.save_id
        path = place.path / records.save_record(stage, save_id)
        done = try_stage(
            place, stage, save_id, self.node, lambda: work(_read_existing(path, record_type))
        )
        write_record(place.path / records.save_record(stage, save_id, kind), done)


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
        steps = committed_steps(store) if store is not None and reads_steps else []
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
