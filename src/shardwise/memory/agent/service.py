"""A node's agent as a process: alone in its home, known by its info, working and serving."""

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
    """How an agent is to serve.

    Args:
        interface: an address, or the name of a network interface.
        port: 0 is that of the agent before, or any that is free.
        domain: what fails together with this node; the node itself if "".
        tls: by what nodes know each other; in clear if None.
        secret: a file with what others must know; one that the home keeps if None.
        until_idle: end when nothing is kept and no training runs.
    """

    interface: str = LOOPBACK
    port: int = 0
    domain: str = ""
    tls: Tls | None = None
    secret: Path | None = None
    until_idle: bool = False


def run_agent(directory: Path, options: ServeOptions) -> bool:
    """Be the agent of a node until told to end (SIGTERM, SIGINT), or until it is idle.

    Args:
        directory: where the node keeps its snapshots.

    Returns:
        Whether all that was begun is finished. If not, threads still work; the next agent does
        that work again.

    Raises:
        StoreError: another agent lives there, or it cannot serve as it is told to.
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
    """What does each kind of action."""
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
            log.info("the agent ends, within %.0f s", ENDING)
            finished = await asyncio.to_thread(agent.stop, ENDING)
            home.info.unlink(missing_ok=True)
    if not finished:
        log.warning("work is left unfinished; the next agent does it again")
    return finished


def _reenter(home: Home, info: AgentInfo) -> None:
    """Write down where this agent is now, in the roots of the runs that it keeps."""
    for name in home.runs():
        with contextlib.suppress(StoreError):  # it is none of ours
            reenter(home.run(name), info)


async def _until_ended(home: Home, ended: asyncio.Event, *, until_idle: bool) -> None:
    busy_at = time.monotonic()
    while not ended.is_set():
        if not until_idle or home.runs() or is_training(home):
            busy_at = time.monotonic()
        elif time.monotonic() - busy_at > IDLE:
            log.info("nothing is kept here any more, and nobody trains")
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), 1.0)


def _listener(home: Home, address: str, port: int) -> socket.socket:
    """A socket at this port; if it is 0 at that of the agent before, which others know."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bind = partial(socket.create_server, family=family, backlog=BACKLOG)
    if not port:
        with contextlib.suppress(OSError):
            return bind((address, last_port(home)))
    try:
        return bind((address, port))
    except OSError as error:
        raise StoreError(f"nothing can be served at {address}, port {port}: {error}") from error


def _open_many_files() -> None:
    """Connections and snapshots take descriptors: as many as the system lets this process have."""
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
            raise StoreError(f"another agent lives in {home}")
        time.sleep(0.05)
