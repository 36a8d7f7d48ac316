"""Saves that storage fails, and trainings that go on."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.memory.test_snapshots import shm
from tests.tools.faulty_store import Fault, FaultyStore
from tests.tools.gang import Gang

__all__ = ["shm"]
MB = 1 << 20


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def state(value: float) -> dict[str, Any]:
    """1 MiB."""
    return {"t": torch.full((MB // 4,), float(value))}


def fill_up(directory: Path) -> Path:
    """Leave less than 1 MiB free."""
    found = os.statvfs(directory)
    path = directory / "filler"
    path.write_bytes(bytes(found.f_bavail * found.f_frsize - MB // 2))
    return path


def test_a_checkpoint_that_is_committed_during_a_restore_is_restored(
    tmp_path: Path, shm: Path
) -> None:
    """An agent may persist the last snapshot of a lost training while another one starts."""
    root, memory = tmp_path / "root", sw.Memory(dir=str(shm), snapshot_every=0, slots=1)
    with sw.Checkpointer(root, memory=memory) as cp:
        cp.save(1, {"t": torch.full((9,), 1.0)})

    def persist(event: sw.Event) -> None:
        if event.stage == "reading" and not (root / "step-00000002").exists():
            sw.save(root / "step-00000002", {"t": torch.full((9,), 2.0)}, step=2)

    found = torch.zeros(9)
    with sw.Checkpointer(root, memory=memory, on_event=persist) as cp:
        assert cp.restore({"t": found}) == 2
        assert cp.last_restore is not None
        assert cp.last_restore.step == 2
    assert torch.equal(found, torch.full((9,), 2.0))


@pytest.mark.parametrize("background", [False, True])
def test_a_save_without_room_begins_nothing_and_the_next_one_works(
    small: Path, shm: Path, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    caplog.set_level(logging.WARNING, "shardwise")
    memory = sw.Memory(dir=str(shm), snapshot_every=0, slots=1, wait=20.0) if background else None
    root = small / "run"
    with sw.Checkpointer(root, memory=memory, on_failure="warn") as cp:
        handle = cp.save(1, state(1))
        assert handle is not None
        handle.result()
        filler = fill_up(small)
        assert cp.save(2, state(2)) is None
        assert "step 2 is not saved; the training continues" in caplog.text
        assert "its tensors need 1,048,576 bytes, but only " in caplog.text
        assert not (root / "step-00000002").exists()
        filler.unlink()
        assert cp.save(3, state(3)) is not None
    target = state(0)
    assert sw.load(root, target).step == 3
    assert target["t"].tolist() == [3.0] * (MB // 4)
    cp = sw.Checkpointer(root, memory=memory)
    assert cp.restore(target) == 3
    fill_up(small)
    with pytest.raises(sw.StoreError, match="no room for this save"):
        cp.save(4, state(4))
    cp.close()
    assert cp.steps() == [1, 3]


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_fills_up_while_it_is_written(
    small: Path,
    shm: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    background: bool,
) -> None:
    caplog.set_level(logging.WARNING, "shardwise")
    monkeypatch.setattr("shardwise.kernel.engine.planning.free_bytes", lambda store: None)
    memory = sw.Memory(dir=str(shm), snapshot_every=0, slots=1, wait=20.0) if background else None
    root = small / "run"
    root.mkdir()
    filler = fill_up(small)
    with sw.Checkpointer(root, memory=memory, on_failure="warn") as cp:
        handle = cp.save(1, state(1))
        assert (handle is not None) == background
        if handle is not None:
            with pytest.raises(sw.StoreError, match="No space left"):
                handle.result()
        filler.unlink()
        assert cp.save(2, state(2)) is not None
    assert "No space left" in caplog.text
    assert sw.open(root).step == 2
    sw.open(root).verify()


@pytest.mark.parametrize("has_mirror", [False, True])
def test_a_step_that_storage_has_no_room_for_is_kept_in_memory(
    small: Path, shm: Path, tmp_path: Path, has_mirror: bool
) -> None:
    """And persisted at the end, when there is room. Until then, its handle is not durable."""
    memory = sw.Memory(dir=str(shm), when_full="wait", wait=20.0)
    mirror = tmp_path / "mirror" if has_mirror else None
    with sw.Checkpointer(small / "run", memory=memory, on_failure="warn", mirror=mirror) as cp:
        filler = fill_up(small)
        handle = cp.save(1, state(1))
        assert handle is not None
        handle.committed(20.0)
        handle.protected(20.0)
        assert cp.steps() == []
        assert handle.done()
        assert not handle.durable
        with pytest.raises(sw.StoreError, match=r"step 1 is not durable, .* no room for this save"):
            handle.result()
        why = "not durable, .* no room" if has_mirror else "no mirror="
        with pytest.raises(sw.StoreError, match=why):
            handle.mirrored()
        filler.unlink()
    assert cp.steps() == [1]
    assert handle.durable
    assert handle.result(20.0).step == 1
    if has_mirror:
        handle.mirrored(20.0)
        assert sw.open(tmp_path / "mirror").step == 1


def test_a_step_that_storage_has_no_room_for_at_the_end_either_is_not_durable(
    small: Path, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = sw.Memory(dir=str(shm), when_full="wait", wait=20.0)
    with sw.Checkpointer(small / "run", memory=memory, on_failure="warn") as cp:
        fill_up(small)
        handle = cp.save(1, state(1))
        assert handle is not None
    assert "is not durable: step 1" in caplog.text or "a save failed: step 1" in caplog.text
    assert cp.steps() == []
    assert handle.done()
    assert not handle.durable
    with pytest.raises(sw.StoreError):
        handle.result()


def save_without_room(root: str, memory: sw.Memory) -> tuple[bool, bool, str]:
    with sw.Checkpointer(root, memory=memory, on_failure="warn", save_at_end=False) as cp:
        if dist.get_rank() == 0:
            fill_up(Path(root).parent)
        dist.barrier()
        handle = cp.save(3, state(3) | {"mine": sw.PerRank(dist.get_rank())})
        assert handle is not None
        handle.committed(60.0)
        try:
            handle.result(60.0)
        except sw.StoreError as error:
            return handle.done(), handle.durable, str(error)
    raise AssertionError("the step counts as durable")


def test_on_all_ranks_a_step_that_is_only_in_memory_is_not_durable(
    gang: Gang, small: Path, shm: Path
) -> None:
    memory = sw.Memory(dir=str(shm))
    for done, durable, why in gang.run(save_without_room, str(small / "run"), memory, world=2):
        assert done
        assert not durable
        assert "no room for this save" in why


def test_a_handle_says_whether_its_step_is_in_the_root(tmp_path: Path, shm: Path) -> None:
    """For each kind of save: with and without agents, for memory only, and removed later."""
    root = tmp_path / "direct"
    with sw.Checkpointer(root, memory=None, keep=sw.Keep(last=1)) as cp:
        first, second = cp.save(1, state(1)), cp.save(2, state(2))
        assert cp.steps() == [2]
        for handle in (first, second):  # it was durable, and the rules removed it
            assert handle is not None
            assert handle.done()
            assert handle.durable
            assert handle.result() is handle.report

    root, memory = tmp_path / "background", sw.Memory(dir=str(shm), when_full="wait", wait=20.0)
    handles: dict[int, sw.SaveHandle | None] = {}
    with sw.Checkpointer(root, memory=memory, save_every=2, keep=sw.Keep(last=1)) as cp:
        for step in range(1, 8):
            handles[step] = cp.save(step, state(step))
            handle = handles[step]
            assert handle is not None
            if step != 6:  # nobody asks for this one until a newer one has replaced it
                report = handle.result(60.0)
                assert report.step == step
                assert handle.done()
                assert handle.durable == (step % 2 == 0)
                assert (str(root) in report.path) == (step % 2 == 0)
    assert cp.steps() == [7]  # saved at the end, so it has become durable
    expected = {step: step % 2 == 0 or step == 7 for step in handles}
    assert {step: handle and handle.durable for step, handle in handles.items()} == expected
    for step, handle in handles.items():
        assert handle is not None
        assert handle.done()
        assert handle.result(60.0).step == step


def gone(operation: str) -> None:
    raise OSError("the disk of rank 1 is gone")


def save_wrongly(root: str) -> list[str]:
    """On a rank: what storage fails on rank 1 is logged, what is wrong there is raised."""
    said = []
    fault = Fault(0 if dist.get_rank() == 1 else None, gone, verbs=("create",))
    with sw.Checkpointer(FaultyStore(root, fault), memory=None, on_failure="warn") as cp:
        value = state(1) | {"mine": sw.PerRank(dist.get_rank())}
        said.append(str(cp.save(1, value)))
        try:
            cp.save(2, {"t": dist.get_rank()})
        except sw.ShardwiseError as error:
            said.append(type(error).__name__)
        said.append(str(cp.save(3, value) is not None))
    return [*said, str(cp.steps())]


def test_all_ranks_go_on_or_none_does(gang: Gang, tmp_path: Path) -> None:
    expected = ["None", "MismatchError", "True", "[3]"]
    assert gang.run(save_wrongly, str(tmp_path), world=2) == [expected] * 2
