"""`Mirrors`: the agent's threads that keep the mirrors of roots up to date."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from shardwise.errors import ShardwiseError
from shardwise.memory.home import Home, Run
from shardwise.memory.mirror_tasks import (
    mirror_task_age,
    mirror_tasks,
    remove_mirror_task,
)
from shardwise.memory.rank_locks import has_trainers
from shardwise.memory.records import StorageTask
from shardwise.store import open_store
from shardwise.tiers.worker import MirrorWorker

POLL_PERIOD = 1.0
RETRY_PERIOD = 60.0
REOPEN_PERIOD = 600.0
"""Seconds after which a mirror that fails is opened anew."""
LONGEST_AFTER_END = 86400.0
STOP_TIMEOUT = 5.0
log = logging.getLogger("shardwise.agent")


@dataclass(slots=True)
class _ActiveTask:
    """A task, and the thread that works on it; None if its stores could not be opened."""

    task: StorageTask
    worker: MirrorWorker | None
    started_at: float


class Mirrors:
    """Works on the tasks of this node: keeps the mirrors of roots up to date.

    Args:
        home: the home of the node.
        clock: seconds since 1970.
    """

    def __init__(self, home: Home, clock: Callable[[], float] = time.time) -> None:
        self._home = home
        self._clock = clock
        self._active: dict[Run, _ActiveTask] = {}
        self._bell = threading.Event()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="mirrors", daemon=True)

    def start(self) -> None:
        """Start the thread that looks for tasks."""
        self._thread.start()

    def wake(self) -> None:
        """Look for tasks soon."""
        self._bell.set()

    def stop(self) -> None:
        """Stop all threads. Copies in progress are continued by the next agent."""
        self._is_stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT)
        for active in self._active.values():
            if active.worker is not None:
                active.worker.stop(STOP_TIMEOUT)

    def is_busy(self) -> bool:
        """Return whether there is any task."""
        return bool(mirror_tasks(self._home))

    def update_tasks(self) -> None:
        """Start threads for new tasks, update the other threads, and remove completed tasks."""
        tasks = mirror_tasks(self._home)
        for run in self._active.keys() - tasks.keys():
            self._end_task(run)
        for run, task in tasks.items():
            self._update_task(run, task)
            if self._is_finished(run, self._active[run]):
                remove_mirror_task(run)
                self._end_task(run)

    def _update_task(self, run: Run, task: StorageTask) -> None:
        active = self._active.get(run)
        if active is not None and _have_same_tiers(active.task, task):
            # Opened anew, the stores may find other credentials.
            age = self._clock() - active.started_at
            if age < (RETRY_PERIOD if active.worker is None else REOPEN_PERIOD) or (
                active.worker is not None and not active.worker.is_failing
            ):
                if active.worker is not None and active.task != task:
                    active.worker.set_saved(task.newest, task.damaged)
                active.task = task
                return
        if active is not None:
            self._end_task(run)
        self._active[run] = _ActiveTask(task, _start_worker(task), self._clock())

    def _is_finished(self, run: Run, active: _ActiveTask) -> bool:
        """Return whether a run has ended, and its mirror is complete or has failed for too long."""
        if has_trainers(run) or run.steps():
            return False
        if active.worker is not None and active.worker.is_current:
            return True
        if mirror_task_age(run, self._clock()) < LONGEST_AFTER_END:
            return False
        log.error(
            "the mirror %s of %s still lacks checkpoints a day after the run has ended, and is "
            "given up; the next training with this root and mirror copies them",
            *(active.task.mirror and active.task.mirror.place, active.task.root),
        )
        return True

    def _end_task(self, run: Run) -> None:
        active = self._active.pop(run)
        if active.worker is not None:
            active.worker.stop(STOP_TIMEOUT)

    def _work(self) -> None:
        while not self._is_stopping:
            try:
                self.update_tasks()
            except Exception:
                log.exception("looking for mirrors failed; trying again")
            self._bell.wait(POLL_PERIOD)
            self._bell.clear()


def _have_same_tiers(before: StorageTask, after: StorageTask) -> bool:
    def tiers(task: StorageTask) -> object:
        return task.root, task.mirror, task.keep

    return tiers(before) == tiers(after)


def _start_worker(task: StorageTask) -> MirrorWorker | None:
    """Start a thread for a task; return None if its stores cannot be opened."""
    mirror = task.mirror
    if mirror is None:
        return None
    try:
        root = open_store(task.root)
        worker = MirrorWorker(root, task.rules, mirror.options(), lowers_priority=True)
    except (ShardwiseError, OSError, ValueError) as error:
        log.error("the mirror %s of %s cannot be used: %s", mirror.place, task.root, error)
        return None
    worker.set_saved(task.newest, task.damaged)
    worker.start()
    return worker
