"""The addresses of a run's agents, in the run's root. A restart on other nodes finds them there.

<root>/nodes/<node>.json    one file for each node, written by the agent of that node

Each file contains the address of the agent, and a token that only allows reading the snapshots of
this run. On a file system, only the owner can read the file. If the file system does not enforce
this, the token is left out, and the node is not asked. In an object store, everybody who can read
the root can read the token.
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

import msgspec

from shardwise.decoding import prepare_decoding
from shardwise.errors import StoreError
from shardwise.memory.home import Home, Run
from shardwise.memory.identity import make_run_token, serves_own_host_only
from shardwise.memory.records import AgentInfo
from shardwise.store import Store, open_store, publish_private, read_private

NODES_DIRECTORY = "nodes"
LARGEST_ENTRY = 1 << 14
MOST_ENTRIES = 1024
READ_THREADS = 32
LONGEST_AGE = 7 * 86400.0
REWRITE_PERIOD = 86400.0
RETRY_PERIOD = 60.0
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
log = logging.getLogger("shardwise.agent")


@prepare_decoding
class NodeEntry(msgspec.Struct, frozen=True, rename={"info": "card", "written_at": "at"}):
    """A node that may hold snapshots of a run.

    Attributes:
        info: the address of its agent, with a token for this run only, or "" as the token.
        run: the run's id.
        written_at: the time when the entry was written, in seconds since 1970.
    """

    info: AgentInfo
    run: str
    written_at: float


class Registration:
    """Keeps the entries of a node up to date: one in the root of each run that has snapshots here.

    Args:
        home: the home of the node.
        info: the node's agent, with its secret.
        clock: a function that returns seconds since 1970.
    """

    def __init__(self, home: Home, info: AgentInfo, clock: Callable[[], float] = time.time) -> None:
        self._home, self._info, self._clock = home, info, clock
        self._roots: dict[Run, Store] = {}
        self._due_at: dict[Run, float] = {}

    def update(self) -> None:
        """Write entries of new runs, and remove entries of runs that are gone. Log failures."""
        runs, now = self._home.runs(), self._clock()
        for run in runs:
            if now >= self._due_at.get(run, 0.0) and run.steps():
                self._due_at[run] = now + RETRY_PERIOD
                try:
                    self._write(run, now)
                    self._due_at[run] = now + REWRITE_PERIOD
                except (OSError, ValueError) as error:
                    log.warning(
                        "cannot write the address of this agent below the root (%s): a restart on "
                        "other nodes may not find the snapshots of this node",
                        error,
                    )
        for run in self._due_at.keys() - runs:
            del self._due_at[run]
            if (entries := self._roots.pop(run, None)) is not None:
                with suppress(OSError):
                    entries.delete(_file_of(self._info.node))

    def _write(self, run: Run, now: float) -> None:
        if (root := run.root()) is None:
            return
        entries = open_store(root).at(NODES_DIRECTORY)
        public = msgspec.structs.replace(
            self._info, token=make_run_token(self._info.token, run.name)
        )
        name = _file_of(public.node)
        entry, without_token = (
            msgspec.json.encode(NodeEntry(info, run.name, now))
            for info in (public, msgspec.structs.replace(public, token=""))
        )
        if not publish_private(entries, name, entry, without_token):
            log.warning(
                "%s/%s: this file system does not enforce file modes, so the token of this node is "
                "not written there; a restart on other nodes cannot read the snapshots of this "
                "node",
                *(entries, name),
            )
        self._roots[run] = entries


def read_entries(
    root: Store, run: str, excluding: Collection[str] = (), now: float | None = None
) -> tuple[list[AgentInfo], dict[str, str]]:
    """Return the nodes that may hold snapshots of a run; and remove entries of others.

    Args:
        excluding: the names of nodes to leave out.
        now: the time in seconds since 1970; None for the present.

    Returns:
        The agents that can be asked; and the names of other nodes, each with the reason why it
        cannot be asked.
    """
    entries, excluded = root.at(NODES_DIRECTORY), {_file_of(node) for node in excluding}
    oldest = (time.time() if now is None else now) - LONGEST_AGE
    found: list[AgentInfo] = []
    unreachable: dict[str, str] = {}
    try:
        names = [each for each in entries.list() if each.endswith(".json") and each not in excluded]
    except OSError as error:
        return [], {"all": f"cannot read {entries}: {error}"}
    with ThreadPoolExecutor(READ_THREADS, "shardwise-registry") as pool:
        read = list(pool.map(lambda name: _read(entries, name), names[:MOST_ENTRIES]))
    for name, entry in zip(names, read, strict=False):
        if isinstance(entry, str):
            unreachable[name.removesuffix(".json")] = entry
        elif entry.run != run or entry.written_at < oldest:
            with suppress(OSError):
                entries.delete(name)
        elif serves_own_host_only(entry.info) and entry.info.host != socket.gethostname():
            why = f"its agent serves its own host only, {entry.info.host}"
            unreachable[entry.info.node] = why
        else:
            found.append(entry.info)
    return found, unreachable


def _file_of(node: str) -> str:
    """Return the file name of a node's entry."""
    name = node if _PLAIN.fullmatch(node) else hashlib.blake2b(node.encode()).hexdigest()[:32]
    return f"{name}.json"


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
