"""The tasks of this node's agent in roots, one for each run: keep a mirror, or remove old steps.

<home>/roots/<run>.json

Trainers and agents write a task. The agent removes the task of a mirror when the run has ended and
the mirror has all checkpoints, and any other task when the old steps are removed. So the work
continues after the training has ended, and after the agent was restarted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from shardwise.kernel.errors import (
    ShardwiseError,
    StoreError,
    StoreUnavailableError,
    describe_error,
)
from shardwise.kernel.store import Store, open_store
from shardwise.parts.memory.files import read_record, write_record
from shardwise.parts.memory.home import Home, Run
from shardwise.parts.memory.rank_liveness import has_trainers
from shardwise.parts.memory.records import REMOVE_OLD, StageOutcome
from shardwise.parts.memory.states import SaveStates, places_with_states, read_state
from shardwise.parts.memory.times import DAY, FORGET_AFTER, RETRY_PERIOD
from shardwise.parts.tiers.mirroring import Mirroring
from shardwise.parts.tiers.options import StorageTask

MOST_STORES = 16
log = logging.getLogger("shardwise.agent")


def set_root_task(run: Run, task: StorageTask) -> None:
    """Have the agent of this node keep a mirror up to date, or remove old checkpoints once.

    A task without a newest step keeps the newest step of the earlier task for the same root.
    """
    path = run.task_path
    path.parent.mkdir(mode=0o700, exist_ok=True)
    earlier = read_root_task(run)
    if earlier is not None and earlier.root == task.root and task.newest is None:
        task = msgspec.structs.replace(task, newest=earlier.newest, damaged=earlier.damaged)
    write_record(path, task)


def read_root_task(run: Run) -> StorageTask | None:
    """Return the task of a run, or None if there is none. A damaged task is set aside."""
    try:
        return read_record(run.task_path, StorageTask)
    except StoreError as error:
        _set_aside(run, error)
        return None


def _set_aside(run: Run, error: StoreError) -> None:
    log.error("the next save requests the work in the root again: %s", error)
    path = run.task_path
    with suppress(FileNotFoundError):
        path.rename(path.with_name(f".{path.name}.damaged"))


def mirror_tasks(home: Home) -> dict[Run, StorageTask]:
    """Return the task of each run whose root has a mirror."""
    found = {run: read_root_task(run) for run in home.runs_with_tasks()}
    return {run: task for run, task in found.items() if task is not None and task.mirror}


class OpenedStores:
    """The stores that an agent has opened, by URL. Threads may share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, Store] = {}

    @contextmanager
    def open(self, url: str) -> Iterator[Store]:
        """Open a store, and keep it open for later calls, unless the block raises.

        After a failure, the store is opened again, because it may have to read other credentials.

        Raises:
            StoreError: as for `open_store`.
        """
        with self._lock:
            store = self._stores.pop(url, None)
        store = store or open_store(url)
        yield store
        with self._lock:
            self._stores[url] = store
            while len(self._stores) > MOST_STORES:
                del self._stores[next(iter(self._stores))]


@dataclass(slots=True)
class _OpenMirror:
    """A root and its mirror, opened for a task.

    Attributes:
        task: the task when the mirror was last brought up to date.
        opened_at: the time of the opening.
        completed_at: the time when the mirror was last complete; 0 if the last attempt failed.
    """

    task: StorageTask
    mirroring: Mirroring
    opened_at: float
    completed_at: float = 0.0


class RootTasks:
    """Works on the tasks in roots.

    Args:
        states: the states of the saves on this node.
        stores: the stores that the agent has opened.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        states: SaveStates,
        stores: OpenedStores,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._states, self._stores = states, stores
        self._clock = clock
        self._open_mirrors: dict[Run, _OpenMirror] = {}

    def stop(self) -> None:
        """End the copies in progress between two chunks. The next agent continues them."""
        for each in list(self._open_mirrors.values()):
            each.mirroring.stop()

    def perform(self, run: Run) -> None:
        """Work on the task of a run. The agent calls this again and again, until it is removed.

        Raises:
            StoreUnavailableError: the storage does not answer.
        """
        task = None
        try:
            task = read_record(run.task_path, StorageTask)
        except StoreError as error:
            self._end_removal(run, None, StageOutcome(failure=str(error), ended_at=self._clock()))
            _set_aside(run, error)
        if task is None or task.mirror is None:
            self._open_mirrors.pop(run, None)
        if task is not None:
            if task.mirror is not None:
                self._catch_up(run, task)
            else:
                self._remove_old(run, task)

    def _remove_old(self, run: Run, task: StorageTask) -> None:
        """Remove old checkpoints from a root. Stop if the task is withdrawn.

        Publishing does not wait for the removal: freeing the blocks of a large file can take a
        third of the time that writing the file took.
        """
        begun, start = self._age_of_task(run), time.monotonic()
        failure = ""
        try:
            with self._stores.open(task.root) as root:
                task.remove_old(root, lambda: read_root_task(run) == task)
        except Exception as error:  # any error: the outcome must say it
            is_outage = isinstance(error, StoreUnavailableError)
            if is_outage and begun is not None and begun < DAY:
                raise
            failure = describe_error(error)
            log.error("%s: old checkpoints were not removed: %s", task.root, failure)
        seconds = time.monotonic() - start
        done = StageOutcome(seconds=seconds, failure=failure, ended_at=self._clock())
        self._end_removal(run, task.newest, done)
        with self._states.lock:  # the leader of a save holds it while it writes the next task
            if read_root_task(run) == task:
                run.task_path.unlink(missing_ok=True)

    def _end_removal(self, run: Run, newest: int | None, done: StageOutcome) -> None:
        """Record how the removal has ended, for the saves that were persisted until then."""
        for place in places_with_states(run):
            outcomes = read_state(place).outcomes
            is_old = place.path.exists() and newest is not None and place.step <= newest
            if REMOVE_OLD not in outcomes and (is_old or "persist" in outcomes):
                with suppress(FileNotFoundError):
                    self._states.end(place, {REMOVE_OLD: done})

    def _age_of_task(self, run: Run) -> float | None:
        with suppress(FileNotFoundError):
            return self._clock() - run.task_path.lstat().st_mtime
        return None

    def _catch_up(self, run: Run, task: StorageTask) -> None:
        """Bring the mirror of a run up to date.

        When the run has ended, the task is removed as soon as the mirror is complete. If copies
        fail, it is removed a day after the end.

        Failures are logged, and recorded in the root.
        """
        opened = self._open_mirrors.get(run)
        if opened is None or _tiers_of(opened.task) != _tiers_of(task):
            opened = self._open(run, task)
        if opened is not None and self._needs_attempt(opened, task):
            opened.task, opened.completed_at = task, 0.0
            if opened.mirroring.catch_up(lambda: (read_root_task(run) or task).saved_steps):
                opened.completed_at = self._clock()
        is_failing = opened is None or not opened.completed_at
        is_old = opened is not None and self._clock() - opened.opened_at >= FORGET_AFTER
        if is_failing and is_old:
            del self._open_mirrors[run]
        if read_root_task(run) == task and self._is_finished(run, task, is_failing=is_failing):
            run.task_path.unlink(missing_ok=True)
            self._open_mirrors.pop(run, None)

    def _needs_attempt(self, opened: _OpenMirror, task: StorageTask) -> bool:
        return task != opened.task or self._clock() - opened.completed_at >= RETRY_PERIOD

    def _open(self, run: Run, task: StorageTask) -> _OpenMirror | None:
        """Open the root and the mirror of a task; return None if that fails."""
        self._open_mirrors.pop(run, None)
        try:
            mirroring = Mirroring.of_task(task)
        except (ShardwiseError, OSError, ValueError) as error:
            log.error("the mirror of %s cannot be used: %s", task.root, error)
            return None
        if mirroring is None:
            return None
        opened = self._open_mirrors[run] = _OpenMirror(task, mirroring, self._clock())
        return opened

    def _is_finished(self, run: Run, task: StorageTask, *, is_failing: bool) -> bool:
        """Return whether a run has ended, and its mirror is complete or has failed for too long."""
        if has_trainers(run) or run.snapshots():
            return False
        if not is_failing:
            return True
        age = self._age_of_task(run)
        if age is not None and age < DAY:
            return False
        log.error(
            "the mirror %s of %s still lacks checkpoints a day after the run has ended, and is "
            "given up; the next training with this root and mirror copies them",
            *(task.mirror and task.mirror.place, task.root),
        )
        return True


def _tiers_of(task: StorageTask) -> object:
    return task.root, task.mirror, task.keep
