"""Restarts a node's agent if it dies during the training."""

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
    """A thread in one rank of each node that restarts the agent if it is gone.

    It logs warnings, and raises only from `check`. It ends when this object is deleted.

    Args:
        home: the node's home.
        options: the options for a new agent.
    """

    def __init__(self, home: Home, options: Memory) -> None:
        self._round = _Checks(home, options)
        stopping = self._stopping = threading.Event()
        weakref.finalize(self, stopping.set)
        attending = ExitStack()
        attending.enter_context(training_lock(home))
        self._thread = threading.Thread(
            target=_check_repeatedly,
            args=(self._round, stopping, attending),
            name="shardwise-supervisor",
            daemon=True,
        )
        self._thread.start()

    def check(self) -> None:
        """Raise if no agent runs and the supervisor has stopped restarting it.

        Raises:
            StoreError: why it has.
        """
        failure = self._round.failure
        if failure and not self._round.home.has_agent():
            raise StoreError(failure)

    def stop(self) -> None:
        """Stop the thread. Further calls do nothing."""
        self._stopping.set()
        self._thread.join(LOOK_AROUND + NO_ANSWER)


def _check_repeatedly(each: _Checks, stopping: threading.Event, attending: ExitStack) -> None:
    with attending:
        while not stopping.wait(LOOK_AROUND):
            each.look()


class _Checks:
    """The repeated checks of the agent.

    Attributes:
        failure: why the agent is not restarted any more; "" while it is.
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
        """Check the agent once. Failures are logged, never raised: the training must continue."""
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
                log.exception("checking the agent of %s failed", self.home)
            self._trouble = str(error)

    def _start_again(self) -> None:
        if self.failure:
            return
        now = time.monotonic()
        if len(self._starts) == MOST_STARTS and now - self._starts[0] < WITHIN:
            self.failure = (
                f"the agent of {self.home} ended {MOST_STARTS} times within {WITHIN:.0f} s, and "
                f"is not restarted; the end of its log:\n{log_tail(self.home.log)}"
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
            log.warning("the agent of %s runs again (process %d)", self.home, info.process)

    def _ask(self) -> None:
        """Check that the agent answers. A suspended or overloaded agent is not replaced."""
        info = running_agent(self.home)
        if info is None:
            return
        failure = silence(info, self._options.tls, NO_ANSWER)
        if failure and not self._is_silent and self.home.has_agent():
            log.warning(
                "the agent of %s (process %d) runs, but does not answer: %s; snapshots wait until "
                "it answers or is killed",
                self.home,
                info.process,
                failure,
            )
        if self._is_silent and not failure:
            log.warning("the agent of %s answers again", self.home)
        self._is_silent = bool(failure)


@contextmanager
def training_lock(home: Home) -> Iterator[None]:
    """Hold the lock that shows the agent that a training runs on this node."""
    process = os.getpid()
    with _lock_file(home) as fd:
        fcntl.flock(fd, fcntl.LOCK_SH)
        try:
            yield
        finally:
            if os.getpid() == process:  # a forked child shares the lock, and must not release it
                fcntl.flock(fd, fcntl.LOCK_UN)


def is_training(home: Home) -> bool:
    """Return whether a training runs on this node."""
    with _lock_file(home) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@contextmanager
def _lock_file(home: Home) -> Iterator[int]:
    fd = home.open_lock("training.lock")
    try:
        yield fd
    finally:
        os.close(fd)
