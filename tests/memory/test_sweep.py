"""A rank that is killed between any two effects of staging leaves memory that the next one uses."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.kernel.engine.tensors import Array, HostMemory, Slices
from shardwise.kernel.engine.write_file import FileSource
from shardwise.kernel.manifest.checksums import BLOCK
from shardwise.kernel.manifest.manifest import FileEntry, data_file, step_directory
from shardwise.kernel.store.store import Buffer
from shardwise.parts.lineage import new_run_id
from shardwise.parts.memory import records
from shardwise.parts.memory.files import write_record
from shardwise.parts.memory.home import Home, Run, SnapshotDirectory
from shardwise.parts.memory.observe import read_snapshot
from shardwise.parts.memory.pool import ring_owner
from shardwise.parts.memory.rank_liveness import RankLock
from shardwise.parts.memory.reclaim import discard, finish_freeing, forget_copies
from shardwise.parts.memory.records import RankPart, RingFile, StageOutcome
from shardwise.parts.memory.redundancy.placement import make_ring_group
from shardwise.parts.memory.states import SaveStates, read_state
from shardwise.parts.memory.trainer.rings import Ring, protect_ring
from shardwise.parts.memory.trainer.slots import Slots
from tests.breadth import mostly_long
from tests.memory.reconciling import free_abandoned, home_of
from tests.memory.test_staging import SIZE, Trial, content_of

TENSORS = 2
SLOTS = 3  # two that are kept, and one that is written
SLOT_SIZE = TENSORS * SIZE + (1 << 20)
NOTES = 256 << 10
KEPT = 3 * BLOCK
CHANGES = {"os.rename", "os.truncate", "os.remove", "os.mkdir", "os.rmdir", "os.link"}


@pytest.fixture
def exact(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory that has room for the slots of a rank, and no more."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    directory = tmp_path / "shm"
    directory.mkdir()
    size = SLOTS * (SLOT_SIZE + 8192) + NOTES
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr!r}")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def forked(work: Callable[[], object]) -> int:
    """Run it in a child; the signal by which that ended, or 0."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "see what the child printed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def die_before_effect(number: int, directory: Path) -> None:
    """Be killed before this process changes something below a directory for the nth time."""
    left = [number]

    def is_change(event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            path, mode, flags = args
            writes = bool(flags & (os.O_CREAT | os.O_TRUNC)) or bool(set(mode or "") & set("wax"))
            return writes and str(path).startswith(str(directory))
        if event not in CHANGES:
            return False
        return isinstance(args[0], int) or str(args[0]).startswith(str(directory))

    def count() -> None:
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if is_change(event, args):
            count()

    allocate = os.posix_fallocate

    def allocating(fd: int, offset: int, length: int) -> None:
        count()
        allocate(fd, offset, length)

    os.posix_fallocate = allocating
    sys.addaudithook(hook)


def trial_of(directory: Path, run: str) -> tuple[Trial, FileSource]:
    """Staging of rank 0 of a run, prepared for what it stages."""
    trial = Trial(directory, overlap=False, run=run)
    content = content_of(*[HostMemory(torch.full((SIZE,), 7, dtype=torch.uint8))] * TENSORS)
    trial.staging.prepare(content, None)
    return trial, content


def stage(directory: Path, run: str, *steps: int) -> None:
    """Stage a rank's own files."""
    trial, content = trial_of(directory, run)
    for step in steps:
        trial.begin(content, step)
        trial.staging.raise_failure()
        assert trial.staged(content, step) == [7] * TENSORS
    assert trial.staging.has_free() == (len(steps) < SLOTS)


def keep(directory: Path, run: str, *steps: int) -> None:
    """Make copies of the file of rank 1 from the replicas of rank 0."""
    here = Home(directory).run(run)
    slots = Slots(here, ring_owner(0), SLOTS)
    slots.prepare(KEPT)

    def fill(low: int, high: int, out: Buffer) -> None:
        out[:] = 7

    for step in steps:
        place = SnapshotDirectory(here, step, f"{step:016x}")
        files = [
            FileEntry(data_file(rank, place.save_id), rank, KEPT, 0, KEPT, KEPT, 0)
            for rank in (0, 1)
        ]
        group = make_ring_group(
            [(str(each.rank), "", each.name, each.size) for each in files], copies=1, parity=0
        )
        place.path.mkdir()
        part = RankPart(file=None, snapshots_to_keep=2, stages=("commit",), epoch=0)
        write_record(place.path / records.rank_record(0), part)
        added: list[RingFile] = []

        def take(name: str, nbytes: int, place: SnapshotDirectory = place) -> Buffer:
            slot = slots.take(place.temporary_path(name), nbytes)
            assert slot is not None
            return slot

        def add(
            made: RingFile,
            place: SnapshotDirectory = place,
            added: list[RingFile] = added,
        ) -> None:
            added.append(made)
            part = RankPart(
                file=None, snapshots_to_keep=2, stages=("commit",), epoch=0, made=tuple(added)
            )
            write_record(place.path / records.rank_record(0), part)
            place.temporary_path(made.file).rename(place.path / made.file)

        ring = Ring(tuple(files), group, 0, place.save_id)
        with ThreadPoolExecutor(1) as pool:
            protect_ring(ring, lambda _: fill, take, add, pool, 1)
        (made,) = added
        assert (place.path / made.file).read_bytes() == b"\7" * KEPT
    assert slots.has_free() == (len(steps) < SLOTS)


def free_all(run: Run) -> None:
    """As a restore discards, and the agent frees."""
    lock = RankLock(run, 0)
    discard(home_of(run), run.snapshots())
    free_abandoned(run)
    lock.release()


def go_on(directory: Path, run: str, work: Callable[..., None]) -> None:
    """As a restore does: forget what is not whole, and have all slots again."""
    left = Home(directory).run(run)
    finish_freeing(left)  # the agent does
    forget_copies(left, 0)
    for place in left.snapshots():
        parts = place.parts()
        assert not any(part.copied for part in parts)
        assert len(read_snapshot(place).staged) == sum(part.file is not None for part in parts)
    free_all(left)
    work(directory, run, *range(11, 11 + SLOTS))
    free_all(left)
    assert len(os.listdir(left.free_directory)) == SLOTS
    assert not left.freed_directories()


def retire(directory: Path, run: str, number: int) -> None:
    """Stage as much as there is memory for, and be killed as all of it is retired."""
    stage(directory, run, *range(1, 1 + SLOTS))
    places = Home(directory).run(run).snapshots()
    for place in places:
        SaveStates().end(place, {"commit": StageOutcome(seconds=1.0)})
    die_before_effect(number, directory)
    free_all(places[0].run)
    assert all(read_state(place).outcomes["commit"].seconds == 1.0 for place in places)


def die_at(work: Callable[..., None]) -> Callable[[Path, str, int], None]:
    """Be killed before an effect of this work."""

    def dying(directory: Path, run: str, number: int) -> None:
        die_before_effect(number, directory)
        work(directory, run, 1)

    return dying


@pytest.mark.parametrize(
    ("dying", "work"),
    [
        pytest.param(die_at(stage), stage, id="stage"),
        pytest.param(die_at(keep), keep, id="keep", marks=pytest.mark.long),
        pytest.param(retire, stage, id="retire"),
    ],
)
@pytest.mark.parametrize("stride", mostly_long([1, 3], [3]))
def test_memory_is_used_again_after_a_process_was_killed_at_any_point(
    exact: Path, dying: Callable[[Path, str, int], None], work: Callable[..., None], stride: int
) -> None:
    """Before each or some of its effects, from the first slot that it makes to its note."""
    for number in range(0, 100, stride):
        run = new_run_id()
        ended = forked(partial(dying, exact, run, number))
        assert forked(partial(go_on, exact, run, work)) == 0
        shutil.rmtree(Home(exact).run(run).path)
        if not ended:
            break
    assert number > 15, "nothing was counted"
    assert not ended


class Crowded(HostMemory):
    """While it is copied, others take all the memory that is left."""

    directory: Path

    def read(self, index: Slices, out: Array, *, wait: bool = True) -> None:
        """Copy it."""
        super().read(index, out, wait=wait)
        found = os.statvfs(self.directory)
        with (self.directory / "others").open("ab") as file:
            file.write(bytes(found.f_bavail * found.f_frsize))


def test_memory_that_is_full_during_a_copy_costs_nothing(exact: Path) -> None:
    """The record of the rank is written before, and nothing afterwards."""

    def work() -> None:
        trial, _ = trial_of(exact, new_run_id())
        crowded = Crowded(torch.full((SIZE,), 8, dtype=torch.uint8))
        crowded.directory = exact
        content = content_of(crowded)
        trial.begin(content, 1)
        trial.staging.raise_failure()
        assert trial.staged(content, 1) == [8]

    assert forked(work) == 0


@pytest.mark.parametrize("record", [records.rank_record(0), records.PENDING])
def test_a_record_that_cannot_be_written_costs_one_save(
    exact: Path, monkeypatch: pytest.MonkeyPatch, record: str
) -> None:
    def write_unless_full(path: Path, value: object) -> None:
        if path.name == record and path.parent.name.startswith(step_directory(1)):
            raise OSError(errno.ENOSPC, "No space left on device")
        write_record(path, value)

    monkeypatch.setattr("shardwise.parts.memory.trainer.staging.write_record", write_unless_full)
    trial, content = trial_of(exact, new_run_id())
    nothing: Any = None  # what is not written has no need to be right
    trial.begin(content, 1, pending=lambda: nothing, durable=True)
    with pytest.raises(sw.StoreError, match=r"staging step 1: .*No space left"):
        trial.staging.raise_failure()
    assert len(os.listdir(trial.run.free_directory)) == SLOTS
    assert not trial.place(1).parts()
    for step in range(2, 2 + SLOTS):
        trial.begin(content, step)
        trial.staging.raise_failure()
        assert trial.staged(content, step) == [7] * TENSORS
    assert not trial.staging.has_free()
    trial.staging.close()
