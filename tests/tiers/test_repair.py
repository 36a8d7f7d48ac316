"""What is damaged in the root and intact in the mirror is repaired in the root."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.manifest.names import MANIFEST, step_directory
from shardwise.retention import committed_steps
from shardwise.store import LocalStore
from shardwise.tiers.mirroring import Mirroring, SavedSteps, TierRules
from shardwise.tiers.record import read_mirror_record
from tests.memory.test_snapshots import shm
from tests.tiers.test_mirror import (
    DAMAGES,
    damage_file,
    data_file,
    files_of,
    flip,
    mirror,
    root,
    save,
    state,
)
from tests.tools.faulty_store import Fault, FaultyStore

__all__ = ["mirror", "root", "shm"]
ALL = sw.Keep()
SECONDS = 60.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def restore(checkpointer: sw.Checkpointer, step: int, seed: int = 0) -> dict[str, int]:
    """Restore a step, and compare all bytes; return how many bytes came from where."""
    target = state(-1)
    assert checkpointer.restore(target) == step
    assert torch.equal(target["t"], state(step + seed)["t"])
    assert target["step"] == step + seed
    assert checkpointer.last_restore is not None
    return checkpointer.last_restore.origins


def repaired_files(root: Path, step: int) -> tuple[str, ...]:
    """Return which files of a step were repaired, by the record in the root."""
    record = read_mirror_record(LocalStore(root))
    return record.repaired[step].files if record and step in record.repaired else ()


def catch_up(root: Path, mirror: Path, saved: SavedSteps | None = None) -> Mirroring:
    each = Mirroring(LocalStore(root), LocalStore(mirror), TierRules(ALL, ALL))
    assert each.catch_up(lambda: saved or SavedSteps())
    return each


@pytest.mark.parametrize("how", [each for each in DAMAGES if each != "missing"])
@pytest.mark.parametrize("in_background", [False, True], ids=["thread", "agent"])
def test_a_file_that_a_restore_finds_damaged_is_repaired(
    root: Path,
    mirror: Path,
    shm: Path,
    caplog: pytest.LogCaptureFixture,
    how: str,
    in_background: bool,
) -> None:
    if in_background and how != "flipped":
        pytest.skip("the thread repairs in the same way")
    save(root, 1, 2, mirror=mirror)
    intact = files_of(root, 2)
    damage_file(data_file(root, 2), how)
    memory = sw.Memory(dir=str(shm), wait=20.0) if in_background else None
    events: list[str] = []
    with sw.Checkpointer(
        root, mirror=mirror, memory=memory, on_event=lambda event: events.append(event.stage)
    ) as checkpointer:
        origins = restore(checkpointer, 2)
        assert origins["mirror"] > 0
        assert sum(origins.values()) == origins["mirror"] + origins["root"]
        until(lambda: repaired_files(root, 2))
        assert data_file(root, 2).read_bytes() == intact[data_file(root, 2).name]
        handle = checkpointer.save(3, state(3))
        assert handle is not None
        handle.mirrored(SECONDS)
        checkpointer.save(4, state(4))
    assert files_of(root, 2) == files_of(mirror, 2) == intact
    assert "repair" in events
    record = read_mirror_record(LocalStore(root))
    assert record is not None
    name = data_file(root, 2).name
    assert record.repaired[2].files == (name,)
    assert record.repaired[2].bytes == len(intact[name])
    if not in_background:
        text = f"step 2 was damaged, and was repaired from the mirror {mirror}: {name}"
        assert text in caplog.text
    with sw.Checkpointer(root, memory=None) as checkpointer:  # from the root alone
        restore(checkpointer, 4)
    sw.open(LocalStore(root / step_directory(2))).verify()


def test_an_intact_root_gives_all_bytes(root: Path, mirror: Path) -> None:
    save(root, 1, mirror=mirror)
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        origins = restore(checkpointer, 1)
        assert origins.pop("root") >= 4 * 400_000
        assert not any(origins.values())
        for path in (root / step_directory(1)).iterdir():
            path.unlink()
        origins = restore(checkpointer, 1)
        assert origins.pop("mirror") >= 4 * 400_000
        assert not any(origins.values())


@pytest.mark.parametrize("how", ["flipped", "empty"])
def test_a_damaged_manifest_is_repaired_without_a_restore(
    root: Path, mirror: Path, how: str
) -> None:
    save(root, 1, 2, mirror=mirror)
    intact = files_of(root, 2)
    damage_file(root / step_directory(2) / MANIFEST, how)
    damage_file(data_file(root, 2), "flipped")
    each = catch_up(root, mirror)
    assert files_of(root, 2) == intact
    assert set(each.record.repaired[2].files) == set(intact)


def test_a_missing_file_is_repaired_without_a_restore(root: Path, mirror: Path) -> None:
    save(root, 1, 2, mirror=mirror)
    intact = files_of(root, 1)
    data_file(root, 1).unlink()
    catch_up(root, mirror)
    assert files_of(root, 1) == intact


def test_a_removed_checkpoint_is_not_repaired(root: Path, mirror: Path) -> None:
    save(root, 1, 2, mirror=mirror)
    (root / step_directory(1) / MANIFEST).unlink()
    catch_up(root, mirror, SavedSteps(2, suspected={1: 1.0}))
    assert committed_steps(LocalStore(root)) == [2]


def test_a_checkpoint_that_is_damaged_in_both_tiers_stays_as_it_is(
    root: Path, mirror: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(root, 1, mirror=mirror)
    for tier in (root, mirror):
        flip(data_file(tier, 1), 70_000)
    before = files_of(root, 1), files_of(mirror, 1)
    each = catch_up(root, mirror, SavedSteps(1, suspected={1: 1.0}))
    assert (files_of(root, 1), files_of(mirror, 1)) == before
    assert "step 1 is damaged there and in its mirror" in caplog.text
    caplog.clear()
    assert each.catch_up(lambda: SavedSteps(1, suspected={1: 1.0}))
    assert not caplog.text  # it is not read again


def test_an_earlier_save_of_the_mirror_never_replaces_a_later_one(root: Path, mirror: Path) -> None:
    save(root, 1, mirror=mirror)
    save(root, 1, seed=100)
    flip(data_file(root, 1), 70_000)
    before = files_of(root, 1)
    each = Mirroring(LocalStore(root), LocalStore(mirror), TierRules(ALL, ALL))
    assert not each.catch_up(lambda: SavedSteps(1, suspected={1: 1.0}))
    assert "damaged" in each.record.failures[1]
    assert files_of(root, 1) == before


def test_the_earlier_save_in_the_mirror_is_restored(
    root: Path, mirror: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(root, 1, mirror=mirror)
    save(root, 1, seed=100)
    flip(data_file(root, 1), 70_000)
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        origins = restore(checkpointer, 1)
        assert origins["mirror"] > 0
        assert origins["root"] == 0
        assert checkpointer.last_restore is not None
        ((step, why),) = checkpointer.last_restore.skipped
        assert step == 1
        assert "differ from those that were saved" in why
        assert "step 1 was saved again; trying its earlier save in" in caplog.text
        checkpointer.save(1, state(7))  # replaces what is damaged
        checkpointer.save(2, state(2))
    assert torch.equal(sw.open(root, step=1)["t"][:], state(7)["t"])
    flip(data_file(mirror, 2), 70_000)
    flip(data_file(root, 2), 70_000)
    with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
        restore(checkpointer, 1, seed=6)


def kill_while_repairing(root: Path, mirror: Path, index: int) -> None:
    """Repair in another process, which is killed before its operation with this index."""
    child = os.fork()
    if child == 0:
        try:
            fault = Fault(index)
            tiers = (FaultyStore(LocalStore(each), fault) for each in (root, mirror))
            Mirroring(*tiers, TierRules(ALL, ALL)).catch_up(
                lambda: SavedSteps(1, suspected={1: 1.0})
            )
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


def test_killed_at_any_operation_the_checkpoint_can_be_read(root: Path, mirror: Path) -> None:
    """The repaired file appears at once, and nothing else stays in the directory."""
    save(root, 1, mirror=mirror)
    intact = files_of(root, 1)
    fault = Fault()
    tiers: list[Any] = [FaultyStore(LocalStore(each), fault) for each in (root, mirror)]
    flip(data_file(root, 1), 70_000)
    assert Mirroring(*tiers, TierRules(ALL, ALL)).catch_up(
        lambda: SavedSteps(1, suspected={1: 1.0})
    )
    assert files_of(root, 1) == intact
    verbs = {operation.split()[0] for operation in fault.operations}
    assert {"create", "write_at", "commit"} <= verbs
    for index in range(len(fault.operations)):
        flip(data_file(root, 1), 70_000)
        damaged = data_file(root, 1).read_bytes()
        kill_while_repairing(root, mirror, index)
        content = data_file(root, 1).read_bytes()
        assert content in (damaged, intact[data_file(root, 1).name]), fault.operations[index]
        target = state(-1)
        with sw.Checkpointer(root, mirror=mirror, memory=None) as checkpointer:
            assert checkpointer.restore(target) == 1
        assert torch.equal(target["t"], state(1)["t"])
        catch_up(root, mirror, SavedSteps(1, suspected={1: 1.0}))
        assert files_of(root, 1) == intact, fault.operations[index]
