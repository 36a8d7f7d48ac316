"""What nodes hold of a run, and the newest snapshot that can be put together of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress

import msgspec

from shardwise.errors import FormatError, StoreError
from shardwise.manifest.manifest import LARGEST_MANIFEST, Manifest, decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory import records
from shardwise.memory.home import Place, Run
from shardwise.memory.lineage import Lineage
from shardwise.memory.records import AgentInfo, PendingManifest, Protect
from shardwise.memory.redundancy.placement import Protection
from shardwise.memory.redundancy.rebuild import unreadable_files
from shardwise.memory.registry import known_nodes
from shardwise.memory.remote.assembled import Assembly
from shardwise.memory.remote.client import AgentClient
from shardwise.memory.tls import Tls

ABSENT = 0.5
SILENT = 10.0
ANSWERED = 5.0  # to take another connection of a node that has answered
ASKED_AT_A_TIME = 64

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
    knows: list[AgentInfo]
    removed: bool = False


def what_is_held(run: Run, node: str) -> Held:
    """What this node holds of a run."""
    steps: dict[int, dict[str, int]] = {}
    knows = {info.node: info for info in known_nodes(run)}
    for step in run.steps():
        place = Place(run, step)
        with suppress(FileNotFoundError):
            steps[step] = _sizes(place)
        with suppress(StoreError):  # a draft that is damaged knows nobody
            for draft in place.drafts() + place.terms():
                knows |= {info.node: info for info in draft.nodes}
    return Held(node, steps, list(knows.values()))


def _sizes(place: Place) -> dict[str, int]:
    """Of the files in a place; agents may be removing some that nobody needs."""
    found: dict[str, int] = {}
    for each in place.path.iterdir():
        with suppress(FileNotFoundError):
            found[each.name] = each.stat().st_size
    return found


def ask_others(infos: Iterable[AgentInfo], run: str, tls: Tls | None) -> list[Held]:
    """What the nodes hold whose agents answer."""

    def ask(info: AgentInfo) -> Held | None:
        with suppress(OSError), closing(_client_of(info, tls)) as client:
            return _ask(client, info, run)
        return None

    with ThreadPoolExecutor(ASKED_AT_A_TIME, "shardwise-ask") as pool:
        return [held for held in pool.map(ask, infos) if held is not None]


def ask_around(
    held: list[Held],
    infos: Mapping[str, AgentInfo],
    run: str,
    tls: Tls | None,
    suffices: Callable[[list[Held], Mapping[str, AgentInfo]], bool] = lambda held, infos: False,
) -> tuple[list[Held], dict[str, AgentInfo]]:
    """What all nodes hold whose agents answer: those that nodes know that are heard, and so on.

    A node may have been on the run beside nodes of which only one is known here, and be known there
    by an address of its own.

    Args:
        held: of nodes that have spoken.
        infos: of these, and others.
        suffices: whether what was heard until now is enough; then no other answer is waited for.

    Returns:
        What all hold, and the infos of those that have answered beside those given.
    """
    found, known = list(held), dict(infos)
    heard = {each.node for each in held}
    asked: set[tuple[str, str]] = set()
    told = [*infos.values(), *(info for each in held for info in each.knows)]
    pending: dict[Future[Held], AgentInfo] = {}
    with (
        ThreadPoolExecutor(ASKED_AT_A_TIME, "shardwise-ask") as pool,
        ExitStack() as unanswered,
    ):
        while True:
            for info in told:
                if info.node not in heard and (info.node, info.url) not in asked:
                    asked.add((info.node, info.url))
                    with suppress(StoreError):  # the info has no address
                        client = _client_of(info, tls)
                        unanswered.callback(client.abort)
                        pending[pool.submit(_ask, client, info, run)] = info
            if not pending or suffices(found, known):
                return found, known
            told = []
            for answer in wait(pending, return_when=FIRST_COMPLETED).done:
                info = pending.pop(answer)
                with suppress(OSError):
                    each = answer.result()
                    told += each.knows
                    if info.node not in heard:
                        heard.add(info.node)
                        found.append(each)
                        known[info.node] = info


def reader(infos: Mapping[str, AgentInfo], run: Run, here: str, tls: Tls | None) -> Read:
    """Reads small files of any of these nodes, and of this one."""

    def read(node: str, step: int, name: str) -> bytes:
        if node == here:
            return (run.step(step) / name).read_bytes()
        with closing(_client_of(infos[node], tls, ANSWERED)) as client:
            return client.read(run.name, step, name, limit=LARGEST_MANIFEST)

    return read


def choose(
    held: list[Held],
    infos: Mapping[str, AgentInfo],
    read: Read,
    *,
    step: int | None,
    below: int | None = None,
    tried: Collection[str] = (),
    lineage: Lineage | None = None,
) -> Assembly:
    """The newest step whose manifest some node has, and all of whose files some nodes have.

    Args:
        step: of this step only.
        below: this step was found to be damaged: only older ones count. It counts again if damaged
            files of it were removed, or if a node that was not tried holds some of its files.
        tried: the nodes that the damaged step was read from.
        lineage: of the run: what it has abandoned is passed over.
    """
    newer: list[tuple[int, str]] = []
    for candidate in _candidates(held, step, below, tried):
        found = _assemble_any(candidate, held, infos, read, lineage)
        if not isinstance(found, str):
            return msgspec.structs.replace(found, newer=newer)
        newer.append((candidate, f"memory: {found}"))
    return Assembly(None, {}, {}, {}, b"", newer)


def suffices(
    held: list[Held],
    infos: Mapping[str, AgentInfo],
    read: Read,
    *,
    step: int | None,
    lineage: Lineage,
) -> bool:
    """Whether no other node can hold anything newer than these do.

    That is so if the newest step they know of is complete among them, and was saved after the run
    was last restored. A node that took part in that step knows every later step of the same
    training too: none is committed without it.
    """
    newest = next(iter(_candidates(held, step)), None)
    if newest is None:
        return False
    found = _assemble_any(newest, held, infos, read, lineage, epoch=lineage.epoch)
    return not isinstance(found, str)


def _candidates(
    held: list[Held], step: int | None, below: int | None = None, tried: Collection[str] = ()
) -> list[int]:
    """The steps of which nodes hold something and that may be taken, the newest first."""
    again = any(each.removed or (below in each.steps and each.node not in tried) for each in held)
    known = sorted({s for each in held for s in each.steps}, reverse=True)
    return [
        each
        for each in known
        if step in (None, each) and (below is None or each < below or (each == below and again))
    ]


def _assemble_any(
    step: int,
    held: list[Held],
    infos: Mapping[str, AgentInfo],
    read: Read,
    lineage: Lineage | None,
    epoch: int | None = None,
) -> Assembly | str:
    """Where the files of a step lie, by the first of its manifests of which all can be had.

    Only those of saves of this epoch count, if one is given.

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
            if epoch not in (None, _epoch(step, manifest.save_id, held, read)):
                continue
            found = _abandoned(step, manifest.save_id, held, read, lineage) or _assemble(
                step, manifest, each.node, held, infos, read
            )
            if not isinstance(found, str):
                return found
            reasons.append(found)
    return "; ".join(reasons) or "it was not committed"


def _abandoned(
    step: int, save_id: str, held: list[Held], read: Read, lineage: Lineage | None
) -> str:
    """Why a save is none that the run went on from; "" if it may be.

    One of which nobody can tell when it was saved could be such a one, so it is none.
    """
    branch = None if lineage is None else lineage.newest_before(step)
    if branch is None:
        return ""
    epoch = _epoch(step, save_id, held, read)
    if epoch is None:
        return "no draft of it is left that would tell whether the run has gone back since"
    if epoch >= branch.epoch:
        return ""
    if branch.step < 0:
        return "abandoned: the run began anew"
    return f"abandoned: the run went on from step {branch.step}"


class _Epoch(msgspec.Struct):
    """What is needed of a draft."""

    epoch: int = 0


def _epoch(step: int, save_id: str, held: list[Held], read: Read) -> int | None:
    """The epoch of a save, as the first node says whose draft of it is whole."""
    for each in held:
        for record in (records.draft(save_id), records.terms(save_id)):
            if record in each.steps.get(step, {}):
                with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    return msgspec.json.decode(read(each.node, step, record), type=_Epoch).epoch
    return None


def _assemble(
    step: int,
    manifest: Manifest,
    source: str,
    held: list[Held],
    infos: Mapping[str, AgentInfo],
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
        lost &= unreadable_files(protection, names)
    if lost:
        shown = ", ".join(sorted(lost)[:3])
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        return f"no node that is left has {shown}{more}"
    holders[MANIFEST] = [source]
    live = {node: infos[node] for node, files in names.items() if files}
    encoded = b"" if protection is None else msgspec.json.encode(protection)
    return Assembly(step, holders, sizes, live, encoded, [])


def _protection(
    step: int, save_id: str, names: Mapping[str, Mapping[str, int]], read: Read
) -> Protection | None:
    """Who protects whom, as the first node says whose record of it is whole."""
    record = records.request("protect", save_id)
    for node, files in names.items():
        if record in files:
            with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return msgspec.json.decode(read(node, step, record), type=Protect).protection
    return None


def _ask(client: AgentClient, info: AgentInfo, run: str) -> Held:
    """What a node without trainers holds."""
    steps = {
        listed.step: {file.name: file.size for file in listed.files} for listed in client.list(run)
    }
    return Held(info.node, steps, _nodes_of_newest(client, run, steps))


def _nodes_of_newest(
    client: AgentClient, run: str, steps: Mapping[int, Mapping[str, int]]
) -> list[AgentInfo]:
    """The nodes of the newest snapshot of which a node has a draft that is whole."""
    for step in sorted(steps, reverse=True):
        drafts = map(records.draft, records.requested("draft", steps[step]))
        terms = map(records.terms, records.requested("terms", steps[step]))
        for name in (*drafts, *terms):
            with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                data = client.read(run, step, name, limit=LARGEST_MANIFEST)
                return msgspec.json.decode(data, type=PendingManifest).nodes
    return []


def _client_of(info: AgentInfo, tls: Tls | None, patience: float = ABSENT) -> AgentClient:
    context = None if tls is None else tls.for_client()
    return AgentClient(info, connect_timeout=patience, read_timeout=SILENT, tls=context)
