"""The addresses of a run's agents, stored in its root, so that a restart on any nodes finds them.

<root>/nodes/<node>.json    one file for each node, written by that node alone

Each file contains the address of a node's agent, and a token that gives access to the snapshots of
this run only. Only its owner can read the file. If the file system does not enforce that, the token
is left out, and the node is not asked.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shardwise.errors import StoreError
from shardwise.memory.files import read_record, replacing, write_record
from shardwise.memory.home import ROOT, Run
from shardwise.memory.identity import run_token, serves_own_host_only
from shardwise.memory.lineage import Epoch
from shardwise.memory.records import AgentInfo
from shardwise.store import Store, local_path, open_store

NODES = "nodes"
KNOWN_NODES = "nodes.json"
MOST_KNOWN = 64
LARGEST_ENTRY = 1 << 14
MOST_ENTRIES = 1024
READ_THREADS = 32
LONGEST_AGE = 7 * 86400.0
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
log = logging.getLogger("shardwise")


class Entry(msgspec.Struct, frozen=True, rename={"info": "card", "saved_at": "at"}):
    """A node that may hold snapshots of a run.

    Attributes:
        info: the address of its agent, with a token for this run only, or "" as the token.
        run: the run's id.
        epoch: the epoch of the run when the node last saved.
        saved_at: when the node last saved, in seconds since 1970.
    """

    info: AgentInfo
    run: str
    epoch: Epoch
    saved_at: float


@dataclass(frozen=True, slots=True)
class RegisteredNodes:
    """The nodes of a run according to its root.

    Attributes:
        infos: the agents that can be asked.
        unreachable: the names of the nodes that cannot be asked, and why.
    """

    infos: list[AgentInfo]
    unreachable: dict[str, str] = field(default_factory=dict)


class Registry:
    """Reads and writes the entries of one run.

    Args:
        root: the store that contains the run's checkpoints.
        run: the run's id.
        clock: a function that returns seconds since 1970.
    """

    def __init__(self, root: Store, run: str, clock: Callable[[], float] = time.time) -> None:
        path = local_path(root)
        self._path = None if path is None else path / NODES
        self._run = run
        self._clock = clock

    def write_entry(self, info: AgentInfo, epoch: int) -> None:
        """Write the entry of a node, and replace an earlier one.

        Args:
            info: the agent, with its secret. The secret is replaced by a token for this run.

        Raises:
            OSError: the root is not writable.
        """
        if self._path is None:
            return
        public = msgspec.structs.replace(info, token=run_token(info.token, self._run))
        entry = Entry(public, self._run, epoch, self._clock())
        self._path.mkdir(parents=True, exist_ok=True)
        _write_private(self._path / _file_of(info.node), entry)

    def remove_entry(self, node: str) -> None:
        """Remove the entry of a node that holds no snapshots of the run any more.

        Raises:
            OSError: the root is not writable.
        """
        if self._path is not None:
            (self._path / _file_of(node)).unlink(missing_ok=True)

    def prune(self) -> None:
        """Remove entries of other runs, old entries, and all but the `MOST_ENTRIES` newest.

        Raises:
            OSError: the root is not writable.
        """
        if self._path is None or not self._path.is_dir():
            return
        files = []
        for path in self._path.iterdir():
            with suppress(OSError):
                files.append((path.stat().st_mtime, path))
        oldest = self._clock() - LONGEST_AGE
        for index, (modified, path) in enumerate(sorted(files, reverse=True)):
            if index >= MOST_ENTRIES or modified < oldest or not self._is_ours(path):
                path.unlink(missing_ok=True)

    def read(self, excluding: Collection[str] = ()) -> RegisteredNodes:
        """Return the nodes that may hold snapshots of the run.

        Args:
            excluding: the names of nodes to leave out.
        """
        found = RegisteredNodes([])
        if self._path is None:
            return found
        try:
            names = sorted(os.listdir(self._path))
        except FileNotFoundError:
            return found
        except OSError as error:
            return RegisteredNodes([], {"all": f"cannot read {self._path}: {error.strerror}"})
        excluded = {_file_of(node) for node in excluding}
        names = [name for name in names if name.endswith(".json") and name not in excluded]
        names = names[:MOST_ENTRIES]
        with ThreadPoolExecutor(READ_THREADS, "shardwise-registry") as pool:
            entries = list(pool.map(_read_private, map(self._path.joinpath, names)))
        for name, entry in zip(names, entries, strict=True):
            if isinstance(entry, str):
                found.unreachable[name.removesuffix(".json")] = entry
            elif entry.run == self._run and self._clock() - entry.saved_at < LONGEST_AGE:
                if serves_own_host_only(entry.info) and entry.info.host != socket.gethostname():
                    why = f"its agent serves its own host only, {entry.info.host}"
                    found.unreachable[entry.info.node] = why
                else:
                    found.infos.append(entry.info)
        return found

    def _is_ours(self, path: Path) -> bool:
        """Return whether an entry belongs to this run. An unreadable entry counts as ours."""
        entry = _read_private(path)
        return isinstance(entry, str) or entry.run == self._run


class Registration:
    """Updates a node's entry while the node saves. Logs the first failure, and raises none.

    Args:
        registry: the entries of the run.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._written: tuple[AgentInfo, int] | None = None
        self._warned = False

    def update(self, info: AgentInfo, epoch: int, *, prunes: bool) -> None:
        """Write the node's entry if it has changed.

        Args:
            epoch: the current epoch of the run.
            prunes: whether to remove old entries of other nodes too.
        """
        if self._written == (info, epoch):
            return
        self._written = info, epoch

        def write_and_prune() -> None:
            self._registry.write_entry(info, epoch)
            if prunes:
                self._registry.prune()

        self._try(write_and_prune)

    def remove(self, node: str) -> None:
        """Remove the node's entry, because the node has no snapshots of the run any more."""
        self._written = None
        self._try(lambda: self._registry.remove_entry(node))

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


def update_address(run: Run, info: AgentInfo) -> None:
    """Update an agent's address in the root of a run, if the root has an entry of the node."""
    with suppress(OSError, ValueError):
        path = _entry_path(run, info.node)
        entry = None if path is None else _read_private(path)
        if path is not None and isinstance(entry, Entry) and entry.run == run.name:
            public = msgspec.structs.replace(info, token=run_token(info.token, run.name))
            if public != entry.info:
                _write_private(path, msgspec.structs.replace(entry, info=public))


def remove_entry(run: Run, node: str) -> None:
    """Remove the entry of a node that has no snapshots of a run any more."""
    with suppress(OSError, ValueError):
        path = _entry_path(run, node)
        entry = None if path is None else _read_private(path)
        if path is not None and isinstance(entry, Entry) and entry.run == run.name:
            path.unlink()


def _entry_path(run: Run, node: str) -> Path | None:
    """Return the path of a node's entry in the root of a run; None if the root is unknown."""
    root = read_record(run.path / ROOT, str)
    path = None if root is None else local_path(open_store(root))
    return None if path is None else path / NODES / _file_of(node)


def _file_of(node: str) -> str:
    """Return the file name of a node's entry."""
    name = node if _PLAIN.fullmatch(node) else hashlib.blake2b(node.encode()).hexdigest()[:32]
    return f"{name}.json"


def _write_private(path: Path, entry: Entry) -> None:
    """Write an entry atomically; leave out the token if other users could read the file."""
    with replacing(path) as file:
        if not _is_private(os.fstat(file.fileno())):
            bare = msgspec.structs.replace(entry.info, token="")
            entry = msgspec.structs.replace(entry, info=bare)
            log.warning(
                "%s: this file system does not enforce file modes, so the token of node %s is not "
                "written there; a restart on other nodes cannot read the snapshots of this node",
                path,
                entry.info.node,
            )
        file.write(msgspec.json.encode(entry))
        file.flush()
        os.fsync(file.fileno())


def _read_private(path: Path) -> Entry | str:
    """Return an entry, or why it cannot be used. Entries that others can write are not trusted."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            if not _is_private(os.fstat(fd)):
                return f"{path} belongs to another user, or others may read or write it"
            return msgspec.json.decode(file.read(LARGEST_ENTRY), type=Entry)
    except OSError as error:
        return f"cannot read {path}: {error.strerror}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"{path} is damaged: {error}"


def _is_private(status: os.stat_result) -> bool:
    is_own = status.st_uid == os.geteuid() and stat.S_ISREG(status.st_mode)
    return is_own and not stat.S_IMODE(status.st_mode) & 0o077


def remember_nodes(run: Run, nodes: Iterable[AgentInfo]) -> None:
    """Record on this node which nodes the run uses. Nodes that it used before stay in the record.

    Ranks may return to this node after other nodes have continued the run. They find these nodes by
    this record; the records of the old snapshots do not name them.
    """
    known = {info.node: info for info in known_nodes(run)}
    for info in nodes:
        known.pop(info.node, None)
        known[info.node] = info
    write_record(run.path / KNOWN_NODES, list(known.values())[-MOST_KNOWN:])


def known_nodes(run: Run) -> list[AgentInfo]:
    """Return the recorded nodes; an empty list if the record is missing or damaged."""
    with suppress(StoreError):
        return read_record(run.path / KNOWN_NODES, list[AgentInfo]) or []
    return []
