"""What is no regular file among the files of a home is opened by nobody: links, pipes, devices."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.memory.files import listen_to_bell, read_record, ring_bell, write_record
from shardwise.memory.home import Home
from shardwise.memory.observe import RecordCache
from shardwise.memory.rank_locks import is_rank_alive, lost_ranks
from shardwise.memory.records import Retry
from shardwise.memory.seal import map_file
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
    home = Home(shm)
    run = home.runs()[0]
    for path in [*run.step_path(3).iterdir(), *run.free_directory.iterdir()]:
        replace(path, kind)
    replace(run.step_path(4), kind)
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


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_names_the_path(kind: str, tmp_path: Path) -> None:
    home, path = Home(tmp_path), tmp_path / "it"
    replace(path, kind)
    for name in ("agent.lock", "start.lock"):
        replace(home.path / name, kind)
        with pytest.raises(sw.StoreError, match=f"{name} is .*(regular file|symbolic link).*: r"):
            home.lock(name).__enter__()
    with pytest.raises(sw.StoreError, match=r"/it is "):
        read_record(path, Retry)
    with pytest.raises(sw.StoreError, match=r"/it is "):
        map_file(path, 0, writable=True)
    found = RecordCache().read(path, Retry)
    assert found is not None
    assert "/it is " in str(found[0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_lock_shows_no_rank(kind: str, tmp_path: Path) -> None:
    run = Home(tmp_path).run("0" * 16)
    (run.path / "trainers").mkdir(parents=True)
    replace(run.path / "trainers" / "00000", kind)
    (run.path / "trainers" / "note").touch()
    (run.path / "trainers" / "00003").touch()
    assert lost_ranks(run) == [3]
    assert not is_rank_alive(run, 0)


def test_a_record_takes_no_place_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    with pytest.raises(sw.StoreError, match="is a directory: remove it"):
        write_record(tmp_path / "it", {})
    assert [each.name for each in tmp_path.iterdir()] == ["it"]


@pytest.mark.parametrize("through", ["file", "link"])
def test_a_bell_that_is_no_pipe_is_replaced(through: str, tmp_path: Path) -> None:
    """Reading a file would return at once, for ever; and ringing would write into it."""
    bell, other, rung = tmp_path / "bell", tmp_path / "other", threading.Event()
    other.write_bytes(b"other")
    if through == "link":
        bell.symlink_to(other)
    else:
        bell.write_bytes(b"other")
    ring_bell(bell)
    assert bell.read_bytes() == other.read_bytes() == b"other"
    threading.Thread(target=listen_to_bell, args=(bell, rung.set), daemon=True).start()
    while not bell.is_fifo():
        time.sleep(0.01)
    assert not rung.wait(0.05)
    while not rung.wait(0.01):
        ring_bell(bell)
