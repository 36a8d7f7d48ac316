"""Copy the checkpoints of roots to their mirrors: the tasks of this node's agent, one for each run.

<home>/mirrors/<run>.json

Trainers and agents write a task. The agent removes the task when the run has ended and the mirror
has all checkpoints. So the copying continues after the training has ended, and after the agent was
restarted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from shardwise.kernel.errors import ShardwiseError, StoreError
from shardwise.parts.memory.files import read_record, write_record
from shardwise.parts.memory.home import Home, Run
from shardwise.parts.memory.rank_liveness import has_trainers
from shardwise.parts.tiers.mirroring import Mirroring
from shardwise.parts.tiers.options import StorageTask

# All in seconds.
CHECK_PERIOD = 60.0  # between two comparisons: other programs may change the root or the mirror
REOPEN_PERIOD = 600.0  # if copies fail, the stores are opened again: they may find new credentials
GIVE_UP_AFTER = 86400.0  # after the end of a run whose copies fail
log = logging.getLogger("shardwise.agent")


def set_mirror_task(run: Run, task: StorageTask) -> None:
    """Have the agent of this node keep a mirror up to date.

    A task without a newest step keeps the newest step of the earlier task for the same root.
    """
    path = run.mirror_task_path
    path.parent.mkdir(mode=0o700, exist_ok=True)
    earlier = read_mirror_task(run)
    if earlier is not None and earlier.root == task.root and task.newest is None:
        task = msgspec.structs.replace(task, newest=earlier.newest, damaged=earlier.damaged)
    write_record(path, task)


def read_mirror_task(run: Run) -> StorageTask | None:
    """Return the task of a run, or None if there is none. A damaged task is set aside."""
    path = run.mirror_task_path
    try:
        return read_record(path, StorageTask)
    except StoreError as error:
        log.error("the next save requests the mirror again: %s", error)
        with suppress(FileNotFoundError):
            path.rename(path.with_name(f".{path.name}.damaged"))
        return None


def mirror_tasks(home: Home) -> dict[Run, StorageTask]:
    """Return the task of each run that has one."""
    found = {run: read_mirror_task(run) for run in home.mirrored_runs()}
    return {run: task for run, task in found.items() if task is not None}


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


class Mirrors:
    """Keeps the mirrors of roots up to date.

    Args:
        clock: seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._open_mirrors: dict[Run, _OpenMirror] = {}

    def stop(self) -> None:
        """End the copies in progress between two chunks. The next agent continues them."""
        for each in list(self._open_mirrors.values()):
            each.mirroring.stop()

    def catch_up(self, run: Run) -> None:
        """Bring the mirror of a run up to date.

        When the run has ended, the task is removed as soon as the mirror is complete. If copies
        fail, it is removed a day after the end.

        Failures are logged, and recorded in the root. The agent calls this again and again.
        """
        if (task := read_mirror_task(run)) is None:
            self._open_mirrors.pop(run, None)
            return
        opened = self._open_mirrors.get(run)
        if opened is None or _tiers_of(opened.task) != _tiers_of(task):
            opened = self._open(run, task)
        if opened is not None and self._needs_attempt(opened, task):
            opened.task, opened.completed_at = task, 0.0
            if opened.mirroring.catch_up(lambda: (read_mirror_task(run) or task).saved_steps):
                opened.completed_at = self._clock()
        is_failing = opened is None or not opened.completed_at
        is_old = opened is not None and self._clock() - opened.opened_at >= REOPEN_PERIOD
        if is_failing and is_old:
            del self._open_mirrors[run]
        if read_mirror_task(run) == task and self._is_finished(run, task, is_failing=is_failing):
            run.mirror_task_path.unlink(missing_ok=True)
            self._open_mirrors.pop(run, None)

    def _needs_attempt(self, opened: _OpenMirror, task: StorageTask) -> bool:
        return task != opened.task or self._clock() - opened.completed_at >= CHECK_PERIOD

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
        if has_trainers(run) or run.steps():
            return False
        if not is_failing:
            return True
        with suppress(FileNotFoundError):
            if self._clock() - run.mirror_task_path.lstat().st_mtime < GIVE_UP_AFTER:
                return False
        log.error(
            "the mirror %s of %s still lacks checkpoints a day after the run has ended, and is "
            "given up; the next training with this root and mirror copies them",
            *(task.mirror and task.mirror.place, task.root),
        )
        return True


def _tiers_of(task: StorageTask) -> object:
    return task.root, task.mirror, task.keep
