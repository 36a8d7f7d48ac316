"""The agent mirrors the root of a run, also after the training and after a restart of the agent."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.memory.test_snapshots import shm
from tests.tiers.test_mirror import data_file, files_of, flip, state
from tests.tools.agents import signal_agents, until
from tests.tools.listings import mirror_of, steps_of

__all__ = ["shm"]


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
    assert steps_of(root) == [4, 5]
    assert steps_of(mirror) == [3, 4, 5]
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


@pytest.mark.long
def test_a_new_agent_continues_what_a_killed_agent_began(tmp_path: Path, shm: Path) -> None:
    """The mirror cannot be created, the agent is killed, the training ends; then it can."""
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    mirror.write_text("in the way")
    checkpointer = open_run(tmp_path, shm, sw.Keep(last=1))
    for step in (1, 2):
        handle = checkpointer.save(step, state(step))
        assert handle is not None
        handle.result(60.0)

    def failing() -> bool:
        record = mirror_of(root)
        return record is not None and record.failing_since is not None and record.pinned == (1,)

    until(failing)
    assert steps_of(root) == [1, 2]
    node = sw.NodeAgent(shm)
    before = node.status().process
    (process,) = signal_agents(shm, signal.SIGKILL)
    assert process == before
    until(lambda: node.status().process not in (None, process))
    checkpointer.close(wait=False)
    open_run(tmp_path, shm, sw.Keep(last=1)).close(wait=False)  # forgets no step that was saved
    mirror.unlink()
    until(lambda: mirror.is_dir() and steps_of(mirror) == [1, 2], 90.0)
    until(lambda: steps_of(root) == [2])
    assert files_of(root, 2) == files_of(mirror, 2)


def test_a_task_ends_when_the_run_has_ended_and_all_is_copied(tmp_path: Path, shm: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    node = sw.NodeAgent(shm)
    with open_run(tmp_path, shm) as checkpointer:
        checkpointer.save(1, state(1))
        (task,) = node.status().mirrors
        assert (task.root, task.mirror) == (str(root), str(mirror))
    assert steps_of(mirror) == [1]
    until(lambda: not node.status().mirrors)
