"""The addresses of a run's agents, in the run's root. A restart on other nodes finds them there.

<root>/nodes/<node>.json    one file for each node, written by that node alone

Each file contains the address of a node's agent, and a token that only allows reading the
snapshots of this run. On a file system, only the owner can read the file. If the file system does
not enforce this, the token is left out, and the node is not asked. In an object store, everybody
who can read the root can read the token.
"""

from __future__ import annotations

import hashlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec

from shardwise.decoding import prepare_decoding
from shardwise.errors import StoreError
from shardwise.memory.files import read_record, write_record
from shardwise.memory.home import Run
from shardwise.memory.identity import make_run_token, serves_own_host_only
from shardwise.memory.lineage import Epoch
from shardwise.memory.records import AgentInfo
from shardwise.store import Store, open_store
from shardwise.store.private import publish_private, read_private

NODES_DIRECTORY = "nodes"
KNOWN_NODES_RECORD = "nodes.json"
MOST_KNOWN_NODES = 64
LARGEST_ENTRY = 1 << 14
MOST_ENTRIES = 1024
READ_THREADS = 32
LONGEST_AGE = 7 * 86400.0
LONGEST_WRITE = 60.0
"""Seconds to wait for a thread that writes an entry."""
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
log = logging.getLogger("shardwise")


@prepare_decoding
class NodeEntry(msgspec.Struct, frozen=True, rename={"info": "card", "saved_at": "at"}):
    """A node that may hold snapshots of a run.

    Attributes:
        info: the address of its agent, with a token for this run only, or "" as the token.
        run: the run's id.
        epoch: the epoch of the run when the node last saved.
        saved_at: the time of the node's last save, in seconds since 1970.
    """

    info: AgentInfo
    run: str
    epoch: Epoch
    saved_at: float


class NodeRegistry:
    """Reads and writes the entries of one run.

    Args:
        root: the store that contains the run's checkpoints.
        run: the run's id.
        clock: a function that returns seconds since 1970.
    """

    def __init__(self, root: Store, run: str, clock: Callable[[], float] = time.time) -> None:
        self._entries = root.at(NODES_DIRECTORY)
        self._run = run
        self._clock = clock

    def write_entry(self, info: AgentInfo, epoch: int) -> None:
        """Write the entry of a node, and replace an earlier one.

        Args:
            info: the agent, with its secret. The secret is replaced by a token for this run.

        Raises:
            OSError: the root is not writable.
        """
        public = msgspec.structs.replace(info, token=make_run_token(info.token, self._run))
        _write(self._entries, NodeEntry(public, self._run, epoch, self._clock()))

    def update_address(self, info: AgentInfo) -> None:
        """Write a new address into the entry of a node, if the node has an entry of this run.

        Raises:
            OSError: the root is not writable.
        """
        entry = _read(self._entries, _file_of(info.node))
        if isinstance(entry, NodeEntry) and entry.run == self._run:
            public = msgspec.structs.replace(info, token=make_run_token(info.token, self._run))
            if public != entry.info:
                _write(self._entries, msgspec.structs.replace(entry, info=public))

    def remove_entry(self, node: str) -> None:
        """Remove the entry of a node that holds no snapshots of the run any more.

        Raises:
            OSError: the root is not writable.
        """
        name = _file_of(node)
        entry = _read(self._entries, name)
        if isinstance(entry, str) or entry.run == self._run:
            self._entries.delete(name)

    def remove_old_entries(self) -> None:
        """Remove entries of other runs, old entries, and all but the `MOST_ENTRIES` newest.

        Entries that cannot be read count as the oldest.

        Raises:
            OSError: the root is not writable.
        """
        oldest = self._clock() - LONGEST_AGE
        kept: list[tuple[float, str]] = []
        for name, entry in self._read_all(self._names()).items():
            if isinstance(entry, str):
                kept.append((0.0, name))
            elif entry.run == self._run and entry.saved_at >= oldest:
                kept.append((entry.saved_at, name))
            else:
                self._entries.delete(name)
        for _, name in sorted(kept, reverse=True)[MOST_ENTRIES:]:
            self._entries.delete(name)

    def read(self, excluding: Collection[str] = ()) -> tuple[list[AgentInfo], dict[str, str]]:
        """Return the nodes that may hold snapshots of the run.

        Args:
            excluding: the names of nodes to leave out.

        Returns:
            The agents that can be asked; and the names of other nodes, each with the reason why it
            cannot be asked.
        """
        found: list[AgentInfo] = []
        unreachable: dict[str, str] = {}
        try:
            names = self._names()
        except OSError as error:
            return [], {"all": f"cannot read {self._entries}: {error}"}
        excluded = {_file_of(node) for node in excluding}
        names = [name for name in names if name not in excluded][:MOST_ENTRIES]
        for name, entry in self._read_all(names).items():
            if isinstance(entry, str):
                unreachable[name.removesuffix(".json")] = entry
            elif entry.run == self._run and self._clock() - entry.saved_at < LONGEST_AGE:
                if serves_own_host_only(entry.info) and entry.info.host != socket.gethostname():
                    why = f"its agent serves its own host only, {entry.info.host}"
                    unreachable[entry.info.node] = why
                else:
                    found.append(entry.info)
        return found, unreachable

    def _names(self) -> list[str]:
        return [name for name in self._entries.list() if name.endswith(".json")]

    def _read_all(self, names: Sequence[str]) -> dict[str, NodeEntry | str]:
        """Return each entry, or why it cannot be used."""
        with ThreadPoolExecutor(READ_THREADS, "shardwise-registry") as pool:
            entries = pool.map(lambda name: _read(self._entries, name), names)
            return dict(zip(names, entries, strict=True))


class Registration:
    """Updates a node's entry while the node saves. Logs the first failure, and raises none.

    Args:
        registry: the entries of the run.
        waits: whether `update` waits until the entry is written. Otherwise a thread writes it, and
            the next `update` tries again if that failed.
    """

    def __init__(self, registry: NodeRegistry, *, waits: bool = True) -> None:
        self._registry = registry
        self._waits = waits
        self._written: tuple[AgentInfo, int] | None = None
        self._thread: threading.Thread | None = None
        self._warned = False

    def update(self, info: AgentInfo, epoch: int, *, removes_old_entries: bool) -> None:
        """Write the node's entry if it has changed.

        Args:
            epoch: the current epoch of the run.
            removes_old_entries: whether to remove old entries of other nodes too.
        """
        if self._written == (info, epoch) or self._is_writing():
            return

        def write_and_prune() -> None:
            self._registry.write_entry(info, epoch)
            self._written = info, epoch
            if removes_old_entries:
                self._registry.remove_old_entries()

        if self._waits:
            self._written = info, epoch  # also after a failure, so that saves stay fast
            self._try(write_and_prune)
        else:
            self._thread = threading.Thread(
                target=self._try, args=(write_and_prune,), name="shardwise-registry", daemon=True
            )
            self._thread.start()

    def finish(self) -> None:
        """Wait until the thread that writes the entry has ended, but not for long."""
        if self._thread is not None:
            self._thread.join(LONGEST_WRITE)

    def remove(self, node: str) -> None:
        """Remove the node's entry, because the node has no snapshots of the run any more."""
        self.finish()
        self._written = None
        self._try(lambda: self._registry.remove_entry(node))

    def _is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            if not self._warned:
                log.warning(
                    "cannot write the address of this node's agent below the root (%s): a restart "
                    "on other nodes will not find the snapshots of this node",
                    error,
                )
            self._warned = True


def registry_of(run: Run) -> NodeRegistry | None:
    """Return the entries in the root of a run; None if the root is unknown."""
    root = run.root()
    return None if root is None else NodeRegistry(open_store(root), run.name)


def _file_of(node: str) -> str:
    """Return the file name of a node's entry."""
    name = node if _PLAIN.fullmatch(node) else hashlib.blake2b(node.encode()).hexdigest()[:32]
    return f"{name}.json"


def _write(entries: Store, entry: NodeEntry) -> None:
    """Write an entry atomically; leave out the token if other users of this file system see it."""
    name = _file_of(entry.info.node)
    if not publish_private(entries, name, msgspec.json.encode(entry)):
        log.warning(
            "%s/%s: this file system does not enforce file modes, so the token of node %s is not "
            "written there; a restart on other nodes cannot read the snapshots of this node",
            entries,
            name,
            entry.info.node,
        )
        bare = msgspec.structs.replace(entry.info, token="")
        public = msgspec.json.encode(msgspec.structs.replace(entry, info=bare))
        entries.publish(name, public, replace=True)


def _read(entries: Store, name: str) -> NodeEntry | str:
    """Return an entry, or why it cannot be used. Entries that others can write are not trusted."""
    try:
        return msgspec.json.decode(read_private(entries, name, limit=LARGEST_ENTRY), type=NodeEntry)
    except StoreError as error:
        return str(error)
    except OSError as error:
        return f"cannot read {entries}/{name}: {error.strerror}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"{entries}/{name} is damaged, remove it: {error}"


def record_known_nodes(run: Run, nodes: Iterable[AgentInfo]) -> None:
    """Record on this node which nodes the run uses. Nodes that it used before stay in the record.

    Ranks may return to this node after other nodes have continued the run. They find these nodes by
    this record; the records of the old snapshots do not name them.
    """
    known = {info.node: info for info in read_known_nodes(run)}
    for info in nodes:
        known.pop(info.node, None)
        known[info.node] = info
    write_record(run.path / KNOWN_NODES_RECORD, list(known.values())[-MOST_KNOWN_NODES:])


def read_known_nodes(run: Run) -> list[AgentInfo]:
    """Return the recorded nodes; an empty list if the record is missing or damaged."""
    with suppress(StoreError):
        return read_record(run.path / KNOWN_NODES_RECORD, list[AgentInfo]) or []
    return []
