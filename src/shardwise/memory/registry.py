"""The agents of a run's nodes, stored in its root, so that a restart on any nodes finds them.

<root>/nodes/<node>.json    one file for each node, written by that node alone

Each file contains the address of a node's agent, and a token for the snapshots of this run alone.
Only its owner may read it. If the file system does not enforce that, the file contains no token,
and the node is not asked.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
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
from shardwise.memory.home import ROOT, Run, read_record, write_record
from shardwise.memory.identity import run_token
from shardwise.memory.interface import serves_own_host_only
from shardwise.memory.lineage import Epoch
from shardwise.memory.records import AgentInfo
from shardwise.store import Store, local_path, open_store

NODES = "nodes"
KNOWN_NODES = "nodes.json"
MOST_KNOWN = 64
LARGEST_ENTRY = 1 << 14
MOST = 1024
AT_A_TIME = 32
KEPT_FOR = 7 * 86400.0
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
log = logging.getLogger("shardwise")


class Entry(msgspec.Struct, frozen=True, rename={"info": "card"}):
    """A node that may hold snapshots of a run.

    Attributes:
        info: the address of its agent, with a token for this run alone; the token is "" if there is
            none.
        run: the run's id.
        epoch: the epoch of the run when the node last saved.
        at: when the node last saved, in seconds since 1970.
    """

    info: AgentInfo
    run: str
    epoch: Epoch
    at: float


@dataclass(frozen=True, slots=True)
class Known:
    """The nodes of a run according to its root.

    Attributes:
        infos: the nodes that can be asked.
        unknown: the nodes that cannot be asked, and why.
    """

    infos: list[AgentInfo]
    unknown: dict[str, str] = field(default_factory=dict)


class Registry:
    """The entries of one run.

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

    def enter(self, info: AgentInfo, epoch: int) -> None:
        """Write the entry of a node, and replace an earlier one.

        Args:
            info: the agent with its secret, which is not written.

        Raises:
            OSError: the root is not writable.
        """
        if self._path is None:
            return
        known = msgspec.structs.replace(info, token=run_token(info.token, self._run))
        entry = Entry(known, self._run, epoch, self._clock())
        self._path.mkdir(parents=True, exist_ok=True)
        _write_private(self._path / _file_of(info.node), entry)

    def leave(self, node: str) -> None:
        """Remove the entry of a node that holds no snapshots of the run any more.

        Raises:
            OSError: the root is not writable.
        """
        if self._path is not None:
            (self._path / _file_of(node)).unlink(missing_ok=True)

    def prune(self) -> None:
        """Remove entries of other runs, old entries, and all but the `MOST` newest.

        Raises:
            OSError: the root is not writable.
        """
        if self._path is None or not self._path.is_dir():
            return
        aged = []
        for path in self._path.iterdir():
            with suppress(OSError):
                aged.append((path.stat().st_mtime, path))
        now = self._clock()
        for number, (changed, path) in enumerate(sorted(aged, reverse=True)):
            if number >= MOST or now - changed > KEPT_FOR or not self._is_ours(path):
                path.unlink(missing_ok=True)

    def read(self, besides: Collection[str] = ()) -> Known:
        """Return the nodes that may hold snapshots of the run, except those named in `besides`."""
        found = Known([])
        if self._path is None:
            return found
        try:
            names = sorted(os.listdir(self._path))
        except FileNotFoundError:
            return found
        except OSError as error:
            return Known([], {"all": f"cannot read {self._path}: {error.strerror}"})
        known = {_file_of(node) for node in besides}
        wanted = [name for name in names if name.endswith(".json") and name not in known][:MOST]
        with ThreadPoolExecutor(AT_A_TIME, "shardwise-registry") as pool:
            entries = list(pool.map(_read_private, map(self._path.joinpath, wanted)))
        for name, entry in zip(wanted, entries, strict=True):
            node = name.removesuffix(".json")
            if isinstance(entry, str):
                found.unknown[node] = entry
            elif entry.run == self._run and self._clock() - entry.at < KEPT_FOR:
                if serves_own_host_only(entry.info) and entry.info.host != socket.gethostname():
                    why = f"its agent serves its own host only, {entry.info.host}"
                    found.unknown[entry.info.node] = why
                else:
                    found.infos.append(entry.info)
        return found

    def _is_ours(self, path: Path) -> bool:
        """Return whether an entry belongs to this run, or to another user and cannot be read."""
        entry = _read_private(path)
        return isinstance(entry, str) or entry.run == self._run


class Registration:
    """Keeps a node's entry up to date while the node saves. Logs failures once, and never raises.

    Args:
        registry: the entries of the run.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._entered: tuple[AgentInfo, int] | None = None
        self._warned = False

    def keep(self, info: AgentInfo, epoch: int, *, prunes: bool) -> None:
        """Write the node's entry if it has changed.

        Args:
            epoch: the current epoch of the run.
            prunes: whether to remove old entries too.
        """
        if self._entered == (info, epoch):
            return
        self._entered = info, epoch

        def work() -> None:
            self._registry.enter(info, epoch)
            if prunes:
                self._registry.prune()

        self._attempt(work)

    def end(self, node: str) -> None:
        """Remove the node's entry: the node holds no snapshots of the run any more."""
        self._entered = None
        self._attempt(lambda: self._registry.leave(node))

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            if not self._warned:
                log.warning(
                    "the address of this node cannot be written below the root (%s): a restart on "
                    "other nodes will not find its snapshots",
                    error,
                )
            self._warned = True


def reenter(run: Run, info: AgentInfo) -> None:
    """Update an agent's address in its entry in the root of a run."""
    with suppress(OSError, ValueError):
        path = _entry_of(run, info.node)
        entry = None if path is None else _read_private(path)
        if path is not None and isinstance(entry, Entry) and entry.run == run.name:
            known = msgspec.structs.replace(info, token=run_token(info.token, run.name))
            if known != entry.info:
                _write_private(path, msgspec.structs.replace(entry, info=known))


def forget(run: Run, node: str) -> None:
    """Remove the entry of a node that holds no snapshots of a run any more."""
    with suppress(OSError, ValueError):
        path = _entry_of(run, node)
        entry = None if path is None else _read_private(path)
        if path is not None and isinstance(entry, Entry) and entry.run == run.name:
            path.unlink()


def _entry_of(run: Run, node: str) -> Path | None:
    """Return the path of a node's entry in the root of a run; None if the root is unknown."""
    root = read_record(run.path / ROOT, str)
    path = None if root is None else local_path(open_store(root))
    return None if path is None else path / NODES / _file_of(node)


def _file_of(node: str) -> str:
    """Return the file name of a node's entry."""
    name = node if _PLAIN.fullmatch(node) else hashlib.blake2b(node.encode()).hexdigest()[:32]
    return f"{name}.json"


def _write_private(path: Path, entry: Entry) -> None:
    """Write an entry atomically, readable by its owner only; omit the token if that is not
    enforced."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            if not _is_private(os.fstat(fd)):
                bare = msgspec.structs.replace(entry.info, token="")
                entry = msgspec.structs.replace(entry, info=bare)
                log.warning(
                    "%s: this file system does not enforce file modes, so no token for node %s is "
                    "written there; a restart on other nodes cannot read its snapshots",
                    path,
                    entry.info.node,
                )
            file.write(msgspec.json.encode(entry))
            file.flush()
            os.fsync(fd)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read_private(path: Path) -> Entry | str:
    """Return an entry, or why it cannot be used. An entry that others can write is not trusted."""
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


def _is_private(found: os.stat_result) -> bool:
    mine = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
    return mine and not stat.S_IMODE(found.st_mode) & 0o077


def remember_nodes(run: Run, nodes: Iterable[AgentInfo]) -> None:
    """Record on this node which nodes the run uses, and the most recent of the earlier ones.

    Ranks may return to this node after others ran elsewhere. They find those nodes by this record,
    because the records of old snapshots do not name them.
    """
    known = {info.node: info for info in known_nodes(run)}
    for info in nodes:
        known.pop(info.node, None)
        known[info.node] = info
    write_record(run.path / KNOWN_NODES, list(known.values())[-MOST_KNOWN:])


def known_nodes(run: Run) -> list[AgentInfo]:
    """Return the recorded nodes; none if the record is damaged."""
    with suppress(StoreError):
        return read_record(run.path / KNOWN_NODES, list[AgentInfo]) or []
    return []
