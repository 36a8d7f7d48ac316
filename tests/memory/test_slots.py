"""Slots: memory that is allocated once, staged into, moved away, and comes back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.manifest.manifest import FileEntry
from shardwise.memory import notes
from shardwise.memory.home import Home, Run, new_run, write_note
from shardwise.memory.notes import Done, Staged
from shardwise.memory.persist import Throttle
from shardwise.memory.place import Place
from shardwise.memory.retire import discard_newer, retire_old
from shardwise.memory.slots import Slots


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of which nothing is kept yet."""
    return Home(tmp_path).run(new_run())


def test_a_slot_is_the_same_memory_again(run: Run) -> None:
    slots = Slots(run, "r00003-", "staged", 1)
    slots.prepare(10_000)
    first = slots.take(10_000)
    assert first is not None
    first.buffer[:] = 7
    assert first.path.read_bytes() == b"\7" * 10_000
    run.step(1).mkdir()
    target, note = (run.step(1) / f"r00003-{'0' * 16}.{each}" for each in ("data", "staged.json"))
    inode = os.stat(first.path).st_ino
    first.path.rename(target)
    note.touch()
    assert slots.take(10_000) is None
    target.rename(run.free / first.name)
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
    run.step(1).mkdir(parents=True)
    taken.path.rename(run.step(1) / "r00000-0123456789abcdef.safetensors")
    (run.step(1) / "r00000-0123456789abcdef.staged.json").write_text("{}")
    assert slots.prepare(1000) == 0
    assert len(list(run.free.iterdir())) == 2


def test_ranks_do_not_take_each_others(run: Run) -> None:
    mine, other = (Slots(run, f"r{rank:05d}-", "staged", n) for rank, n in ((1, 1), (11, 0)))
    mine.prepare(100)
    assert not other.has_free()
    assert other.take(100) is None


def test_a_slot_that_is_lost_is_made_up_for(run: Run) -> None:
    """Such as one whose note was damaged, so that nobody knew what it is called."""
    slots = Slots(run, "r00000-", "staged", 2)
    slots.prepare(1000)
    for path in run.free.iterdir():
        path.unlink()
    assert slots.has_free()
    taken = slots.take(1000)
    assert taken is not None
    taken.buffer[:] = 5
    assert taken.path.read_bytes() == b"\5" * 1000
    assert slots.prepare(1000) > 0
    assert len(list(run.free.iterdir())) == 2


def test_too_little_memory_is_an_error_that_says_how_much_is_needed(run: Run) -> None:
    with pytest.raises(sw.StoreError, match=r"3 slots of [\d,]+ bytes .* need [\d,]+ more"):
        Slots(run, "r00000-", "staged", 3).prepare(1 << 50)
    assert not list(run.free.iterdir())


def test_what_is_newer_is_discarded(run: Run) -> None:
    for step in (1, 2, 3):
        run.step(step).mkdir(parents=True)
        (run.step(step) / "manifest.json").write_text("{}")
    discard_newer(run, 1)
    assert run.steps() == [1]
    discard_newer(run, None)
    assert run.steps() == []


def test_a_budget_spreads_bytes_over_time() -> None:
    now = [0.0]
    throttle = Throttle(1000, lambda: now[0])
    assert throttle.seconds_for(500) == 0
    assert throttle.seconds_for(500) == pytest.approx(0.5)
    now[0] = 10.0
    assert throttle.seconds_for(500) == 0
    assert Throttle(None).seconds_for(1 << 40) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"every": -1},
        {"slots": 0},
        {"copies": 1, "parity": 1},
        {"parity": 8},
        {"when_full": "never"},
        {"wait": 0},
        {"budget": 1},
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="Memory"):
        sw.Memory(**options)  # type: ignore[arg-type]


def leave_committed(run: Run, step: int, *ended: str) -> None:
    """A snapshot that is committed, and of which some stages have ended."""
    save = f"{step:016x}"
    place = Place(run, step)
    place.path.mkdir(parents=True)
    file = FileEntry(f"r00000-{save}.safetensors", 0, 10, 0, 0, 0, 0)
    (place.path / file.name).write_bytes(bytes(10))
    staged = Staged(file, f"r00000-{step}.slot", 2, ("commit", "protect"))
    write_note(place.path / notes.staged(file.name), staged)
    write_note(place.path / "manifest.json", b"{}")
    for stage in ended:
        write_note(place.path / notes.outcome(stage, save), Done(save_id=save, stage=stage))


def test_the_newest_that_is_protected_stays(run: Run) -> None:
    run.free.mkdir(parents=True)
    leave_committed(run, 5, "commit", "protect")
    leave_committed(run, 6, "commit")
    leave_committed(run, 7, "commit")
    assert not retire_old(Place(run, 5))
    assert run.steps() == [5, 6, 7]
    save = f"{7:016x}"
    outcome = Done(save_id=save, stage="protect")
    write_note(run.step(7) / notes.outcome("protect", save), outcome)
    assert retire_old(Place(run, 5))
    assert run.steps() == [6, 7]
