"""Saves in the background by scripts that do what few do: each is right, or says what is wrong."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec import Raw

import shardwise as sw
from shardwise.errors import CheckpointExistsError, StoreError
from shardwise.manifest.manifest import FileEntry, Manifest, encode_manifest
from shardwise.manifest.names import step_directory
from shardwise.memory import decide, observe, records, spawn
from shardwise.memory.agent.lead import Leader
from shardwise.memory.files import write_record
from shardwise.memory.home import OUTCOMES_DIRECTORY, Home, SnapshotDirectory
from shardwise.memory.observe import read_outcome
from shardwise.memory.rank_locks import is_training
from shardwise.memory.records import PendingManifest, StagedFile, StageOutcome, StorageTask
from shardwise.memory.remote.agent_watch import SaveAgents
from shardwise.memory.remote.search import list_own_files
from shardwise.memory.trainer import staging
from shardwise.memory.trainer.copying import CopyProgress
from shardwise.memory.trainer.save_handle import PendingSave
from tests.memory.test_snapshots import shm
from tests.memory.test_sweep import forked
from tests.tools.agents import end_agents
from tests.tools.gang import Gang

__all__ = ["shm"]


def memory(shm: Path, **options: int | bool) -> sw.Memory:
    """In a directory of the test's own."""
    return sw.Memory(dir=str(shm), wait=10.0, when_full="wait", **options)  # type: ignore[arg-type]


def test_of_several_saves_of_a_step_the_last_one_stays(tmp_path: Path, shm: Path) -> None:
    with sw.Checkpointer(tmp_path / "root", save_every=2, memory=memory(shm)) as cp:
        for step in (1, 2, 3):
            for value in (1.0, 2.0):
                handle = cp.save(step, {"t": torch.full((9,), value)}, overwrite=True)
            assert handle is not None
            handle.result(20.0)
            target = {"t": torch.zeros(9)}
            assert cp.restore(target) == step
            assert bool((target["t"] == 2).all())
    assert sw.open(tmp_path / "root" / step_directory(2))["t"][0] == 2


def test_a_step_that_is_still_being_saved_is_not_saved_again_unasked(
    tmp_path: Path, shm: Path
) -> None:
    with sw.Checkpointer(tmp_path / "root", memory=memory(shm)) as cp:
        first = cp.save(1, {"t": 1})
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            cp.save(1, {"t": 2})
        assert first is not None
        first.result(20.0)
    assert sw.open(tmp_path / "root" / step_directory(1))["t"] == 1


def test_what_was_committed_of_another_save_of_a_step_is_not_published(
    tmp_path: Path, shm: Path
) -> None:
    with sw.Checkpointer(tmp_path / "root", save_every=2, memory=memory(shm)) as cp:
        handle = cp.save(1, {"t": 1})
        assert handle is not None
        handle.result(20.0)
        home = Home(shm)
        place = SnapshotDirectory(home.runs()[0], 1)
        pending = PendingManifest(
            save_id="0" * 16,
            step=1,
            manifest="",
            files=[],
            nodes=place.pending_manifests()[0].nodes,
            leader=place.pending_manifests()[0].leader,
            durable=True,
            storage=StorageTask(root=str(tmp_path / "root")),
        )
        write_record(
            place.path / records.save_record("commit", pending.save_id, "all"),
            records.StageOutcome(save_id=pending.save_id, stage="commit"),
        )
        write_record(place.path / records.save_record("pending", pending.save_id), pending)
        Leader(pending.leader).perform(decide.Action("persist", place, pending.save_id))
        done = read_outcome(place, "persist", pending.save_id)
        assert done is not None
        assert "step 1 was saved again meanwhile" in done.failure
        assert cp.steps() == []


@pytest.mark.parametrize("every", [1, 5])
def test_a_handle_says_what_has_become_of_a_save_after_all_is_closed(
    tmp_path: Path, shm: Path, every: int
) -> None:
    with sw.Checkpointer(tmp_path / "root", save_every=every, memory=memory(shm)) as cp:
        handles = [cp.save(step, {"t": step}) for step in (1, 2, 5)]
    assert not list(shm.glob("**/*-all-*.json"))  # the notes went with the memory
    for step, handle in zip((1, 2, 5), handles, strict=True):
        assert handle is not None
        assert handle.done()
        handle.committed(1.0)
        handle.protected(1.0)
        assert handle.result(1.0).step == step


def test_memory_in_a_relative_directory_stays_where_it_was(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shm)
    (shm / "elsewhere").mkdir()
    with sw.Checkpointer("root", memory=sw.Memory(dir="memory", wait=10.0)) as cp:
        monkeypatch.chdir(shm / "elsewhere")
        handle = cp.save(1, {"t": 1})
        assert handle is not None
        handle.result(20.0)
    assert not list((shm / "elsewhere").iterdir())


def fork_while_copying(root: Path, shm: Path) -> None:
    """Fork a child that exits while a copy is under way in this process."""
    released, stage = threading.Event(), staging.copy_range

    def slow(*arguments: Any, **options: Any) -> None:
        released.wait(60.0)
        stage(*arguments, **options)

    def child() -> None:
        signal.alarm(20)  # kills a child that waits for the copy
        atexit._run_exitfuncs()

    with (
        patch.object(staging, "copy_range", slow),
        sw.Checkpointer(root, memory=memory(shm, overlap=True)) as cp,
    ):
        handle = cp.save(1, {"t": torch.ones(9)})
        assert handle is not None
        assert forked(child) == 0, "the child waits for a copy that it does not make"
        released.set()
        handle.result(20.0)


def test_a_child_that_was_forked_ends_while_a_copy_is_under_way(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    gang.run(fork_while_copying, tmp_path / "root", shm, world=1)


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_a_checkpointer_is_refused_in_a_forked_child_and_stays_the_parents(
    tmp_path: Path, shm: Path, is_in_memory: bool
) -> None:
    """A child of a fork has no thread that would copy anything, so that it waited for ever."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = {"model": model, "optimizer": optimizer}
    options = memory(shm, overlap=True) if is_in_memory else None
    checkpointer = sw.Checkpointer(
        tmp_path / "root", memory=options, save_on_signals=(signal.SIGTERM,)
    )
    handle = checkpointer.save(1, state)
    assert handle is not None

    def child() -> None:
        signal.alarm(30)
        for use in (
            lambda: checkpointer.save(2, state),
            lambda: checkpointer.restore(state),
            lambda: checkpointer.prepare(state),
            lambda: checkpointer.close(),
        ):
            with pytest.raises(sw.ShardwiseError, match="is a forked child"):
                use()
        optimizer.step()  # nobody copies the child's state
        with checkpointer:
            pass
        assert checkpointer.steps() in ([], [1])
        os.kill(os.getpid(), signal.SIGTERM)

    assert forked(child) == signal.SIGTERM
    if is_in_memory:
        assert is_training(Home(shm))
    handle.result(20.0)
    again = checkpointer.save(2, state)
    assert again is not None
    again.result(20.0)
    checkpointer.close()
    assert checkpointer.steps() == [1, 2]


def test_a_forked_child_waits_for_no_copy() -> None:
    copying = CopyProgress(1, None)

    def child() -> None:
        with pytest.raises(StoreError, match="wait in that process"):
            copying.wait()

    assert forked(child) == 0


def test_of_several_checkpointers_of_a_root_the_last_one_saves(tmp_path: Path, shm: Path) -> None:
    first = sw.Checkpointer(tmp_path / "root", memory=memory(shm))
    handle = first.save(1, {"t": 1})
    assert handle is not None
    handle.result(20.0)
    with sw.Checkpointer(tmp_path / "root", memory=memory(shm)) as second:
        assert second.restore({"t": 0}) == 1
        with pytest.raises(StoreError, match="another Checkpointer of the same root"):
            first.save(2, {"t": 2})
        first.close()
        handle = second.save(2, {"t": 2})
        assert handle is not None
        handle.result(20.0)
    assert second.steps() == [1, 2]
    assert not list(shm.glob("**/*.slot"))


def test_steps_go_back_only_by_restoring(tmp_path: Path, shm: Path) -> None:
    root = tmp_path / "root"
    with sw.Checkpointer(root, save_every=1000, memory=memory(shm)) as cp:
        for step in (10, 20):
            handle = cp.save(step, {"t": step})
            assert handle is not None
            handle.result(20.0)
        with pytest.raises(sw.StateError, match="memory holds the newer step 20 of this run"):
            cp.save(11, {"t": 11})
    with sw.Checkpointer(root, save_every=1000, memory=memory(shm)) as cp:
        with pytest.raises(sw.StateError, match="memory holds the newer step 20"):
            cp.save(1, {"t": 1})
        state = {"t": 0}
        assert cp.restore(state, step=10) == 10
        handle = cp.save(11, {"t": 11})
        assert handle is not None
        handle.result(20.0)
        assert cp.restore(state) == 11
        assert state == {"t": 11}


def test_a_home_that_is_removed_under_a_run_is_told(tmp_path: Path, shm: Path) -> None:
    cp = sw.Checkpointer(tmp_path / "root", memory=memory(shm))
    handle = cp.save(1, {"t": 1})
    assert handle is not None
    handle.result(20.0)
    end_agents(shm)
    shutil.rmtree(Home(shm).path)
    with pytest.raises(StoreError, match="was removed while it is in use"):
        cp.save(2, {"t": 2})
    cp.close(wait=False)


def test_a_save_that_newer_ones_have_replaced_is_not_waited_for(tmp_path: Path, shm: Path) -> None:
    """Its memory may go before anybody has told that it is protected."""
    home = Home(shm)
    place = SnapshotDirectory(home.run("0" * 16), 1)
    save_id = "f" * 16
    place.path.mkdir(parents=True)
    commit = records.save_record("commit", save_id, "all")
    write_record(place.path / commit, StageOutcome(save_id=save_id, stage="commit"))
    stages = PendingSave(
        agents=SaveAgents(home, None, None, 10.0),
        place=place,
        save_id=save_id,
        stages=("commit", "protect", "persist"),
        logs_failures=True,
    )
    assert stages.outcome("protect") is None
    ended = place.run.path / OUTCOMES_DIRECTORY
    ended.mkdir()
    (place.path / commit).rename(ended / commit)
    assert stages.wait_for("protect", 10.0).failure == ""
    assert stages.wait_for("retain", 10.0).failure == ""
    with pytest.raises(StoreError, match="a newer snapshot replaced this one"):
        stages.wait_for("persist", 10.0)
    write_record(
        ended / records.save_record("persist", save_id, "all"),
        StageOutcome(save_id=save_id, stage="persist"),
    )
    assert stages.wait_for("persist", 10.0).failure == ""


def test_a_file_that_vanishes_as_others_look_hides_no_snapshot(shm: Path) -> None:
    run = Home(shm).run("0" * 16)
    run.step_path(1).mkdir(parents=True)
    (run.step_path(1) / "manifest.json").write_bytes(b"{}")
    (run.step_path(1) / ".note.json.0badf00d").symlink_to("nowhere")  # as one that is gone by now
    assert list_own_files(run, "n").steps == {1: {"manifest.json": 2}}


def test_a_save_that_is_committed_meanwhile_is_not_taken_for_an_old_one(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its manifest comes just after the names of files were read."""
    first, second = "a" * 16, "b" * 16
    place = SnapshotDirectory(Home(shm).run("0" * 16), 1)
    place.path.mkdir(parents=True)

    def commit(save_id: str) -> None:
        manifest = Manifest(
            save_id=save_id,
            step=1,
            created="",
            world_size=1,
            files=(),
            objects=(),
            tensors=Raw(b"[]"),
        )
        write_record(place.path / "manifest.json", encode_manifest(manifest))
        done = StageOutcome(save_id=save_id, stage="commit")
        write_record(place.path / records.save_record("commit", save_id, "all"), done)

    for save_id in (first, second):
        file = FileEntry(f"r00000-{save_id}.safetensors", 0, 0, 0, 0, 0, 0)
        (place.path / file.name).touch()
        write_record(
            place.path / records.file_record(file.name, "staged"),
            StagedFile(file, "slot", 2, ("commit",)),
        )
    commit(first)
    named = SnapshotDirectory.list_names

    def named_just_before(self: SnapshotDirectory, suffix: str) -> list[str]:
        found = named(self, suffix)
        commit(second)
        return found

    monkeypatch.setattr(SnapshotDirectory, "list_names", named_just_before)
    seen = observe.read_run_view(place.run)
    freed = [each for each in decide.decide_run(seen, 0.0) if each.kind == decide.FREE]
    assert all(each.names == (first,) for each in freed)
    monkeypatch.undo()
    seen = observe.read_run_view(place.run)
    assert decide.Action(
        decide.FREE, place, why=decide.REPLACED, names=(first,)
    ) in decide.decide_run(seen, 0.0)


def test_an_agent_that_another_process_never_finishes_starting_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process is stopped, and keeps its lock."""
    home = Home(tmp_path)
    monkeypatch.setattr(spawn, "LOCK_TIMEOUT", 0.05)
    fd = home.open_lock("start.lock")
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(StoreError, match="another process has been starting the agent"):
        spawn.ensure_agent(home, memory(tmp_path))
    os.close(fd)
