"""The addresses of a run's agents, in the run's root. A restart on other nodes finds them there.

<root>/nodes/<node>.json      one file for each node, written by the agent of that node
<root>/nodes/newest           some nodes of the newest snapshot, written by the agent that leads it

A restore first asks the nodes in `newest`, of which each knows all nodes of the snapshot. If the
file is lost or old, the restore asks more nodes, and finds the same snapshots.

The file of a node has the epoch in which it last took part in the run (see `lineage.py`). A node
that was lost cannot remove its file. So once a restore has found a complete snapshot of a later
epoch, it removes the files of nodes of earlier epochs, except for the newest of these.

Each file contains addresses of agents, and tokens that only allow reading the snapshots of this
run. On a file system, only the owner can read the file. If the file system does not enforce this,
the tokens are left out, and the nodes are not asked. In an object store, everybody who can read the
root can read the tokens.
"""

from __future__ import annotations

import hashlib
import logging
import re
import socket
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import msgspec

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import Count
from shardwise.kernel.store import Store, open_store, publish_private, read_private
from shardwise.parts.memory.home import Home, Run
from shardwise.parts.memory.identity import info_for_run, serves_own_host_only
from shardwise.parts.memory.observe import read_run_view
from shardwise.parts.memory.records import AgentInfo
from shardwise.parts.memory.states import RecordCache
from shardwise.parts.memory.times import DAY, RETRY_PERIOD, UPKEEP_PERIOD, WEEK
from shardwise.parts.memory.view import RunView

NODES_DIRECTORY, NEWEST_FILE = "nodes", "newest"
LARGEST_ENTRY, LARGEST_NEWEST = 1 << 14, 1 << 16
MOST_ENTRIES = 8192
MOST_EARLIER = 16
"""How many nodes of earlier epochs stay listed although a snapshot of a later epoch exists."""
MOST_NEWEST = 16
"""How many nodes of the newest snapshot the root names. Each of them knows the others."""
READ_THREADS = 32
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
T = TypeVar("T")
log = logging.getLogger("shardwise.agent")


@prepare_decoding
class NodeEntry(msgspec.Struct, frozen=True, rename={"info": "card", "written_at": "at"}):
    """A node that may hold snapshots of a run.

    Attributes:
        info: the address of its agent, with a token for this run only, or "" as the token.
        run: the run's id.
        written_at: the time when the entry was written, in seconds since 1970.
        epoch: the last epoch of the run of which the node has a snapshot.
    """

    info: AgentInfo
    run: str
    written_at: float
    epoch: Count = 0


@prepare_decoding
class NewestNodes(msgspec.Struct, frozen=True):
    """Some nodes of the newest committed snapshot.

    Attributes:
        run: the run's id.
        epoch: the epoch of the snapshot.
        nodes: the addresses of their agents, with tokens for this run only.
    """

    run: str
    epoch: Count
    nodes: Annotated[list[AgentInfo], msgspec.Meta(max_length=MOST_NEWEST)]


class Registration:
    """Keeps the entries of a node up to date: one in the root of each run that has snapshots here.

    Args:
        home: the home of the node.
        info: the node's agent, with its secret.
        clock: a function that returns seconds since 1970.
    """

    def __init__(self, home: Home, info: AgentInfo, clock: Callable[[], float] = time.time) -> None:
        self._home, self._info, self._clock = home, info, clock
        self._runs: dict[Run, _Registered] = {}

    def update(self) -> None:
        """Write entries of new runs, and remove entries of runs that are gone. Log failures."""
        runs, now = self._home.runs(), self._clock()
        for run in runs:
            registered = self._runs.get(run, _Registered())
            if now >= registered.retry_at and run.snapshots():
                self._runs[run] = registered
                try:
                    self._update_run(run, registered, now)
                except (OSError, ValueError) as error:
                    registered.retry_at = now + RETRY_PERIOD
                    log.warning(
                        "cannot write the address of this agent below the root (%s): a restart on "
                        "other nodes may not find the snapshots of this node",
                        error,
                    )
        for run in self._runs.keys() - runs:
            self._remove(self._runs.pop(run))

    def _update_run(self, run: Run, registered: _Registered, now: float) -> None:
        view = read_run_view(run, registered.records)
        epochs = [part.epoch for each in view.snapshots for part in each.parts]
        epoch = max([0, registered.epoch, *epochs])
        is_due = now >= registered.due_at or epoch > registered.epoch
        newest = self._find_newest_nodes(view) if now >= registered.newest_due_at else None
        has_changed = newest is not None and newest != registered.newest
        if newest is not None:
            registered.newest_due_at = now + UPKEEP_PERIOD
        if not (is_due or has_changed) or (root := run.root()) is None:
            return
        entries = open_store(root).at(NODES_DIRECTORY)
        if is_due:
            name = _file_of(self._info.node)
            self._publish(
                entries, name, lambda info: NodeEntry(info(self._info), run.name, now, epoch), run
            )
            registered.due_at, registered.epoch = now + DAY, epoch
            registered.entries = entries
        if newest is not None and has_changed:
            nodes = newest.nodes
            self._publish(
                entries,
                NEWEST_FILE,
                lambda info: msgspec.structs.replace(newest, nodes=[info(each) for each in nodes]),
                run,
            )
            registered.newest = newest

    def _find_newest_nodes(self, view: RunView) -> NewestNodes | None:
        """Return nodes of the newest committed snapshot, if this node leads its save."""
        newest = view.newest_committed
        if newest is None or newest.pending is None or newest.pending.leader != self._info.node:
            return None
        nodes = newest.pending.nodes
        every = -(-len(nodes) // MOST_NEWEST)
        return NewestNodes(view.run.name, newest.pending.epoch, nodes[::every])

    def _publish(
        self,
        entries: Store,
        name: str,
        make: Callable[[Callable[[AgentInfo], AgentInfo]], object],
        run: Run,
    ) -> None:
        """Write a file, with tokens of the run if only its owner can read it.

        Args:
            make: makes the content. It takes a function that makes an agent's address public.
        """
        private = msgspec.json.encode(make(lambda info: info_for_run(info, run.name)))
        public = msgspec.json.encode(make(lambda info: msgspec.structs.replace(info, token="")))
        if not publish_private(entries, name, private, public):
            log.warning(
                "%s/%s: this file system does not enforce file modes, so the token of this node is "
                "not written there; a restart on other nodes cannot read the snapshots of this "
                "node",
                *(entries, name),
            )

    def _remove(self, registered: _Registered) -> None:
        """Remove what this agent has written about a run. Another agent may lead the run now."""
        entries, newest = registered.entries, registered.newest
        if entries is None:
            return
        with suppress(OSError):
            entries.delete(_file_of(self._info.node))
        if newest is not None:
            with suppress(OSError, ValueError, RecursionError):
                found = _read_file(entries, NEWEST_FILE, LARGEST_NEWEST, NewestNodes)
                if [each.url for each in found.nodes] == [each.url for each in newest.nodes]:
                    entries.delete(NEWEST_FILE)


@dataclass(slots=True)
class _Registered:
    """What an agent has written about a run.

    Attributes:
        entries: the directory of the entries; None if nothing was written.
        retry_at: when to try again after a failure.
        due_at, newest_due_at: when to write the entry, and to look at the newest snapshot again.
        epoch: the epoch in the entry.
        newest: the nodes of the newest snapshot that were written, with their secrets.
        records: the records of the run that were read.
    """

    entries: Store | None = None
    retry_at: float = 0.0
    due_at: float = 0.0
    newest_due_at: float = 0.0
    epoch: int = -1
    newest: NewestNodes | None = None
    records: RecordCache = field(default_factory=RecordCache)


@dataclass(frozen=True, slots=True)
class Entries:
    """The nodes that have an entry below a root.

    Attributes:
        agents: the agents that can be asked, those of the newest epochs first.
        epochs: the epoch of each of these agents' nodes.
        unreachable: the names of other nodes, each with the reason why it cannot be asked.
    """

    agents: list[AgentInfo]
    epochs: dict[str, int]
    unreachable: dict[str, str]


def read_newest_nodes(root: Store, run: str) -> list[AgentInfo]:
    """Return some nodes of the newest snapshot of a run, as far as they are known."""
    with suppress(OSError, ValueError, RecursionError):
        found = _read_file(root.at(NODES_DIRECTORY), NEWEST_FILE, LARGEST_NEWEST, NewestNodes)
        if found.run == run:
            return [info for info in found.nodes if not _why_unreachable(info)]
    return []


def read_entries(
    root: Store, run: str, excluding: Collection[str] = (), now: float | None = None
) -> Entries:
    """Return the nodes that may hold snapshots of a run; and remove entries of others.

    Args:
        excluding: the names of nodes to leave out.
        now: the time in seconds since 1970; None for the present.
    """
    entries, excluded = root.at(NODES_DIRECTORY), {_file_of(node) for node in excluding}
    oldest = (time.time() if now is None else now) - WEEK
    found: list[NodeEntry] = []
    unreachable: dict[str, str] = {}
    try:
        names = [each for each in entries.list() if each.endswith(".json") and each not in excluded]
    except OSError as error:
        return Entries([], {}, {"all": f"cannot read {entries}: {error}"})
    with ThreadPoolExecutor(READ_THREADS, "shardwise-registry") as pool:
        read = list(pool.map(lambda name: _read(entries, name), names[:MOST_ENTRIES]))
    for name, entry in zip(names, read, strict=False):
        if isinstance(entry, str):
            unreachable[name.removesuffix(".json")] = entry
        elif entry.run != run or entry.written_at < oldest:
            with suppress(OSError):
                entries.delete(name)
        elif why := _why_unreachable(entry.info):
            unreachable[entry.info.node] = why
        else:
            found.append(entry)
    found.sort(key=lambda each: (each.epoch, each.written_at), reverse=True)
    epochs = {each.info.node: each.epoch for each in found}
    return Entries([each.info for each in found], epochs, unreachable)


def remove_earlier(root: Store, run: str, epoch: int, excluding: Collection[str]) -> None:
    """Remove the entries of nodes that have not taken part in a run since before an epoch.

    The `MOST_EARLIER` newest of them stay.

    Args:
        epoch: the epoch of a snapshot that is complete on other nodes. The nodes have no snapshot
            of a newer step, unless the run has superseded it.
        excluding: the names of nodes whose entries stay.
    """
    directory, excluded = root.at(NODES_DIRECTORY), {_file_of(node) for node in excluding}
    with suppress(OSError):
        if len(set(directory.list()) - excluded) <= MOST_EARLIER:
            return
        entries = read_entries(root, run, excluding)
        nodes = [info.node for info in entries.agents if entries.epochs[info.node] < epoch]
        for node in nodes[MOST_EARLIER:]:
            directory.delete(_file_of(node))


def _why_unreachable(info: AgentInfo) -> str:
    """Return why an agent cannot be asked from here, or "" if it can."""
    if serves_own_host_only(info) and info.host != socket.gethostname():
        return f"its agent serves its own host only, {info.host}"
    return ""


def _file_of(node: str) -> str:
    """Return the file name of a node's entry."""
    name = node if _PLAIN.fullmatch(node) else hashlib.blake2b(node.encode()).hexdigest()[:32]
    return f"{name}.json"


def _read(entries: Store, name: str) -> NodeEntry | str:
    """Return an entry, or why it cannot be used. Entries that others can write are not trusted."""
    try:
        return _read_file(entries, name, LARGEST_ENTRY, NodeEntry)
    except StoreError as error:
        return str(error)
    except OSError as error:
        return f"cannot read {entries}/{name}: {error.strerror}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"{entries}/{name} is damaged, remove it: {error}"


def _read_file(entries: Store, name: str, limit: int, kind: type[T]) -> T:
    return msgspec.json.decode(read_private(entries, name, limit=limit), type=kind)
