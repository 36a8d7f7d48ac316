"""The storage refuses, on one rank, at each operation of a save: an error on all, in time."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.ports.store import Store, open_store
from shardwise.testing.thread_group import ThreadGroup, run_ranks, run_ranks_and_catch
from tests.faults.scenario import (
    assert_values,
    leftovers,
    restored,
    save_step,
    state_of,
    step_directory,
)
from tests.tools.faulty_store import (
    FULL_DISK,
    READ_ONLY,
    Action,
    Fault,
    FaultyStore,
    make_os_error_action,
)
from tests.tools.gang import Gang
from tests.tools.wrapped_store import WrappedStore

T = TypeVar("T")
WORLD = 3
OLD, NEW, AGAIN = 1, 2, 3


def save_on_ranks(place: Path, seed: int, victim: int, fault: Fault) -> list[object]:
    """What became of a save, by rank; one rank's storage has a fault."""

    def save(group: ThreadGroup) -> sw.SaveReport:
        mine = fault if group.rank == victim else Fault()
        store = FaultyStore(place, mine)
        return sw.save(store, state_of(seed, group.rank, WORLD), group=group)

    return list(run_ranks_and_catch(WORLD, save, timeout=60.0))


def assert_refused(outcomes: list[object], victim: int, number: int, *, where: str) -> None:
    """The victim says why. The others say whose fault it is, or repeat what rank 0 says."""
    own = str(outcomes[victim])
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, OSError | sw.ShardwiseError), where
        if rank == victim:
            assert isinstance(outcome, sw.StoreError), where
            assert outcome.errno == number, where
        elif victim == 0 and isinstance(outcome, sw.StoreError):
            assert str(outcome).endswith(own.partition(": ")[2]), where
        else:
            assert isinstance(outcome, sw.RankError), where
            assert not isinstance(outcome, sw.LostRankError), where
            assert list(outcome.failures) == [victim], where


@pytest.mark.parametrize("victim", range(WORLD))
@pytest.mark.parametrize("sticky", [False, True], ids=["once", "from then on"])
def test_refused_at_any_operation_nothing_is_half_saved(
    place: Path, victim: int, sticky: bool
) -> None:
    clean = Fault()
    reports = save_on_ranks(place / "clean", NEW, victim, clean)
    assert all(isinstance(report, sw.SaveReport) for report in reports)
    verbs = [operation.split()[0] for operation in clean.operations]
    published = verbs.index("link") + 1 if victim == 0 else len(verbs)
    for at, operation in enumerate(clean.operations):
        where = f"rank {victim} at operation {at}: {operation}"
        fault = Fault(at, FULL_DISK, sticky=sticky)
        target = place / f"refused-{at}"
        outcomes = save_on_ranks(target, NEW, victim, fault)
        if at < published:
            assert_refused(outcomes, victim, errno.ENOSPC, where=where)
            assert not (target / "manifest.json").exists(), where
        else:
            assert_values(loaded(target), NEW)
        again = save_on_ranks(target, AGAIN, victim, Fault())
        if at < published:
            assert all(isinstance(report, sw.SaveReport) for report in again), where
            assert leftovers_of(target) == [], where
            assert_values(loaded(target), AGAIN)
        else:
            assert isinstance(again[0], sw.CheckpointExistsError), where


def loaded(place: Path) -> dict[str, object]:
    state = state_of(0)
    sw.load(place, state)
    sw.open(place).verify()
    return state


def leftovers_of(place: Path) -> list[str]:
    return [name for name in leftovers(place.parent) if name.startswith(f"{place.name}/")]


def refuse_one_write(root: Path, number: int) -> float:
    """On a rank: save step 2 while rank 1's disk refuses; seconds until this rank knew."""
    rank, world = dist.get_rank(), dist.get_world_size()
    fault = Fault(0 if rank == 1 else None, make_os_error_action(number), verbs=("write_at",))
    started = time.monotonic()
    with sw.Checkpointer(FaultyStore(root, fault), memory=None) as checkpointer:
        try:
            checkpointer.save(2, state_of(NEW, rank, world))
        except (OSError, sw.RankError):
            seconds = time.monotonic() - started
        else:
            raise AssertionError("the save succeeded")
        checkpointer.save(3, state_of(AGAIN, rank, world))
        return seconds


def test_ranks_go_on_together_after_one_was_refused(gang: Gang, place: Path) -> None:
    seconds = gang.run(refuse_one_write, place, errno.EIO, world=WORLD)
    assert max(seconds) < 15.0
    found, state = restored(place)
    assert found == 3
    assert_values(state, AGAIN)
    assert leftovers(place) == []


def unready(place: Path) -> str:
    """On a rank: save a state that rank 1 cannot describe."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state = state_of(NEW, rank, world)
    if rank == 1:
        state["meta"] = torch.empty(2, device="meta")
    try:
        sw.save(place, state)
    except sw.ShardwiseError as error:
        return type(error).__name__
    return "saved"


def test_a_state_that_one_rank_cannot_save_is_saved_by_none(gang: Gang, place: Path) -> None:
    assert gang.run(unready, place / "it", world=WORLD) == ["RankError", "StateError", "RankError"]
    assert not (place / "it").exists()


@pytest.fixture
def disk(place: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    where = place / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", where],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True)


class LateErrorStore(WrappedStore):
    """Publishes a file, and then raises an error that no rank but rank 0 knows."""

    def at(self, name: str) -> LateErrorStore:
        return LateErrorStore(self.store.at(name))

    def run(self, operation: str, path: str, act: Callable[[], T]) -> T:
        result = act()
        if operation == "publish":
            raise OSError(errno.EIO, "the directory was not synced", path)
        return result


def test_an_error_after_the_manifest_was_published_loses_nothing(tmp_path: Path) -> None:
    """The checkpoint is committed, so no rank may remove its file."""

    def save(group: ThreadGroup) -> None:
        part = sw.Box((group.rank * 4, 0), (4, 2))
        values = torch.full((4, 2), float(group.rank))
        state = {"w": sw.Shards((12, 2), torch.float32, [(part, values)])}
        sw.save(LateErrorStore(open_store(tmp_path / "a")), state, group=group)

    errors = run_ranks_and_catch(3, save)
    assert all(isinstance(error, OSError | sw.RankError) for error in errors)
    saved = sw.open(tmp_path / "a")["w"][...]
    assert torch.equal(saved, torch.arange(3.0).repeat_interleave(4)[:, None].expand(12, 2))


def test_a_disk_that_is_full_loses_nothing(disk: Path) -> None:
    root = disk / "root"
    with sw.Checkpointer(root, memory=None) as checkpointer:
        checkpointer.save(1, state_of(OLD))
        with pytest.raises(sw.StoreError, match="no room for this save"):
            checkpointer.save(2, state_of(NEW) | {"large": torch.ones(1 << 18)})
        assert checkpointer.steps() == [1]
        assert leftovers(root) == []
        found, state = restored(root)
        assert found == 1
        assert_values(state, OLD)
        checkpointer.save(2, state_of(AGAIN))
    assert_values(restored(root)[1], AGAIN)


def test_a_full_disk_that_has_no_room_for_the_manifest_loses_nothing(disk: Path) -> None:
    root = disk / "root"
    with sw.Checkpointer(root, memory=None) as checkpointer:
        checkpointer.save(1, state_of(OLD))
    fill(disk / "filler")
    attempts = 0
    while not saved_or_unharmed(root):
        attempts += 1
        os.truncate(disk / "filler", (disk / "filler").stat().st_size - 4096)
    assert attempts >= 3
    assert_values(restored(root)[1], NEW)


def fill(path: Path) -> None:
    """Take all the room there is."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))


def saved_or_unharmed(root: Path) -> bool:
    """Whether step 2 was saved; if not, step 1 is what it was."""
    with sw.Checkpointer(root, memory=None) as checkpointer:
        try:
            checkpointer.save(2, state_of(NEW), overwrite=True)
        except OSError as error:
            if error.errno != errno.ENOSPC and "no room for this save" not in str(error):
                raise
            found, state = restored(root)
            assert found == 1
            assert_values(state, OLD)
            return False
    return True


def test_from_a_read_only_disk_one_loads(disk: Path) -> None:
    root = disk / "root"
    with sw.Checkpointer(root, memory=None) as checkpointer:
        checkpointer.save(1, state_of(OLD))
    crashed = step_directory(root, 2)
    crashed.mkdir()
    (crashed / "r00000-0123456789abcdef.safetensors").write_bytes(b"half")
    (crashed / "saving-0123456789abcdef.lock").touch()
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    found, state = restored(root)
    assert found == 1
    assert_values(state, OLD)
    with (
        sw.Checkpointer(root, memory=None) as checkpointer,
        pytest.raises(OSError, match="Read-only") as caught,
    ):
        checkpointer.save(2, state_of(NEW), overwrite=True)
    assert caught.value.errno == errno.EROFS
    assert checkpointer.steps() == [1]


@pytest.mark.parametrize("action", [FULL_DISK, READ_ONLY], ids=["full", "read-only"])
def test_a_disk_that_takes_nothing_keeps_what_it_has(place: Path, action: Action) -> None:
    """The same where mounting is not permitted."""
    with sw.Checkpointer(place, memory=None) as checkpointer:
        checkpointer.save(1, state_of(OLD))
    fault = Fault(0, action, verbs=("create", "write_at", "commit", "publish"), sticky=True)
    with sw.Checkpointer(FaultyStore(place, fault), memory=None) as checkpointer:
        with pytest.raises(OSError, match=r"space|Read-only"):
            checkpointer.save(2, state_of(NEW), overwrite=True)
        state = state_of(0)
        assert checkpointer.restore(state) == 1
    assert_values(state, OLD)
    assert not step_directory(place, 2).exists()


def test_a_clean_save_is_what_the_sweep_counts(gang: Gang, place: Path) -> None:
    """The counting itself: every rank that writes is seen to write."""
    for seen in gang.run(save_step, place, 1, OLD, 0, None, world=WORLD):
        assert [s for s in seen if s.startswith("write_at r0000")]


class _Failing(WrappedStore):
    """A store of which one operation raises an error of the system."""

    def __init__(self, store: Store, failing: str, error: OSError) -> None:
        super().__init__(store)
        self._failing, self._error = failing, error

    def at(self, name: str) -> WrappedStore:
        return _Failing(self.store.at(name), self._failing, self._error)

    def run(self, operation: str, path: str, act: Callable[[], T]) -> T:
        if operation == self._failing:
            raise self._error
        return act()


@pytest.mark.parametrize("operation", ["list", "stat", "create", "write_at", "commit", "publish"])
@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.EROFS, "Read-only file system"),
        TimeoutError("no answer"),
    ],
)
def test_an_error_of_the_system_is_an_error_of_the_storage_on_all_ranks(
    tmp_path: Path, operation: str, error: OSError
) -> None:
    store = _Failing(open_store(tmp_path / "saved"), operation, error)

    def save(group: ThreadGroup) -> list[object]:
        part = sw.Box((group.rank,), (1,)), torch.ones(1)
        state = {"w": sw.Shards((2,), torch.float32, [part])}
        with pytest.raises(sw.ShardwiseError) as caught:
            sw.save(store, state, group=group)
        return [type(caught.value), str(caught.value), getattr(caught.value, "errno", None)]

    for kind, text, number in run_ranks(2, save):
        assert kind in (sw.StoreError, sw.RankError)
        assert f"{tmp_path / 'saved'}: {type(error).__name__}: {error}" in str(text)
        if kind is sw.StoreError:
            assert number in (error.errno, None)  # None: what rank 0 says of itself
