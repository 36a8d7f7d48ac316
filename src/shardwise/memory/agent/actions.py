"""The actions of an agent, except leading a save (`lead.py`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from shardwise.errors import ShardwiseError, StoreError
from shardwise.memory import decide, records
from shardwise.memory.agent.lead import agents_of, attempt, pending_manifest
from shardwise.memory.agent.persist import Throttle, copy_to_store
from shardwise.memory.agent.protect import guard
from shardwise.memory.agent.publication import retain
from shardwise.memory.decide import (
    REPLACED,
    Copy,
    Free,
    Guard,
    LookUpRoot,
    OfSave,
    Rescue,
    Seal,
)
from shardwise.memory.home import ROOT, Place, read_record, write_record
from shardwise.memory.lineage import known_lineage
from shardwise.memory.observe import Observer
from shardwise.memory.reclaim import free_replaced, free_saves, free_unattended
from shardwise.memory.records import (
    Done,
    PendingManifest,
    Persist,
    Protect,
    Staged,
)
from shardwise.memory.remote.peers import Nodes
from shardwise.memory.seal import Mappings, seal
from shardwise.memory.tls import Tls
from shardwise.memory.view import RootView
from shardwise.retention import committed_steps
from shardwise.store import open_store

log = logging.getLogger("shardwise.agent")
W = TypeVar("W")
FILES_AT_A_TIME = 2
AT_ONCE = 0.5


@dataclass(frozen=True, slots=True)
class Sealing:
    """Sealing the files of this node's ranks.

    Attributes:
        mappings: the mappings of these files.
    """

    mappings: Mappings

    def seal(self, action: Seal) -> None:
        """Compute the checksums of staged files."""
        for staged in action.place.staged():
            name = staged.file.name
            if name in action.files and not action.place.has(records.entry(name)):
                data = self.mappings.find(action.place.path / name, staged.file.size)
                write_record(action.place.path / records.entry(name), seal(data, staged.file))


@dataclass(frozen=True, slots=True)
class Following:
    """The actions that the leader of a save requests from every node.

    Attributes:
        node: the name of this node.
        mappings: the mappings of its files.
        tls: certificates for connections to other nodes.
    """

    node: str
    mappings: Mappings
    tls: Tls | None = None

    def copy(self, action: Copy) -> None:
        """Copy this node's files to storage."""
        place = action.place
        self._follow(action, "persist", Persist, lambda request: self._copy(place, request))

    def guard(self, action: Guard) -> None:
        """Make the copies or parity that this node stores for others."""
        place = action.place

        def work(request: Protect) -> int:
            with closing(Nodes(place, request.nodes, self.node, request.wait, self.tls)) as nodes:
                return nodes.retrying(
                    lambda: guard(place, request, nodes, self.node, self.mappings)
                )

        self._follow(action, "protect", Protect, work)

    def retain(self, action: decide.Retain) -> None:
        """Remove old checkpoints from storage, while the request exists."""
        name = records.request(records.RETAIN, action.save_id)

        def work(request: records.Retain) -> int:
            return retain(request, is_wanted=lambda: action.place.has(name))

        self._follow(action, records.RETAIN, records.Retain, work, ends=records.outcome)

    def rescue(self, action: Rescue) -> None:
        """Have a snapshot persisted that was meant for memory only."""
        log.warning("%s: persisting step %d", action.why, action.place.step)
        self._call_for_rescue(action.place, pending_manifest(action))

    def _call_for_rescue(self, place: Place, pending: PendingManifest) -> None:
        """Request the rescue from the leader, or if it is lost, from another node or this one."""
        call = Done(save_id=pending.save_id, stage="rescue", node=self.node)
        infos = agents_of(pending, place.run)
        with closing(Nodes(place, infos, self.node, AT_ONCE, self.tls)) as nodes:
            for node in dict.fromkeys([pending.leader, *(info.node for info in pending.nodes)]):
                try:
                    nodes.tell(node, records.request("rescue", pending.save_id), call)
                except StoreError as error:
                    log.warning("node %s: %s", node, error)
                    continue
                write_record(place.path / records.request("called", pending.save_id), call)
                return

    def _copy(self, place: Place, request: Persist) -> int:
        """Copy files to storage, each as soon as it is staged, several at a time."""
        throttle = Throttle(request.budget)
        store = open_store(request.place)

        def copy(name: str) -> int:
            deadline = time.monotonic() + request.wait
            # A rank's record is valid only once its file exists.
            place.expect(name, deadline, failed=records.failed(name))
            staged = _read(place.path / records.staged(name), Staged).file
            data = self.mappings.find(place.path / name, staged.size)

            def sealed() -> None:
                place.expect(records.entry(name), deadline)

            copy_to_store(data, staged, store, throttle, sealed)
            return staged.size

        with ThreadPoolExecutor(FILES_AT_A_TIME, "shardwise-files") as pool:
            nbytes = sum(pool.map(copy, request.files))
        store.sync()
        return nbytes

    def _follow(
        self,
        action: OfSave,
        stage: str,
        kind: type[W],
        work: Callable[[W], int],
        ends: Callable[[str, str], str] = records.done,
    ) -> None:
        """Carry out a leader's request, and record how it ended."""
        place, save_id = action.place, action.save_id
        request = place.path / records.request(stage, save_id)
        start = time.monotonic()
        nbytes, failure = attempt(place, lambda: work(_read(request, kind)))
        done = Done(
            save_id=save_id,
            stage=stage,
            seconds=time.monotonic() - start,
            bytes=nbytes,
            failure=failure,
            node=self.node,
        )
        write_record(place.path / ends(stage, save_id), done)


def _read(path: Path, kind: type[W]) -> W:
    """Return a record that must exist."""
    record = read_record(path, kind)
    if record is None:
        raise StoreError(f"{path} was removed")
    return record


def free(action: Free) -> None:
    """Free the memory of a snapshot, or of some of its saves.

    Raises:
        SnapshotHeld: the snapshot is in use.
    """
    if action.saves:
        free_saves(action.place, action.saves)
    elif action.why == REPLACED:
        free_replaced(action.place)
    else:
        free_unattended(action.place)
        step = action.place.step
        log.info("run %s: freed step %d: %s", action.place.run.name, step, action.why)


def look_up_root(action: LookUpRoot, observer: Observer) -> None:
    """Read the root of a run without trainers; keep the earlier result if it is unreachable."""
    run, now = action.run, observer.clock()
    known = observer.run(run).root or RootView(looked=now)
    try:
        path = read_record(run.path / ROOT, str)
        store = None if path is None else open_store(path)
        lineage = None if store is None else known_lineage(store)
        if lineage is not None and lineage.run != run.name:
            lineage = None
        asks = action.stored and store is not None and lineage is not None
        found = RootView(
            looked=now,
            reached=store is not None,
            lineage=lineage,
            stored=max(committed_steps(store), default=None) if asks and store else None,
            knows_stored=asks,
        )
    except (ShardwiseError, OSError, ValueError) as error:
        log.info("run %s: cannot read its root: %s", run.name, error)
        found = replace(known, looked=now, reached=False)
    observer.set_root(run, found)
