"""The agent mirrors the root of a run, also after the training and after a restart of the agent."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import shardwise as sw
from shardwise.memory.agent.mirrors import (
    Mirrors,
    read_mirror_task,
    set_mirror_task,
)
from shardwise.memory.home import Home
from shardwise.memory.records import StorageTask
from shardwise.memory.spawn import running_agent
from shardwise.retention import committed_steps
from shardwise.store import LocalStore
from shardwise.tiers.options import MirrorRequest
from shardwise.tiers.record import read_mirror_record
from tests.memory.test_snapshots import shm
from tests.tiers.test_mirror import data_file, files_of, flip, state

__all__ = ["shm"]
RUN = "0" * 16


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def open_run(tmp_path: Path, shm: Path, keep: sw.Keep | None = None) -> sw.Checkpointer:
    mirror = sw.Mirror(tmp_path / "mirror", keep=sw.Keep(last=3))
    memory = sw.Memory(dir=str(shm), wait=20.0, when_full="wait")
    return sw.Checkpointer(tmp_path / "root", mirror=mirror, keep=keep, memory=memory)


def test_the_agent_copies_and_the_trainer_does_not(tmp_path: Path, shm: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    with open_run(tmp_path, shm, sw.Keep(last=2)) as checkpointer:
        for step in range(1, 6):
            handle = checkpointer.save(step, state(step))
            assert handle is not None
            if step == 3:
                handle.mirrored(60.0)
                assert files_of(root, 3) == files_of(mirror, 3)
        names = {thread.name for thread in threading.enumerate()}
        assert not [name for name in names if "mirror" in name]
    assert committed_steps(LocalStore(root)) == [4, 5]
    assert committed_steps(LocalStore(mirror)) == [3, 4, 5]
    for step in (4, 5):
        assert files_of(root, step) == files_of(mirror, step)
    flip(data_file(root, 5), 70_000)
    flip(data_file(mirror, 5), 270_000)
    with open_run(tmp_path, shm) as checkpointer:
        target = state(0)
        assert checkpointer.restore(target) == 5
        assert torch.equal(target["t"], state(5)["t"])
        assert checkpointer.restore(target, step=3) == 3
        assert torch.equal(target["t"], state(3)["t"])


def test_a_new_agent_continues_what_a_killed_agent_began(tmp_path: Path, shm: Path) -> None:
    """The mirror cannot be created, the agent is killed, the training ends; then it can."""
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    mirror.write_text("in the way")
    home = Home(shm)
    checkpointer = open_run(tmp_path, shm, sw.Keep(last=1))
    for step in (1, 2):
        handle = checkpointer.save(step, state(step))
        assert handle is not None
        handle.result(60.0)

    def failing() -> bool:
        record = read_mirror_record(LocalStore(root))
        return record is not None and record.failing_since is not None and record.pinned == (1,)

    until(failing)
    assert committed_steps(LocalStore(root)) == [1, 2]
    info = running_agent(home)
    assert info is not None
    os.kill(info.process, signal.SIGKILL)
    until(lambda: (now := running_agent(home)) is not None and now.process != info.process)
    checkpointer.close(wait=False)
    mirror.unlink()
    until(lambda: mirror.is_dir() and committed_steps(LocalStore(mirror)) == [1, 2], 90.0)
    until(lambda: committed_steps(LocalStore(root)) == [2])
    assert files_of(root, 2) == files_of(mirror, 2)


def test_a_task_ends_when_the_run_has_ended_and_all_is_copied(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    sw.save(root / "step-00000001", state(1), step=1)
    home = Home(tmp_path / "home")
    run = home.run(RUN)
    request = MirrorRequest(str(mirror))
    set_mirror_task(run, StorageTask(root=str(root), mirror=request, newest=1, damaged=[7]))
    set_mirror_task(run, StorageTask(root=str(root), mirror=request))
    task = read_mirror_task(run)
    assert task is not None
    assert (task.newest, task.damaged) == (1, [7])  # a restart of the training does not forget
    assert home.mirrored_runs() == [run]
    mirrors = Mirrors()

    def is_finished() -> bool:
        mirrors.catch_up(run)
        return not home.mirrored_runs()

    until(is_finished)
    assert committed_steps(LocalStore(mirror)) == [1]


def test_a_mirror_that_never_answers_is_given_up_a_day_after_the_run(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    sw.save(root / "step-00000001", state(1), step=1)
    mirror.write_text("in the way")
    home = Home(tmp_path / "home")
    run = home.run(RUN)
    set_mirror_task(run, StorageTask(root=str(root), mirror=MirrorRequest(str(mirror))))
    now = time.time()
    mirrors = Mirrors(lambda: now)
    mirrors.catch_up(run)
    assert (root / "mirror.json").exists()
    mirrors.catch_up(run)
    assert home.mirrored_runs() == [run]
    first = mirrors._open_mirrors[run].mirroring
    now += 601.0
    mirrors.catch_up(run)
    mirrors.catch_up(run)
    assert mirrors._open_mirrors[run].mirroring is not first  # opened anew
    now += 86500.0
    mirrors.catch_up(run)
    assert not home.mirrored_runs()
    run.mirror_task_path.write_text("{")  # damaged: ignored
    mirrors.catch_up(run)
    assert not home.mirrored_runs()
    shutil.rmtree(run.mirror_task_path.parent)
    mirrors.catch_up(run)
    assert not home.mirrored_runs()
