"""A node's agent as a process: alone in its home, known by its card, working and serving."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from shardwise.errors import StoreError
from shardwise.memory.agent import Agent, listen, undisturbed
from shardwise.memory.duties import Following, Leading, seal_staged
from shardwise.memory.home import Home, write_note
from shardwise.memory.notes import Card
from shardwise.memory.retire import retire_old
from shardwise.memory.server import create_app, serving

PATIENCE = 2.0
IDLE = 60.0
log = logging.getLogger("shardwise.agent")


def run_agent(directory: Path, *, interface: str, port: int = 0, domain: str = "") -> None:
    """Be the agent of a node until told to end (SIGTERM), or until there is nothing left to guard.

    Args:
        directory: where the node keeps its snapshots.
        interface, port: where to serve other nodes; port 0 is one that is free.
        domain: what fails together with this node; the node itself if "".

    Raises:
        StoreError: another agent lives there.
    """
    home = Home(directory)
    with _alone(home):
        node = node_name(home)
        leading, following = Leading(node), Following(node)
        agent = Agent(
            home,
            {
                "seal": undisturbed(seal_staged),
                "commit": undisturbed(leading.commit),
                "protect": undisturbed(leading.protect),
                "persist": undisturbed(leading.persist),
                "guard": undisturbed(following.protect),
                "copy": undisturbed(following.persist),
                "retire": retire_old,
            },
        )
        asyncio.run(_serve(home, agent, Card(node, "", "", os.getpid(), domain), interface, port))


def node_name(home: Home) -> str:
    """The name of a node, made with its home: it lasts as long as what lies there."""
    path = home.path / "node"
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(f"{socket.gethostname()}-{secrets.token_hex(4)}")
    return path.read_text()


async def _serve(home: Home, agent: Agent, card: Card, interface: str, port: int) -> None:
    token = secrets.token_urlsafe(32)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    threading.Thread(target=listen, args=(home.bell, agent.wake), daemon=True).start()
    async with serving(create_app(home.path, token, agent.wake), interface, port) as bound:
        host = f"[{interface}]" if ":" in interface else interface
        url = f"http://{host}:{bound}"
        agent.start()
        agent.wake()
        write_note(home.card, Card(card.node, url, token, card.process, card.domain))
        log.info("agent of node %s serves %s at %s", card.node, home, url)
        try:
            await _until_idle(home, ended)
        finally:
            home.card.unlink(missing_ok=True)
            agent.stop(timeout=5.0)


async def _until_idle(home: Home, ended: asyncio.Event) -> None:
    busy_at = time.monotonic()
    while not ended.is_set():
        if home.runs():
            busy_at = time.monotonic()
        elif time.monotonic() - busy_at > IDLE:
            log.info("nothing is kept here any more: the agent ends")
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(ended.wait(), 1.0)


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
