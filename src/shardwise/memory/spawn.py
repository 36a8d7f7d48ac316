"""Finds the agent of a node, or starts one."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwise.errors import StoreError
from shardwise.memory.home import Home, read_note
from shardwise.memory.notes import Card

POLL = 0.02
PATIENCE = 60.0


def agent_of(home: Home, options: Sequence[str]) -> Card:
    """The card of the node's agent, which is started if none lives there.

    Args:
        options: for `shardwise agent`, if it has to be started.

    Raises:
        StoreError: it does not come to life; says what it logged.
    """
    deadline = time.monotonic() + PATIENCE
    with _alone(home):
        process: subprocess.Popen[bytes] | None = None
        while True:
            card = read_note(home.card, Card)
            if home.has_agent() and card is not None and _is_alive(card.process):
                return card
            if process is None and not home.has_agent():
                process = _start(home, options)
            if process is not None and process.poll() not in (None, 0):
                raise StoreError(f"the agent of {home} ended at once:\n{_log_tail(home)}")
            if time.monotonic() > deadline:
                raise StoreError(
                    f"the agent of {home} did not start in {PATIENCE:.0f} s:\n{_log_tail(home)}"
                )
            time.sleep(POLL)


@contextmanager
def _alone(home: Home) -> Iterator[None]:
    """One rank of the node at a time."""
    fd = os.open(home.path / "start.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _start(home: Home, options: Sequence[str]) -> subprocess.Popen[bytes]:
    """In a session of its own: what ends the trainers does not end it."""
    command = [sys.executable, "-m", "shardwise", "agent", "run", f"--dir={home.path.parent}"]
    with home.log.open("ab") as log:
        return subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _is_alive(process: int) -> bool:
    return process > 0 and os.path.exists(f"/proc/{process}")


def _log_tail(home: Home) -> str:
    try:
        return "\n".join(home.log.read_text(errors="replace").splitlines()[-10:])
    except OSError:
        return "(it has no log)"
