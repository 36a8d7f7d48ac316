"""The mirrors that the agent of this node keeps up to date, one file for each run.

<home>/mirrors/<run>.json

Trainers and agents write a task. The agent removes the task when the run has ended and the mirror
has all checkpoints. So the copying continues after the training has ended, and after the agent was
restarted.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

import msgspec

from shardwise.errors import StoreError
from shardwise.memory.files import read_record, write_record
from shardwise.memory.home import Home, Run
from shardwise.memory.records import StorageTask

TASKS_DIRECTORY = "mirrors"
log = logging.getLogger("shardwise.agent")


def set_mirror_task(run: Run, task: StorageTask) -> None:
    """Have the agent of this node keep a mirror up to date.

    A task without a newest step keeps the newest step of the earlier task for the same root.
    """
    path = _task_path(run)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    earlier = read_mirror_task(run)
    if earlier is not None and earlier.root == task.root and task.newest is None:
        task = msgspec.structs.replace(task, newest=earlier.newest, damaged=earlier.damaged)
    write_record(path, task)


def read_mirror_task(run: Run) -> StorageTask | None:
    """Return the task of a run, or None if there is none. A damaged one is set aside."""
    path = _task_path(run)
    try:
        return read_record(path, StorageTask)
    except StoreError as error:
        log.error("the next save requests the mirror again: %s", error)
        with suppress(FileNotFoundError):
            path.rename(path.with_name(f".{path.name}.damaged"))
        return None


def remove_mirror_task(run: Run) -> None:
    """Remove the task of a run."""
    _task_path(run).unlink(missing_ok=True)


def mirror_task_age(run: Run, now: float) -> float:
    """Return the seconds since the task of a run was written; `now` is in seconds since 1970."""
    try:
        return now - _task_path(run).lstat().st_mtime
    except FileNotFoundError:
        return 0.0


def mirror_tasks(home: Home) -> dict[Run, StorageTask]:
    """Return the task of each run that has one."""
    found: dict[Run, StorageTask] = {}
    for path in sorted((home.path / TASKS_DIRECTORY).glob("[!.]*.json")):
        with suppress(StoreError):  # not the name of a run
            run = home.run(path.stem)
            if (task := read_mirror_task(run)) is not None:
                found[run] = task
    return found


def _task_path(run: Run) -> Path:
    return run.path.parents[1] / TASKS_DIRECTORY / f"{run.name}.json"
