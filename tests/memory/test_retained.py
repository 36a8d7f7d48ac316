"""Old checkpoints go once the newer one is published, which does not wait for it."""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.kernel.deadline import Deadline
from shardwise.kernel.engine.checkpoint_directory import CheckpointDirectory
from shardwise.kernel.engine.root import Root
from shardwise.kernel.errors import StoreError, StoreUnavailableError
from shardwise.kernel.manifest.manifest import MANIFEST, decode_manifest, lock_file, step_directory
from shardwise.kernel.store.local import LocalStore
from shardwise.parts.lineage import Lineage, new_run_id
from shardwise.parts.memory import reclaim, records
from shardwise.parts.memory.agent.root_tasks import OpenedStores, RootTasks, set_root_task
from shardwise.parts.memory.decide import (
    FREE,
    ROOT_TASK,
    UNCOMMITTABLE,
    Action,
    RunAction,
    decide_run,
)
from shardwise.parts.memory.home import Home, SnapshotDirectory
from shardwise.parts.memory.observe import Observer
from shardwise.parts.memory.records import StageOutcome
from shardwise.parts.memory.states import SaveStates, read_state
from shardwise.parts.memory.trainer import pending_saves
from shardwise.parts.memory.trainer.pending_saves import PendingSave, PendingSaves
from shardwise.parts.tiers.options import StorageTask
from tests.faults.memory.scenario import Cluster, begin
from tests.memory.reconciling import free_now, resume
from tests.memory.test_snapshots import shm
from tests.tools.gang import Gang

__all__ = ["shm"]
SAVE = "0" * 16


def checkpointer(root: Path, shm: Path) -> sw.Checkpointer:
    """One that keeps the newest only."""
    memory = sw.Memory(dir=str(shm), wait=10.0)
    return sw.Checkpointer(root, keep=sw.Keep(last=1), memory=memory)


def save_what_cannot_go(place: Path) -> None:
    """Save a checkpoint of which a data file cannot be deleted: it has become a directory."""
    sw.save(place, {"t": torch.zeros(1)})
    (data,) = place.glob("*.safetensors")
    data.unlink()
    data.mkdir()


def test_old_checkpoints_are_gone_when_the_run_is_closed(tmp_path: Path, shm: Path) -> None:
    root = tmp_path / "root"
    with checkpointer(root, shm) as cp:
        for step in (1, 2, 3):
            handle = cp.save(step, {"t": step})
            assert handle is not None
            handle.result(20.0)
            assert cp.latest() == step
    assert [each.name for each in root.glob("step-*")] == [step_directory(3)]


def test_old_checkpoints_that_cannot_go_fail_the_next_save_and_not_the_one_that_is_published(
    tmp_path: Path, shm: Path
) -> None:
    root = tmp_path / "root"
    save_what_cannot_go(root / step_directory(0))
    cp = checkpointer(root, shm)
    handle = cp.save(1, {"t": 1}, overwrite=True)
    assert handle is not None
    handle.result(20.0)
    deadline = time.monotonic() + 20
    (place,) = Home(shm).runs()[0].snapshots()
    while records.REMOVE_OLD not in read_state(place).outcomes:
        assert time.monotonic() < deadline, "nobody told"
        time.sleep(0.01)
    with pytest.raises(
        StoreError, match=r"step 1: the stage 'retain' of .* failed: IsADirectoryError"
    ):
        cp.save(2, {"t": 2})
    cp.close(wait=False)
    target = {"t": 0}
    sw.load(root / step_directory(1), target)
    assert target == {"t": 1}


def test_who_looks_for_leftovers_just_now_fails_no_save(tmp_path: Path) -> None:
    """A Checkpointer that is opened has the lock of a save that is being persisted for a moment."""
    store = LocalStore(tmp_path / step_directory(1))
    directory = CheckpointDirectory(store)
    with ExitStack() as looking:
        assert looking.enter_context(store.lock(lock_file(SAVE)))
        deadline = Deadline(10.0, sleep=lambda seconds: looking.close())
        with (
            directory.lock_for_publishing(SAVE, [], overwrite=False, deadline=deadline),
            store.lock(lock_file(SAVE)) as other,
        ):
            assert not other


def test_a_lock_that_others_hold_is_tried_again(tmp_path: Path) -> None:
    """An agent ends its save if it gets this error, unless it is `StoreUnavailableError`."""
    store = LocalStore(tmp_path / step_directory(1))
    directory = CheckpointDirectory(store)
    with (
        store.lock(lock_file(SAVE)),
        pytest.raises(StoreUnavailableError, match="another process holds it"),
        directory.lock_for_publishing(SAVE, [], overwrite=False, deadline=Deadline(0.0)),
    ):
        pass


@pytest.mark.parametrize("publisher", ["another save", "an agent that has just ended"])
def test_a_save_that_meets_a_checkpoint_removes_its_files_unless_it_is_the_same_save(
    tmp_path: Path, publisher: str
) -> None:
    sw.save(tmp_path / "made", {"t": torch.arange(9)}, step=1)
    manifest = (tmp_path / "made" / MANIFEST).read_bytes()
    own = decode_manifest(manifest)
    root, step = LocalStore(tmp_path / "root"), tmp_path / "root" / step_directory(1)
    directory, names = Root(root).at(1), [file.name for file in own.files]
    with directory.lock_for_publishing(own.save_id, names, overwrite=False):
        for file in own.files:
            shutil.copy(tmp_path / "made" / file.name, step)
        if publisher == "another save":
            sw.save(tmp_path / "other", {"t": 2}, step=1)
            for path in (tmp_path / "other").iterdir():
                shutil.copy(path, step)
            with pytest.raises(sw.CheckpointExistsError, match="Checkpoint already exists"):
                directory.commit(own.save_id, manifest, names, overwrite=False)
        else:
            (step / MANIFEST).write_bytes(manifest)
            directory.commit(own.save_id, manifest, names, overwrite=False)
    expected = tmp_path / ("other" if publisher == "another save" else "made")
    assert {p.name for p in step.iterdir()} == {p.name for p in expected.iterdir()}
    sw.open(step).verify()


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path, shm: Path) -> None:
    root, memory = tmp_path / "root", sw.Memory(dir=str(shm), snapshot_every=0, wait=10.0)
    values = torch.arange(1000)
    with sw.Checkpointer(root, memory=memory) as cp:
        for step in (1, 2, 3):
            cp.save(step, {"t": values + step})
    (data,) = (root / step_directory(3)).glob("*.safetensors")
    whole = bytearray(data.read_bytes())
    whole[4000] ^= 1
    data.write_bytes(whole)
    found = torch.zeros_like(values)
    with sw.Checkpointer(root, keep=sw.Keep(last=2), memory=memory) as cp:
        assert cp.restore({"t": found}) == 2
        cp.save(4, {"t": values + 4})
    assert cp.steps() == [2, 3, 4]
    for step in (2, 4):
        sw.load(root / step_directory(step), {"t": found})
        assert torch.equal(found, values + step)


def test_publishing_does_not_wait_for_old_checkpoints(tmp_path: Path, shm: Path) -> None:
    root = tmp_path / "root"
    cp = checkpointer(root, shm)
    first = cp.save(1, {"t": 1})
    assert first is not None
    first.result(20.0)
    opened = sw.open(root)
    second = cp.save(2, {"t": 2})
    assert second is not None
    second.result(20.0)
    cp.close()
    assert opened["t"] == 1
    assert cp.steps() == [1, 2]  # one that is read stays until the next time


def test_old_checkpoints_that_cannot_go_are_told_of_when_the_run_is_closed(
    tmp_path: Path, shm: Path
) -> None:
    root = tmp_path / "root"
    save_what_cannot_go(root / step_directory(0))
    cp = checkpointer(root, shm)
    cp.save(1, {"t": 1}, overwrite=True)
    with pytest.raises(
        StoreError, match=r"step 1: the stage 'retain' of .* failed: IsADirectoryError"
    ):
        cp.close()
    assert cp.steps() == [1]
    assert not list(shm.glob("**/free/*"))


def test_what_cannot_go_is_told_though_the_last_snapshot_is_for_memory_only(
    tmp_path: Path, shm: Path
) -> None:
    root = tmp_path / "root"
    save_what_cannot_go(root / step_directory(0))
    memory = sw.Memory(dir=str(shm), wait=10.0, when_full="wait")
    cp = sw.Checkpointer(root, keep=sw.Keep(last=1), save_every=2, memory=memory)
    cp.save(2, {"t": 2}, overwrite=True)

    def save_and_close() -> None:
        cp.save(3, {"t": 3})  # fails itself if the agent was fast
        cp.close()

    with pytest.raises(
        StoreError, match=r"step 2: the stage 'retain' of .* failed: IsADirectoryError"
    ):
        save_and_close()
    cp.close(wait=False)


@pytest.fixture
def place(tmp_path: Path) -> SnapshotDirectory:
    """Step 3, as its agent has persisted it; steps 1 and 2 are in storage as well."""
    root = tmp_path / "root"
    for step in (1, 2, 3):
        sw.save(root / step_directory(step), {"t": step})
    place = SnapshotDirectory(Home(tmp_path / "home").run(new_run_id()), 3, SAVE)
    place.path.mkdir(parents=True)
    place.manifest_path.write_bytes(b"{}")
    set_root_task(place.run, StorageTask(root=str(root), keep=asdict(sw.Keep(last=1)), newest=3))
    for stage in ("commit", "persist"):
        SaveStates().end(place, {stage: StageOutcome(node="here")})
    return place


def stages_of(place: SnapshotDirectory) -> PendingSave:
    home = Home(place.run.path.parents[2])
    return PendingSave(
        home,
        sw.Memory(wait=10.0),
        0,
        place,
        ("commit", "persist"),
        logs_failures=True,
        deletes_older=True,
    )


def remove_old(place: SnapshotDirectory) -> None:
    """Do what the agent has to do in the root."""
    RootTasks(SaveStates(), OpenedStores()).perform(place.run)


def due(place: SnapshotDirectory) -> list[str]:
    """The actions of the agent on the root."""
    observer = Observer(Home(place.run.path.parents[2]), "here", clock=lambda: 0.0)
    actions = [each for run in observer.runs() for each in decide_run(observer.run(run), 0.0)]
    return [each.kind for each in actions if isinstance(each, RunAction)]


def test_who_waits_learns_of_the_end_within_milliseconds(
    place: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    done = StageOutcome(node="here")

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if sum(pauses) > 1.0:
            SaveStates().end(place, {records.REMOVE_OLD: done})

    monkeypatch.setattr(pending_saves, "Deadline", partial(Deadline, sleep=sleep))
    assert stages_of(place).wait_for(records.REMOVE_OLD, None) == done
    assert max(pauses) <= 0.005


def in_storage(tmp_path: Path) -> list[str]:
    return sorted(each.name for each in (tmp_path / "root").iterdir())


def test_old_checkpoints_go_once(tmp_path: Path, place: SnapshotDirectory) -> None:
    stages = stages_of(place)
    assert due(place) == [ROOT_TASK]
    assert stages.outcome(records.REMOVE_OLD) is None
    assert not stages.has_succeeded()
    remove_old(place)
    assert in_storage(tmp_path) == [step_directory(3)]
    assert stages.has_succeeded()
    assert due(place) == []


def test_one_that_fails_is_told(tmp_path: Path, place: SnapshotDirectory) -> None:
    shutil.rmtree(tmp_path / "root" / step_directory(1))
    save_what_cannot_go(tmp_path / "root" / step_directory(1))
    remove_old(place)
    with pytest.raises(StoreError, match=r"step 3: the stage 'retain' of .* failed: .*Is"):
        stages_of(place).check_no_stage_failed()
    assert due(place) == []


def test_a_snapshot_that_is_retired_leaves_what_is_still_to_be_removed(
    tmp_path: Path, place: SnapshotDirectory
) -> None:
    """Its memory is free at once; and whoever waits for the removal goes on to do so."""
    (place.path / f"r00000-{SAVE}.safetensors").touch()
    stages = stages_of(place)
    free_now(place)
    assert not place.path.exists()
    assert due(place) == [ROOT_TASK]
    assert stages.outcome(records.REMOVE_OLD) is None
    assert not stages.has_succeeded()
    remove_old(place)
    assert in_storage(tmp_path) == [step_directory(3)]
    assert stages.has_succeeded()
    assert due(place) == []


def test_a_failure_is_told_though_the_snapshot_is_retired(
    tmp_path: Path, place: SnapshotDirectory
) -> None:
    shutil.rmtree(tmp_path / "root" / step_directory(1))
    save_what_cannot_go(tmp_path / "root" / step_directory(1))
    free_now(place)
    remove_old(place)
    with pytest.raises(StoreError, match=r"step 3: the stage 'retain' of .* failed: .*Is"):
        stages_of(place).check_no_stage_failed()


def test_what_the_run_has_left_behind_removes_nothing_more(
    tmp_path: Path, place: SnapshotDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be saved again meanwhile."""
    delete = LocalStore.delete

    def goes_back(store: LocalStore, name: str) -> None:
        resume(place.run, 2, Lineage(place.run.name), ["here"], 2)
        delete(store, name)

    monkeypatch.setattr(LocalStore, "delete", goes_back)
    remove_old(place)
    assert not place.path.exists()
    assert in_storage(tmp_path) == [step_directory(2), step_directory(3)]
    assert due(place) == []


def test_a_restore_of_the_step_ends_the_wait_for_what_is_to_be_removed(
    tmp_path: Path, place: SnapshotDirectory
) -> None:
    """The task in the root goes with a restore, before an agent has begun with it."""
    resume(place.run, 3, Lineage(place.run.name), ["here"], 2)
    remove_old(place)
    assert place.path.exists()
    assert len(in_storage(tmp_path)) == 3
    assert stages_of(place).outcome(records.REMOVE_OLD) is not None


def test_a_task_that_is_damaged_removes_nothing_and_is_told(
    tmp_path: Path, place: SnapshotDirectory
) -> None:
    place.run.task_path.write_bytes(b"{")
    remove_old(place)
    assert len(in_storage(tmp_path)) == 3
    with pytest.raises(
        StoreError,
        match=r"step 3: the stage 'retain' of .* failed: .* is damaged: truncated",
    ):
        stages_of(place).check_no_stage_failed()


def test_each_failure_is_told_once_and_what_is_under_way_stays(place: SnapshotDirectory) -> None:
    begun = PendingSaves()
    others = [SnapshotDirectory(place.run, step, f"{step:016x}") for step in (4, 5)]
    for each in (place, *others):
        each.path.mkdir(exist_ok=True)
        begun.add(stages_of(each))

    def fails(each: SnapshotDirectory) -> None:
        SaveStates().end(each, {records.REMOVE_OLD: StageOutcome(failure="busy")})

    begun.raise_failure()
    fails(place)
    fails(others[1])
    for step in (3, 5):
        with pytest.raises(StoreError, match=f"step {step}: the stage 'retain' of .* failed: busy"):
            begun.raise_failure()
    begun.raise_failure()
    fails(others[0])
    with pytest.raises(StoreError, match=r"step 4: the stage 'retain' of .* failed: busy"):
        begun.raise_failure()
    assert not begun.is_last_durable()


def test_a_save_that_newer_ones_have_replaced_is_not_waited_for(tmp_path: Path, shm: Path) -> None:
    """Its memory may go before anybody has told that it is protected."""
    home = Home(shm)
    place = SnapshotDirectory(home.run("0" * 16), 1, "f" * 16)
    place.path.mkdir(parents=True)
    place.manifest_path.write_bytes(b"{}")
    states = SaveStates()
    states.end(place, {"commit": StageOutcome()})
    stages = PendingSave(
        home=home,
        options=sw.Memory(wait=10.0),
        rank=0,
        place=place,
        stages=("commit", "protect", "persist"),
        logs_failures=True,
    )
    assert stages.outcome("protect") is None
    free_now(place)
    assert stages.wait_for("protect", 10.0).failure == ""
    with pytest.raises(StoreError, match="a newer snapshot replaced this one"):
        stages.wait_for("persist", 10.0)
    states.end(place, {"persist": StageOutcome()})
    assert stages.wait_for("persist", 10.0).failure == ""
    states.end(place, {"persist": StageOutcome()})
    assert stages.wait_for("retain", 10.0).failure == ""


def test_a_rank_that_waits_for_what_is_freed_uncommitted_gets_an_error(shm: Path) -> None:
    """Its agent frees it because newer snapshots need its memory, and nobody commits it later."""
    home = Home(shm)
    place = SnapshotDirectory(home.run("0" * 16), 1, "f" * 16)
    place.path.mkdir(parents=True)
    save = PendingSave(home, sw.Memory(wait=10.0), 0, place, ("commit",), logs_failures=False)
    assert save.outcome("commit") is None
    assert reclaim.free(Action(FREE, place, UNCOMMITTABLE), SaveStates())
    assert not place.path.exists()
    with pytest.raises(StoreError, match=r"step 1: the stage 'commit' of .* takes too long"):
        save.wait_for("commit", 10.0)


def test_a_commit_that_has_failed_before_is_freed_with_its_own_failure(shm: Path) -> None:
    place = SnapshotDirectory(Home(shm).run("0" * 16), 1, "f" * 16)
    place.path.mkdir(parents=True)
    states, failed = SaveStates(), StageOutcome(failure="a node is lost")
    states.end(place, {"commit": failed})
    assert reclaim.free(Action(FREE, place, UNCOMMITTABLE), states)
    assert read_state(place).outcomes == {"commit": failed}


def close_though_one_fails(cluster: Cluster) -> tuple[str, str, float]:
    """One rank alone finds that something has failed: how closing ends, and after how long."""
    cp = cluster.open()
    _, state, _ = begin(cp, cluster.columns, "rows")
    cp.save(1, state)
    wait_for = PendingSave.wait_for

    def fail(save: PendingSave, stage: str, timeout: float | None) -> StageOutcome:
        raise sw.StoreError("its disk is full")

    if dist.get_rank() == 1:
        PendingSave.wait_for = fail  # type: ignore[method-assign]
    started = time.monotonic()
    try:
        with pytest.raises(sw.ShardwiseError) as caught:
            cp.close()
    finally:
        PendingSave.wait_for = wait_for  # type: ignore[method-assign]
    return type(caught.value).__name__, str(caught.value), time.monotonic() - started


def test_closing_fails_on_all_ranks_if_waiting_does_on_one(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    cluster = Cluster(root=tmp_path / "root", shm=shm, every=1)
    (first, said, _), (second, _, _), *_ = told = gang.run(close_though_one_fails, cluster, world=2)
    assert (first, second) == ("RankError", "StoreError")
    assert "waiting for saves" in said
    assert "rank 1: StoreError: its disk is full" in said
    assert max(took for *_, took in told) < 30.0
