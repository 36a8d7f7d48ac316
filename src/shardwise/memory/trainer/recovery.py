"""Which snapshot can be had again, out of what the nodes that are left hold."""

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
from shardwise.memory.records import AgentInfo
from shardwise.memory.registry import Known
from shardwise.memory.remote.assembled import AssembledStore, Assembly
from shardwise.memory.remote.search import (
    Held,
    ask_around,
    choose,
    reader,
    suffices,
    what_is_held,
)
from shardwise.memory.seal import is_intact
from shardwise.memory.trainer.snapshots import Snapshots

SETTLE = 5.0
POLL = 0.01


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot that can be had, if there is one, and why no newer one can.

    Attributes:
        nodes: those that hold some of it.
        choosing: seconds that rank 0 took to choose it, once it had heard what nodes hold.
        unasked: nodes of the run that could not be asked, and why, if they may hold something
            newer.
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
    """The newest snapshot of which every file is held somewhere. All ranks together.

    Args:
        step: that of this step only.
        damaged: this one was found to be damaged: only older ones count. It counts again if its
            damaged files were found and removed, or if nodes hold some of it that had not answered
            when it was chosen.
    """
    assembly = find_assembly(snapshots, group, step=step, damaged=damaged)
    nodes = frozenset(assembly.nodes)
    found = Found(-1, None, assembly.newer, nodes, assembly.choosing, assembly.unasked)
    if assembly.step is None:
        return found
    store = AssembledStore(assembly, snapshots.run, snapshots.node, snapshots.tls)
    return replace(found, step=assembly.step, store=store)


def find_assembly(
    snapshots: Snapshots, group: Group, *, step: int | None, damaged: Found | None = None
) -> Assembly:
    """Agree on where the files of that snapshot lie."""
    meeting, run, here = snapshots.meeting, snapshots.run, snapshots.node
    tls = snapshots.tls
    below = None if damaged is None else damaged.step
    complete = _complete_saves(snapshots, group) if below is None else set()

    def speak() -> bytes:
        if not snapshots.is_first_of_node:
            return b""
        removed = False
        if below is None:
            _let_settle(run, complete)
        else:
            removed = remove_damaged(Place(run, below))
        held = what_is_held(run, here)
        return msgspec.msgpack.encode(msgspec.structs.replace(held, removed=removed))

    def answer(said: list[bytes]) -> bytes:
        held = [msgspec.msgpack.decode(each, type=Held) for each in said if each]
        known = snapshots.registry.read({info.node for info in meeting.nodes})
        met = {info.node: info for info in (*known.infos, *meeting.nodes)}
        lineage = meeting.lineage

        def is_enough(held: list[Held], infos: Mapping[str, AgentInfo]) -> bool:
            read = reader(infos, run, here, tls)
            return suffices(held, infos, read, step=step, lineage=lineage)

        first = () if damaged else (is_enough,)
        held, infos = ask_around(held, met, run.name, tls, *first)
        start = time.perf_counter()
        read = reader(infos, run, here, tls)
        tried = () if damaged is None else damaged.nodes
        found = choose(held, infos, read, step=step, below=below, tried=tried, lineage=lineage)
        seconds = time.perf_counter() - start
        unasked = _unasked(known, {each.node for each in held})
        if unasked and is_enough(held, infos):
            unasked = {}
        found = msgspec.structs.replace(found, choosing=seconds, unasked=unasked)
        return msgspec.msgpack.encode(found)

    reply = exchange(group, "looking for snapshots", speak, answer)
    return msgspec.msgpack.decode(reply, type=Assembly)


def _unasked(known: Known, heard: set[str]) -> dict[str, str]:
    """The nodes that the root knows and nobody heard, and why."""
    silent = {
        info.node: f"its agent at {info.url} did not answer, or another agent has replaced it"
        for info in known.infos
    }
    return {node: why for node, why in {**known.unknown, **silent}.items() if node not in heard}


def remove_damaged(place: Place) -> bool:
    """Remove what is not what was committed, so that it is had from elsewhere; if there was any."""
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
        (place.path / records.staged(name)).unlink(missing_ok=True)  # its slot is no more in use
    return bool(damaged)


def _complete_saves(snapshots: Snapshots, group: Group) -> set[str]:
    """The saves that were staged on all nodes: what is still to be committed of them will be."""

    def speak() -> bytes:
        staged: list[str] = []
        begun: list[tuple[str, list[str]]] = []
        for step in snapshots.run.steps() if snapshots.is_first_of_node else ():
            place = Place(snapshots.run, step)
            with suppress(StoreError):  # a record is damaged: nothing comes of it
                staged += [each.file.name for each in place.staged()]
                begun += [
                    (each.save_id, [name for name, _ in each.files]) for each in place.drafts()
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


def _let_settle(run: Run, complete: set[str]) -> None:
    """Give the agents time to commit what was staged completely before the trainers ended.

    A save counts as committed here once the manifest is there: that all other nodes have it too
    may never be, as one may be lost.
    """
    deadline = time.monotonic() + SETTLE
    while time.monotonic() < deadline and any(
        save in complete and place.ended("commit", save) is None and not _has_manifest(place, save)
        for place in (Place(run, step) for step in run.steps())
        for save in place.saves()
    ):
        time.sleep(POLL)


def _has_manifest(place: Place, save_id: str) -> bool:
    with suppress(OSError, StoreError, FormatError):
        return bool(place.manifest_of(save_id))
    return False
