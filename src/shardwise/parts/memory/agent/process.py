"""Runs an agent: locks the node, starts the threads of `agent.py`, and serves other nodes."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import resource
import signal
import socket
import ssl
import threading
import time
from functools import partial
from pathlib import Path

import msgspec

from shardwise.kernel.errors import StoreError
from shardwise.parts.memory import decide
from shardwise.parts.memory.agent.actions import Follower, look_up_root
from shardwise.parts.memory.agent.agent import Agent, Performer
from shardwise.parts.memory.agent.lead import Leader
from shardwise.parts.memory.agent.metrics import read_metrics
from shardwise.parts.memory.agent.root_tasks import RootTasks
from shardwise.parts.memory.agent.server import BACKLOG, Served, create_app, serve_connections
from shardwise.parts.memory.files import listen_to_bell, read_record, write_record
from shardwise.parts.memory.home import AGENT_LOCK, Home
from shardwise.parts.memory.identity import (
    previous_port,
    read_or_create_node_name,
    read_or_create_secret,
    record_port,
    resolve_interface,
    write_metrics_token,
)
from shardwise.parts.memory.observe import Observer
from shardwise.parts.memory.options import Tls
from shardwise.parts.memory.reclaim import finish_freeing, finish_removals, free, remove_if_unused
from shardwise.parts.memory.records import RESCUE, STAGES, AgentInfo, schema
from shardwise.parts.memory.registry import Registration
from shardwise.parts.memory.seal import MappedFiles
from shardwise.parts.memory.times import (
    OBSERVE_PERIOD,
    SHUTDOWN_TIMEOUT,
    STOP_TIMEOUT,
    UPKEEP_PERIOD,
)
from shardwise.parts.memory.view import on_this_node

log = logging.getLogger("shardwise.agent")


def run_agent(
    directory: Path,
    *,
    interface: str,
    port: int,
    domain: str,
    tls: Tls | None,
    secret_file: Path | None,
    until_idle: bool,
) -> bool:
    """Run the agent of a node until SIGTERM or SIGINT, or until it is idle.

    Args:
        directory: the directory of the node's snapshots.
        interface, port, domain, secret_file, until_idle: as for `NodeAgent.run`.
        tls: certificates for connections between nodes; None for unencrypted connections.

    Returns:
        Whether all actions in progress have finished. The next agent repeats unfinished actions.

    Raises:
        StoreError: another agent runs on the node, or the address or port cannot be used.
    """
    home = Home(directory)
    address = resolve_interface(interface)
    with home.lock(AGENT_LOCK, timeout=SHUTDOWN_TIMEOUT) as is_held:
        if not is_held:
            raise StoreError(
                f"another agent runs in {home}: stop it first, or choose another directory with "
                "--dir"
            )
        home.info_path.unlink(missing_ok=True)
        _raise_file_limit()
        node = read_or_create_node_name(home)
        finish_removals(home)
        follower = Follower(node, MappedFiles(), tls)
        agent, tasks = make_agent(home, follower)
        info = AgentInfo(
            node=node,
            url="",
            token=read_or_create_secret(home, secret_file),
            process=os.getpid(),
            domain=domain,
            host=socket.gethostname(),
            schema=schema(),
        )
        context = None if tls is None else tls.for_server()
        listener = _open_listener(home, address, port)
        return asyncio.run(
            _serve(home, agent, follower, tasks, info, listener, context, until_idle=until_idle)
        )


def make_agent(home: Home, follower: Follower) -> tuple[Agent, RootTasks]:
    """Return the threads of an agent, and what works on its tasks in roots."""
    tasks = RootTasks(follower.states, follower.stores)
    observer = Observer(home, follower.node, requested=follower.calls.stages_of)
    performers = _make_performers(home, observer, follower, tasks)

    def before_observing() -> None:
        follower.mapped_files.unmap_removed()
        follower.calls.forget_freed()

    return Agent(observer, performers, before_observing, follower.stopping), tasks


def _make_performers(
    home: Home, observer: Observer, follower: Follower, tasks: RootTasks
) -> dict[str, Performer]:
    """Return the function that performs each kind of action."""
    leader = Leader(follower)
    return {
        "seal": follower.seal,
        **dict.fromkeys(STAGES, leader.perform),
        **{on_this_node(stage): follower.answer for stage in STAGES},
        decide.FOLLOW: follower.follow,
        RESCUE: follower.rescue,
        decide.ROOT_TASK: lambda action: tasks.perform(action.run),
        decide.FREE: partial(free, states=follower.states),
        decide.FINISH_FREEING: lambda action: finish_freeing(action.run),
        decide.FREE_RUN: lambda action: remove_if_unused(home, action.run),
        decide.LOOK_UP_ROOT: partial(look_up_root, observer=observer),
    }


async def _serve(
    home: Home,
    agent: Agent,
    follower: Follower,
    tasks: RootTasks,
    info: AgentInfo,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    *,
    until_idle: bool,
) -> bool:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    address, port = listener.getsockname()[:2]
    record_port(home, port)
    scheme, host = "http" if tls is None else "https", f"[{address}]" if ":" in address else address
    info = msgspec.structs.replace(info, url=f"{scheme}://{host}:{port}")
    threading.Thread(target=listen_to_bell, args=(home.bell_path, agent.wake), daemon=True).start()
    write_metrics_token(home, info.token)
    served = Served(
        home=home.path,
        token=info.token,
        wake=agent.wake,
        calls=follower.calls,
        states=follower.states,
        list_failing=lambda: [*agent.list_failing(), *follower.states.list_silent()],
        list_metrics=partial(read_metrics, home),
    )
    async with serve_connections(create_app(served), listener, tls=tls):
        agent.start()
        agent.wake()
        write_record(home.info_path, info)
        registration = Registration(home, info)
        threading.Thread(target=_register, args=(registration, ended), daemon=True).start()
        log.info("agent of node %s serves %s at %s", info.node, home, info.url)
        try:
            await _wait_for_end(home, info, ended, until_idle=until_idle)
        finally:
            log.info("stopping the agent; actions in progress have %.0f s to finish", STOP_TIMEOUT)
            tasks.stop()
            finished = await asyncio.to_thread(agent.stop, STOP_TIMEOUT)
            home.info_path.unlink(missing_ok=True)
    if not finished:
        log.warning("some actions are unfinished; the next agent repeats them")
    return finished


def _register(registration: Registration, ended: asyncio.Event) -> None:
    """Refresh this node's address in the registries of all roots, in a thread of its own.

    A root that hangs blocks only this thread.
    """
    while not ended.is_set():
        try:
            registration.update()
        except Exception:  # any error: without this thread, no root gets the address
            log.exception("updating the addresses in roots failed; trying again")
        time.sleep(OBSERVE_PERIOD)


async def _wait_for_end(
    home: Home, info: AgentInfo, ended: asyncio.Event, *, until_idle: bool
) -> None:
    busy_at = trimmed_at = time.monotonic()
    while not ended.is_set():
        if time.monotonic() - trimmed_at > UPKEEP_PERIOD:
            await asyncio.to_thread(release_free_memory)
            trimmed_at = time.monotonic()
        _restore_info(home, info)
        if not until_idle or home.runs() or home.runs_with_tasks():
            busy_at = time.monotonic()
        elif time.monotonic() - busy_at > UPKEEP_PERIOD:
            log.info("the node stores nothing, and no training runs: exiting")
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), 1.0)


def _restore_info(home: Home, info: AgentInfo) -> None:
    """Write this agent's record again if it was damaged."""
    try:
        read_record(home.info_path, AgentInfo)
    except StoreError as error:
        log.error("written again: %s", error)
        write_record(home.info_path, info)


def release_free_memory() -> None:
    """Return freed memory of this process to the system.

    Otherwise, glibc keeps freed buffers in the heaps of its threads: 20 to 45 MB after the files of
    a lost node were decoded and persisted.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _open_listener(home: Home, address: str, port: int) -> socket.socket:
    """Return a listening socket.

    For port 0, try the port of the previous agent first, because other nodes know it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bind = partial(socket.create_server, family=family, backlog=BACKLOG)
    if not port:
        with contextlib.suppress(OSError):
            return bind((address, previous_port(home)))
    try:
        return bind((address, port))
    except OSError as error:
        raise StoreError(
            f"the agent cannot listen on {address}, port {port}: {error.strerror}; choose another "
            "address or port with --interface or --port"
        ) from error


def _raise_file_limit() -> None:
    """Raise this process's limit of open files: connections and snapshots need many."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
