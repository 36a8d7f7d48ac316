"""The agent of a node: observes it, decides what to do, and does it with one worker for each kind.

An agent keeps no state that matters. If it is killed, the next one observes the same records and
makes the same decisions.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.memory.decide import (
    DEFAULT_PERIODS,
    Action,
    Free,
    FreeRun,
    LookUpRoot,
    Periods,
    Retain,
    decide,
    decide_run,
)
from shardwise.memory.home import ABANDONED, Run, SnapshotHeld
from shardwise.memory.observe import Observer

LOOK_AROUND = 1.0
NICE = 10
LATEST = 60.0
FORGOTTEN = 600.0
log = logging.getLogger("shardwise.agent")

Perform = Callable[..., object]
"""Performs an action. If it raises `SnapshotHeld`, the action is tried again later."""


class Agent:
    """The threads of an agent: one that observes, and one for each kind of action.

    Args:
        observer: the observer of the node; the caller holds the agent's lock.
        perform: the function that performs each kind of action.
        around: a function to call before each observation.
    """

    def __init__(
        self,
        observer: Observer,
        perform: Mapping[type, Perform],
        around: Callable[[], object] = lambda: None,
        periods: Periods = DEFAULT_PERIODS,
    ) -> None:
        self._observer = observer
        self._perform = perform
        self._around = around
        self._periods = periods
        self._retries = Retries(observer.clock)
        self._bell = threading.Event()
        self._stopping = threading.Event()
        self._workers = {kind: _Worker(kind.__name__.lower(), self) for kind in perform}
        self._looking = threading.Thread(target=self._observe_repeatedly, name="look", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        for worker in self._workers.values():
            worker.thread.start()
        self._looking.start()

    @property
    def is_stopping(self) -> bool:
        """Whether no further action may begin."""
        return self._stopping.is_set()

    def wake(self) -> None:
        """Make the agent observe the node soon."""
        self._bell.set()

    def stop(self, timeout: float) -> bool:
        """Stop the threads between two actions; return whether all ended within the timeout."""
        self._stopping.set()
        self.wake()
        deadline = self._observer.clock() + timeout
        threads = [self._looking, *(worker.thread for worker in self._workers.values())]
        for thread in threads:
            thread.join(max(0.0, deadline - self._observer.clock()))
        return not any(thread.is_alive() for thread in threads)

    def look(self) -> list[Action]:
        """Observe the node, and return the actions that are due."""
        now = self._observer.clock()
        actions = decide(self._observer.node(), now, self._periods)
        self._retries.forget_but(actions)
        return [each for each in actions if self._retries.is_due(each)]

    def do(self, action: Action) -> bool:
        """Perform an action if it is still decided on; return whether to observe again at once.

        The node is observed again first: the action may have been done, or become pointless because
        trainers have resumed from an older step.
        """
        try:
            if not self._is_decided(action):
                return True
            if isinstance(action, (Free, FreeRun, LookUpRoot, Retain)):
                self._perform[type(action)](action)
            else:
                with action.place.hold(shared=True) as held:  # so that it is not freed meanwhile
                    if not held:
                        return False
                    self._perform[type(action)](action)
        except SnapshotHeld:
            return False
        except Exception as error:
            self._retries.failed(action, error)
            return False
        self._retries.succeeded(action)
        return True

    def _is_decided(self, action: Action) -> bool:
        run = self._observer.run(run_of(action))
        return action in decide_run(run, self._observer.clock(), self._periods)

    def _observe_repeatedly(self) -> None:
        _lower_priority()
        while not self.is_stopping:
            self._bell.wait(LOOK_AROUND)
            self._bell.clear()
            try:
                self._around()
                due = self.look()
            except Exception:
                log.exception("observing this node failed")
                continue
            for kind, worker in self._workers.items():
                worker.offer([each for each in due if type(each) is kind])
        for worker in self._workers.values():
            worker.offer([])


class _Worker:
    """Does one kind of action, one after the other."""

    def __init__(self, name: str, agent: Agent) -> None:
        self._agent = agent
        self._changed = threading.Condition()
        self._queue: list[Action] = []
        self._running: Action | None = None
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)

    def offer(self, actions: Sequence[Action]) -> None:
        """Replace the queued actions. The action in progress is not queued again."""
        with self._changed:
            self._queue = [each for each in actions if each != self._running]
            self._changed.notify()

    def _work(self) -> None:
        _lower_priority()
        while (action := self._next()) is not None:
            if self._agent.do(action):
                self._agent.wake()

    def _next(self) -> Action | None:
        with self._changed:
            self._running = None
            while not self._queue and not self._agent.is_stopping:
                self._changed.wait()
            if self._agent.is_stopping:
                return None
            self._running = self._queue.pop(0)
            return self._running


def run_of(action: Action) -> Run:
    """Return the run of an action."""
    return action.run if isinstance(action, (FreeRun, LookUpRoot)) else action.place.run


@dataclass(slots=True)
class _Count:
    """How often something has happened in a row, and when it last did."""

    times: int = 0
    at: float = 0.0

    def add(self, now: float) -> None:
        """Count one more; start again from zero if the last time is long ago."""
        self.times = self.times + 1 if now - self.at < FORGOTTEN else 1
        self.at = now

    def is_due(self, now: float) -> bool:
        """Return whether to try again: at once after the first time, then with growing delays."""
        pause = min(2.0 ** (self.times - 2), LATEST) if self.times > 1 else 0.0
        return now - self.at >= pause


class Retries:
    """When to retry each action, and which failures to log. Threads may share it.

    An action that succeeded but is still decided on is delayed like one that failed. Failures of
    one
    kind are logged with decreasing frequency, the first with its traceback.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._actions: dict[Action, _Count] = {}
        self._failures: dict[tuple[str, int], _Count] = {}

    def is_due(self, action: Action) -> bool:
        """Return whether an action may be tried now."""
        with self._lock:
            count = self._actions.get(action)
            return count is None or count.is_due(self._clock())

    def succeeded(self, action: Action) -> None:
        """Count a success."""
        with self._lock:
            self._actions.setdefault(action, _Count()).add(self._clock())

    def failed(self, action: Action, error: Exception) -> None:
        """Count a failure, and log it."""
        with self._lock:
            count = self._actions.setdefault(action, _Count())
            count.add(self._clock())
            self._log(action, error, count.times)

    def forget_but(self, actions: Collection[Action]) -> None:
        """Forget actions that are no longer decided on."""
        with self._lock:
            for action in self._actions.keys() - set(actions):
                del self._actions[action]

    def _log(self, action: Action, error: Exception, times: int) -> None:
        name = type(action).__name__.lower()
        path = action.run.path if isinstance(action, (FreeRun, LookUpRoot)) else action.place.path
        what = f"{name}: {path}: {type(error).__name__}: {error}"
        passing = isinstance(error, FileNotFoundError) and times == 1
        if passing or not path.exists() or (path / ABANDONED).exists():
            log.info("%s (the snapshot is being removed)", what)
            return
        kind = self._failures.setdefault(_kind_of(error), _Count())
        kind.add(self._clock())
        if kind.times == 1:
            log.error("%s", what, exc_info=error)
        elif kind.times & (kind.times - 1) == 0:  # 2, 4, 8, …
            log.error("%s (failed %d times)", what, kind.times)


def _kind_of(error: Exception) -> tuple[str, int]:
    """Return what repeated failures have in common: the type, and the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return type(error).__name__, 0 if trace is None else trace.tb_lineno


def _lower_priority() -> None:
    """Lower the priority of this thread, and of those that it starts: training goes first. The
    threads that serve other nodes keep theirs, because a restore waits for them.
    """
    with suppress(OSError):
        os.nice(NICE)  # of this thread alone, on Linux


def listen(bell: Path, wake: Callable[[], None]) -> None:
    """Create a named pipe, and call `wake` whenever something is written to it. Never returns."""
    with suppress(FileExistsError):
        os.mkfifo(bell, 0o600)
    fd = os.open(bell, os.O_RDWR | os.O_CLOEXEC)
    while True:
        os.read(fd, 4096)
        wake()
