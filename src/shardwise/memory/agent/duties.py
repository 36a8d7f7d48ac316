"""What an agent does with a snapshot, stage by stage, as its records ask for it.

    staged ─seal─▶ entry ─commit─▶ manifest ─protect─▶ … ─persist─▶ in storage

A duty is a function that looks at one snapshot, does what there is to do now, and says whether it
did anything. The agent of rank 0's node leads: it has the draft, asks the other nodes for each
stage by a record, and gathers their records that it has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from shardwise.errors import ShardwiseError, StoreError
from shardwise.manifest.manifest import FileEntry, complete_manifest, decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory import records
from shardwise.memory.agent.guard import guard, protection_of
from shardwise.memory.agent.persist import Throttle, copy_to_store
from shardwise.memory.agent.publication import publication, retain, retention_of
from shardwise.memory.agent.rescue import copy_lost
from shardwise.memory.home import ABANDONED, Place, Run, read_record, write_record
from shardwise.memory.records import (
    AgentInfo,
    Done,
    PendingManifest,
    Persist,
    Protect,
    Retain,
    Staged,
)
from shardwise.memory.remote.peers import Nodes, of_each
from shardwise.memory.seal import Mappings
from shardwise.memory.tls import Tls
from shardwise.store import Store, open_store

log = logging.getLogger("shardwise.agent")
W = TypeVar("W")
FILES_AT_A_TIME = 2
AT_ONCE = 0.5
PATIENCE = 5.0  # with nodes that do not answer, when others are lost


@dataclass(frozen=True, slots=True)
class Leading:
    """The duties of the node that has the draft of a snapshot.

    Attributes:
        node: the name of this node.
        tls: by what nodes know each other.
    """

    node: str
    tls: Tls | None = None

    def commit(self, place: Place) -> bool:
        """Gather the entries of all files, and give all nodes the manifest: the commit."""
        return self._lead(place, "commit", lambda draft: True, self._commit)

    def protect(self, place: Place) -> bool:
        """Have all nodes make the redundancy that was asked for."""
        return self._lead(place, "protect", lambda draft: True, self._protect)

    def persist(self, place: Place) -> bool:
        """Have all nodes copy their files to storage, and publish the manifest there.

        A snapshot that is to be rescued is persisted also by another node than that of its draft.
        """

        def wanted(draft: PendingManifest) -> bool:
            return draft.durable or place.has(records.request("rescue", draft.save_id))

        busy = self._lead(place, "persist", wanted, self._persist)
        for draft in place.terms():
            ended = place.has(records.outcome("persist", draft.save_id))
            if not ended and place.has(records.request("rescue", draft.save_id)):
                busy = True
                self._finish(place, "persist", draft, self._persist)
        return busy

    def _lead(
        self,
        place: Place,
        stage: str,
        wanted: Callable[[PendingManifest], bool],
        work: Callable[[Place, PendingManifest, Nodes], int],
    ) -> bool:
        busy = False
        for draft in place.drafts():
            commit = place.ended("commit", draft.save_id)
            after = stage != "protect" or (commit is not None and not commit.failure)
            ended = place.has(records.outcome(stage, draft.save_id))
            if draft.leader != self.node or ended or not after or not wanted(draft):
                continue
            busy = True
            self._finish(place, stage, draft, work)
        return busy

    def _finish(
        self,
        place: Place,
        stage: str,
        draft: PendingManifest,
        work: Callable[[Place, PendingManifest, Nodes], int],
    ) -> None:
        start = time.monotonic()
        infos = agents_of(draft, place.run)
        rescuing = place.has(records.request("rescue", draft.save_id))
        wait = min(draft.wait, PATIENCE) if rescuing else draft.wait
        with closing(Nodes(place, infos, self.node, wait, self.tls)) as nodes:
            nbytes, failure = attempt(place, lambda: work(place, draft, nodes))
            done = Done(
                save_id=draft.save_id,
                stage=stage,
                seconds=time.monotonic() - start,
                bytes=nbytes,
                failure=failure,
                node=self.node,
                bytes_held=draft.bytes_held,
                bytes_total=draft.bytes_total,
                files=len(draft.files),
            )
            nodes.tell_all(records.outcome(stage, draft.save_id), done)

    def _commit(self, place: Place, draft: PendingManifest, nodes: Nodes) -> int:
        by_node = _files_by_node(draft)

        def entries_of(node: str) -> dict[str, FileEntry]:
            return {
                name: nodes.expect(
                    node, records.entry(name), FileEntry, failed=records.failed(name)
                )
                for name in by_node[node]
            }

        found = of_each(by_node, entries_of)
        entries = [found[node][name] for name, node in draft.files]
        manifest = complete_manifest(draft.manifest.encode(), entries)
        # Here first: a node that is lost, and none of whose files it needs, delays it nowhere else.
        nodes.tell(self.node, MANIFEST, manifest)
        nodes.tell_others((records.terms(draft.save_id), draft), (MANIFEST, manifest))
        return sum(each.size for each in entries)

    def _protect(self, place: Place, draft: PendingManifest, nodes: Nodes) -> int:
        if not (draft.copies or draft.parity):
            return 0
        manifest = decode_manifest(place.manifest_of(draft.save_id))
        wish = Protect(
            save_id=draft.save_id,
            protection=protection_of(draft, list(manifest.files)),
            nodes=agents_of(draft, place.run),
            wait=draft.wait,
            rings=len(draft.rings),
        )
        nodes.tell_all(records.request("protect", draft.save_id), wish)
        done, request = (each("protect", draft.save_id) for each in (records.done, records.request))
        named = [info.node for info in draft.nodes]
        ended = of_each(named, lambda node: nodes.expect(node, done, Done, asked=request))
        for node, each in ended.items():
            if each.failure:
                raise StoreError(f"node {node}: {each.failure}")
        return sum(each.bytes for each in ended.values())

    def _persist(self, place: Place, draft: PendingManifest, nodes: Nodes) -> int:
        with publication(draft) as publish:
            copied = 0 if publish.is_published else self._copy(place, draft, nodes, publish.store)
            publish.finish(place.manifest_of(draft.save_id))
        if (wish := retention_of(draft)) is not None:
            write_record(place.path / records.request(records.RETAIN, draft.save_id), wish)
        return copied

    def _copy(self, place: Place, draft: PendingManifest, nodes: Nodes, to: Store) -> int:
        """Each node copies its own files; this one those of nodes that are lost."""
        by_node = _files_by_node(draft)

        def ask(node: str) -> bool:
            return self._ask_to_persist(place, draft, nodes, node, by_node[node], str(to))

        heard = of_each(by_node, ask)  # all, before any is waited for
        hearing = [node for node in by_node if heard[node]]
        ended = of_each(hearing, lambda node: self._persisted(place, draft, nodes, node))
        for node, done in ended.items():
            if done is not None and done.failure:
                raise StoreError(f"node {node}: {done.failure}")
        nbytes = sum(done.bytes for done in ended.values() if done is not None)
        lost = [node for node in by_node if ended.get(node) is None]
        commit = nodes.expect(self.node, records.outcome("commit", draft.save_id), Done)
        if commit.failure:
            raise StoreError(f"it was never committed: {commit.failure}")
        if lost:
            names = [name for node in lost for name in by_node[node]]
            infos = agents_of(draft, place.run)
            nbytes += copy_lost(
                place, names, infos, self.node, self.tls, to, Throttle(draft.budget)
            )
        return nbytes

    def _ask_to_persist(
        self,
        place: Place,
        draft: PendingManifest,
        nodes: Nodes,
        node: str,
        files: list[str],
        to: str,
    ) -> bool:
        """Ask a node to copy its files; whether it has heard."""
        wish = Persist(
            save_id=draft.save_id, place=to, files=files, budget=draft.budget, wait=draft.wait
        )
        try:
            nodes.tell(node, records.request("persist", draft.save_id), wish)
        except StoreError as error:
            place.refuse_abandoned()
            log.warning("node %s is lost: %s", node, error)
            return False
        return True

    def _persisted(
        self, place: Place, draft: PendingManifest, nodes: Nodes, node: str
    ) -> Done | None:
        """How a node has ended; None if it is lost."""
        done, request = (each("persist", draft.save_id) for each in (records.done, records.request))
        try:
            return nodes.expect(node, done, Done, asked=request)
        except StoreError as error:
            place.refuse_abandoned()
            log.warning("node %s is lost: %s", node, error)
            return None


def _files_by_node(draft: PendingManifest) -> dict[str, list[str]]:
    """The names of the files of each node that has any."""
    found: dict[str, list[str]] = {}
    for name, node in draft.files:
        found.setdefault(node, []).append(name)
    return found


def agents_of(draft: PendingManifest, run: Run) -> list[AgentInfo]:
    """The agents of a snapshot's nodes, as the newest of the run's drafts know them."""
    if len(draft.nodes) == 1:  # this one
        return draft.nodes
    drafts = [draft, *(each for step in run.steps() for each in Place(run, step).drafts())]
    known = {info.node: info for each in drafts for info in each.nodes}
    return [known[info.node] for info in draft.nodes]


@dataclass(frozen=True, slots=True)
class Following:
    """The duties of every node: what the leader of a snapshot asks it for.

    Attributes:
        node: the name of this node.
        mappings: of its files.
        tls: by what nodes know each other.
    """

    node: str
    mappings: Mappings
    tls: Tls | None = None

    def persist(self, place: Place) -> bool:
        """Copy this node's files to storage."""
        return self._follow(place, "persist", Persist, lambda wish: self._copy(place, wish))

    def protect(self, place: Place) -> bool:
        """Keep for other nodes what protects them."""

        def work(wish: Protect) -> int:
            with closing(Nodes(place, wish.nodes, self.node, wish.wait, self.tls)) as nodes:
                return nodes.insist(lambda: guard(place, wish, nodes, self.node, self.mappings))

        return self._follow(place, "protect", Protect, work)

    def retain(self, place: Place) -> bool:
        """Remove what storage no longer keeps, while the record that asks for it is there."""

        def work(wish: Retain) -> int:
            request = records.request(records.RETAIN, wish.save_id)
            return retain(wish, is_wanted=lambda: place.has(request))

        return self._follow(place, records.RETAIN, Retain, work, told=records.outcome)

    def rescue(self, place: Place, why: str) -> bool:
        """Have a snapshot persisted, unless that is under way or not wanted."""
        save_id = decode_manifest((place.path / MANIFEST).read_bytes()).save_id
        called = [records.request(each, save_id) for each in ("rescue", "called")]
        if any(map(place.has, [records.outcome("persist", save_id), *called])):
            return False
        for draft in place.drafts() + place.terms():
            if draft.save_id == save_id and draft.rescue and not draft.durable:
                log.warning("%s: step %d is to be persisted", why, place.step)
                self._call_for_rescue(place, draft)
                return True
        return False

    def _call_for_rescue(self, place: Place, draft: PendingManifest) -> None:
        """Tell the node that leads; or another, if that is lost; or do it here."""
        call = Done(save_id=draft.save_id, stage="rescue", node=self.node)
        infos = agents_of(draft, place.run)
        with closing(Nodes(place, infos, self.node, AT_ONCE, self.tls)) as nodes:
            for node in dict.fromkeys([draft.leader, *(info.node for info in draft.nodes)]):
                try:
                    nodes.tell(node, records.request("rescue", draft.save_id), call)
                except StoreError as error:
                    log.warning("node %s: %s", node, error)
                    continue
                write_record(place.path / records.request("called", draft.save_id), call)
                return

    def _copy(self, place: Place, wish: Persist) -> int:
        """Copy files to storage, each as soon as it is staged; those of several ranks at a time."""
        throttle = Throttle(wish.budget)
        store = open_store(wish.place)

        def copy(name: str) -> int:
            deadline = time.monotonic() + wish.wait
            place.expect(name, deadline, failed=records.failed(name))  # only then its record counts
            staged = _read(place.path / records.staged(name), Staged).file
            data = self.mappings.find(place.path / name, staged.size)

            def sealed() -> None:
                place.expect(records.entry(name), deadline)

            copy_to_store(data, staged, store, throttle, sealed)
            return staged.size

        with ThreadPoolExecutor(FILES_AT_A_TIME, "shardwise-files") as pool:
            nbytes = sum(pool.map(copy, wish.files))
        store.sync()
        return nbytes

    def _follow(
        self,
        place: Place,
        stage: str,
        kind: type[W],
        work: Callable[[W], int],
        told: Callable[[str, str], str] = records.done,
    ) -> bool:
        busy = False
        for save_id in records.requested(stage, place.named(".json")):
            if place.has(told(stage, save_id)):
                continue
            busy = True
            start = time.monotonic()
            request = place.path / records.request(stage, save_id)
            nbytes, failure = attempt(place, partial(_fulfil, request, kind, work))
            done = Done(
                save_id=save_id,
                stage=stage,
                seconds=time.monotonic() - start,
                bytes=nbytes,
                failure=failure,
                node=self.node,
            )
            write_record(place.path / told(stage, save_id), done)
        return busy


def _fulfil(request: Path, kind: type[W], work: Callable[[W], int]) -> int:
    """Do what a record asks for."""
    return work(_read(request, kind))


def _read(path: Path, kind: type[W]) -> W:
    """A record that is there."""
    record = read_record(path, kind)
    if record is None:
        raise StoreError(f"{path} is gone")
    return record


def attempt(place: Place, work: Callable[[], int]) -> tuple[int, str]:
    """What some work on a snapshot gives, or why it cannot be done."""
    try:
        return work(), ""
    except Exception as error:
        level = logging.INFO if place.has(ABANDONED) else logging.ERROR
        is_usual = isinstance(error, (ShardwiseError, OSError))
        log.log(level, "%s: %s", type(error).__name__, error, exc_info=not is_usual)
        return 0, f"{type(error).__name__}: {error}"
