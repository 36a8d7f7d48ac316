"""A root and its mirror: what is copied when, what stays, and what is read from where."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise as sw
from shardwise.kernel.engine.root import Root
from shardwise.kernel.manifest.manifest import (
    MANIFEST,
    MIRROR_FILE,
    decode_manifest,
    step_directory,
)
from shardwise.kernel.store import LocalStore
from shardwise.parts.tiers.mirror_watch import MirrorWatch
from shardwise.parts.tiers.mirroring import Mirroring, MirrorWorker
from shardwise.parts.tiers.record import MirrorRecord
from shardwise.parts.tiers.store import TieredStore
from tests.tools.faulty_store import FULL_DISK, Fault, FaultyStore

COUNT = 400_000  # elements of a tensor: 1.6 MB, 25 blocks
LAST = sw.Keep(last=1)


def state(seed: float) -> dict[str, Any]:
    return {"t": torch.arange(COUNT, dtype=torch.float32) + seed, "step": int(seed)}


def save(root: Path, *steps: int, seed: float = 0, **options: Any) -> None:
    with sw.Checkpointer(root, memory=None, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, state(step + seed), overwrite=seed > 0 or step == steps[0])


def data_file(root: Path, step: int) -> Path:
    return next((root / step_directory(step)).glob("*.safetensors"))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def files_of(root: Path, step: int) -> dict[str, bytes]:
    """The content of all files of a step, but not its telemetry, which may come after the copy."""
    return {
        path.name: path.read_bytes()
        for path in (root / step_directory(step)).iterdir()
        if not path.name.startswith("telemetry-")
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


def mirroring(root: Path, mirror: Path, keep: sw.Keep, mirror_keep: sw.Keep) -> Mirroring:
    return Mirroring(LocalStore(root), keep, sw.Mirror(mirror, keep=mirror_keep))


def nothing_saved() -> tuple[None, tuple[()]]:
    return None, ()


def test_every_checkpoint_is_copied_and_the_record_says_so(root: Path, mirror: Path) -> None:
    save(root, 1, 2, mirror=mirror)
    for step in (1, 2):
        assert files_of(root, step) == files_of(mirror, step)
    record = MirrorRecord.read(LocalStore(root))
    assert record is not None
    assert (record.place, record.waiting, record.failing_since) == (str(mirror), (), None)
    for step in (1, 2):
        manifest = decode_manifest((root / step_directory(step) / MANIFEST).read_bytes())
        assert record.has(step, manifest.save_id)
        assert record.steps[step].bytes == sum(file.size for file in manifest.files)


def test_each_tier_has_its_own_rules(root: Path, mirror: Path) -> None:
    keep = sw.Keep(last=2)
    save(root, 1, 2, 3, 4, 5, keep=keep, mirror=sw.Mirror(mirror, keep=sw.Keep(multiple_of=2)))
    assert Root(LocalStore(root)).steps() == [4, 5]
    assert Root(LocalStore(mirror)).steps() == [2, 4, 5]
    with sw.Checkpointer(root, mirror=mirror, keep=keep, memory=None) as checkpointer:
        assert checkpointer.steps() == [2, 4, 5]
        target = state(0)
        assert checkpointer.restore(target, step=2) == 2
        assert torch.equal(target["t"], state(2)["t"])


def test_a_handle_waits_for_the_mirror(root: Path, mirror: Path) -> None:
    events: list[str] = []
    with sw.Checkpointer(
        root, mirror=mirror, memory=None, on_event=lambda event: events.append(event.stage)
    ) as checkpointer:
        for step in (1, 2, 3):
            handle = checkpointer.save(step, state(step))
            assert handle is not None
            handle.mirrored(60.0)
            assert files_of(root, step) == files_of(mirror, step)
    assert "mirror" in events
    with sw.Checkpointer(root, memory=None) as checkpointer:
        handle = checkpointer.save(4, state(4), overwrite=True)
        assert handle is not None
        with pytest.raises(sw.StoreError, match="has no mirror="):
            handle.mirrored()


def test_a_lost_root_is_restored_from_the_mirror(root: Path, mirror: Path) -> None:
    save(root, 1, 2, mirror=mirror)
    shutil.rmtree(root)
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        target = state(0)
        assert checkpointer.restore(target) == 2
        assert torch.equal(target["t"], state(2)["t"])
        checkpointer.save(3, state(3))
    assert Root(LocalStore(root)).steps() == [3]
    assert Root(LocalStore(mirror)).steps() == [1, 2, 3]


def damage_file(path: Path, how: str) -> None:
    size = path.stat().st_size
    if how == "flipped":
        flip(path, size // 2)
    elif how == "truncated":
        with path.open("r+b") as file:
            file.truncate(size // 2)
    elif how == "longer":
        with path.open("ab") as file:
            file.write(b"\0" * 5000)
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "table":
        flip(path, size - 2)
    else:
        path.unlink()


DAMAGES = ("flipped", "truncated", "longer", "empty", "table", "missing")


@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("victim", ["root", "mirror"])
def test_damage_of_one_tier_is_read_from_the_other(
    root: Path, mirror: Path, victim: str, how: str
) -> None:
    save(root, 1, 2, mirror=mirror)
    damage_file(data_file(root if victim == "root" else mirror, 2), how)
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        target = state(0)
        assert checkpointer.restore(target) == 2
        assert torch.equal(target["t"], state(2)["t"])
        assert target["step"] == 2
        assert checkpointer.last_restore is not None
        assert not checkpointer.last_restore.skipped


@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_a_damaged_manifest_is_read_from_the_mirror(root: Path, mirror: Path, how: str) -> None:
    save(root, 1, 2, mirror=mirror)
    damage_file(root / step_directory(2) / MANIFEST, how)
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        target = state(0)
        assert checkpointer.restore(target) == 2
    assert torch.equal(target["t"], state(2)["t"])


def test_damage_in_different_blocks_is_combined(root: Path, mirror: Path) -> None:
    """Even in blocks of one read, and with a bad size, a truncation and flips at once."""
    save(root, 1, mirror=mirror)
    size = data_file(root, 1).stat().st_size
    blocks = size // 65536
    assert blocks > 20
    for block in range(0, blocks - 6, 2):
        flip(data_file(root, 1), block * 65536 + 7)
        flip(data_file(mirror, 1), (block + 1) * 65536 + 9)
    with data_file(root, 1).open("r+b") as file:
        file.truncate(size - 3 * 65536)
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        target = state(0)
        assert checkpointer.restore(target) == 1
    assert torch.equal(target["t"], state(1)["t"])
    flip(data_file(mirror, 1), 4 * 65536 + 9)  # now both copies of this block are damaged
    with (
        sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer,
        pytest.raises(sw.CorruptionError),
    ):
        checkpointer.restore(state(0))


def test_a_step_that_is_saved_again_replaces_the_old_one(root: Path, mirror: Path) -> None:
    save(root, 1, 2, mirror=mirror)
    save(root, 1, mirror=mirror, seed=100)
    assert files_of(root, 1) == files_of(mirror, 1)
    target = state(0)
    sw.load(mirror / step_directory(1), target)
    assert torch.equal(target["t"], state(101)["t"])


class Outage(LocalStore):
    """A store that fails while `down` is set, and counts the attempts."""

    def __init__(self, path: Path, down: threading.Event, calls: list[str]) -> None:
        super().__init__(path)
        self.down, self.calls = down, calls

    def at(self, name: str) -> Outage:
        return Outage(self.path / name, self.down, self.calls)

    def _check(self, call: str) -> None:
        self.calls.append(call)
        if self.down.is_set():
            raise sw.StoreError("503 Slow Down")

    def list(self) -> list[str]:
        self._check("list")
        return super().list()

    def create(self, key: str, size: int, *, replace: bool = False) -> Any:
        self._check("create")
        return super().create(key, size, replace=replace)

    def publish(self, key: str, data: bytes, *, replace: bool) -> None:
        self._check("publish")
        super().publish(key, data, replace=replace)

    def read(self, key: str, *, limit: int) -> bytes:
        self._check("read")
        return super().read(key, limit=limit)

    def open(self, path: str, size: int | None = None) -> Any:
        self._check("open")
        return super().open(path, size)


class Simulation:
    """A root, a mirror that can fail, and a clock."""

    def __init__(self, root: Path, mirror: Path, keep: sw.Keep = LAST) -> None:
        self.now = 1e9
        self.root, self.mirror, self.keep = root, mirror, keep
        self.down = threading.Event()
        self.calls: list[str] = []
        self.saved: tuple[int | None, frozenset[int]] = (None, frozenset())
        self.start()

    def start(self) -> None:
        """Start, as another process after the first one has ended."""
        store = Outage(self.mirror, self.down, self.calls)
        root, options, clock = LocalStore(self.root), sw.Mirror(store), lambda: self.now
        self.worker = MirrorWorker(root, self.keep, options, wall_clock=clock, clock=clock)
        self.mirroring = self.worker.mirroring

    def save(self, step: int) -> None:
        sw.save(self.root / step_directory(step), state(step), step=step)
        self.worker.set_saved(step)

    def run(self, seconds: float) -> int:
        """Let time pass; return the number of attempts."""
        end, attempts = self.now + seconds, 0
        while (due := max(0.0, self.worker._due_at - self.now)) <= end - self.now:
            self.now += due + 0.001
            self.worker.attempt()
            attempts += 1
        self.now = end
        return attempts

    def steps(self) -> tuple[list[int], list[int]]:
        return Root(LocalStore(self.root)).steps(), Root(LocalStore(self.mirror)).steps()


def test_an_outage_of_minutes(root: Path, mirror: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing leaves the root, attempts are rare, and everything is copied afterwards."""
    simulation = Simulation(root, mirror)
    simulation.save(1)
    simulation.run(5.0)
    assert simulation.steps() == ([1], [1])
    simulation.down.set()
    for step in (2, 3, 4, 5):
        simulation.save(step)
        assert simulation.run(150.0) < 10
    assert simulation.steps() == ([2, 3, 4, 5], [1])
    record = MirrorRecord.read(LocalStore(root))
    assert record is not None
    assert (record.waiting, record.pinned) == ((5, 4, 3, 2), (2, 3, 4))
    assert "503 Slow Down" in record.failure
    assert record.failing_since == pytest.approx(1e9 + 5.0, abs=1.0)
    watch = MirrorWatch(LocalStore(root))
    assert "Checkpoints that it lacks: 4; of them, 3 stay in" in watch.describe_problem()
    errors = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert 1 <= len(errors) <= 2
    simulation.down.clear()
    simulation.run(61.0)
    assert simulation.steps() == ([5], [1, 2, 3, 4, 5])
    assert "can be used again" in caplog.text
    for step in range(1, 6):
        target = state(0)
        sw.load(mirror / step_directory(step), target)
        assert torch.equal(target["t"], state(step)["t"])


def test_the_end_waits_for_an_attempt_that_knows_the_last_save(root: Path, mirror: Path) -> None:
    """An attempt that began before copies the last save, but removes nothing."""
    save(root, 1)
    worker = MirrorWorker(LocalStore(root), LAST, sw.Mirror(mirror))
    begun, may_continue = threading.Event(), threading.Event()
    catch_up = worker.mirroring.catch_up

    def catch_up_late(saved: Callable[[], tuple[int | None, Collection[int]]]) -> bool:
        known = saved()
        begun.set()
        may_continue.wait(60)
        is_current = catch_up(lambda: known)
        worker.mirroring.catch_up = catch_up  # type: ignore[method-assign]
        return is_current

    worker.mirroring.catch_up = catch_up_late  # type: ignore[method-assign]
    worker.start()
    assert begun.wait(60)
    save(root, 2)
    worker.set_saved(2)
    may_continue.set()
    worker.wait_until_seen(60)
    assert worker.stop(60)
    assert Root(LocalStore(root)).steps() == [2]


def test_a_restart_during_an_outage_continues(root: Path, mirror: Path) -> None:
    simulation = Simulation(root, mirror)
    simulation.down.set()
    for step in (1, 2):
        simulation.save(step)
        simulation.run(10.0)
    simulation.start()
    simulation.run(10.0)
    simulation.down.clear()
    simulation.run(61.0)
    assert simulation.steps() == ([1, 2], [1, 2])  # no save yet says which step is the newest
    simulation.save(3)
    simulation.run(1.0)
    assert simulation.steps() == ([3], [1, 2, 3])


def test_a_broken_copy_is_continued(root: Path, mirror: Path) -> None:
    """Files that are there are not sent again; others are."""
    save(root, 1, 2)
    for step in (1, 2):
        shutil.copytree(root / step_directory(step), mirror / step_directory(step))
        (mirror / step_directory(step) / MANIFEST).unlink()
    whole = data_file(mirror, 1)
    whole.rename(whole.with_name(f"{whole.name}.part"))
    calls: list[str] = []
    store = Outage(mirror, threading.Event(), calls)
    each = Mirroring(LocalStore(root), sw.Keep(), sw.Mirror(store))
    assert each.catch_up(nothing_saved)
    assert calls.count("create") == 1
    assert [each.record.steps[step].bytes > 0 for step in (1, 2)] == [True, False]
    for step in (1, 2):
        assert files_of(root, step) == files_of(mirror, step)


def test_a_damaged_checkpoint_does_not_stop_the_others(root: Path, mirror: Path) -> None:
    save(root, 1, 2, 3)
    flip(data_file(root, 2), 70_000)
    each = mirroring(root, mirror, LAST, sw.Keep())
    assert not each.catch_up(lambda: (3, ()))
    assert Root(LocalStore(mirror)).steps() == [1, 3]
    assert Root(LocalStore(root)).steps() == [2, 3]
    assert "damaged" in each.record.failures[2]
    assert each.catch_up(lambda: (3, {2}))


def test_a_mirror_that_refuses_deletes_gets_everything(root: Path, mirror: Path) -> None:
    save(root, 1, 2, 3)
    target = LocalStore(mirror)

    class WithoutDelete(LocalStore):
        def at(self, name: str) -> WithoutDelete:
            return WithoutDelete(self.path / name)

        def delete(self, key: str) -> None:
            raise PermissionError(1, "AccessDenied", key)

    each = Mirroring(LocalStore(root), LAST, sw.Mirror(WithoutDelete(mirror), keep=LAST))
    assert each.catch_up(lambda: (2, ()))  # step 3 is of another branch
    assert Root(target).steps() == [2, 3]
    save(root, 4)
    assert not each.catch_up(lambda: (4, ()))
    assert Root(target).steps() == [2, 3, 4]
    assert "cannot remove step 2 from the mirror" in each.record.failure
    assert Root(LocalStore(root)).steps() == [4]


def test_only_one_process_mirrors_a_root(root: Path, mirror: Path) -> None:
    save(root, 1)
    first, second = (mirroring(root, mirror, LAST, sw.Keep()) for _ in range(2))
    inside, release = threading.Event(), threading.Event()

    def wait() -> tuple[None, tuple[()]]:
        inside.set()
        release.wait(20.0)
        return nothing_saved()

    thread = threading.Thread(target=first.catch_up, args=(wait,))
    thread.start()
    assert inside.wait(20.0)
    assert not second.catch_up(nothing_saved)
    assert not mirror.exists()
    release.set()
    thread.join(20.0)
    assert second.catch_up(nothing_saved)
    assert Root(LocalStore(mirror)).steps() == [1]


def test_a_checkpoint_that_is_read_stays_until_later(root: Path, mirror: Path) -> None:
    save(root, 1, 2)
    each = mirroring(root, mirror, LAST, LAST)
    with LocalStore(root / step_directory(1)).lock(MANIFEST, shared=True):
        assert each.catch_up(lambda: (2, ()))
        assert Root(LocalStore(root)).steps() == [1, 2]
    assert each.catch_up(lambda: (2, ()))
    assert Root(LocalStore(root)).steps() == [2]


def test_a_checkpoint_that_is_removed_meanwhile_is_no_failure_for_others(
    root: Path, mirror: Path
) -> None:
    save(root, 1, 2)
    each = mirroring(root, mirror, sw.Keep(), sw.Keep())
    with LocalStore(root / step_directory(2)).lock(MANIFEST):
        assert not each.catch_up(nothing_saved)
    assert Root(LocalStore(mirror)).steps() == [1]
    assert each.catch_up(nothing_saved)
    assert Root(LocalStore(mirror)).steps() == [1, 2]


def test_leftovers_in_the_mirror_are_removed(root: Path, mirror: Path) -> None:
    save(root, 1)
    left = mirror / step_directory(7)
    left.mkdir(parents=True)
    (left / f"r00000-{'0' * 16}.safetensors").write_bytes(b"part")
    (left / "notes.txt").write_text("mine")
    assert mirroring(root, mirror, sw.Keep(), sw.Keep()).catch_up(nothing_saved)
    assert [path.name for path in left.iterdir()] == ["notes.txt"]


@pytest.fixture
def tiers(root: Path, mirror: Path) -> TieredStore:
    save(root, 1, mirror=mirror)
    return TieredStore(LocalStore(root), LocalStore(mirror))


def test_a_tier_that_fails_is_skipped_unless_it_is_needed(
    root: Path, mirror: Path, tiers: TieredStore
) -> None:
    down = threading.Event()
    down.set()
    broken = Outage(mirror, down, [])
    assert Root(TieredStore(LocalStore(root), broken)).steps() == [1]
    assert Root(TieredStore(Outage(root, down, []), LocalStore(mirror))).steps() == [1]
    for order in (
        [LocalStore(root), broken],
        [Outage(root, down, []), LocalStore(mirror)],
    ):
        target = state(0)
        sw.load(TieredStore(*order).at(step_directory(1)), target)
        assert torch.equal(target["t"], state(1)["t"])
    shutil.rmtree(root)
    with pytest.raises(sw.StoreError, match="503"):  # not "there is no checkpoint"
        Root(TieredStore(LocalStore(root), broken)).steps()


def test_a_mirror_is_checked(root: Path, mirror: Path) -> None:
    with pytest.raises(sw.StateError, match="the root itself"):
        sw.Checkpointer(root, mirror=root, memory=None)
    with pytest.raises(TypeError, match="expected a path"):
        sw.Checkpointer(root, mirror=7, memory=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"sw\.Keep"):
        sw.Mirror(mirror, keep=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_bytes_per_second"):
        sw.Mirror(mirror, max_bytes_per_second=np.int64(5))  # type: ignore[arg-type]


def test_a_damaged_record_is_replaced(root: Path, mirror: Path) -> None:
    save(root, 1, mirror=mirror)
    (root / MIRROR_FILE).write_bytes(b"{")
    with pytest.raises(sw.StoreError, match="remove it"):
        MirrorRecord.read(LocalStore(root))
    save(root, 2, mirror=mirror)
    record = MirrorRecord.read(LocalStore(root))
    assert record is not None
    assert sorted(record.steps) == [1, 2]


def test_a_full_root_and_a_failing_mirror_are_reported_together(
    root: Path, mirror: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mirror.write_text("in the way", encoding="utf-8")
    store = FaultyStore(LocalStore(root), Fault(1, FULL_DISK, verbs=("create",), sticky=True))
    checkpointer = sw.Checkpointer(store, keep=LAST, mirror=mirror, memory=None)
    handle = checkpointer.save(1, state(1))
    assert handle is not None
    with pytest.raises(TimeoutError, match=r"step 1 is not in the mirror .*NotADirectoryError"):
        handle.mirrored(2.0)
    with pytest.raises(OSError, match="No space left") as caught:
        checkpointer.save(2, state(2))
    assert "Checkpoints that it lacks: 1. Reason" in str(caught.value.__notes__)
    assert "Checkpoints that it lacks: 1. Reason" in caplog.text
    checkpointer.close(wait=False)


def test_a_checkpointer_without_the_mirror_of_its_root_warns(
    root: Path, mirror: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(root, 1, mirror=mirror)
    assert "mirror" not in caplog.text
    save(root, 2)
    assert f"{root} has the mirror {mirror}, which gets no copies without mirror=" in caplog.text
