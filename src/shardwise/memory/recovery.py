"""Which snapshot can be had again, out of what the nodes that are left hold."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
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
from shardwise.memory.placement import Protection
from shardwise.memory.rebuild import assemblable
from shardwise.memory.seal import is_intact
from shardwise.memory.snapshots import Snapshots
from shardwise.memory.tls import Tls

SETTLE = 5.0
POLL = 0.01
ABSENT = 2.0
SILENT = 10.0
ASKED_AT_A_TIME = 16

Read = Callable[[str, int, str], bytes]
"""`read(node, step, name)`: all of a small file; raises `OSError` where it cannot be had."""


class Held(msgspec.Struct, array_like=True):
    """What a node holds of a run.

    Attributes:
        steps: names and sizes of files, by step.
        knows: the nodes that it knows of.
        removed: whether something was damaged just now, and removed.
    """

    node: str
    steps: dict[int, dict[str, int]]
    knows: list[Card]
    removed: bool = False


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
        below: only older ones: this one has turned out to be damaged. It is taken again only if
            what was damaged could be found and removed, and the rest is enough.
    """
    assembly = find_assembly(snapshots, group, step=step, below=below)
    if assembly.step is None:
        return Found(-1, None, assembly.newer)
    store = AssembledStore(assembly, snapshots.run, snapshots.node, snapshots.tls)
    return Found(assembly.step, store, assembly.newer)


def find_assembly(
    snapshots: Snapshots, group: Group, *, step: int | None, below: int | None
) -> Assembly:
    """Agree on where the files of that snapshot lie."""
    meeting, run, here = snapshots.meeting, snapshots.run, snapshots.node
    tls = snapshots.tls
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
        cards = {card.node: card for card in meeting.nodes}
        for each in held:
            for card in each.knows:
                cards.setdefault(card.node, card)
        present = {each.node for each in held}
        absent = [card for card in cards.values() if card.node not in present]
        with ThreadPoolExecutor(ASKED_AT_A_TIME, "shardwise-ask") as pool:
            asked = pool.map(lambda card: _ask(card, run.name, tls), absent)
            held += [each for each in asked if each]

        def read(node: str, step: int, name: str) -> bytes:
            if node == here:
                return (run.step(step) / name).read_bytes()
            return _read_of(cards[node], run.name, step, name, tls)

        return msgspec.msgpack.encode(choose(held, cards, read, step=step, below=below))

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
        with suppress(StoreError):  # a draft that is damaged knows nobody
            for draft in place.drafts() + place.terms():
                knows |= {card.node: card for card in draft.nodes}
    return Held(node, steps, list(knows.values()))


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
        (place.path / notes.staged(name)).unlink(missing_ok=True)  # its slot is no more in use
    return bool(damaged)


def choose(
    held: list[Held],
    cards: Mapping[str, Card],
    read: Read,
    *,
    step: int | None,
    below: int | None,
) -> Assembly:
    """The newest step whose manifest some node has, and all of whose files some nodes have."""
    newer: list[tuple[int, str]] = []
    again = any(each.removed for each in held)
    for candidate in sorted({s for each in held for s in each.steps}, reverse=True):
        if step not in (None, candidate):
            continue
        if below is not None and (candidate > below or (candidate == below and not again)):
            continue
        found = _assemble_any(candidate, held, cards, read)
        if not isinstance(found, str):
            return msgspec.structs.replace(found, newer=newer)
        newer.append((candidate, f"memory: {found}"))
    return Assembly(None, {}, {}, {}, b"", newer)


def _assemble_any(
    step: int, held: list[Held], cards: Mapping[str, Card], read: Read
) -> Assembly | str:
    """Where the files of a step lie, by the first of its manifests of which all can be had.

    All nodes have the same, but one that is damaged, or that was away when the step was saved anew.
    """
    reasons: list[str] = []
    tried: set[str] = set()
    for each in held:
        files = each.steps.get(step, {})
        if MANIFEST not in files or any(save in name for save in tried for name in files):
            continue
        try:
            manifest = decode_manifest(read(each.node, step, MANIFEST))
        except (FormatError, OSError) as error:
            reasons.append(f"node {each.node}: {error}")
            continue
        if manifest.save_id not in tried:
            tried.add(manifest.save_id)
            found = _assemble(step, manifest, each.node, held, cards, read)
            if not isinstance(found, str):
                return found
            reasons.append(found)
    return "; ".join(reasons) or "it was not committed"


def _assemble(
    step: int,
    manifest: Manifest,
    source: str,
    held: list[Held],
    cards: Mapping[str, Card],
    read: Read,
) -> Assembly | str:
    """Where the files of a manifest lie, which a node was the source of; or why not all can be
    had."""
    sizes = {file.name: file.size for file in manifest.files}
    names = {each.node: each.steps.get(step, {}) for each in held}
    holders = {
        name: [node for node, files in names.items() if files.get(name) == size]
        for name, size in sizes.items()
    }
    lost = {name for name, nodes in holders.items() if not nodes}
    protection = _protection(step, manifest.save_id, names, read)
    if protection is not None:
        lost &= assemblable(protection, names)
    if lost:
        shown = ", ".join(sorted(lost)[:3])
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        return f"no node that is left has {shown}{more}"
    holders[MANIFEST] = [source]
    live = {node: cards[node] for node, files in names.items() if files}
    encoded = b"" if protection is None else msgspec.json.encode(protection)
    return Assembly(step, holders, sizes, live, encoded, [])


def _protection(
    step: int, save_id: str, names: Mapping[str, Mapping[str, int]], read: Read
) -> Protection | None:
    """Who protects whom, as the first node says whose note of it is whole."""
    note = notes.request("protect", save_id)
    for node, files in names.items():
        if note in files:
            with suppress(OSError, msgspec.DecodeError):
                return msgspec.json.decode(read(node, step, note), type=Protect).protection
    return None


def _read_of(card: Card, run: str, step: int, name: str, tls: Tls | None) -> bytes:
    with closing(_client_of(card, tls)) as client:
        return client.read(run, step, name, limit=LARGEST_MANIFEST)


def _ask(card: Card, run: str, tls: Tls | None) -> Held | None:
    """What a node without trainers holds; None if its agent does not answer."""
    with (
        suppress(OSError),
        closing(_client_of(card, tls)) as client,
    ):
        steps = {
            listed.step: {file.name: file.size for file in listed.files}
            for listed in client.list(run)
        }
        return Held(card.node, steps, [])
    return None


def _client_of(card: Card, tls: Tls | None) -> AgentClient:
    context = None if tls is None else tls.for_client()
    return AgentClient(card, connect_timeout=ABSENT, read_timeout=SILENT, tls=context)


def _complete_saves(snapshots: Snapshots, group: Group) -> set[str]:
    """The saves that were staged on all nodes: what is still to be committed of them will be."""

    def speak() -> bytes:
        staged: list[str] = []
        begun: list[tuple[str, list[str]]] = []
        for step in snapshots.run.steps() if snapshots.is_first_of_node else ():
            place = Place(snapshots.run, step)
            with suppress(StoreError):  # a note is damaged: nothing comes of it
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
    """Give the agents time to commit what was staged completely before the trainers ended."""
    deadline = time.monotonic() + SETTLE
    while time.monotonic() < deadline and any(
        save in complete and place.ended("commit", save) is None
        for place in (Place(run, step) for step in run.steps())
        for save in place.saves()
    ):
        time.sleep(POLL)
