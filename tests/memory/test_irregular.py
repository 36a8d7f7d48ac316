"""What is no regular file among the files of a home is opened by nobody: links, pipes, devices."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.breadth import mostly_long
from tests.memory.test_snapshots import shm
from tests.tools.agents import end_agents

__all__ = ["shm"]
KINDS = ("a link to itself", "a link to a device", "a pipe", "a directory")


def replace(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    else:
        path.symlink_to(path.name if kind == "a link to itself" else "/dev/zero")


@pytest.mark.parametrize("kind", KINDS)
def test_a_restore_takes_the_step_before(kind: str, tmp_path: Path, shm: Path) -> None:
    memory = sw.Memory(dir=str(shm), wait=10.0)
    with sw.Checkpointer(tmp_path / "root", save_every=100, memory=memory) as cp:
        for step in (1, 2, 3):
            handle = cp.save(step, {"t": torch.arange(5000.0) + step})
            assert handle is not None
            handle.result(20.0)
        cp.close(wait=False)
    end_agents(shm)
    (run,) = shm.glob("*/runs/*")
    for path in [*run.glob("step-00000003-*/*"), *run.glob("free/*")]:
        replace(path, kind)
    replace(run / f"step-00000004-{4:016x}", kind)
    with sw.Checkpointer(tmp_path / "root", save_every=100, memory=memory) as cp:
        state = {"t": torch.zeros(5000)}
        assert cp.restore(state) == 2
        assert torch.equal(state["t"], torch.arange(5000.0) + 2)
        assert cp.last_restore is not None
        assert cp.last_restore.source == "memory"
        assert "not committed" in str(cp.last_restore)
        handle = cp.save(3, {"t": torch.arange(5000.0)})
        assert handle is not None
        handle.result(20.0)
        assert cp.restore(state) == 3
        assert torch.equal(state["t"], torch.arange(5000.0))


@pytest.mark.parametrize("name", mostly_long(["agent.lock", "start.lock"], ["agent.lock"]))
@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_that_is_no_file_is_named(kind: str, name: str, tmp_path: Path, shm: Path) -> None:
    memory = sw.Memory(dir=str(shm))
    sw.Checkpointer(tmp_path / "root", memory=memory).close()
    end_agents(shm)
    (home,) = shm.iterdir()
    replace(home / name, kind)
    with pytest.raises(sw.StoreError, match=f"{name} is .*(regular file|symbolic link).*: r"):
        sw.Checkpointer(tmp_path / "root", memory=memory)
