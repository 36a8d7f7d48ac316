"""Slots: memory that is allocated once, taken from a pool, and comes back."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import shardwise as sw
from shardwise.kernel.engine.buffers import HUGE_PAGE
from shardwise.kernel.manifest.manifest import FileEntry
from shardwise.parts.lineage import Lineage, new_run_id
from shardwise.parts.memory import reclaim, records
from shardwise.parts.memory import states as states_module
from shardwise.parts.memory.decide import ABANDONED, FREE, NO_TRAINER, REPLACED, Action, decide_run
from shardwise.parts.memory.files import write_record
from shardwise.parts.memory.home import (
    AGENT_LOCK,
    ENDED_DIRECTORY,
    Home,
    Run,
    SnapshotDirectory,
    list_snapshots,
    newest_step_here,
)
from shardwise.parts.memory.observe import Observer
from shardwise.parts.memory.pool import AGENT, PAGE_SIZE, Pool, rank_owner, ring_owner
from shardwise.parts.memory.reclaim import (
    bytes_needed_for_others,
    bytes_stored_for_others,
    discard,
    finish_freeing,
    refuse_older_step,
)
from shardwise.parts.memory.records import PendingManifest, RankPart, RingFile, StageOutcome
from shardwise.parts.memory.states import SaveStates, read_state
from shardwise.parts.memory.trainer.slots import Slots
from shardwise.parts.tiers.copying import FileCopier
from shardwise.parts.tiers.options import StorageTask
from tests.memory.reconciling import free_abandoned, free_decided, free_now, home_of


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of which nothing is kept yet."""
    return Home(tmp_path).run(new_run_id())


def place_of(run: Run, step: int, number: int | None = None) -> SnapshotDirectory:
    """The directory of a save, which is made. A step that is saved again has other numbers."""
    place = SnapshotDirectory(run, step, f"{step if number is None else number:016x}")
    place.path.mkdir(parents=True, exist_ok=True)
    return place


def part_of(
    place: SnapshotDirectory,
    *,
    rank: int = 0,
    slots: int = 2,
    stages: tuple[str, ...] = ("commit", "protect"),
    made: tuple[RingFile, ...] = (),
) -> RankPart:
    """The record of a rank that has staged 10 bytes."""
    name = f"r{rank:05d}-{place.save_id}.safetensors"
    file = FileEntry(name, rank, 10, 0, 0, 0, 0)
    return RankPart(file=file, snapshots_to_keep=slots, stages=stages, epoch=0, made=made)


def record(place: SnapshotDirectory, part: RankPart, rank: int = 0) -> Path:
    """Write the record of a rank; return where its file goes."""
    write_record(place.path / records.rank_record(rank), part)
    assert part.file is not None
    return place.path / part.file.name


def steps_of(run: Run) -> list[int]:
    return [each.step for each in run.snapshots()]


def slots_of(run: Run, count: int, rank: int = 0) -> Slots:
    """The slots of a rank for its own data."""
    return Slots(run, rank_owner(rank), count)


def test_a_slot_is_the_same_memory_again(run: Run) -> None:
    slots = slots_of(run, 1, rank=3)
    slots.prepare(10_000)
    place = place_of(run, 1)
    target = record(place, part_of(place, rank=3), 3)
    first = slots.take(target, 10_000)
    assert first is not None
    first[:] = 7
    assert target.read_bytes() == b"\7" * 10_000
    inode = os.stat(target).st_ino
    again = place_of(run, 2)
    target = record(again, part_of(again, rank=3), 3)
    assert slots.take(target, 10_000) is None
    free_now(place)
    second = slots.take(target, 12_000)
    assert second is not None
    assert os.stat(target).st_ino == inode
    second[:] = 8
    assert target.read_bytes() == b"\10" * 12_000


def test_slots_in_use_count(run: Run) -> None:
    """Also those that are being filled."""
    slots = slots_of(run, 3)
    assert slots.prepare(1000) > 0
    place = place_of(run, 1)
    name = record(place, part_of(place)).name
    assert slots.take(place.temporary_path(name), 1000) is not None
    assert slots.prepare(1000) == 0
    place.temporary_path(name).rename(place.path / name)
    assert slots.prepare(1000) == 0
    assert len(list(run.free_directory.iterdir())) == 2


def test_slots_of_a_snapshot_that_is_being_freed_count(run: Run) -> None:
    """They will be free in a moment, or a little later if a process was killed meanwhile."""
    slots = slots_of(run, 2)
    slots.prepare(1000)
    place = place_of(run, 1)
    assert slots.take(record(place, part_of(place)), 1000) is not None
    place.path.rename(run.path / "freed-0123456789abcdef")
    assert slots.prepare(1000) == 0
    finish_freeing(run)
    assert slots.prepare(1000) == 0
    assert len(list(run.free_directory.iterdir())) == 2


def test_slots_for_others_count_apart(run: Run) -> None:
    place = place_of(run, 1)
    claimed, kept = (RingFile(f"rank-00000.made-{n}.bin", f"r{n}.bin", {}) for n in (1, 2))
    record(place, part_of(place, made=(claimed, kept))).touch()
    own, others = slots_of(run, 2), Slots(run, ring_owner(0), 4)
    (place.path / ".rank-00000.made-0.bin").touch()  # the rank fills it
    (place.path / ".r1.bin").touch()  # the agent has renamed it, and adds what it lacks
    (place.path / kept.file).touch()
    own.prepare(1000)
    others.prepare(1000)
    names = sorted(each.name[:11] for each in run.free_directory.iterdir())
    assert names == ["rank-00000-", "ring-00000-"]


def test_ranks_do_not_take_each_others(run: Run) -> None:
    mine, other = (slots_of(run, n, rank) for rank, n in ((1, 1), (11, 0)))
    mine.prepare(100)
    assert not other.has_free()
    assert other.take(run.path / "to", 100) is None


def test_a_slot_that_is_lost_is_made_up_for(run: Run) -> None:
    """Such as one whose note was damaged, so that nobody knew what it is called."""
    slots = slots_of(run, 2)
    slots.prepare(1000)
    for path in run.free_directory.iterdir():
        path.unlink()
    assert slots.has_free()
    place = place_of(run, 1)
    taken = slots.take(path := record(place, part_of(place)), 1000)
    assert taken is not None
    taken[:] = 5
    assert path.read_bytes() == b"\5" * 1000
    assert slots.prepare(1000) > 0
    assert len(list(run.free_directory.iterdir())) == 1


def test_too_little_memory_is_an_error_that_says_how_much_is_needed(run: Run) -> None:
    with pytest.raises(sw.StoreError, match=r"3 slots of [\d,]+ bytes .* need [\d,]+ more"):
        slots_of(run, 3).prepare(1 << 50)
    assert not list(run.free_directory.iterdir())


def full(fd: int, offset: int, length: int) -> None:
    """There are pages for the first bytes only."""
    if offset + length > PAGE_SIZE:
        raise OSError(errno.ENOSPC, "No space left on device")
    os.pwrite(fd, bytes(PAGE_SIZE), 0)


def test_a_slot_that_cannot_be_allocated_is_as_it_was(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = slots_of(run, 1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(sw.StoreError, match="make the file system larger"):
            slots.prepare(3 * HUGE_PAGE)
        assert not list(run.free_directory.iterdir())
    slots.prepare(1000)
    (slot,) = run.free_directory.iterdir()
    size = slot.stat().st_size
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(sw.StoreError, match="make the file system larger"):
            slots.prepare(3 * HUGE_PAGE)
        assert slot.stat().st_size == size
        with pytest.raises(sw.StoreError, match="make the file system larger"):
            slots.take(run.path / "to", 3 * HUGE_PAGE)
    (slot,) = run.free_directory.iterdir()
    assert slot.stat().st_size == size
    taken = slots.take(run.path / "to", 1000)
    assert taken is not None
    taken[:] = 1


def test_a_slot_whose_pages_were_not_all_given_gets_them(run: Run) -> None:
    """Whoever allocated it was killed."""
    run.free_directory.mkdir(parents=True)
    slot = run.free_directory / "rank-00000-00000000"
    slot.touch()
    os.truncate(slot, 4 << 20)
    slots = slots_of(run, 1)
    assert slots.prepare(1000) > 0
    found = slot.stat()
    assert found.st_blocks * 512 >= found.st_size
    os.truncate(slot, 0)
    os.truncate(slot, 4 << 20)
    assert slots.take(run.path / "to", 100_000) is not None
    assert (run.path / "to").stat().st_blocks * 512 >= 100_000


def test_memory_for_others_has_to_be_left(run: Run) -> None:
    slots = slots_of(run, 2)
    said = r"stores for others needs [\d,]{16,} more, and 2 slots .* need [\d,]{7,} more"
    with pytest.raises(sw.StoreError, match=said):
        slots.prepare(1000, leave_free=1 << 50)
    assert not list(run.free_directory.iterdir())
    assert slots.prepare(1000, leave_free=1000) > 0
    with pytest.raises(
        sw.StoreError, match=r"stores for others needs [\d,]{16,} more, and .* 0 more"
    ):
        slots.prepare(1000, leave_free=1 << 50)


def test_memory_that_agents_let_go_of_is_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = slots_of(run, 1)
    found = iter([0, 0])
    monkeypatch.setattr(slots, "_available_bytes", lambda: next(found, 1 << 40))
    assert slots.prepare(1000) > 0


@pytest.mark.parametrize(
    ("options", "nodes", "expected"),
    [
        ({"copies": 1}, 1, 0),
        ({"copies": 1}, 2, 2 * 1000),
        ({"copies": 2}, 2, 2 * 1000),
        ({"copies": 2, "slots": 3}, 8, 3 * 2 * 1000),
        ({"parity": 1}, 2, 2 * 1000),
        ({"parity": 1}, 3, 2 * 500),
        ({"parity": 2, "group": 6}, 12, 2 * 2 * 250),
        ({"parity": 1, "group": 4}, 6, 2 * 500),
        ({}, 8, 0),
    ],
)
def test_what_is_kept_for_others_is_known_before(
    options: dict[str, int], nodes: int, expected: int
) -> None:
    assert bytes_needed_for_others(1000, sw.Memory(**options), nodes=nodes) == expected  # type: ignore[arg-type]


def test_what_is_kept_for_others_already_is_what_is_in_no_slot(run: Run) -> None:
    assert bytes_stored_for_others(run) == 0
    place = leave_committed(run, 1)
    assert bytes_stored_for_others(run) == 0
    made = RingFile("rank-00000.made-0.bin", "made.safetensors", {})
    record(place, part_of(place, made=(made,)))
    (place.path / made.file).write_bytes(bytes(7))  # a slot of the rank
    assert bytes_stored_for_others(run) == 0
    for name, size in [("r00001-0.safetensors", 30), (".parity-0-0.bin", 5), ("x.json", 100)]:
        (place.path / name).write_bytes(bytes(size))
    assert bytes_stored_for_others(run) == 35


def test_what_is_newer_is_discarded(run: Run) -> None:
    places = [place_of(run, step) for step in (1, 2, 3)]
    for place in places:
        place.manifest_path.write_text("{}")
    for rest in (places[:1], []):
        discard(home_of(run), [each for each in run.snapshots() if each not in rest])
        assert run.snapshots() == rest
        assert run.snapshots(abandoned=True) != rest, "only the agent frees it"
        free_abandoned(run)
        assert run.snapshots(abandoned=True) == rest


def test_a_restore_does_not_depend_on_an_agent_that_hangs(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is discarded stays until the agent goes on, and nobody restores it meanwhile."""
    monkeypatch.setattr(reclaim, "SHORT_PATIENCE", 0.2)
    monkeypatch.setattr(reclaim, "FREE_TIMEOUT", 0.5)
    home, kept, left = home_of(run), leave_committed(run, 1, "commit"), leave_committed(run, 2)
    run.record_info("root", [])
    assert newest_step_here(str(home.path.parent), "root") == 2
    with home.lock(AGENT_LOCK) as is_held:
        assert is_held
        with left.hold(shared=True), pytest.raises(sw.StoreError, match=r"agent .* is using"):
            discard(home, [left])
        discard(home, [left])
    assert run.snapshots() == [kept]
    assert run.snapshots(abandoned=True) == [kept, left]
    assert list(list_snapshots(home.path, run.name)) == [kept.name]
    assert newest_step_here(str(home.path.parent), "root") == 1
    refuse_older_step(run, 2, Lineage(run.name), "root")
    with pytest.raises(sw.StateError, match="newer step 1"):
        refuse_older_step(run, 0, Lineage(run.name), "root")
    assert Action(FREE, left, ABANDONED) in decide_run(Observer(home).run(run), 0.0)
    free_abandoned(run)
    assert run.snapshots(abandoned=True) == [kept]


def test_the_memory_of_what_was_discarded_is_back_before_a_restore_continues(run: Run) -> None:
    """The snapshot is gone at once, but the agent may take a while to return its files."""
    home, place = home_of(run), leave_committed(run, 1, "commit")
    place.path.rename(run.path / "freed-0123456789abcdef")
    finishing = threading.Timer(0.3, finish_freeing, [run])
    with home.lock(AGENT_LOCK):
        finishing.start()
        discard(home, [place])
    assert sizes_of(run, rank_owner(0)) == [10]


def test_a_slot_has_its_size_before_it_is_in_the_snapshot(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that follows the copy maps the file as soon as it is there."""
    slots, truncate = slots_of(run, 1), os.truncate
    slots.prepare(50_000)
    target = place_of(run, 1).temporary_path("r")

    def cut(path: Path, size: int) -> None:
        assert not target.exists()
        truncate(path, size)

    monkeypatch.setattr(os, "truncate", cut)
    assert slots.take(target, 10_000) is not None
    assert target.stat().st_size == 10_000


def test_a_slot_for_a_snapshot_that_was_freed_says_so(run: Run) -> None:
    slots = slots_of(run, 1)
    slots.prepare(1000)
    gone = SnapshotDirectory(run, 1, "0" * 16)
    with pytest.raises(sw.StoreError, match=r"step-00000001-0+ was freed before it was filled"):
        slots.take(gone.temporary_path("r"), 1000)
    assert slots.has_free()


def test_a_budget_spreads_bytes_over_time() -> None:
    now = [0.0]
    copier = FileCopier(1000, lambda: now[0])
    assert copier.seconds_for(500) == 0
    assert copier.seconds_for(500) == pytest.approx(0.5)
    now[0] = 10.0
    assert copier.seconds_for(500) == 0
    assert FileCopier(None).seconds_for(1 << 40) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"snapshot_every": -1},
        {"slots": 0},
        {"copies": 1, "parity": 1},
        {"parity": 8},
        {"when_full": "never"},
        {"wait": 0},
        {"max_bytes_per_second": 1},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="Memory"):
        sw.Memory(**options)  # type: ignore[arg-type]


def leave_committed(
    run: Run,
    step: int,
    *ended: str,
    number: int | None = None,
    stages: tuple[str, ...] = ("commit", "protect"),
) -> SnapshotDirectory:
    """A snapshot that is committed, and of which some stages have ended."""
    place = place_of(run, step, number)
    record(place, part_of(place, stages=stages)).write_bytes(bytes(10))
    write_record(place.manifest_path, b"{}")
    for stage in ended:
        end(place, stage)
    return place


def end(place: SnapshotDirectory, stage: str, failure: str = "") -> None:
    """A stage has ended on all nodes."""
    SaveStates().end(place, {stage: StageOutcome(failure=failure)})


def test_the_newest_that_is_protected_stays(run: Run) -> None:
    run.free_directory.mkdir(parents=True)
    oldest = leave_committed(run, 5, "commit", "protect")
    leave_committed(run, 6, "commit")
    newest = leave_committed(run, 7, "commit")
    assert not free_decided(run)
    assert steps_of(run) == [5, 6, 7]
    end(newest, "protect")
    with oldest.hold(shared=True):
        assert not free_decided(run)
    assert free_decided(run)
    assert steps_of(run) == [6, 7]


def test_one_whose_protection_failed_is_not_protected(run: Run) -> None:
    run.free_directory.mkdir(parents=True)
    leave_committed(run, 5, "commit", "protect")
    for step in (6, 7):
        end(leave_committed(run, step, "commit"), "protect", failure="no node is left")
    assert free_decided(run)
    assert steps_of(run) == [5, 7]


def pending_of(place: SnapshotDirectory, *, durable: bool, saved_at: float) -> PendingManifest:
    return PendingManifest(
        save_id=place.save_id,
        step=place.step,
        manifest="",
        files=[],
        nodes=[],
        leader="",  # the node that is looked at here
        durable=durable,
        saved_at=saved_at,
        storage=StorageTask(root=""),
    )


def test_what_was_promised_to_storage_stays_until_it_is_there(run: Run) -> None:
    """Also where a newer one was persisted before, and as long as its agent can still do it."""
    run.free_directory.mkdir(parents=True)
    stages = ("commit", "protect", "persist")
    for step in (5, 6, 7):
        leave_committed(run, step, *stages[: 2 if step == 5 else 3], stages=stages)
    promised = place_of(run, 5)
    pending = pending_of(promised, durable=True, saved_at=0.0)
    write_record(promised.path / records.PENDING, pending)
    free_decided(run)
    assert steps_of(run) == [5, 7]
    end(promised, "persist")
    leave_committed(run, 8, *stages, stages=stages)
    assert free_decided(run)
    assert steps_of(run) == [7, 8]


def test_a_node_that_leads_nothing_keeps_nothing_that_newer_ones_have_replaced(run: Run) -> None:
    """It may never hear what has become of it."""
    run.free_directory.mkdir(parents=True)
    stages = ("commit", "protect", "persist")
    for step in (5, 6, 7):
        leave_committed(run, step, *stages[: 2 if step == 5 else 3], stages=stages)
    assert free_decided(run)
    assert steps_of(run) == [6, 7]


def test_what_is_left_of_a_step_that_was_saved_again_is_removed(run: Run) -> None:
    """As soon as nothing waits for it that the newer save has not done as well, and no sooner."""
    run.free_directory.mkdir(parents=True)
    old, new = place_of(run, 7, 0xF), leave_committed(run, 7, "commit", number=0xA)
    record(old, part_of(old)).write_bytes(b"of before ")
    for place, saved_at in ((old, 1.0), (new, 2.0)):
        pending = pending_of(place, durable=False, saved_at=saved_at)
        write_record(place.path / records.PENDING, pending)
    assert not free_decided(run)
    end(old, "commit", failure="a rank was killed")
    end(new, "protect", failure="no node is left")
    assert free_decided(run)
    assert run.snapshots() == [new]
    (slot,) = run.free_directory.iterdir()
    assert slot.name.startswith("rank-00000-")
    assert slot.read_bytes() == b"of before "
    assert not free_decided(run)


def test_a_save_of_which_the_time_is_not_known_yet_is_not_the_older_one(run: Run) -> None:
    """Its rank 0 has not told of it yet, or another node has not passed it on."""
    run.free_directory.mkdir(parents=True)
    begun, other = place_of(run, 7, 0xA), leave_committed(run, 7, "commit", "protect", number=0xF)
    record(begun, part_of(begun)).touch()
    write_record(other.path / records.PENDING, pending_of(other, durable=False, saved_at=1.0))
    assert not free_decided(run)
    pending = pending_of(begun, durable=False, saved_at=0.5)
    write_record(begun.path / records.PENDING, pending)
    assert free_decided(run)
    assert run.snapshots() == [other]


def test_what_is_still_done_with_a_replaced_one_ceases(run: Run) -> None:
    """Such as to ask nodes that are lost for their part, which would keep its slot for long."""
    run.free_directory.mkdir(parents=True)
    for step in (5, 6, 7):
        leave_committed(run, step, "commit", "protect")
    place = place_of(run, 5)
    place.refuse_abandoned()
    with place.hold(shared=True):
        assert not free_decided(run)
        with pytest.raises(sw.StoreError, match="abandoned"):
            place.refuse_abandoned()
    assert free_decided(run)
    assert steps_of(run) == [6, 7]


def test_a_step_that_is_retired_while_slots_are_counted_counts_for_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = SnapshotDirectory(run, 7, f"{7:016x}")
    monkeypatch.setattr(Run, "snapshots", lambda self, **options: [gone])
    assert slots_of(run, 2).prepare(1000) > 0
    assert len(list(run.free_directory.iterdir())) == 2


def test_what_has_become_of_a_save_is_known_after_its_memory_is_free(run: Run) -> None:
    run.free_directory.mkdir(parents=True)
    places = [leave_committed(run, step, "commit", "protect") for step in (5, 6, 7)]
    end(places[0], records.REMOVE_OLD, failure="busy")
    states = [read_state(place) for place in places]
    free_decided(run)
    assert steps_of(run) == [6, 7]
    assert [read_state(place) for place in places] == states
    assert states[0].outcomes[records.REMOVE_OLD].failure == "busy"
    assert not places[0].path.exists()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_what_was_freed_in_part_is_freed_to_the_end(run: Run, is_damaged: bool) -> None:
    """Files go back to their owners; if it is not known whose they are, to the agent."""
    place = leave_committed(run, 1)
    made = RingFile("rank-00000.made-0.bin", "p.bin", {}), RingFile("gone.bin", "q.bin", {})
    record(place, part_of(place, made=made))
    files = {"p.bin": 1, "rank-00000.made-0.bin": 2, ".q.bin": 3, "c.bin": 4, "r0.bin": 5}
    for name, size in (*files.items(), (".rank-00000.made-1.bin", 6), (".parity-0-0.bin", 7)):
        (place.path / name).write_bytes(bytes(size))
    if is_damaged:
        (place.path / records.rank_record(0)).write_bytes(b"damaged")
    (place.path / "a directory").mkdir()
    place.path.rename(run.path / "freed-0123456789abcdef")
    assert run.snapshots() == []
    expected = {AGENT: {1, 4, 5, 7}, ring_owner(0): {2, 3, 6}, rank_owner(0): {10}}
    if is_damaged:
        expected = {AGENT: {1, 2, 3, 4, 5, 6, 7, 10}, ring_owner(0): set(), rank_owner(0): set()}
    for _ in range(2):
        finish_freeing(run)
        assert run.freed_directories() == []
        found = {owner: sizes_of(run, owner) for owner in expected}
        assert found == {owner: sorted(sizes) for owner, sizes in expected.items()}


def sizes_of(run: Run, owner: str) -> list[int]:
    """The sizes of the free files of an owner."""
    return sorted(path.stat().st_size for _, path in Pool(run.free_directory).files(owner))


def leave_made(run: Run, step: int, *made: tuple[str, int]) -> None:
    """A committed snapshot of rank 0, and what the agent has made for others, so large."""
    place = place_of(run, step)
    record(place, part_of(place, slots=1, stages=())).write_bytes(bytes(10))
    write_record(place.manifest_path, b"{}")
    for name, size in made:
        (place.path / f"{name}-{place.save_id}.safetensors").write_bytes(bytes(size))


def test_what_was_made_for_others_is_spare_when_it_is_retired(run: Run) -> None:
    run.free_directory.mkdir(parents=True)
    leave_made(run, 1, ("r00001", 300), (".r00002", 20))
    leave_made(run, 2, ("r00001", 300), ("r00002", 20))
    assert free_decided(run)
    assert sizes_of(run, AGENT) == [20, 300]
    assert sizes_of(run, rank_owner(0)) == [10]
    leave_made(run, 3)
    assert free_decided(run)
    assert sizes_of(run, AGENT) == []  # nothing is made for others any more
    assert bytes_stored_for_others(run) == 0


def leave_free(run: Run, owner: str, *pages: int) -> None:
    """Free files of so many pages."""
    run.path.mkdir(parents=True, exist_ok=True)
    for number in pages:
        Pool(run.free_directory).new_path(owner).write_bytes(bytes(number * PAGE_SIZE))


def test_the_least_that_is_large_enough_is_taken_or_else_the_largest(run: Run) -> None:
    leave_free(run, AGENT, 1, 5, 3)
    leave_free(run, rank_owner(0), 2)
    pool, to = Pool(run.free_directory), run.path / "to"
    for wanted, taken in ((2, 3), (6, 5), (6, 1)):
        pool.take(AGENT, wanted * PAGE_SIZE, to)
        assert to.stat().st_size == taken * PAGE_SIZE
        to.unlink()
    pool.take(AGENT, 1, to)
    assert not to.exists()


def test_the_largest_of_the_agent_stay_and_those_of_some_ranks(run: Run) -> None:
    leave_free(run, AGENT, 1, 5, 3)
    for rank in (1, 11):
        leave_free(run, rank_owner(rank), rank)
        leave_free(run, ring_owner(rank), rank)
    pool = Pool(run.free_directory)
    pool.shrink([1, 11], 5)
    assert len(pool.files()) == 7
    pool.shrink([1], 2)
    sizes = [(path.name[:10], path.stat().st_size // PAGE_SIZE) for _, path in pool.files()]
    assert [size for name, size in sizes if name.startswith(AGENT)] == [3, 5]
    assert {name for name, _ in sizes if not name.startswith(AGENT)} == {"rank-00001", "ring-00001"}
    pool.shrink()
    assert pool.files() == []


def test_outcomes_that_another_process_deletes_meanwhile_are_no_failure(tmp_path: Path) -> None:
    """A trainer and the agent of its node free snapshots at the same time."""
    place = place_of(Home(tmp_path).run("0" * 16), 1)
    ended = place.run.path / ENDED_DIRECTORY
    ended.mkdir()
    for i in range(3):
        (ended / f"{i}.json").write_bytes(b"{}")
    scandir = os.scandir

    def scan(path: Path) -> Any:
        if Path(path) != ended:
            return scandir(path)
        entries = [*scandir(path)]
        (ended / "1.json").unlink()
        return nullcontext(entries)

    with patch("os.scandir", scan):
        free_now(place)
    assert sorted(os.listdir(ended)) == ["0.json", "2.json"]


@pytest.mark.parametrize("why", [REPLACED, NO_TRAINER], ids=["replaced", "no trainer"])
@pytest.mark.parametrize(
    ("owner", "name"),
    [(states_module, "regular_files"), (SnapshotDirectory, "state_path")],
    ids=["listed", "found"],
)
def test_outcomes_of_a_save_that_is_freed_meanwhile_are_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, why: str
) -> None:
    """Whatever is read last before the agent frees it in another thread."""
    place, states = leave_committed(run, 5, "commit", "protect"), SaveStates()
    freeing = threading.Thread(target=reclaim.free, args=(Action(FREE, place, why), states))
    original = getattr(owner, name)

    def read_and_free(of: Any) -> object:
        found = original(of)
        if freeing.ident is None:
            freeing.start()
            freeing.join(0.1)
        return found

    monkeypatch.setattr(owner, name, read_and_free)
    while_freed = states.read_outcomes(run)
    freeing.join(10.0)
    assert not place.path.exists()
    assert while_freed.saves[place.save_id].keys() == {"commit", "protect"}
    assert states.read_outcomes(run).saves == while_freed.saves
