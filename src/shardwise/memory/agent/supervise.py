"""Keeps a node's agent alive while training runs beside it."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shardwise.errors import StoreError
from shardwise.memory.home import Home
from shardwise.memory.options import Memory
from shardwise.memory.remote.watch import silence
from shardwise.memory.spawn import ensure_agent, log_tail, running_agent

LOOK_AROUND = 1.0
BETWEEN_QUESTIONS = 5.0
NO_ANSWER = 5.0
MOST_STARTS, WITHIN = 5, 60.0
log = logging.getLogger("shardwise")


class Supervisor:
    """A thread of one rank of each node, which starts the agent again if it is gone.

    What it sees it logs as warnings; it never raises, but for `check`. It ends with this object.

    Args:
        home: the node's directory.
        options: how the agent is to be.
    """

    def __init__(self, home: Home, options: Memory) -> None:
        self._round = _Checks(home, options)
        stopping = self._stopping = threading.Event()
        weakref.finalize(self, stopping.set)
        attending = ExitStack()
        attending.enter_context(training_lock(home))
        self._thread = threading.Thread(
            target=_go_round,
            args=(self._round, stopping, attending),
            name="shardwise-keeper",
            daemon=True,
        )
        self._thread.start()

    def check(self) -> None:
        """Raise if there is no agent, and it was given up.

        Raises:
            StoreError: says why.
        """
        failure = self._round.failure
        if failure and not self._round.home.has_agent():
            raise StoreError(failure)

    def stop(self) -> None:
        """Leave the agent alone from now on; nothing if done before."""
        self._stopping.set()
        self._thread.join(LOOK_AROUND + NO_ANSWER)


def _go_round(each: _Checks, stopping: threading.Event, attending: ExitStack) -> None:
    with attending:
        while not stopping.wait(LOOK_AROUND):
            each.look()


class _Checks:
    """What is looked at again and again.

    Attributes:
        failure: why the agent was given up; "" if it was not.
    """

    def __init__(self, home: Home, options: Memory) -> None:
        self.home = home
        self.failure = ""
        self._options = options
        self._starts: deque[float] = deque(maxlen=MOST_STARTS)
        self._asked = time.monotonic()
        self._is_silent = False
        self._trouble = ""

    def look(self) -> None:
        """Look once; whatever is found, the training goes on."""
        try:
            if not self.home.has_agent():
                self._start_again()
                return
            self.failure = ""
            if time.monotonic() - self._asked > BETWEEN_QUESTIONS:
                self._ask()
                self._asked = time.monotonic()
        except Exception as error:
            if str(error) != self._trouble:
                log.exception("looking after the agent of %s", self.home)
            self._trouble = str(error)

    def _start_again(self) -> None:
        if self.failure:
            return
        now = time.monotonic()
        if len(self._starts) == MOST_STARTS and now - self._starts[0] < WITHIN:
            self.failure = (
                f"the agent of {self.home} ended {MOST_STARTS} times within {WITHIN:.0f} s, and "
                f"is not started any more; its log ends so:\n{log_tail(self.home.log)}"
            )
            log.error("%s", self.failure)
            return
        self._starts.append(now)
        doing = "starting another" if self._options.start_agent else "waiting for another"
        log.warning("the agent of %s is gone; %s (its log: %s)", self.home, doing, self.home.log)
        try:
            info = ensure_agent(self.home, self._options)
        except StoreError as error:
            log.warning("%s", error)
        else:
            log.warning("the agent of %s lives again (process %d)", self.home, info.process)

    def _ask(self) -> None:
        """Have it answer; one that is stopped or starved lives, so no other may be started."""
        info = running_agent(self.home)
        if info is None:
            return
        failure = silence(info, self._options.tls, NO_ANSWER)
        if failure and not self._is_silent and self.home.has_agent():
            log.warning(
                "the agent of %s (process %d) lives, but does not answer: %s; snapshots wait until "
                "it does, or is ended",
                self.home,
                info.process,
                failure,
            )
        if self._is_silent and not failure:
            log.warning("the agent of %s answers again", self.home)
        self._is_silent = bool(failure)


@contextmanager
def training_lock(home: Home) -> Iterator[None]:
    """Have the agent know, while the block runs, that training runs beside it."""
    process = os.getpid()
    with _attending(home) as fd:
        fcntl.flock(fd, fcntl.LOCK_SH)
        try:
            yield
        finally:
            if os.getpid() == process:  # forked children hold the same lock, and do not let it go
                fcntl.flock(fd, fcntl.LOCK_UN)


def is_training(home: Home) -> bool:
    """Whether training runs beside an agent."""
    with _attending(home) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@contextmanager
def _attending(home: Home) -> Iterator[int]:
    fd = home.open_lock("training.lock")
    try:
        yield fd
    finally:
        os.close(fd)
