"""What trainers leave who ended before their first snapshot, or before their mirror answered."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.kernel.errors import StoreError
from shardwise.kernel.manifest.manifest import MANIFEST
from shardwise.parts.lineage import new_run_id
from shardwise.parts.memory import reclaim, records
from shardwise.parts.memory.agent import process
from shardwise.parts.memory.agent.root_tasks import OpenedStores, RootTasks, set_root_task
from shardwise.parts.memory.files import lock_directory, write_record
from shardwise.parts.memory.home import Home, Run, SnapshotDirectory
from shardwise.parts.memory.rank_liveness import RankLock, is_rank_alive
from shardwise.parts.memory.reclaim import remove_if_unused
from shardwise.parts.memory.records import AgentInfo, PendingManifest, RankPart, SaveState
from shardwise.parts.memory.states import SaveStates
from shardwise.parts.tiers.options import MirrorRequest, StorageTask
from tests.memory.reconciling import Attendant
from tests.tiers.test_mirror import state


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Of a node."""
    return Home(tmp_path)


def begun(home: Home) -> Run:
    """A run that has allocated memory, and whose trainer is gone."""
    run = home.run(new_run_id())
    RankLock(run, 0).release_as_lost()
    run.free_directory.mkdir()
    (run.free_directory / "rank-00000-0").write_bytes(b"memory")
    return run


def place_of(run: Run) -> SnapshotDirectory:
    """A snapshot of step 7, of which there is nothing yet."""
    place = SnapshotDirectory(run, 7, f"{7:016x}")
    place.path.mkdir()
    return place


def test_a_run_without_trainers_and_snapshots_is_removed(home: Home) -> None:
    run, kept = begun(home), begun(home)
    place = place_of(kept)
    (place.path / f"r00000-{place.save_id}.safetensors").touch()
    Attendant(home).after(10.0)
    assert home.runs() == [kept]
    assert (kept.free_directory / "rank-00000-0").exists()
    assert not run.path.exists()
    assert not list(home.path.glob("vacant-*"))


def test_a_trainer_that_starts_again_soon_finds_its_memory(home: Home) -> None:
    run = begun(home)
    agent = Attendant(home)
    agent.look()
    lock = RankLock(run, 0)
    agent.after(20.0)
    assert (run.free_directory / "rank-00000-0").exists()
    lock.release_as_lost()
    agent.look()  # it is vacant again from now on
    assert run.path.exists()
    agent.after(10.0)
    assert not run.path.exists()


def test_trainers_that_come_just_then_have_their_places(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One just before it is removed, which then is not, and another as that is seen."""
    run = begun(home)
    inode = run.path.stat().st_ino
    came = [RankLock(run, 0)]
    coming = threading.Thread(target=lambda: came.append(RankLock(run, 1)))

    def holding(directory: Path, *, shared: bool) -> AbstractContextManager[bool]:
        coming.start()
        return lock_directory(directory, shared=shared)

    monkeypatch.setattr(reclaim, "lock_directory", holding)
    reclaim.remove_if_unused(home, run)
    coming.join(20.0)
    assert len(came) == 2
    assert is_rank_alive(run, 0)
    assert is_rank_alive(run, 1)
    assert run.path.stat().st_ino == inode
    assert (run.free_directory / "rank-00000-0").exists()
    assert not list(home.path.glob("vacant-*"))


def test_a_trainer_that_comes_as_a_run_is_removed_begins_it_anew(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(home)
    came: list[RankLock] = []
    coming = threading.Thread(target=lambda: came.append(RankLock(run, 0)))
    look = reclaim.has_trainers

    def is_training(seen: Run) -> bool:
        found = look(seen)
        with lock_directory(seen.path, shared=True) as free:
            if not free:  # it is looked at for the last time
                coming.start()
                coming.join(0.1)
                assert not came
        return found

    monkeypatch.setattr(reclaim, "has_trainers", is_training)
    reclaim.remove_if_unused(home, run)
    coming.join(20.0)
    assert len(came) == 1
    assert is_rank_alive(run, 0)
    assert not run.free_directory.exists()
    assert not list(home.path.glob("vacant-*"))


def test_what_is_begun_anew_is_vacant_only_later(home: Home) -> None:
    run = begun(home)
    agent = Attendant(home)
    agent.after(10.0)
    assert not run.path.exists()
    RankLock(run, 0).release_as_lost()
    agent.look()
    assert run.path.exists()


def test_what_is_no_run_stays(home: Home) -> None:
    (home.path / "runs" / "something else").mkdir()
    Attendant(home).after(10.0)
    assert home.runs() == []
    assert (home.path / "runs" / "something else").exists()


def test_an_agent_of_which_nothing_is_needed_ends(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "UPKEEP_PERIOD", 0.1)
    run = begun(home)

    async def live() -> None:
        idle = process._wait_for_end(home, AgentInfo("n", "", ""), asyncio.Event(), until_idle=True)
        ending = asyncio.ensure_future(idle)
        await asyncio.sleep(0.3)
        assert not ending.done()
        reclaim.remove_if_unused(home, run)
        await asyncio.wait_for(ending, 30.0)

    asyncio.run(live())


def test_what_an_agent_was_killed_over_is_removed_by_the_next(home: Home) -> None:
    left = home.path / "vacant-0123abcd"
    begun(home).path.rename(left)
    reclaim.finish_removals(home)
    assert not left.exists()


def pending_of(place: SnapshotDirectory, leader: str) -> PendingManifest:
    return PendingManifest(
        save_id=place.save_id,
        step=place.step,
        manifest="",
        files=[],
        nodes=[],
        leader=leader,
        storage=StorageTask(root="/nowhere"),
    )


def test_records_alone_keep_nothing_after_the_end(home: Home) -> None:
    """Nobody can restore anything from them; and another node leads the save."""
    run = begun(home)
    place = place_of(run)
    part = RankPart(file=None, snapshots_to_keep=2, stages=("commit", "persist"), epoch=0)
    write_record(place.path / records.rank_record(0), part)
    write_record(place.path / records.PENDING, pending_of(place, "there"))
    write_record(place.path / records.STATE, SaveState(rescue_sent=True))
    write_record(place.path / MANIFEST, b"garbage")
    attendant = Attendant(home)
    attendant.look()
    assert run.snapshots() == [place]
    attendant.after(10.0)
    attendant.after(10.0)
    assert home.runs() == []


@pytest.mark.parametrize(
    ("leader", "state"),
    [("here", SaveState()), ("there", SaveState(rescue="there"))],
    ids=["led", "rescued"],
)
def test_records_of_a_save_that_must_still_be_persisted_are_kept(
    home: Home, leader: str, state: SaveState
) -> None:
    """Other nodes have its files."""
    run = begun(home)
    place = place_of(run)
    write_record(place.path / records.PENDING, pending_of(place, leader))
    write_record(place.path / records.STATE, state)
    Attendant(home).after(10.0)
    assert run.snapshots() == [place]


def test_a_mirror_that_never_answers_is_given_up_a_day_after_the_run(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    sw.save(root / "step-00000001", state(1), step=1)
    mirror.write_text("in the way")
    home = Home(tmp_path / "home")
    run = home.run("0" * 16)
    set_root_task(run, StorageTask(root=str(root), mirror=MirrorRequest(str(mirror))))
    now = time.time()
    tasks = RootTasks(SaveStates(), OpenedStores(), lambda: now)
    tasks.perform(run)
    assert (root / "mirror.json").exists()
    tasks.perform(run)
    assert home.runs_with_tasks() == [run]
    first = tasks._open_mirrors[run].mirroring
    now += 601.0
    tasks.perform(run)
    tasks.perform(run)
    assert tasks._open_mirrors[run].mirroring is not first  # opened anew
    now += 86500.0
    tasks.perform(run)
    assert not home.runs_with_tasks()
    run.task_path.write_text("{")  # damaged: ignored
    tasks.perform(run)
    assert not home.runs_with_tasks()
    shutil.rmtree(run.task_path.parent)
    tasks.perform(run)
    assert not home.runs_with_tasks()


@pytest.mark.parametrize("step", ["step-00000000", "step-00000001"])
def test_snapshots_of_another_version_are_not_removed_for_nobodys(
    tmp_path: Path, step: str
) -> None:
    """That version had one directory for all saves of a step."""
    home = Home(tmp_path)
    run = home.run(new_run_id())
    (run.path / step).mkdir(parents=True)
    with pytest.raises(StoreError, match=rf"another version .*{step}"):
        remove_if_unused(home, run)
    assert (run.path / step).exists()
