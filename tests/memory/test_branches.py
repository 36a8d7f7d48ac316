"""What a node discards when its run goes on from a step or has ended, with ranks on it or not."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec import Raw

import shardwise as sw
from shardwise.kernel.manifest.manifest import FileEntry, Manifest, encode_manifest
from shardwise.kernel.store import LocalStore
from shardwise.parts.lineage import Lineage, new_run_id, read_or_create_lineage, resume_from
from shardwise.parts.memory import records
from shardwise.parts.memory.agent.actions import Follower
from shardwise.parts.memory.decide import (
    is_superseded,
)
from shardwise.parts.memory.files import write_record
from shardwise.parts.memory.home import Home, Run, SnapshotDirectory
from shardwise.parts.memory.identity import read_or_create_node_name
from shardwise.parts.memory.observe import read_snapshot
from shardwise.parts.memory.pool import rank_owner
from shardwise.parts.memory.rank_liveness import RankLock
from shardwise.parts.memory.records import PendingManifest, RankPart, SaveState, StageOutcome
from shardwise.parts.memory.seal import MappedFiles
from shardwise.parts.memory.states import SaveStates, request_rescue
from shardwise.parts.memory.times import DAY, UNTIL_FREED_IF_STORED, UPKEEP_PERIOD
from shardwise.parts.memory.trainer.slots import Slots
from shardwise.parts.tiers.options import StorageTask
from tests.memory.reconciling import Attendant, free_decided, resume
from tests.memory.test_given_back import train
from tests.memory.test_snapshots import shm
from tests.tools.agents import until

__all__ = ["shm"]
HERE, GONE = "here", "gone"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of which nothing is kept yet."""
    return Home(tmp_path).run(new_run_id())


def leave(
    run: Run,
    step: int,
    epoch: int | None = 0,
    *,
    committed: bool = True,
    ended: tuple[str, ...] = (),
    durable: bool = False,
    leader: str = GONE,
) -> None:
    """A snapshot of which this node has the part of rank 0."""
    place = place_of(run, step)
    save = place.save_id
    stages = ("commit", "protect", "persist") if durable else ("commit", "protect")
    file = FileEntry(f"r00000-{save}.safetensors", 0, 4, 0, 0, 0, 0)
    place.path.mkdir(parents=True)
    (place.path / file.name).write_bytes(b"data")
    if epoch is not None:  # or nothing says when it was saved
        part = RankPart(
            file=file,
            snapshots_to_keep=2,
            stages=stages,
            epoch=epoch,
        )
        write_record(place.path / records.rank_record(0), part)
    outcomes = dict.fromkeys(ended, StageOutcome())
    write_record(place.path / records.STATE, SaveState(outcomes=outcomes))
    if committed:
        manifest = Manifest(
            save_id=save,
            step=step,
            created="",
            world_size=1,
            files=(),
            objects=(),
            tensors=Raw(b"[]"),
        )
        write_record(place.path / "manifest.json", encode_manifest(manifest))
        pending = PendingManifest(
            save_id=save,
            step=step,
            manifest="",
            files=[],
            nodes=[],
            leader=leader,
            epoch=epoch or 0,
            durable=durable,
            storage=StorageTask(root=""),
        )
        write_record(place.path / records.PENDING, pending)


def place_of(run: Run, step: int) -> SnapshotDirectory:
    return SnapshotDirectory(run, step, f"{step:016x}")


def steps(run: Run) -> list[int]:
    """The steps of the snapshots on this node."""
    return [place.step for place in run.snapshots()]


def went(*steps: int) -> Lineage:
    """A run that has gone back to these steps, one after the other."""
    lineage = Lineage("0" * 16)
    for step in steps:
        lineage = lineage.after_resuming(step)
    return lineage


def has_free(run: Run) -> bool:
    """Whether rank 0 finds a slot."""
    return Slots(run, rank_owner(0), 3).has_free()


def test_what_a_node_missed_while_it_was_idle_takes_no_slot(run: Run) -> None:
    """The run went back to 48 without it, and saved 49 and 50 elsewhere."""
    leave(run, 48, ended=("commit", "protect"))
    leave(run, 49, ended=("commit",))
    leave(run, 50, committed=False)
    assert not has_free(run)
    resume(run, 50, went(48), [HERE], 2)
    assert steps(run) == [48]
    assert has_free(run)


def test_what_waits_for_a_leader_that_is_gone_takes_no_slot_forever(run: Run) -> None:
    for step in (47, 48, 49):
        leave(run, step, ended=("commit",))
    resume(run, 49, went(), [HERE], 2)
    assert steps(run) == [49]
    assert has_free(run)


def test_as_many_as_there_are_slots_stay(run: Run) -> None:
    for step in (46, 47, 48):
        leave(run, step, ended=("commit", "protect"))
    resume(run, 48, went(), [HERE], 2)
    assert steps(run) == [47, 48]


def test_what_is_still_being_rescued_holds_no_slot(run: Run) -> None:
    """Of nodes that are lost, one after the other, which may take long."""
    leave(run, 46, ended=("commit", "protect"))
    leave(run, 47, ended=("commit", "protect"))
    request_rescue(SaveStates(), place_of(run, 47), GONE)
    resume(run, 48, went(), [HERE], 2)
    assert steps(run) == [46]


def test_what_the_run_goes_on_from_stays_though_no_manifest_came(run: Run) -> None:
    leave(run, 3, ended=("commit", "protect"))
    leave(run, 4, ended=("commit", "protect"))
    leave(run, 5, committed=False)
    resume(run, 5, went(), [HERE], 2)
    assert steps(run) == [4, 5]


def test_what_is_being_persisted_stays_as_long_as_its_leader_is_there(run: Run) -> None:
    leave(run, 40, durable=True, leader=HERE, ended=("commit",))
    leave(run, 44, ended=("commit", "protect"))
    leave(run, 45)
    resume(run, 45, went(), [HERE], 2)
    assert steps(run) == [40, 45]
    leave(run, 41, durable=True, leader=HERE, ended=("commit",))
    leave(run, 42, durable=True, leader=GONE, ended=("commit",))
    resume(run, 45, went(), [HERE], 2)
    assert steps(run) == [40, 41, 45]


@pytest.mark.parametrize("step", [2, None])
def test_what_is_newer_goes(run: Run, step: int | None) -> None:
    for each in (1, 2, 3, 4):
        leave(run, each, ended=("commit", "protect"))
    resume(run, step, went(), [HERE], 3)
    assert steps(run) == ([] if step is None else [1, 2])


@pytest.mark.parametrize(
    ("epoch", "back_to", "expected"),
    [(0, 6, True), (0, 7, False), (1, 6, False), (None, 6, False), (0, None, False)],
)
def test_abandoned_is_what_is_known_to_be(
    run: Run, epoch: int | None, back_to: int | None, expected: bool
) -> None:
    """What nobody can tell of may be what the run goes on from."""
    leave(run, 7, epoch, committed=False)
    lineage = went(*([] if back_to is None else [back_to]))
    assert is_superseded(read_snapshot(place_of(run, 7)), lineage) == expected


def test_a_step_that_was_saved_again_is_not_abandoned(run: Run) -> None:
    leave(run, 7, 0)
    assert is_superseded(read_snapshot(place_of(run, 7)), went(6))
    again = SnapshotDirectory(run, 7, "f" * 16)
    file = FileEntry(f"r00000-{again.save_id}.safetensors", 0, 4, 0, 0, 0, 0)
    again.path.mkdir()
    (again.path / file.name).write_bytes(b"data")
    part = RankPart(file=file, snapshots_to_keep=2, stages=(), epoch=1)
    write_record(again.path / records.rank_record(0), part)
    assert not is_superseded(read_snapshot(again), went(6))
    resume(run, 7, went(6), [HERE], 2)
    assert run.snapshots() == [again]


def an_idle_node(run: Run, root: Path, *steps: int) -> LocalStore:
    """Of a run that has gone back to these steps; it has two snapshots of the beginning, and a slot
    that is free."""
    store = LocalStore(root)
    lineage = read_or_create_lineage(store)
    store.publish("run.json", msgspec.json.encode(Lineage(run.name)), replace=True)
    assert lineage.run != run.name
    run.record_info(str(store), [])
    for step in steps:
        resume_from(store, run.name, step)
    for step in (7, 8):
        leave(run, step, ended=("commit", "protect"))
    run.free_directory.mkdir()
    (run.free_directory / "rank-00000-1").write_bytes(b"free")
    return store


@pytest.fixture
def idle_run(run: Run) -> Run:
    """The same, in a directory that is there."""
    run.path.mkdir(parents=True)
    return run


def attendant(run: Run) -> Attendant:
    return Attendant(Home(run.path.parents[2]))


def test_a_node_that_is_idle_gives_memory_of_abandoned_branches_back(
    idle_run: Run, tmp_path: Path
) -> None:
    an_idle_node(idle_run, tmp_path / "root", 7)
    attendant(idle_run).after(10.0)
    assert steps(idle_run) == [7]
    assert not list(idle_run.free_directory.iterdir())


def test_a_node_that_is_idle_hears_later_that_its_run_has_gone_back(
    idle_run: Run, tmp_path: Path
) -> None:
    store = an_idle_node(idle_run, tmp_path / "root")
    agent = attendant(idle_run)
    agent.after(10.0)
    assert steps(idle_run) == [7, 8]
    resume_from(store, idle_run.name, 6)
    agent.after(10.0)
    assert steps(idle_run) == []


def test_a_node_is_not_idle_that_has_been_without_trainers_for_a_moment(
    idle_run: Run, tmp_path: Path
) -> None:
    an_idle_node(idle_run, tmp_path / "root", 6)
    agent = attendant(idle_run)
    agent.after(9.0)
    lock = RankLock(idle_run, 0)
    agent.after(10.0)
    lock.release()
    agent.after(9.0)
    assert steps(idle_run) == [7, 8]
    agent.after(1.0)
    assert steps(idle_run) == []


def test_a_node_with_trainers_gives_nothing_back_by_itself(idle_run: Run, tmp_path: Path) -> None:
    an_idle_node(idle_run, tmp_path / "root", 6)
    agent = attendant(idle_run)
    lock = RankLock(idle_run, 0)
    agent.after(1e6)
    assert steps(idle_run) == [7, 8]
    lock.release()
    agent.after(10.0)
    assert steps(idle_run) == []


@pytest.mark.parametrize("damage", ["gone", "another's", "damaged"])
def test_a_root_that_says_nothing_of_a_run_costs_it_nothing(
    idle_run: Run, tmp_path: Path, damage: str
) -> None:
    an_idle_node(idle_run, tmp_path / "root", 6)
    record = tmp_path / "root" / "run.json"
    if damage == "gone":
        record.unlink()
    else:
        text = record.read_text().replace(idle_run.name, new_run_id())
        record.write_text(text if damage == "another's" else "{")
    attendant(idle_run).after(10.0)
    assert steps(idle_run) == [7, 8]


def failed(run: Run, step: int) -> None:
    """Its commit has failed."""
    done = StageOutcome(failure="a node is lost")
    SaveStates().end(place_of(run, step), {"commit": done})


def aged(run: Run, step: int, seconds: float) -> None:
    """It was staged so many seconds ago."""
    (file,) = place_of(run, step).path.glob("*.safetensors")
    os.utime(file, (time.time() - seconds,) * 2)


def test_what_will_never_be_committed_gives_its_slot_back(run: Run) -> None:
    for step in range(1, 8):
        leave(run, step, committed=step == 1, durable=step in (4, 5))
    for step in (3, 4, 7):
        failed(run, step)
    assert free_decided(run)
    # 1 is committed, 2 and 6 may still be, 5 is to be persisted, and 7 is the newest.
    assert steps(run) == [1, 2, 5, 6, 7]
    aged(run, 7, 122.0)
    assert free_decided(run)
    assert steps(run) == [1, 5, 7]
    assert len(list(run.free_directory.glob("rank-00000-*"))) == 4


LINGER, LONGEST = UNTIL_FREED_IF_STORED, DAY


class Node:
    """A node after its trainer has left; time passes as the test says."""

    def __init__(self, shm: Path) -> None:
        self._agent = Attendant(Home(shm))
        self._agent.rescue = Follower(
            read_or_create_node_name(self._agent.home), MappedFiles()
        ).rescue

    def after(self, seconds: float) -> int:
        """Return how many snapshots are left so many seconds later."""
        self._agent.after(seconds)
        return sum(len(steps(run)) for run in self._agent.home.runs())

    def is_empty(self) -> bool:
        """Whether nothing of any run is left, a little later."""
        self._agent.after(UPKEEP_PERIOD)
        home = self._agent.home
        return not home.runs() and not list(home.path.glob("**/free/*"))


def test_what_storage_has_leaves_memory_half_an_hour_after_the_run(
    tmp_path: Path, shm: Path
) -> None:
    train(tmp_path / "root", shm, every=1)
    node = Node(shm)
    assert node.after(LINGER - 1) == 2
    assert node.after(20.0) == 0
    assert node.is_empty()


def test_what_only_memory_has_is_persisted_first(tmp_path: Path, shm: Path) -> None:
    root = tmp_path / "root"
    train(root, shm, every=1000)
    node = Node(shm)
    assert node.after(LINGER + 20) == 2
    until(lambda: list(root.glob("step-*/manifest.json")))
    found = torch.zeros(1000, dtype=torch.int64)
    sw.load(root / "step-00000002", {"t": found})
    assert torch.equal(found, torch.full((1000,), 2))
    assert node.after(20.0) == 0
    assert node.is_empty()


def test_a_run_whose_root_was_removed_leaves_memory_too(tmp_path: Path, shm: Path) -> None:
    train(tmp_path / "root", shm, every=1000)
    shutil.rmtree(tmp_path / "root")
    node = Node(shm)
    assert node.after(LINGER - 1) == 2
    assert node.after(20.0) == 0
    assert node.is_empty()


def test_what_is_not_to_be_persisted_stays_for_a_day(tmp_path: Path, shm: Path) -> None:
    train(tmp_path / "root", shm, every=1000, rescue=False)
    node = Node(shm)
    assert node.after(LONGEST - 1) == 2
    assert node.after(20.0) == 0
    assert node.is_empty()
