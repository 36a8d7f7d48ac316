"""The threads of an agent: one observes the node and decides, the others perform the actions.

Each run is observed, decided on and acted upon apart from the others, so that none of them waits
for another, or fails with it.

All state is in the records on the node. If an agent is killed, the next agent observes the same
records and makes the same decisions.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shardwise.kernel.errors import StoreUnavailableError
from shardwise.parts.memory.decide import (
    FREE,
    Action,
    AnyAction,
    RunAction,
    decide_run,
)
from shardwise.parts.memory.home import ABANDONED_MARKER, Run
from shardwise.parts.memory.observe import Observer
from shardwise.parts.memory.records import Failing
from shardwise.parts.memory.times import FORGET_AFTER, OBSERVE_PERIOD, RETRY_PERIOD

NICENESS = 10
log = logging.getLogger("shardwise.agent")

Performer = Callable[..., object]
"""A function that performs an action.

If one that frees a snapshot, or works on a whole run, returns False, it is called again later."""


class Agent:
    """The threads of an agent: one that observes, and one for each run and kind of action.

    Args:
        observer: the observer of the node. The caller holds the agent's lock.
        performers: the function that performs each kind of action.
        before_observing: a function to call before each observation.
        stopping: set when the agent stops, so that long actions end.
    """

    def __init__(
        self,
        observer: Observer,
        performers: Mapping[str, Performer],
        before_observing: Callable[[], object] = lambda: None,
        stopping: threading.Event | None = None,
    ) -> None:
        self._observer = observer
        self._performers = performers
        self._before_observing = before_observing
        self._retries = Retries(observer.clock)
        self._bell = threading.Event()
        self._stopping = stopping or threading.Event()
        self._lock = threading.Lock()
        self._queues: dict[tuple[str, str], list[AnyAction]] = {}  # each has a thread
        self._threads: list[threading.Thread] = []
        self._observer_thread = threading.Thread(
            target=self._observe_repeatedly, name="observe", daemon=True
        )

    def start(self) -> None:
        """Start the thread that observes."""
        self._observer_thread.start()

    @property
    def is_stopping(self) -> bool:
        """Whether no further action may begin."""
        return self._stopping.is_set()

    def list_failing(self) -> list[Failing]:
        """Return the saves and runs that the agent fails to work on. Any thread may call this."""
        return self._retries.list_failing()

    def wake(self) -> None:
        """Make the agent observe the node soon."""
        self._bell.set()

    def stop(self, timeout: float) -> bool:
        """Stop the threads between two actions; return whether all ended within the timeout."""
        self._stopping.set()
        self.wake()
        deadline = self._observer.clock() + timeout
        self._observer_thread.join(timeout)
        threads = [self._observer_thread, *self._threads]
        for thread in threads:
            thread.join(max(0.0, deadline - self._observer.clock()))
        return not any(thread.is_alive() for thread in threads)

    def due_actions(self) -> list[AnyAction]:
        """Observe the node, and return the actions that are due."""
        now = self._observer.clock()
        decided = {run: self._try_to_decide(run, now) for run in self._observer.runs()}
        actions = [each for found in decided.values() for each in found or ()]
        failed = [run for run, found in decided.items() if found is None]
        self._retries.forget_all_except([*actions, *failed])
        return [each for each in actions if self._retries.is_due(each)]

    def _try_to_decide(self, run: Run, now: float) -> list[AnyAction] | None:
        """Return the actions for a run; None if it cannot be observed."""
        try:
            return decide_run(self._observer.run(run), now)
        except Exception as error:  # any error: the agent goes on with other runs
            self._retries.record_failure(run, error)
            return None

    def perform(self, action: AnyAction) -> bool:
        """Perform an action if it is still due; return whether to observe again at once.

        The run is observed again first, because another thread may have done the action, or
        trainers may have resumed the run from an older step.
        """
        try:
            if not self._is_still_due(action):
                return True
            if isinstance(action, RunAction) or action.kind == FREE:
                if self._performers[action.kind](action) is False:
                    return False
            else:
                # While the lock is held, the snapshot cannot be freed.
                with action.place.hold(shared=True) as held:
                    if not held or action.place.is_abandoned():
                        return False
                    self._performers[action.kind](action)
        except Exception as error:  # any error: the agent logs it, and tries again
            self._retries.record_failure(action, error)
            return False
        self._retries.record_success(action)
        return True

    def _is_still_due(self, action: AnyAction) -> bool:
        run = self._observer.run(action.run)
        is_decided = action in decide_run(run, self._observer.clock())
        return is_decided and self._retries.is_due(action)

    def _observe_repeatedly(self) -> None:
        _lower_priority()
        while not self.is_stopping:
            self._bell.wait(OBSERVE_PERIOD)
            self._bell.clear()
            try:
                self._before_observing()
                self._distribute(self.due_actions())
            except Exception:  # any error: without this thread, the agent would do nothing
                log.exception("observing this node failed; trying again")

    def _distribute(self, due: Sequence[AnyAction]) -> None:
        """Queue the due actions by run and kind, and start a thread for each new queue.

        The threads have the low priority of this thread.
        """
        queues: dict[tuple[str, str], list[AnyAction]] = {}
        for action in due:
            if action.kind in self._performers:
                queues.setdefault((action.run.name, action.kind), []).append(action)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        with self._lock:
            for key in queues.keys() - self._queues.keys():
                thread = threading.Thread(target=self._work, args=(key,), name=key[1], daemon=True)
                thread.start()  # it waits for the lock
                self._threads.append(thread)
            self._queues = {key: [] for key in self._queues} | queues

    def _work(self, key: tuple[str, str]) -> None:
        """Perform the actions of a queue, one after the other, until the queue is empty."""
        while (action := self._take_next(key)) is not None:
            if self.perform(action):
                self.wake()

    def _take_next(self, key: tuple[str, str]) -> AnyAction | None:
        """Return the next action of a queue; remove an empty queue, and return None."""
        with self._lock:
            if not self.is_stopping and (queue := self._queues.get(key)):
                return queue.pop(0)
            self._queues.pop(key, None)
            return None


@dataclass(slots=True)
class _Attempts:
    """The number of attempts at an action, the time of the last attempt, and how it failed."""

    count: int = 0
    last_at: float = 0.0
    failure: str = ""
    failing_since: float = 0.0

    def add(self, now: float) -> None:
        """Count an attempt. If the last attempt was long ago, forget the earlier attempts."""
        self.count = self.count + 1 if self.is_recent(now) else 1
        self.last_at = now

    def is_recent(self, now: float) -> bool:
        """Return whether the last attempt was not long ago."""
        return now - self.last_at < FORGET_AFTER

    def is_due(self, now: float) -> bool:
        """Return whether to try again: at once after one attempt, later after growing delays."""
        delay = min(2.0 ** (self.count - 2), RETRY_PERIOD) if self.count > 1 else 0.0
        return now - self.last_at >= delay


class Retries:
    """Decides when to retry each action, and which failures to log. Threads may share it.

    `decide_run` may return an action again that has succeeded. Such an action is delayed like a
    failed action. Failures with the same cause are logged ever more rarely, the first with its
    traceback.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._actions: dict[AnyAction | Run, _Attempts] = {}
        self._failures: dict[tuple[str, int, str], _Attempts] = {}

    def is_due(self, action: AnyAction) -> bool:
        """Return whether an action may be tried now."""
        with self._lock:
            count = self._actions.get(action)
            return count is None or count.is_due(self._clock())

    def record_success(self, action: AnyAction) -> None:
        """Count a success."""
        with self._lock:
            attempts = self._actions.setdefault(action, _Attempts())
            attempts.add(self._clock())
            attempts.failure = ""

    def record_failure(self, action: AnyAction | Run, error: Exception) -> None:
        """Count and log a failure to perform an action, or to observe a run."""
        with self._lock:
            attempts = self._actions.setdefault(action, _Attempts())
            attempts.add(self._clock())
            self._log(action, error, attempts.count)
            if isinstance(error, StoreUnavailableError):
                attempts.failure = ""
                return
            if not attempts.failure:
                attempts.failing_since = self._clock()
            attempts.failure = f"{type(error).__name__}: {error}"

    def list_failing(self) -> list[Failing]:
        """Return the saves and runs whose last attempt failed.

        Attempts that failed because the storage does not answer are not included: a record says so,
        and they are tried again for a long time (see `try_stage`).
        """
        now = self._clock()
        with self._lock:
            return [
                Failing(
                    each.name if isinstance(each, Run) else each.run.name,
                    each.place.step if isinstance(each, Action) else None,
                    max(0.0, now - attempts.failing_since),
                    attempts.failure,
                )
                for each, attempts in self._actions.items()
                if attempts.failure and isinstance(each, (Run, Action))
            ]

    def forget_all_except(self, actions: Collection[AnyAction | Run]) -> None:
        """Forget the attempts at all other actions, and to observe all other runs."""
        with self._lock:
            for action in self._actions.keys() - set(actions):
                del self._actions[action]

    def _log(self, action: AnyAction | Run, error: Exception, times: int) -> None:
        name = "observe" if isinstance(action, Run) else action.kind
        run = action if isinstance(action, Run) else action.run
        path = action.place.path if isinstance(action, Action) else run.path
        message = f"{name}: {path}: {type(error).__name__}: {error}"
        is_first_missing = isinstance(error, FileNotFoundError) and times == 1
        if is_first_missing or not path.exists() or (path / ABANDONED_MARKER).exists():
            log.info("%s (the snapshot is being removed)", message)
            return
        now = self._clock()
        known = {cause: each for cause, each in self._failures.items() if each.is_recent(now)}
        self._failures = known
        failures = known.setdefault((*_cause_of(error), run.name), _Attempts())
        failures.add(now)
        if failures.count == 1:
            log.error("%s", message, exc_info=error)
        elif failures.count & (failures.count - 1) == 0:  # 2, 4, 8, …
            log.error("%s (failed %d times)", message, failures.count)


def _cause_of(error: Exception) -> tuple[str, int]:
    """Return the type of an error, and the line that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return type(error).__name__, 0 if trace is None else trace.tb_lineno


def _lower_priority() -> None:
    """Lower the priority of this thread and of the threads that it starts below the training's.

    The threads that serve other nodes keep their priority, because a restore waits for them.
    """
    with suppress(OSError):
        os.nice(NICENESS)  # on Linux, this applies to the thread
