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
from shardwise.kernel.manifest.manifest import MANIFEST, step_directory
from shardwise.parts.memory import reclaim, records
from shardwise.parts.memory.agent import process
from shardwise.parts.memory.agent.mirrors import Mirrors, set_mirror_task
from shardwise.parts.memory.files import lock_directory, write_record
from shardwise.parts.memory.home import Home, Run, SnapshotDirectory, new_run_id
from shardwise.parts.memory.rank_liveness import RankLock, is_rank_alive
from shardwise.parts.memory.records import AgentInfo, PendingManifest
from shardwise.parts.tiers.options import MirrorRequest, StorageTask
from tests.memory.reconciling import Attendant
from tests.memory.test_server import serve
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
    (run.free_directory / "r00000-0.slot").write_bytes(b"memory")
    return run


def test_a_run_without_trainers_and_snapshots_is_removed(home: Home) -> None:
    run, kept = begun(home), begun(home)
    kept.step_path(7).mkdir()
    (kept.step_path(7) / f"r00000-{7:016x}.safetensors").touch()
    Attendant(home).after(10.0)
    assert home.runs() == [kept]
    assert (kept.free_directory / "r00000-0.slot").exists()
    assert not run.path.exists()
    assert not list(home.path.glob("vacant-*"))


def test_a_trainer_that_starts_again_soon_finds_its_memory(home: Home) -> None:
    run = begun(home)
    agent = Attendant(home)
    agent.look()
    lock = RankLock(run, 0)
    agent.after(20.0)
    assert (run.free_directory / "r00000-0.slot").exists()
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
    assert (run.free_directory / "r00000-0.slot").exists()
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
    monkeypatch.setattr(process, "IDLE_TIMEOUT", 0.1)
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


@pytest.mark.parametrize("is_known", [True, False])
def test_records_that_others_write_after_the_end_keep_nothing(home: Home, is_known: bool) -> None:
    """Whoever has the secret can write some records, also for runs that there are not."""
    run, save = begun(home) if is_known else home.run(new_run_id()), "0" * 16
    with serve(home.path) as served:
        for name in (
            MANIFEST,
            records.save_record("pending", save, "copy"),
            records.save_record("persist", save),
            records.save_record("rescue", save),
            records.save_record("commit", save, "all"),
        ):
            for step in (7, 99_999_999):
                path = f"/runs/{run.name}/{step_directory(step)}/{name}"
                assert served.ask("PUT", path, b"garbage")[0] == 204
    attendant = Attendant(home)
    attendant.after(10.0)
    attendant.after(10.0)
    assert home.runs() == []


def test_records_of_a_save_that_must_still_be_persisted_are_kept(home: Home) -> None:
    run, save = begun(home), "0" * 16
    place = SnapshotDirectory(run, 7)
    place.path.mkdir()
    pending = PendingManifest(
        save_id=save,
        step=7,
        manifest="",
        files=[],
        nodes=[],
        leader="there",
        storage=StorageTask(root="/nowhere"),
    )
    write_record(place.path / records.save_record("pending", save, "copy"), pending)
    Attendant(home).after(10.0)
    assert run.steps() == [7]


def test_a_mirror_that_never_answers_is_given_up_a_day_after_the_run(tmp_path: Path) -> None:
    root, mirror = tmp_path / "root", tmp_path / "mirror"
    sw.save(root / "step-00000001", state(1), step=1)
    mirror.write_text("in the way")
    home = Home(tmp_path / "home")
    run = home.run("0" * 16)
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
