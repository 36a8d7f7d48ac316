"""Finding the newest snapshot that the nodes of a run can provide together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass

import msgspec

from shardwise.errors import FormatError, StoreError
from shardwise.manifest.manifest import LARGEST_MANIFEST, Manifest, decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.memory import records
from shardwise.memory.home import Place, Run
from shardwise.memory.lineage import Lineage
from shardwise.memory.options import Tls
from shardwise.memory.records import AgentInfo, PendingManifest, Protect
from shardwise.memory.redundancy.placement import Protection
from shardwise.memory.redundancy.rebuild import unreadable_files
from shardwise.memory.registry import known_nodes
from shardwise.memory.remote.assembled import Assembly
from shardwise.memory.remote.client import AgentClient

CONNECT_TIMEOUT = 0.5
READ_TIMEOUT = 10.0
CONNECT_AGAIN_TIMEOUT = 5.0  # for a node that has answered before
REQUESTS_AT_ONCE = 64
UNREADABLE = (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Read = Callable[[str, int, str], bytes]
"""`read(node, step, name)` returns the contents of a small file, or raises `OSError`."""


class Held(msgspec.Struct, array_like=True):
    """The files that a node holds of a run.

    Attributes:
        steps: name and size of each file, by step.
        knows: the agents of the nodes that this node knows.
        removed: whether this node has just removed damaged files.
    """

    node: str
    steps: dict[int, dict[str, int]]
    knows: list[AgentInfo]
    removed: bool = False


def held_here(run: Run, node: str) -> Held:
    """Return what this node holds of a run."""
    steps: dict[int, dict[str, int]] = {}
    knows = {info.node: info for info in known_nodes(run)}
    for step in run.steps():
        place = Place(run, step)
        with suppress(FileNotFoundError):
            steps[step] = _sizes(place)
        with suppress(StoreError):  # a damaged manifest names no nodes
            for pending in place.pending_manifests() + place.pending_copies():
                knows |= {info.node: info for info in pending.nodes}
    return Held(node, steps, list(knows.values()))


def _sizes(place: Place) -> dict[str, int]:
    """Return name and size of each file of a snapshot; agents may be removing some."""
    found: dict[str, int] = {}
    for each in place.path.iterdir():
        with suppress(FileNotFoundError):
            found[each.name] = each.stat().st_size
    return found


def ask_others(infos: Iterable[AgentInfo], run: str, tls: Tls | None) -> list[Held]:
    """Return what each node holds whose agent answers."""

    def ask(info: AgentInfo) -> Held | None:
        with suppress(OSError), closing(_client_of(info, tls)) as client:
            return _ask(client, info, run)
        return None

    with ThreadPoolExecutor(REQUESTS_AT_ONCE, "shardwise-ask") as pool:
        return [held for held in pool.map(ask, infos) if held is not None]


def ask_around(
    held: list[Held],
    infos: Mapping[str, AgentInfo],
    run: str,
    tls: Tls | None,
    suffices: Callable[[list[Held], Mapping[str, AgentInfo]], bool] = lambda held, infos: False,
) -> tuple[list[Held], dict[str, AgentInfo]]:
    """Ask all nodes what they hold, also the nodes that they know, and so on.

    A node may have trained with nodes of which only one is known here, and that one may know it by
    another address.

    Args:
        held: what some nodes are known to hold.
        infos: the agents of these nodes and of others.
        suffices: whether the answers so far are enough. Further answers are not awaited then.

    Returns:
        What all nodes hold that answered, and `infos` with their agents added.
    """
    found, known = list(held), dict(infos)
    heard = {each.node for each in held}
    asked: set[tuple[str, str]] = set()
    named = [*infos.values(), *(info for each in held for info in each.knows)]
    pending: dict[Future[Held], AgentInfo] = {}
    with (
        ThreadPoolExecutor(REQUESTS_AT_ONCE, "shardwise-ask") as pool,
        ExitStack() as unanswered,
    ):
        while True:
            for info in named:
                if info.node not in heard and (info.node, info.url) not in asked:
                    asked.add((info.node, info.url))
                    with suppress(StoreError):  # the URL or the token is invalid
                        client = _client_of(info, tls)
                        unanswered.callback(client.abort)
                        pending[pool.submit(_ask, client, info, run)] = info
            if not pending or suffices(found, known):
                return found, known
            named = []
            for answer in wait(pending, return_when=FIRST_COMPLETED).done:
                info = pending.pop(answer)
                with suppress(OSError):
                    each = answer.result()
                    named += each.knows
                    if info.node not in heard:
                        heard.add(info.node)
                        found.append(each)
                        known[info.node] = info


def reader(infos: Mapping[str, AgentInfo], run: Run, here: str, tls: Tls | None) -> Read:
    """Return a function that reads small files of any of these nodes, and of this one."""

    def read(node: str, step: int, name: str) -> bytes:
        if node == here:
            return (run.step(step) / name).read_bytes()
        with closing(_client_of(infos[node], tls, CONNECT_AGAIN_TIMEOUT)) as client:
            return client.read(run.name, step, name, limit=LARGEST_MANIFEST)

    return read


@dataclass(frozen=True, slots=True)
class Search:
    """A search for snapshots among nodes.

    Attributes:
        held: what each node holds.
        infos: the agents of these nodes.
        read: reads their records and manifests.
        lineage: of the run: snapshots of branches that it has abandoned are skipped.
    """

    held: list[Held]
    infos: Mapping[str, AgentInfo]
    read: Read
    lineage: Lineage | None = None

    def choose(
        self, step: int | None, *, below: int | None = None, tried: Collection[str] = ()
    ) -> Assembly:
        """Return the newest snapshot that has a manifest and all of whose files can be read.

        Args:
            step: consider only this step.
            below: this step was found to be damaged: consider only older ones. It is considered
                again if damaged files of it were removed, or a node that was not tried holds some
                of its files.
            tried: the nodes that the damaged step was read from.
        """
        newer: list[tuple[int, str]] = []
        for candidate in self._candidates(step, below, tried):
            found = self._assemble_any(candidate)
            if not isinstance(found, str):
                return msgspec.structs.replace(found, newer=newer)
            newer.append((candidate, f"memory: {found}"))
        return Assembly(None, {}, {}, {}, b"", newer)

    def is_complete(self, step: int | None) -> bool:
        """Return whether no other node can hold a newer snapshot than these nodes do.

        That is so if the newest step they know is complete among them, and was saved after the run
        was last restored. A node that took part in that step knows every later step of the same
        training, too, because no step is committed without it.
        """
        if self.lineage is None:
            return False
        newest = next(iter(self._candidates(step)), None)
        if newest is None:
            return False
        return not isinstance(self._assemble_any(newest, epoch=self.lineage.epoch), str)

    def _candidates(
        self, step: int | None, below: int | None = None, tried: Collection[str] = ()
    ) -> list[int]:
        """Return the steps to consider, newest first."""
        again = any(
            each.removed or (below in each.steps and each.node not in tried) for each in self.held
        )
        known = sorted({s for each in self.held for s in each.steps}, reverse=True)
        return [
            each
            for each in known
            if step in (None, each) and (below is None or each < below or (each == below and again))
        ]

    def _assemble_any(self, step: int, epoch: int | None = None) -> Assembly | str:
        """Return where the files of a step are, or why it cannot be read.

        All nodes have the same manifest, except one that is damaged, or that was away when the step
        was saved again. So each manifest is tried until one has all its files.

        Args:
            step: the step.
            epoch: consider only saves of this epoch.
        """
        reasons: list[str] = []
        tried: set[str] = set()
        for each in self.held:
            files = each.steps.get(step, {})
            if MANIFEST not in files or any(save in name for save in tried for name in files):
                continue
            try:
                manifest = decode_manifest(self.read(each.node, step, MANIFEST))
            except (FormatError, OSError) as error:
                reasons.append(f"node {each.node}: {error}")
                continue
            if manifest.save_id not in tried:
                tried.add(manifest.save_id)
                if epoch not in (None, self._epoch(step, manifest.save_id)):
                    continue
                found = self._abandoned(step, manifest.save_id) or self._assemble(
                    step, manifest, each.node
                )
                if not isinstance(found, str):
                    return found
                reasons.append(found)
        return "; ".join(reasons) or "not committed"

    def _abandoned(self, step: int, save_id: str) -> str:
        """Return why a save belongs to an abandoned branch, or "" if it does not.

        A save whose epoch is unknown counts as abandoned.
        """
        branch = None if self.lineage is None else self.lineage.newest_before(step)
        if branch is None:
            return ""
        epoch = self._epoch(step, save_id)
        if epoch is None:
            return "no pending manifest says whether the run has resumed from an older step since"
        if epoch >= branch.epoch:
            return ""
        if branch.step < 0:
            return "abandoned: the run started anew"
        return f"abandoned: the run resumed from step {branch.step}"

    def _epoch(self, step: int, save_id: str) -> int | None:
        """Return the epoch of a save, from the first node with a readable pending manifest."""
        for each in self.held:
            for record in (records.pending_record(save_id), records.pending_copy_record(save_id)):
                if record in each.steps.get(step, {}):
                    with suppress(*UNREADABLE):
                        return msgspec.json.decode(
                            self.read(each.node, step, record), type=_Epoch
                        ).epoch
        return None

    def _assemble(self, step: int, manifest: Manifest, source: str) -> Assembly | str:
        """Return where the files of a manifest are, or which cannot be read.

        Args:
            step: the step.
            manifest: the manifest of the step.
            source: the node that has this manifest.
        """
        sizes = {file.name: file.size for file in manifest.files}
        names = {each.node: each.steps.get(step, {}) for each in self.held}
        holders = {
            name: [node for node, files in names.items() if files.get(name) == size]
            for name, size in sizes.items()
        }
        lost = {name for name, nodes in holders.items() if not nodes}
        protection = self._protection(step, manifest.save_id, names)
        if protection is not None:
            lost &= unreadable_files(protection, names)
        if lost:
            shown = ", ".join(sorted(lost)[:3])
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            return f"no reachable node has {shown}{more}"
        holders[MANIFEST] = [source]
        live = {node: self.infos[node] for node, files in names.items() if files}
        encoded = b"" if protection is None else msgspec.json.encode(protection)
        return Assembly(step, holders, sizes, live, encoded, [])

    def _protection(
        self, step: int, save_id: str, names: Mapping[str, Mapping[str, int]]
    ) -> Protection | None:
        """Return the protection of a save, from the first node with a readable record of it."""
        record = records.request_record("protect", save_id)
        for node, files in names.items():
            if record in files:
                with suppress(*UNREADABLE):
                    return msgspec.json.decode(
                        self.read(node, step, record), type=Protect
                    ).protection
        return None


class _Epoch(msgspec.Struct):
    """The only field of a pending manifest that is needed here."""

    epoch: int = 0


def _ask(client: AgentClient, info: AgentInfo, run: str) -> Held:
    """Return what a node holds, from its agent."""
    steps = {
        listed.step: {file.name: file.size for file in listed.files} for listed in client.list(run)
    }
    return Held(info.node, steps, _nodes_of_newest(client, run, steps))


def _nodes_of_newest(
    client: AgentClient, run: str, steps: Mapping[int, Mapping[str, int]]
) -> list[AgentInfo]:
    """Return the nodes of the newest snapshot whose pending manifest a node can provide."""
    for step in sorted(steps, reverse=True):
        own = map(records.pending_record, records.requested_saves("pending", steps[step]))
        copies = map(
            records.pending_copy_record, records.requested_saves("pending-copy", steps[step])
        )
        for name in (*own, *copies):
            with suppress(*UNREADABLE):
                data = client.read(run, step, name, limit=LARGEST_MANIFEST)
                return msgspec.json.decode(data, type=PendingManifest).nodes
    return []


def _client_of(info: AgentInfo, tls: Tls | None, patience: float = CONNECT_TIMEOUT) -> AgentClient:
    context = None if tls is None else tls.for_client()
    return AgentClient(info, connect_timeout=patience, read_timeout=READ_TIMEOUT, tls=context)
