"""What an agent has made for others: its memory is taken again, and given back where it is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import shardwise as sw
from shardwise.manifest.manifest import FileEntry
from shardwise.memory import records
from shardwise.memory.files import write_record
from shardwise.memory.home import Home, Run, SnapshotDirectory, new_run_id
from shardwise.memory.reclaim import (
    add_spare,
    bytes_stored_for_others,
    delete_smallest_spares,
    list_spares,
    reuse_spare,
)
from shardwise.memory.records import StagedFile
from tests.breadth import mostly_long
from tests.memory.reconciling import free_decided
from tests.memory.test_snapshots import memory_of, rows, shm
from tests.tools.gang import Gang

__all__ = ["shm"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of which nothing is kept."""
    run = Home(tmp_path).run(new_run_id())
    run.free_directory.mkdir(parents=True)
    return run


def leave(run: Run, step: int, *made: tuple[str, int]) -> None:
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
    leave(run, 1, ("r00001", 300), (".r00002", 20))
    leave(run, 2, ("r00001", 300), ("r00002", 20))
    assert free_decided(run)
    assert [size for size, _ in list_spares(run)] == [20, 300]
    assert [each.name for each in run.free_directory.glob("*.slot")] == ["r00000-1.slot"]
    assert bytes_stored_for_others(run) == 2 * 320
    leave(run, 3)
    assert free_decided(run)
    assert not list_spares(run)  # nothing is made for others any more
    assert bytes_stored_for_others(run) == 0


def test_the_least_that_is_large_enough_is_taken_or_else_the_largest(run: Run) -> None:
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
    for size in (10, 500, 300):
        path = run.path / "made"
        path.write_bytes(bytes(size))
        add_spare(run, path)
    delete_smallest_spares(run, 5)
    assert len(list_spares(run)) == 3
    delete_smallest_spares(run, 1)
    assert [size for size, _ in list_spares(run)] == [500]


def made_for_others(shm: str, root: str, options: dict[str, int]) -> list[set[int]]:
    """The files, by inode, that this node has for others; after some saves, and after more."""
    memory = memory_of(shm, 2, **options)
    cp = sw.Checkpointer(root, save_every=1000, memory=memory)
    found = []
    for step in range(1, 9):
        handle = cp.save(step, rows(step))
        assert handle is not None
        handle.protected(20.0)
        if step in (4, 8):
            (run,) = Path(memory.dir).glob("*/runs/*")
            own = f"r{dist.get_rank():05d}-"
            files = [*run.glob("step-*/*.safetensors"), *run.glob("step-*/*.bin")]
            files = [path for path in files if not path.name.startswith(own)]
            found.append({path.stat().st_ino for path in [*files, *run.glob("free/*.spare")]})
    cp.close(wait=False)
    return found


@pytest.mark.parametrize("options", mostly_long([{"copies": 1}, {"parity": 1}], [{"parity": 1}]))
def test_agents_take_the_same_memory_for_every_snapshot(
    gang: Gang, tmp_path: Path, shm: Path, options: dict[str, int]
) -> None:
    root = str(tmp_path / "root")
    for before, after in gang.run(made_for_others, str(shm), root, options, world=2):
        assert 2 <= len(after) <= 4
        assert len(after - before) <= 1
