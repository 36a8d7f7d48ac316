"""The agent as a process: it locks the home, publishes its address, works and serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from shardwise.errors import StoreError
from shardwise.memory import decide
from shardwise.memory.agent.actions import Following, Sealing, free, look_up_root
from shardwise.memory.agent.agent import Agent, Perform, listen
from shardwise.memory.agent.connections import BACKLOG, serving
from shardwise.memory.agent.lead import Leading
from shardwise.memory.agent.server import create_app
from shardwise.memory.agent.supervise import is_training
from shardwise.memory.home import Home, write_record
from shardwise.memory.identity import last_port, node_name, remember_port, secret_of
from shardwise.memory.interface import LOOPBACK, address_of
from shardwise.memory.observe import Observer
from shardwise.memory.reclaim import remove_if_vacant, remove_leftovers
from shardwise.memory.records import AgentInfo, schema
from shardwise.memory.registry import reenter
from shardwise.memory.seal import Mappings
from shardwise.memory.tls import Tls

PATIENCE = 2.0
IDLE = 10.0
ENDING = 20.0
log = logging.getLogger("shardwise.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of an agent.

    Args:
        interface: the address to serve, or the name of a network interface.
        port: the port to serve. 0: the previous agent's port, or any free one.
        domain: the failure domain of this node; "" for the node itself.
        tls: certificates for connections between nodes; None for unencrypted ones.
        secret: the file with the secret that clients must present; None for one stored in the home.
        until_idle: whether to exit when the node stores nothing and no training runs.
    """

    interface: str = LOOPBACK
    port: int = 0
    domain: str = ""
    tls: Tls | None = None
    secret: Path | None = None
    until_idle: bool = False


def run_agent(directory: Path, options: ServeOptions) -> bool:
    """Run the agent of a node until SIGTERM or SIGINT, or until it is idle.

    Args:
        directory: the directory of the node's snapshots.

    Returns:
        Whether all actions have finished. If not, the next agent repeats the others.

    Raises:
        StoreError: another agent runs on the node, or the address cannot be served.
    """
    home = Home(directory)
    address = address_of(options.interface)
    with _alone(home):
        home.info.unlink(missing_ok=True)
        _open_many_files()
        node = node_name(home)
        mappings = Mappings()
        remove_leftovers(home)
        observer = Observer(home, node)
        actions = _actions(home, node, observer, mappings, options.tls)
        agent = Agent(observer, actions, around=mappings.unmap_removed)
        info = AgentInfo(
            node=node,
            url="",
            token=secret_of(home, options.secret),
            process=os.getpid(),
            domain=options.domain,
            host=socket.gethostname(),
            schema=schema(),
        )
        return asyncio.run(_serve(home, agent, info, options, address))


def _actions(
    home: Home, node: str, observer: Observer, mappings: Mappings, tls: Tls | None
) -> dict[type, Perform]:
    """Return the function that performs each kind of action."""
    leading, following = Leading(node, tls), Following(node, mappings, tls)
    return {
        decide.Seal: Sealing(mappings).seal,
        decide.Commit: leading.commit,
        decide.Protect: leading.protect,
        decide.Guard: following.guard,
        decide.Persist: leading.persist,
        decide.Copy: following.copy,
        decide.Retain: following.retain,
        decide.Rescue: following.rescue,
        decide.Free: free,
        decide.FreeRun: lambda action: remove_if_vacant(home, action.run),
        decide.LookUpRoot: partial(look_up_root, observer=observer),
    }


async def _serve(
    home: Home, agent: Agent, info: AgentInfo, options: ServeOptions, address: str
) -> bool:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    tls = None if options.tls is None else options.tls.for_server()
    listener = _listener(home, address, options.port)
    port = listener.getsockname()[1]
    remember_port(home, port)
    scheme, host = "http" if tls is None else "https", f"[{address}]" if ":" in address else address
    info = msgspec.structs.replace(info, url=f"{scheme}://{host}:{port}")
    threading.Thread(target=listen, args=(home.bell, agent.wake), daemon=True).start()
    async with serving(create_app(home.path, info.token, agent.wake), listener, tls=tls):
        agent.start()
        agent.wake()
        write_record(home.info, info)
        threading.Thread(target=_reenter, args=(home, info), daemon=True).start()
        log.info("agent of node %s serves %s at %s", info.node, home, info.url)
        try:
            await _until_ended(home, ended, until_idle=options.until_idle)
        finally:
            log.info("stopping the agent; actions in progress have %.0f s to finish", ENDING)
            finished = await asyncio.to_thread(agent.stop, ENDING)
            home.info.unlink(missing_ok=True)
    if not finished:
        log.warning("some work is unfinished; the next agent repeats it")
    return finished


def _reenter(home: Home, info: AgentInfo) -> None:
    """Write this agent's address to the roots of the runs that it stores."""
    for name in home.runs():
        with contextlib.suppress(StoreError):  # not a run
            reenter(home.run(name), info)


async def _until_ended(home: Home, ended: asyncio.Event, *, until_idle: bool) -> None:
    busy_at = time.monotonic()
    while not ended.is_set():
        if not until_idle or home.runs() or is_training(home):
            busy_at = time.monotonic()
        elif time.monotonic() - busy_at > IDLE:
            log.info("nothing is stored and no training runs: exiting")
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), 1.0)


def _listener(home: Home, address: str, port: int) -> socket.socket:
    """Return a listening socket. Port 0 means the previous agent's port, which others know."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bind = partial(socket.create_server, family=family, backlog=BACKLOG)
    if not port:
        with contextlib.suppress(OSError):
            return bind((address, last_port(home)))
    try:
        return bind((address, port))
    except OSError as error:
        raise StoreError(f"cannot serve at {address}, port {port}: {error}") from error


def _open_many_files() -> None:
    """Raise this process's limit of open files: connections and snapshots need many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextlib.contextmanager
def _alone(home: Home) -> Iterator[None]:
    deadline = time.monotonic() + PATIENCE
    while True:
        with home.lock() as alone:
            if alone:
                yield
                return
        if time.monotonic() > deadline:
            raise StoreError(f"another agent runs in {home}")
        time.sleep(0.05)
