"""Slots: memory that is allocated once, staged into, moved away, and comes back."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from msgspec import Raw

import shardwise as sw
from shardwise.kernel.engine.buffers import HUGE_PAGE
from shardwise.kernel.manifest.manifest import FileEntry, Manifest, encode_manifest
from shardwise.parts.memory import records
from shardwise.parts.memory.files import write_record
from shardwise.parts.memory.home import (
    OUTCOMES_DIRECTORY,
    Home,
    Run,
    SnapshotDirectory,
    SnapshotInUse,
    new_run_id,
)
from shardwise.parts.memory.reclaim import (
    add_spare,
    bytes_needed_for_others,
    bytes_stored_for_others,
    delete_smallest_spares,
    discard,
    free,
    list_spares,
    reuse_spare,
)
from shardwise.parts.memory.records import PendingManifest, StagedFile, StageOutcome
from shardwise.parts.memory.trainer.slots import PAGE_SIZE, Slots
from shardwise.parts.tiers.copying import FileCopier
from shardwise.parts.tiers.options import StorageTask
from tests.memory.reconciling import free_decided


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of which nothing is kept yet."""
    return Home(tmp_path).run(new_run_id())


def test_a_slot_is_the_same_memory_again(run: Run) -> None:
    slots = Slots(run, "r00003-", "staged", 1)
    slots.prepare(10_000)
    first = slots.take(10_000)
    assert first is not None
    first.buffer[:] = 7
    assert first.path.read_bytes() == b"\7" * 10_000
    run.step_path(1).mkdir()
    suffixes = ("data", "staged.json")
    target, note = (run.step_path(1) / f"r00003-{'0' * 16}.{each}" for each in suffixes)
    inode = os.stat(first.path).st_ino
    first.path.rename(target)
    note.touch()
    assert slots.take(10_000) is None
    target.rename(run.free_directory / first.name)
    note.unlink()
    again = slots.take(12_000)
    assert again is not None
    assert os.stat(again.path).st_ino == inode
    again.buffer[:] = 8
    assert again.path.read_bytes() == b"\10" * 12_000


def test_slots_in_use_count(run: Run) -> None:
    slots = Slots(run, "r00000-", "staged", 3)
    assert slots.prepare(1000) > 0
    taken = slots.take(1000)
    assert taken is not None
    run.step_path(1).mkdir(parents=True)
    taken.path.rename(run.step_path(1) / "r00000-0123456789abcdef.safetensors")
    (run.step_path(1) / "r00000-0123456789abcdef.staged.json").write_text("{}")
    assert slots.prepare(1000) == 0
    assert len(list(run.free_directory.iterdir())) == 2


def test_ranks_do_not_take_each_others(run: Run) -> None:
    mine, other = (Slots(run, f"r{rank:05d}-", "staged", n) for rank, n in ((1, 1), (11, 0)))
    mine.prepare(100)
    assert not other.has_free()
    assert other.take(100) is None


def test_a_slot_that_is_lost_is_made_up_for(run: Run) -> None:
    """Such as one whose note was damaged, so that nobody knew what it is called."""
    slots = Slots(run, "r00000-", "staged", 2)
    slots.prepare(1000)
    for path in run.free_directory.iterdir():
        path.unlink()
    assert slots.has_free()
    taken = slots.take(1000)
    assert taken is not None
    taken.buffer[:] = 5
    assert taken.path.read_bytes() == b"\5" * 1000
    assert slots.prepare(1000) > 0
    assert len(list(run.free_directory.iterdir())) == 2


def test_too_little_memory_is_an_error_that_says_how_much_is_needed(run: Run) -> None:
    with pytest.raises(sw.StoreError, match=r"3 slots of [\d,]+ bytes .* need [\d,]+ more"):
        Slots(run, "r00000-", "staged", 3).prepare(1 << 50)
    assert not list(run.free_directory.iterdir())


def full(fd: int, offset: int, length: int) -> None:
    """There are pages for the first bytes only."""
    if offset + length > PAGE_SIZE:
        raise OSError(errno.ENOSPC, "No space left on device")
    os.pwrite(fd, bytes(PAGE_SIZE), 0)


def test_a_slot_that_cannot_be_allocated_is_as_it_was(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = Slots(run, "r00000-", "staged", 1)
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
        for grow in (slots.prepare, slots.take):
            with pytest.raises(sw.StoreError, match="make the file system larger"):
                grow(3 * HUGE_PAGE)
            assert slot.stat().st_size == size
    taken = slots.take(1000)
    assert taken is not None
    taken.buffer[:] = 1


def test_a_slot_whose_pages_were_not_all_given_gets_them(run: Run) -> None:
    """Whoever allocated it was killed."""
    run.free_directory.mkdir(parents=True)
    slot = run.free_directory / "r00000-00000000.slot"
    slot.touch()
    os.truncate(slot, 4 << 20)
    slots = Slots(run, "r00000-", "staged", 1)
    assert slots.prepare(1000) > 0
    found = slot.stat()
    assert found.st_blocks * 512 >= found.st_size
    os.truncate(slot, 0)
    os.truncate(slot, 4 << 20)
    assert slots.take(100_000) is not None
    assert slot.stat().st_blocks * 512 >= 100_000


def test_memory_for_others_has_to_be_left(run: Run) -> None:
    slots = Slots(run, "r00000-", "staged", 2)
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
    slots = Slots(run, "r00000-", "staged", 1)
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
    leave_committed(run, 1)
    assert bytes_stored_for_others(run) == 0
    for name, size in [("r00001-0.safetensors", 30), (".parity-0-0.bin", 5), ("x.json", 100)]:
        (run.step_path(1) / name).write_bytes(bytes(size))
    assert bytes_stored_for_others(run) == 35


def test_what_is_newer_is_discarded(run: Run) -> None:
    for step in (1, 2, 3):
        run.step_path(step).mkdir(parents=True)
        (run.step_path(step) / "manifest.json").write_text("{}")
    discard([SnapshotDirectory(run, 2), SnapshotDirectory(run, 3)])
    assert run.steps() == [1]
    discard(run.snapshots())
    assert run.steps() == []


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
    run: Run, step: int, *ended: str, stages: tuple[str, ...] = ("commit", "protect")
) -> None:
    """A snapshot that is committed, and of which some stages have ended."""
    save = f"{step:016x}"
    place = SnapshotDirectory(run, step)
    place.path.mkdir(parents=True)
    file = FileEntry(f"r00000-{save}.safetensors", 0, 10, 0, 0, 0, 0)
    (place.path / file.name).write_bytes(bytes(10))
    staged = StagedFile(file, f"r00000-{step}.slot", 2, stages)
    write_record(place.path / records.file_record(file.name, "staged"), staged)
    write_record(place.path / "manifest.json", b"{}")
    for stage in ended:
        write_record(
            place.path / records.save_record(stage, save, "all"),
            StageOutcome(save_id=save, stage=stage),
        )


def test_the_newest_that_is_protected_stays(run: Run) -> None:
    run.free_directory.mkdir(parents=True)
    leave_committed(run, 5, "commit", "protect")
    leave_committed(run, 6, "commit")
    leave_committed(run, 7, "commit")
    assert not free_decided(run)
    assert run.steps() == [5, 6, 7]
    save = f"{7:016x}"
    outcome = StageOutcome(save_id=save, stage="protect")
    write_record(run.step_path(7) / records.save_record("protect", save, "all"), outcome)
    with SnapshotDirectory(run, 5).hold(shared=True), pytest.raises(SnapshotInUse):
        free_decided(run)
    assert free_decided(run)
    assert run.steps() == [6, 7]


def test_one_whose_protection_failed_is_not_protected(run: Run) -> None:
    run.free_directory.mkdir(parents=True)
    leave_committed(run, 5, "commit", "protect")
    for step in (6, 7):
        leave_committed(run, step, "commit")
        save = f"{step:016x}"
        failed = StageOutcome(save_id=save, stage="protect", failure="no node is left")
        write_record(run.step_path(step) / records.save_record("protect", save, "all"), failed)
    assert free_decided(run)
    assert run.steps() == [5, 7]


def test_what_was_promised_to_storage_stays_until_it_is_there(run: Run) -> None:
    """Also where a newer one was persisted before, and as long as its agent can still do it."""
    run.free_directory.mkdir(parents=True)
    stages = ("commit", "protect", "persist")
    for step in (5, 6, 7):
        leave_committed(run, step, *stages[: 2 if step == 5 else 3], stages=stages)
    promised = SnapshotDirectory(run, 5)
    pending = PendingManifest(
        save_id=f"{5:016x}",
        step=5,
        manifest="",
        files=[],
        nodes=[],
        leader="here",
        durable=True,
        storage=StorageTask(root=""),
    )
    write_record(promised.path / records.save_record("pending", pending.save_id), pending)
    free_decided(run)
    assert run.steps() == [5, 7]
    outcome = records.save_record("persist", pending.save_id, "all")
    write_record(promised.path / outcome, StageOutcome(save_id=pending.save_id, stage="persist"))
    leave_committed(run, 8, *stages, stages=stages)
    assert free_decided(run)
    assert run.steps() == [7, 8]


def test_a_node_that_leads_nothing_keeps_nothing_that_newer_ones_have_replaced(run: Run) -> None:
    """It may never hear what has become of it."""
    run.free_directory.mkdir(parents=True)
    stages = ("commit", "protect", "persist")
    for step in (5, 6, 7):
        leave_committed(run, step, *stages[: 2 if step == 5 else 3], stages=stages)
    assert free_decided(run)
    assert run.steps() == [6, 7]


def _staged_saves(place: SnapshotDirectory) -> set[str]:
    return {records.save_id_in_name(name) for name in place.list_names(".staged.json")}


def test_what_is_left_of_a_step_that_was_saved_again_is_removed(run: Run) -> None:
    """As soon as it is known to have failed, and no sooner."""
    run.free_directory.mkdir(parents=True)
    leave_committed(run, 7, "commit")
    place, old = SnapshotDirectory(run, 7), "f" * 16
    saved = Manifest(
        save_id=f"{7:016x}",
        step=7,
        created="",
        world_size=1,
        files=(),
        objects=(),
        tensors=Raw(b"[]"),
    )
    write_record(place.path / "manifest.json", encode_manifest(saved))
    file = FileEntry(f"r00000-{old}.safetensors", 0, 10, 0, 0, 0, 0)
    (place.path / file.name).write_bytes(b"of before")
    write_record(
        place.path / records.file_record(file.name, "staged"),
        StagedFile(file, "r00000-old.slot", 2, ()),
    )
    assert not free_decided(run)
    assert _staged_saves(place) == {old, saved.save_id}
    failed = StageOutcome(save_id=old, stage="commit", failure="a rank was killed")
    write_record(place.path / records.save_record("commit", old, "all"), failed)
    assert free_decided(run)
    assert _staged_saves(place) == {saved.save_id}
    assert (run.free_directory / "r00000-old.slot").read_bytes() == b"of before"
    assert not free_decided(run)


def test_what_is_still_done_with_a_replaced_one_ceases(run: Run) -> None:
    """Such as to ask nodes that are lost for their part, which would keep its slot for long."""
    run.free_directory.mkdir(parents=True)
    for step in (5, 6, 7):
        leave_committed(run, step, "commit", "protect")
    place = SnapshotDirectory(run, 5)
    place.refuse_abandoned()
    with place.hold(shared=True):
        with pytest.raises(SnapshotInUse):
            free_decided(run)
        with pytest.raises(sw.StoreError, match="abandoned"):
            place.refuse_abandoned()
    assert free_decided(run)
    assert run.steps() == [6, 7]


def test_a_step_that_is_retired_while_slots_are_counted_counts_for_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Run, "steps", lambda self: [7])
    assert Slots(run, "r00000-", "staged", 2).prepare(1000) > 0
    assert len(list(run.free_directory.iterdir())) == 2


def test_a_snapshot_that_newer_ones_have_replaced_leaves_what_is_to_be_removed(run: Run) -> None:
    """Its memory is free, and storage is tidied all the same."""
    run.free_directory.mkdir(parents=True)
    for step in (5, 6, 7):
        leave_committed(run, step, "commit", "protect")
    request = records.save_record(records.REMOVE_OLD, f"{5:016x}")
    (run.step_path(5) / request).write_bytes(b"{}")
    free_decided(run)
    assert SnapshotDirectory(run, 5).list_names("") == [request]
    assert not SnapshotDirectory(run, 5).is_committed()


def leave_made(run: Run, step: int, *made: tuple[str, int]) -> None:
    """A committed snapshot of rank 0, and what the agent has made for others, so large."""
    save = f"{step:016x}"
    place = SnapshotDirectory(run, step)
    place.path.mkdir(parents=True)
    file = FileEntry(f"r00000-{save}.safetensors", 0, 10, 0, 0, 0, 0)
    (place.path / file.name).write_bytes(bytes(10))
    write_record(
        place.path / records.file_record(file.name, "staged"),
        StagedFile(file, f"r00000-{step}.slot", 1, ()),
    )
    write_record(place.path / "manifest.json", b"{}")
    for name, size in made:
        (place.path / f"{name}-{save}.safetensors").write_bytes(bytes(size))


def test_what_was_made_for_others_is_spare_when_it_is_retired(run: Run) -> None:
    run.free_directory.mkdir(parents=True)
    leave_made(run, 1, ("r00001", 300), (".r00002", 20))
    leave_made(run, 2, ("r00001", 300), ("r00002", 20))
    assert free_decided(run)
    assert [size for size, _ in list_spares(run)] == [20, 300]
    assert [each.name for each in run.free_directory.glob("*.slot")] == ["r00000-1.slot"]
    assert bytes_stored_for_others(run) == 2 * 320
    leave_made(run, 3)
    assert free_decided(run)
    assert not list_spares(run)  # nothing is made for others any more
    assert bytes_stored_for_others(run) == 0


def test_the_least_that_is_large_enough_is_taken_or_else_the_largest(run: Run) -> None:
    run.free_directory.mkdir(parents=True)
    for size in (10, 500, 300):
        path = run.path / "made"
        path.write_bytes(bytes(size))
        add_spare(run, path)
    to = run.path / "to"
    for wanted, taken in ((200, 300), (600, 500), (600, 10)):
        reuse_spare(run, wanted, to)
        assert to.stat().st_size == taken
        reuse_spare(run, wanted, to)  # there is one already
        to.unlink()
    reuse_spare(run, 1, to)
    assert not to.exists()


def test_the_largest_stay(run: Run) -> None:
    run.free_directory.mkdir(parents=True)
    for size in (10, 500, 300):
        path = run.path / "made"
        path.write_bytes(bytes(size))
        add_spare(run, path)
    delete_smallest_spares(run, 5)
    assert len(list_spares(run)) == 3
    delete_smallest_spares(run, 1)
    assert [size for size, _ in list_spares(run)] == [500]


def test_outcomes_that_another_process_deletes_meanwhile_are_no_failure(tmp_path: Path) -> None:
    """A trainer and the agent of its node free snapshots at the same time."""
    place = SnapshotDirectory(Home(tmp_path).run("0" * 16), 1)
    place.path.mkdir(parents=True)
    ended = place.run.path / OUTCOMES_DIRECTORY
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
        assert free(place)
    assert sorted(os.listdir(ended)) == ["0.json", "2.json"]
