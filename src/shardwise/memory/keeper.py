"""Keeps a node's agent alive while training runs beside it."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import deque
from contextlib import closing, suppress

from shardwise.errors import StoreError
from shardwise.memory.client import AgentClient
from shardwise.memory.home import Home
from shardwise.memory.options import Memory
from shardwise.memory.spawn import agent_of, card_of, log_tail

LOOK_AROUND = 1.0
BETWEEN_QUESTIONS = 5.0
NO_ANSWER = 5.0
MOST_STARTS, WITHIN = 5, 60.0
log = logging.getLogger("shardwise")


class Keeper:
    """A thread of one rank of each node, which starts the agent again if it is gone.

    What it sees it logs as warnings; it never raises, but for `check`.

    Args:
        home: the node's directory.
        options: how the agent is to be.
    """

    def __init__(self, home: Home, options: Memory) -> None:
        self._home = home
        self._options = options
        self._starts: deque[float] = deque(maxlen=MOST_STARTS)
        self._failure = self._trouble = ""
        self._is_silent = False
        self._stopping = threading.Event()
        self._attendance = _attend(home)
        self._thread = threading.Thread(target=self._live, name="shardwise-keeper", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if there is no agent, and it was given up.

        Raises:
            StoreError: says why.
        """
        if self._failure and not self._home.has_agent():
            raise StoreError(self._failure)

    def stop(self) -> None:
        """Leave the agent alone from now on; nothing if done before."""
        self._stopping.set()
        self._thread.join(LOOK_AROUND + NO_ANSWER)
        if self._attendance >= 0:
            fcntl.flock(self._attendance, fcntl.LOCK_UN)  # forked processes have it too
            os.close(self._attendance)
            self._attendance = -1

    def _live(self) -> None:
        asked = time.monotonic()
        while not self._stopping.wait(LOOK_AROUND):
            try:
                if not self._home.has_agent():
                    self._start_again()
                    continue
                self._failure = ""
                if time.monotonic() - asked > BETWEEN_QUESTIONS:
                    self._ask()
                    asked = time.monotonic()
            except Exception as error:  # whatever it is, the training goes on
                if str(error) != self._trouble:
                    log.exception("looking after the agent of %s", self._home)
                self._trouble = str(error)

    def _start_again(self) -> None:
        if self._failure:
            return
        now = time.monotonic()
        if len(self._starts) == MOST_STARTS and now - self._starts[0] < WITHIN:
            self._failure = (
                f"the agent of {self._home} ended {MOST_STARTS} times within {WITHIN:.0f} s, and "
                f"is not started any more; its log ends so:\n{log_tail(self._home)}"
            )
            log.error("%s", self._failure)
            return
        self._starts.append(now)
        doing = "starting another" if self._options.start_agent else "waiting for another"
        log.warning("the agent of %s is gone; %s (its log: %s)", self._home, doing, self._home.log)
        try:
            card = agent_of(self._home, self._options)
        except StoreError as error:
            log.warning("%s", error)
        else:
            log.warning("the agent of %s lives again (process %d)", self._home, card.process)

    def _ask(self) -> None:
        """Have it answer; one that is stopped or starved lives, so no other may be started."""
        card = card_of(self._home)
        if card is None:
            return
        tls = self._options.tls
        failure = ""
        try:
            client = AgentClient(
                card,
                connect_timeout=NO_ANSWER,
                read_timeout=NO_ANSWER,
                tls=None if tls is None else tls.for_client(),
            )
            with closing(client):
                client.health()
        except StoreError as error:
            failure = str(error)
        if failure and not self._is_silent and self._home.has_agent():
            log.warning(
                "the agent of %s (process %d) lives, but does not answer: %s; snapshots wait until "
                "it does, or is ended",
                self._home,
                card.process,
                failure,
            )
        if self._is_silent and not failure:
            log.warning("the agent of %s answers again", self._home)
        self._is_silent = bool(failure)


def _attend(home: Home) -> int:
    """A descriptor that shows, while it is open, that training runs beside the agent."""
    fd = os.open(home.path / "training.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def is_attended(home: Home) -> bool:
    """Whether training runs beside an agent."""
    fd = os.open(home.path / "training.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        return True
    finally:
        os.close(fd)
