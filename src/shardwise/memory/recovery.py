"""Which snapshot can be had again, out of what the nodes that are left hold."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.errors import FormatError, StoreError
from shardwise.manifest.manifest import LARGEST_MANIFEST, Manifest, decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory import notes
from shardwise.memory.assembled import AssembledStore, Assembly
from shardwise.memory.client import AgentClient
from shardwise.memory.home import Run
from shardwise.memory.notes import Card, Protect
from shardwise.memory.place import Place
from shardwise.memory.rebuild import assemblable
from shardwise.memory.snapshots import Snapshots

SETTLE = 5.0
POLL = 0.01
ABSENT = 2.0


class Held(msgspec.Struct, array_like=True):
    """What a node holds of a run: file names and sizes by step, and the nodes it knows of."""

    node: str
    steps: dict[int, dict[str, int]]
    knows: list[Card]


@dataclass(frozen=True, slots=True)
class Found:
    """A snapshot that can be had, if there is one, and why no newer one can."""

    step: int
    store: AssembledStore | None
    newer: list[tuple[int, str]]


def find_snapshot(
    snapshots: Snapshots, group: Group, *, step: int | None, below: int | None
) -> Found:
    """The newest snapshot of which every file is held somewhere. All ranks together.

    Args:
        step: that of this step only.
        below: only older ones: this one has turned out to be damaged.
    """
    assembly = find_assembly(snapshots, group, step=step, below=below)
    if assembly.step is None:
        return Found(-1, None, assembly.newer)
    store = AssembledStore(assembly, snapshots.run, snapshots.node)
    return Found(assembly.step, store, assembly.newer)


def find_assembly(
    snapshots: Snapshots, group: Group, *, step: int | None, below: int | None
) -> Assembly:
    """Agree on where the files of that snapshot lie."""
    meeting = snapshots.meeting

    def speak() -> bytes:
        if not snapshots.is_first_of_node:
            return b""
        _let_settle(snapshots.run, snapshots.node)
        return msgspec.msgpack.encode(what_is_held(snapshots.run, snapshots.node))

    def answer(said: list[bytes]) -> bytes:
        held = [msgspec.msgpack.decode(each, type=Held) for each in said if each]
        cards = {card.node: card for card in meeting.nodes}
        for each in held:
            for card in each.knows:
                cards.setdefault(card.node, card)
        present = {each.node for each in held}
        for card in cards.values():
            if card.node not in present:
                with suppress(StoreError, OSError):
                    held.append(_ask(card, meeting.run))
        found = choose(held, cards, snapshots.run, step=step, below=below)
        return msgspec.msgpack.encode(found)

    reply = exchange(group, "looking for snapshots", speak, answer)
    return msgspec.msgpack.decode(reply, type=Assembly)


def what_is_held(run: Run, node: str) -> Held:
    """What this node holds of a run."""
    steps: dict[int, dict[str, int]] = {}
    knows: dict[str, Card] = {}
    for step in run.steps():
        place = Place(run, step)
        with suppress(FileNotFoundError):
            found = place.path.iterdir()
            steps[step] = {each.name: each.stat().st_size for each in found}
        for draft in place.drafts():
            knows |= {card.node: card for card in draft.nodes}
    return Held(node, steps, list(knows.values()))


def choose(
    held: list[Held],
    cards: Mapping[str, Card],
    run: Run,
    *,
    step: int | None,
    below: int | None,
) -> Assembly:
    """The newest step whose manifest some node has, and all of whose files some nodes have."""
    newer: list[tuple[int, str]] = []
    steps = sorted({s for each in held for s in each.steps}, reverse=True)
    for candidate in steps:
        if step not in (None, candidate) or (below is not None and candidate >= below):
            continue
        having = [each for each in held if MANIFEST in each.steps.get(candidate, {})]
        if not having:
            newer.append((candidate, "memory: it was not committed"))
            continue
        try:
            manifest = decode_manifest(_read(having[0].node, cards, run, candidate, MANIFEST))
        except (StoreError, FormatError, OSError) as error:
            newer.append((candidate, f"memory: {error}"))
            continue
        found = _assemble(candidate, manifest, held, cards, run)
        if isinstance(found, str):
            newer.append((candidate, found))
        else:
            return msgspec.structs.replace(found, newer=newer)
    return Assembly(None, {}, {}, {}, b"", newer)


def _assemble(
    step: int, manifest: Manifest, held: list[Held], cards: Mapping[str, Card], run: Run
) -> Assembly | str:
    """Where the files of a snapshot lie, or why they cannot be had."""
    sizes = {file.name: file.size for file in manifest.files}
    names = {each.node: each.steps.get(step, {}) for each in held}
    holders = {
        name: [node for node, files in names.items() if files.get(name) == size]
        for name, size in sizes.items()
    }
    note = notes.request("protect", manifest.save_id)
    lost = {name for name, nodes in holders.items() if not nodes}
    protection = b""
    if lost:
        knowing = [node for node, files in names.items() if note in files]
        if knowing:
            data = _read(knowing[0], cards, run, step, note)
            wish = msgspec.json.decode(data, type=Protect)
            protection = msgspec.json.encode(wish.protection)
            lost = assemblable(wish.protection, names)
    if lost:
        shown = ", ".join(sorted(lost)[:3])
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        return f"memory: no node that is left has {shown}{more}"
    holders[MANIFEST] = [node for node, files in names.items() if MANIFEST in files]
    live = {node: cards[node] for node, files in names.items() if files}
    return Assembly(step, holders, sizes, live, protection, [])


def _read(node: str, cards: Mapping[str, Card], run: Run, step: int, name: str) -> bytes:
    local = run.step(step) / name
    if local.exists():
        return local.read_bytes()
    client = AgentClient(cards[node])
    try:
        return client.read(run.name, step, name, limit=LARGEST_MANIFEST)
    finally:
        client.close()


def _ask(card: Card, run: str) -> Held:
    """What a node without trainers holds, if its agent lives."""
    client = AgentClient(card, connect_timeout=ABSENT)
    try:
        steps = {
            listed.step: {file.name: file.size for file in listed.files}
            for listed in client.list(run)
        }
        return Held(card.node, steps, [])
    finally:
        client.close()


def _let_settle(run: Run, node: str) -> None:
    """Give the agent time to commit what was staged completely before the trainers ended."""
    deadline = time.monotonic() + SETTLE
    while time.monotonic() < deadline and any(
        _is_under_way(Place(run, step), node) for step in run.steps()
    ):
        time.sleep(POLL)


def _is_under_way(place: Place, node: str) -> bool:
    unsealed = any(not place.has(notes.entry(each.file.name)) for each in place.staged())
    waiting = [
        draft
        for draft in place.drafts()
        if draft.leader == node and place.ended("commit", draft.save_id) is None
    ]
    return unsealed or bool(waiting)
