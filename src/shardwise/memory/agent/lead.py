"""How the agent of rank 0's node leads a save through its stages.

It has the pending manifest. It requests each stage from the other nodes by a record, waits for
their
records that the stage is done, and writes the outcome to all nodes. Failed stages have outcomes
too. An action is retried only if it raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from shardwise.errors import ShardwiseError, StoreError
from shardwise.manifest.manifest import FileEntry, complete_manifest, decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory import decide, records
from shardwise.memory.agent.persist import Throttle
from shardwise.memory.agent.protect import protection_of
from shardwise.memory.agent.publication import publication, retention_of
from shardwise.memory.agent.rescue import copy_lost
from shardwise.memory.decide import (
    Commit,
    OfSave,
)
from shardwise.memory.home import ABANDONED, Place, Run, write_record
from shardwise.memory.records import (
    AgentInfo,
    Done,
    PendingManifest,
    Persist,
    Protect,
)
from shardwise.memory.remote.peers import Nodes, of_each
from shardwise.memory.tls import Tls
from shardwise.store import Store

log = logging.getLogger("shardwise.agent")
PATIENCE = 5.0  # seconds to wait for a node that does not answer, during a rescue


@dataclass(frozen=True, slots=True)
class Leading:
    """The actions of the node that leads a save.

    Attributes:
        node: the name of this node.
        tls: certificates for connections to other nodes.
    """

    node: str
    tls: Tls | None = None

    def commit(self, action: Commit) -> None:
        """Collect the entries of all files, and write the manifest to all nodes."""
        self._finish(action, "commit", self._commit)

    def protect(self, action: decide.Protect) -> None:
        """Have all nodes make the copies or parity that were requested."""
        self._finish(action, "protect", self._protect)

    def persist(self, action: decide.Persist) -> None:
        """Have all nodes copy their files to storage, and publish the manifest there.

        If the snapshot is rescued, another node than that of rank 0 may do this.
        """
        self._finish(action, "persist", self._persist)

    def _finish(
        self,
        action: OfSave,
        stage: str,
        work: Callable[[Place, PendingManifest, Nodes], int],
    ) -> None:
        place = action.place
        pending = pending_manifest(action)
        start = time.monotonic()
        infos = agents_of(pending, place.run)
        rescuing = place.has(records.request("rescue", pending.save_id))
        wait = min(pending.wait, PATIENCE) if rescuing else pending.wait
        with closing(Nodes(place, infos, self.node, wait, self.tls)) as nodes:
            nbytes, failure = attempt(place, lambda: work(place, pending, nodes))
            done = Done(
                save_id=pending.save_id,
                stage=stage,
                seconds=time.monotonic() - start,
                bytes=nbytes,
                failure=failure,
                node=self.node,
                bytes_held=pending.bytes_held,
                bytes_total=pending.bytes_total,
                files=len(pending.files),
            )
            nodes.tell_all(records.outcome(stage, pending.save_id), done)

    def _commit(self, place: Place, pending: PendingManifest, nodes: Nodes) -> int:
        by_node = _files_by_node(pending)

        def entries_of(node: str) -> dict[str, FileEntry]:
            return {
                name: nodes.expect(
                    node, records.entry(name), FileEntry, failed=records.failed(name)
                )
                for name in by_node[node]
            }

        found = of_each(by_node, entries_of)
        entries = [found[node][name] for name, node in pending.files]
        manifest = complete_manifest(pending.manifest.encode(), entries)
        # First on this node: a lost node whose files are not needed must not delay the commit here.
        nodes.tell(self.node, MANIFEST, manifest)
        nodes.tell_others((records.pending_copy(pending.save_id), pending), (MANIFEST, manifest))
        return sum(each.size for each in entries)

    def _protect(self, place: Place, pending: PendingManifest, nodes: Nodes) -> int:
        if not (pending.copies or pending.parity):
            return 0
        manifest = decode_manifest(place.manifest_of(pending.save_id))
        request = Protect(
            save_id=pending.save_id,
            protection=protection_of(pending, list(manifest.files)),
            nodes=agents_of(pending, place.run),
            wait=pending.wait,
            rings=len(pending.rings),
        )
        nodes.tell_all(records.request("protect", pending.save_id), request)
        done, asked = (each("protect", pending.save_id) for each in (records.done, records.request))
        named = [info.node for info in pending.nodes]
        ended = of_each(named, lambda node: nodes.expect(node, done, Done, asked=asked))
        for node, each in ended.items():
            if each.failure:
                raise StoreError(f"node {node}: {each.failure}")
        return sum(each.bytes for each in ended.values())

    def _persist(self, place: Place, pending: PendingManifest, nodes: Nodes) -> int:
        with publication(pending) as publish:
            copied = 0 if publish.is_published else self._copy(place, pending, nodes, publish.store)
            publish.finish(place.manifest_of(pending.save_id))
        if (request := retention_of(pending)) is not None:
            write_record(place.path / records.request(records.RETAIN, pending.save_id), request)
        return copied

    def _copy(self, place: Place, pending: PendingManifest, nodes: Nodes, to: Store) -> int:
        """Have each node copy its own files; copy those of lost nodes here; return the bytes."""
        by_node = _files_by_node(pending)

        def ask(node: str) -> bool:
            return self._ask_to_persist(place, pending, nodes, node, by_node[node], str(to))

        reached = of_each(by_node, ask)  # request from all nodes before waiting for any
        following = [node for node in by_node if reached[node]]
        ended = of_each(following, lambda node: self._persisted(place, pending, nodes, node))
        for node, done in ended.items():
            if done is not None and done.failure:
                raise StoreError(f"node {node}: {done.failure}")
        nbytes = sum(done.bytes for done in ended.values() if done is not None)
        lost = [node for node in by_node if ended.get(node) is None]
        commit = nodes.expect(self.node, records.outcome("commit", pending.save_id), Done)
        if commit.failure:
            raise StoreError(f"the save was never committed: {commit.failure}")
        if lost:
            names = [name for node in lost for name in by_node[node]]
            infos = agents_of(pending, place.run)
            nbytes += copy_lost(
                place, names, infos, self.node, self.tls, to, Throttle(pending.budget)
            )
        return nbytes

    def _ask_to_persist(
        self,
        place: Place,
        pending: PendingManifest,
        nodes: Nodes,
        node: str,
        files: list[str],
        to: str,
    ) -> bool:
        """Request that a node copies its files; return False if the node is lost."""
        request = Persist(
            save_id=pending.save_id, place=to, files=files, budget=pending.budget, wait=pending.wait
        )
        try:
            nodes.tell(node, records.request("persist", pending.save_id), request)
        except StoreError as error:
            place.refuse_abandoned()
            log.warning("node %s is lost: %s", node, error)
            return False
        return True

    def _persisted(
        self, place: Place, pending: PendingManifest, nodes: Nodes, node: str
    ) -> Done | None:
        """Return how copying has ended on a node; None if the node is lost."""
        done, request = (
            each("persist", pending.save_id) for each in (records.done, records.request)
        )
        try:
            return nodes.expect(node, done, Done, asked=request)
        except StoreError as error:
            place.refuse_abandoned()
            log.warning("node %s is lost: %s", node, error)
            return None


def pending_manifest(action: OfSave) -> PendingManifest:
    """Return the pending manifest of a save, or the followers' copy of it."""
    for each in action.place.pending_manifests() + action.place.pending_copies():
        if each.save_id == action.save_id:
            return each
    raise StoreError(f"{action.place.path}: the pending manifest of {action.save_id} was removed")


def _files_by_node(pending: PendingManifest) -> dict[str, list[str]]:
    """Return the names of each node's files."""
    found: dict[str, list[str]] = {}
    for name, node in pending.files:
        found.setdefault(node, []).append(name)
    return found


def agents_of(pending: PendingManifest, run: Run) -> list[AgentInfo]:
    """Return the agents of a snapshot's nodes, as the run's newest pending manifest lists them."""
    if len(pending.nodes) == 1:  # only this node
        return pending.nodes
    places = [Place(run, step) for step in run.steps()]
    listings = [pending, *(each for place in places for each in place.pending_manifests())]
    known = {info.node: info for each in listings for info in each.nodes}
    return [known[info.node] for info in pending.nodes]


def attempt(place: Place, work: Callable[[], int]) -> tuple[int, str]:
    """Return the result of `work`, or why it failed."""
    try:
        return work(), ""
    except Exception as error:
        level = logging.INFO if place.has(ABANDONED) else logging.ERROR
        is_usual = isinstance(error, (ShardwiseError, OSError))
        log.log(level, "%s: %s", type(error).__name__, error, exc_info=not is_usual)
        return 0, f"{type(error).__name__}: {error}"
