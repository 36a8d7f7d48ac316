"""The telemetry of real saves and restores, by ranks in processes."""

from __future__ import annotations

import errno
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardwise as sw
from shardwise.kernel.errors import StoreUnavailableError
from shardwise.kernel.manifest.manifest import decode_manifest, telemetry_file
from shardwise.kernel.store import LocalStore, Store, open_store
from shardwise.parts.stores.remote import RetryingStore
from shardwise.parts.stores.retry import Retry
from shardwise.parts.telemetry import files
from shardwise.parts.telemetry.hook import TelemetryHook
from shardwise.parts.telemetry.records import NOT_RUN, Telemetry
from tests.memory.test_snapshots import shm
from tests.tools.faulty_store import Fault, FaultyStore
from tests.tools.gang import Gang
from tests.tools.wrapped_store import WrappedStore

__all__ = ["shm"]
ROWS = 256


def telemetry_of(root: Path, step: int) -> Telemetry:
    place = root / f"step-{step:08d}"
    save_id = decode_manifest((place / "manifest.json").read_bytes()).save_id
    found = files.read_file(LocalStore(place), telemetry_file(save_id))
    assert found is not None
    return found


def sharded_state() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tensor = torch.arange(ROWS * 64.0).reshape(ROWS, 64)
    return {"w": distribute_tensor(tensor, mesh, [Shard(0), Shard(1)]),
            "r": distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])}  # fmt: skip


def save_two_steps(root: Path, memory: sw.Memory | None) -> None:
    state = sharded_state()
    with sw.Checkpointer(root, memory=memory) as cp:
        for step in (1, 2):
            handle = cp.save(step, state)
            assert handle is not None
            handle.result()
    with sw.Checkpointer(root, memory=memory) as cp:
        assert cp.restore(state) == 2


@pytest.mark.ranks
@pytest.mark.parametrize("background", [False, True])
def test_each_save_and_restore_of_a_run(
    tmp_path: Path, shm: Path, gang: Gang, background: bool
) -> None:
    memory = sw.Memory(dir=str(shm), snapshot_every=0, slots=1) if background else None
    gang.run(save_two_steps, tmp_path / "run", memory, world=4)
    for step in (1, 2):
        found = telemetry_of(tmp_path / "run", step)
        assert (found.operation, found.step, found.world_size) == ("save", step, 4)
        assert found.ranks.tolist() == [0, 1, 2, 3]
        assert (found.axes, found.coordinates.tolist()) == (
            ("dp", "tp"),
            [[0, 0, 1, 1], [0, 1, 0, 1]],
        )
        assert (abs(found.clock) <= 1_000_000).all()  # one host has one clock
        stages = {each.name: each for each in found.stages}
        expected = {"describe", "plan"}
        expected |= {"copy", "commit", "protect", "persist"} if background else {"write", "publish"}
        assert set(stages) >= expected
        ends = max(int((each.start + each.duration).max()) for each in found.stages)
        assert ends <= 1e6 * found.seconds + int(found.began.max()) + 1000
        moved = stages["copy" if background else "write"]
        assert moved.has_run.all()
        assert (moved.bytes >= ROWS * 64).all()
        if not background:
            assert moved.file.tolist()[3].startswith(b"r00003-")
            assert stages["publish"].start.tolist()[1:] == [NOT_RUN] * 3
    (name,) = files.list_operations(LocalStore(tmp_path / "run"))
    restore = files.read_file(LocalStore(tmp_path / "run" / files.DIRECTORY), name)
    assert restore is not None
    assert (restore.operation, restore.step) == ("restore", 2)
    assert restore.ranks.tolist() == [0, 1, 2, 3]
    assert set(restore.phases) >= {"asking", "reading", "rebuilding"}
    assert {each.name for each in restore.stages} >= {"asking", "reading", "open", "match", "read"}


def test_a_snapshot_that_is_persisted_at_the_end(tmp_path: Path, shm: Path) -> None:
    memory = sw.Memory(dir=str(shm), snapshot_every=1, slots=2)
    with sw.Checkpointer(tmp_path / "run", memory=memory, save_every=1000) as cp:
        for step in (1, 2):
            handle = cp.save(step, {"w": torch.ones(9)})
            assert handle is not None
            handle.result()
    found = telemetry_of(tmp_path / "run", 2)
    assert (found.operation, found.step) == ("save", 2)
    assert found.path == str(tmp_path / "run" / "step-00000002")
    assert {"copy", "commit", "persist"} <= {each.name for each in found.stages}


def killed_while_gathering(root: Path) -> str:
    rank = dist.get_rank()
    gather = TelemetryHook._gather

    def die(hook: TelemetryHook, **options: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        gather(hook, **options)

    TelemetryHook._gather = die  # type: ignore[method-assign]
    state = {"w": torch.ones(9)}
    try:
        with sw.Checkpointer(root, memory=None) as cp:
            cp.save(1, state)
            trained = "trained on"
            cp.save(2, state)
    except sw.LostRankError as error:
        return f"{trained}, without {[*error.failures]}"
    return "saved"


@pytest.mark.ranks
def test_a_rank_that_is_killed_while_telemetry_is_gathered(tmp_path: Path, gang: Gang) -> None:
    outcomes = gang.run_outcomes(killed_while_gathering, tmp_path, world=3)
    assert [outcomes[0].value, outcomes[2].value] == ["trained on, without [1]"] * 2
    assert [each.step for each in sw.list_checkpoints(tmp_path).checkpoints] == [1]
    loaded = {"w": torch.zeros(9)}
    sw.load(tmp_path, loaded)
    assert torch.equal(loaded["w"], torch.ones(9))


class RefusingStore(WrappedStore):
    """Raises an error instead of publishing a file whose name begins with a text."""

    def __init__(self, store: Store, prefix: str, error: int) -> None:
        super().__init__(store)
        self._prefix, self._error = prefix, error

    def at(self, name: str) -> RefusingStore:
        return RefusingStore(self.store.at(name), self._prefix, self._error)

    def run(self, operation: str, path: str, act: Any) -> Any:
        if operation == "publish" and path.startswith(self._prefix):
            raise OSError(self._error, os.strerror(self._error), path)
        return act()


@pytest.mark.parametrize("background", [False, True])
def test_the_check_of_replicas_is_a_stage(tmp_path: Path, shm: Path, background: bool) -> None:
    memory = sw.Memory(dir=str(shm), snapshot_every=0, slots=1) if background else None
    stages: list[str] = []
    with sw.Checkpointer(
        tmp_path,
        memory=memory,
        check_replicas_every=1,
        on_event=lambda each: stages.append(each.stage),
    ) as cp:
        handle = cp.save(1, {"w": torch.ones(9)})
        assert handle is not None
        handle.result()
    assert stages[:4] == ["describe", "plan", "check_replicas", "copy" if background else "write"]


def test_a_full_disk_loses_only_the_telemetry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "shardwise")
    root = RefusingStore(open_store(tmp_path), "telemetry-", errno.ENOSPC)
    with sw.Checkpointer(root, memory=None) as cp:
        handle = cp.save(1, {"w": torch.ones(9)})
        assert handle is not None
        assert cp.steps() == [1]
    (message,) = [each.getMessage() for each in caplog.records]
    assert "telemetry is not stored: [Errno 28] No space left on device" in message
    assert sw.open(tmp_path / "step-00000001").verify().intact


def test_retries_are_counted(tmp_path: Path) -> None:
    failures = iter([True, True, False])

    class FailingStore(FaultyStore):
        def at(self, name: str) -> FailingStore:
            return FailingStore(self.store.at(name), self._fault)

        def run(self, operation: str, path: str, act: Any) -> Any:
            if operation == "publish" and path == "manifest.json" and next(failures, False):
                raise StoreUnavailableError("the server is overloaded")
            return super().run(operation, path, act)

    root = RetryingStore(FailingStore(tmp_path, Fault()), Retry(sleep=lambda _: None))
    with sw.Checkpointer(root, memory=None) as cp:
        cp.save(1, {"w": torch.ones(9)})
    publish = telemetry_of(tmp_path, 1).stage("publish")
    assert publish is not None
    assert publish.retries.tolist() == [2]


def test_telemetry_can_be_off(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path, memory=None, telemetry=False) as cp:
        cp.save(1, {"w": torch.ones(9)})
        cp.restore({"w": torch.ones(9)})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.json", "step-00000001"]
    assert not list(tmp_path.rglob("*telemetry*"))


def test_a_mirror_gets_the_telemetry(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    with sw.Checkpointer(root, memory=None) as cp:
        cp.save(1, {"w": torch.ones(9)})
    with sw.Checkpointer(root, mirror=mirror, memory=None) as cp:
        cp.restore({"w": torch.ones(9)})
        handle = cp.save(2, {"w": torch.ones(9)})
        assert handle is not None
        handle.mirrored(60)
    (found,) = (mirror / "step-00000001").glob("telemetry-*")
    assert found.read_bytes() == (root / "step-00000001" / found.name).read_bytes()


def test_retention_removes_the_telemetry(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path, keep=sw.Keep(last=1), memory=None) as cp:
        for step in (1, 2, 3):
            cp.save(step, {"w": torch.ones(9)})
    with sw.Checkpointer(tmp_path, keep=sw.Keep(last=1), memory=None):
        pass
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run.json", "step-00000003"]


def test_a_root_of_others_is_only_mentioned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sw.save(tmp_path / "step-00000001", {"w": torch.ones(9)}, step=1)
    caplog.set_level(logging.INFO, "shardwise")
    root = RefusingStore(open_store(tmp_path), "restore-", errno.EROFS)
    with sw.Checkpointer(root, memory=None) as cp:
        assert cp.restore({"w": torch.zeros(9)}) == 1
    (record,) = [each for each in caplog.records if "telemetry is not stored" in each.message]
    assert record.levelno == logging.INFO
