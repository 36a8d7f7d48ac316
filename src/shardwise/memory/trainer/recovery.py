"""Recovery: finding the newest snapshot that the remaining nodes can provide."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.errors import FormatError, StoreError
from shardwise.manifest.manifest import decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory import records
from shardwise.memory.home import Place, Run
from shardwise.memory.observe import RecordCache, view_run
from shardwise.memory.records import AgentInfo
from shardwise.memory.registry import RegisteredNodes
from shardwise.memory.remote.assembled import AssembledStore, Assembly
from shardwise.memory.remote.search import (
    Held,
    Search,
    ask_around,
    held_here,
    reader,
)
from shardwise.memory.seal import is_intact
from shardwise.memory.trainer.snapshots import Snapshots

COMMIT_TIMEOUT = 5.0
POLL = 0.01


@dataclass(frozen=True, slots=True)
class Found:
    """The newest snapshot that can be restored, if any.

    Attributes:
        step: its step; -1 if there is none.
        store: its files.
        newer: newer steps that cannot be restored, and why.
        nodes: the nodes that hold some of its files, or of damaged ones that were tried before.
        choosing: seconds that rank 0 took to choose it, after it knew what nodes hold.
        unasked: nodes of the run that could not be asked and may hold something newer, and why.
    """

    step: int
    store: AssembledStore | None
    newer: list[tuple[int, str]]
    nodes: frozenset[str] = frozenset()
    choosing: float = 0.0
    unasked: dict[str, str] = field(default_factory=dict)


def find_snapshot(
    snapshots: Snapshots, group: Group, *, step: int | None, damaged: Found | None = None
) -> Found:
    """Return the newest snapshot all of whose files can be read. All ranks call this together.

    Args:
        snapshots: the snapshots of the run.
        group: the ranks.
        step: consider only this step.
        damaged: a snapshot that was found to be damaged: consider only older ones. It is considered
            again if its damaged files were removed, or if nodes hold some of its files that had not
            answered when it was chosen.
    """
    assembly = find_assembly(snapshots, group, step=step, damaged=damaged)
    nodes = frozenset(assembly.nodes) | (damaged.nodes if damaged else frozenset())
    found = Found(-1, None, assembly.newer, nodes, assembly.choosing, assembly.unasked)
    if assembly.step is None:
        return found
    store = AssembledStore(assembly, snapshots.run, snapshots.node, snapshots.tls)
    return replace(found, step=assembly.step, store=store)


def find_assembly(
    snapshots: Snapshots, group: Group, *, step: int | None, damaged: Found | None = None
) -> Assembly:
    """Agree on the snapshot, and return where its files are."""
    membership, run, here = snapshots.membership, snapshots.run, snapshots.node
    tls = snapshots.tls
    below = None if damaged is None else damaged.step
    complete = _complete_saves(snapshots, group) if below is None else set()

    def speak() -> bytes:
        if not snapshots.is_first_of_node:
            return b""
        removed = False
        if below is None:
            _wait_for_commits(run, complete)
        else:
            removed = remove_damaged(Place(run, below))
        held = held_here(run, here)
        return msgspec.msgpack.encode(msgspec.structs.replace(held, removed=removed))

    def answer(said: list[bytes]) -> bytes:
        held = [msgspec.msgpack.decode(each, type=Held) for each in said if each]
        known = snapshots.registry.read({info.node for info in membership.nodes})
        met = {info.node: info for info in (*known.infos, *membership.nodes)}
        lineage = membership.lineage

        def search(held: list[Held], infos: Mapping[str, AgentInfo]) -> Search:
            return Search(held, infos, reader(infos, run, here, tls), lineage)

        def suffices(held: list[Held], infos: Mapping[str, AgentInfo]) -> bool:
            return not damaged and search(held, infos).is_complete(step)

        heard = search(*ask_around(held, met, run.name, tls, suffices))
        start = time.perf_counter()
        tried = () if damaged is None else damaged.nodes
        found = heard.choose(step, below=below, tried=tried)
        seconds = time.perf_counter() - start
        unasked = _unasked(known, {each.node for each in heard.held})
        if unasked and heard.is_complete(step):
            unasked = {}
        found = msgspec.structs.replace(found, choosing=seconds, unasked=unasked)
        return msgspec.msgpack.encode(found)

    reply = exchange(group, "looking for snapshots", speak, answer)
    return msgspec.msgpack.decode(reply, type=Assembly)


def _unasked(known: RegisteredNodes, heard: set[str]) -> dict[str, str]:
    """Return the nodes in the registry that were not asked, and why."""
    silent = {
        info.node: f"its agent at {info.url} did not answer, or another agent has replaced it"
        for info in known.infos
    }
    return {node: why for node, why in {**known.unreachable, **silent}.items() if node not in heard}


def remove_damaged(place: Place) -> bool:
    """Delete damaged files, so that they are read from elsewhere, and return whether any were."""
    try:
        manifest = decode_manifest((place.path / MANIFEST).read_bytes())
    except FileNotFoundError:
        return False
    except FormatError:
        damaged = [MANIFEST]
    else:
        damaged = [
            entry.name
            for entry in manifest.files
            if place.has(entry.name) and not is_intact(place.path / entry.name, entry)
        ]
    for name in damaged:
        (place.path / name).unlink(missing_ok=True)
        (place.path / records.staged_record(name)).unlink(
            missing_ok=True
        )  # marks its slot as in use
    return bool(damaged)


def _complete_saves(snapshots: Snapshots, group: Group) -> set[str]:
    """Return the saves that were staged on all nodes. Their agents will commit them."""

    def speak() -> bytes:
        staged: list[str] = []
        begun: list[tuple[str, list[str]]] = []
        for step in snapshots.run.steps() if snapshots.is_first_of_node else ():
            place = Place(snapshots.run, step)
            with suppress(StoreError):  # a record is damaged, so the save will not be committed
                staged += [each.file.name for each in place.staged()]
                begun += [
                    (each.save_id, [name for name, _ in each.files])
                    for each in place.pending_manifests()
                ]
        return msgspec.msgpack.encode((staged, begun))

    def answer(said: list[bytes]) -> bytes:
        kind = tuple[list[str], list[tuple[str, list[str]]]]
        heard = [msgspec.msgpack.decode(each, type=kind) for each in said]
        staged = {name for names, _ in heard for name in names}
        complete = {save for _, begun in heard for save, files in begun if staged.issuperset(files)}
        return msgspec.msgpack.encode(complete)

    reply = exchange(group, "asking what was staged", speak, answer)
    return msgspec.msgpack.decode(reply, type=set[str])


def _wait_for_commits(run: Run, complete: set[str]) -> None:
    """Wait a limited time for agents to commit what was staged before the trainers ended.

    A save counts as committed once its manifest is on this node. Waiting for all other nodes could
    be in vain, as one may be lost.
    """
    deadline, cache = time.monotonic() + COMMIT_TIMEOUT, RecordCache()
    while time.monotonic() < deadline and any(
        save.save_id in complete
        and save.has_staged
        and not save.state("commit").has_ended
        and snapshot.committed_save != save.save_id
        for snapshot in view_run(run, cache).snapshots
        for save in snapshot.saves.values()
    ):
        time.sleep(POLL)
