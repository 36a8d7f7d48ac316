"""What several ranks of a node want is read once there, also when ranks fail in the middle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.tools.gang import Gang

ROWS, COLUMNS = 64, 4096
READ = "shardwise.kernel.engine.data_reader.DataReader.read"


def reference(i: int) -> torch.Tensor:
    """Values that tell where they belong."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + i


def save_rows(path: str, count: int) -> None:
    """Save tensors, divided by rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    box = sw.Box((ROWS // world * rank, 0), (ROWS // world, COLUMNS))
    sw.save(path, {f"t{i}": _part(box, reference(i)[box.slices()].clone()) for i in range(count)})


def _part(box: sw.Box, data: torch.Tensor) -> sw.Shards:
    return sw.Shards((ROWS, COLUMNS), data.dtype, [(box, data)])


def _columns(count: int) -> tuple[sw.Box, dict[str, object]]:
    rank, world = dist.get_rank(), dist.get_world_size()
    box = sw.Box((0, COLUMNS // world * rank), (ROWS, COLUMNS // world))
    return box, {f"t{i}": _part(box, torch.zeros(box.shape)) for i in range(count)}


def load_columns(path: str, count: int, prefix: str = "") -> tuple[int, int]:
    """Load them divided by columns; bytes needed and read."""
    box, state = _columns(count)
    report = sw.load(path, state, staging_bytes=4 << 20, rename=lambda name: prefix + name)
    for i in range(count):
        target = state[f"t{i}"]
        assert isinstance(target, sw.Shards)
        assert torch.equal(target.fragments[0].data, reference(i)[box.slices()])
    return report.bytes_needed, report.bytes_read


def load_replicas(path: str, count: int) -> int:
    """Load all of every tensor on every rank; bytes read."""
    state: dict[str, object] = {f"t{i}": torch.zeros(ROWS, COLUMNS) for i in range(count)}
    report = sw.load(path, state, staging_bytes=4 << 20)
    assert all(torch.equal(state[f"t{i}"], reference(i)) for i in range(count))
    return report.bytes_read


def die_while_reading(path: str, count: int, victim: int) -> None:
    """One rank is killed once it has read a few spans."""
    if dist.get_rank() == victim:
        calls = iter(range(1000))

        def killing(*args: object, **options: object) -> object:
            if next(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return patched.temp_original(*args, **options)

        patched = patch(READ, killing)
        patched.start()
    load_columns(path, count)


@pytest.fixture(scope="module")
def saved(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of 16 MiB, divided by rows among four ranks."""
    path = str(tmp_path_factory.mktemp("together") / "checkpoint")
    gang.run(save_rows, path, 16, world=4)
    return path


@pytest.mark.parametrize("world", [2, 4])
def test_columns_of_rows_are_read_once_on_the_node(gang: Gang, saved: str, world: int) -> None:
    counts = gang.run(load_columns, saved, 16, world=world)
    needed = sum(n for n, _ in counts)
    read = sum(n for _, n in counts)
    assert needed == 16 * ROWS * COLUMNS * 4
    assert needed <= read <= 1.05 * needed
    assert max(n for _, n in counts) <= 1.5 * needed / world


def test_replicas_are_read_once_on_the_node(gang: Gang, saved: str) -> None:
    assert sum(gang.run(load_replicas, saved, 16, world=4)) <= 1.05 * 16 * ROWS * COLUMNS * 4


def test_damage_is_an_error_on_every_rank(gang: Gang, saved: str, tmp_path: Path) -> None:
    copy = tmp_path / "damaged"
    copy.mkdir()
    for file in Path(saved).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    victim = next(iter(sorted(copy.glob("r00002-*"))))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    outcomes = gang.run_outcomes(load_columns, str(copy), 16, world=4)
    kinds = {type(outcome.exception).__name__ for outcome in outcomes}
    assert "CorruptionError" in kinds
    assert kinds <= {"CorruptionError", "RankError"}
    assert all(victim.name in str(outcome.exception) for outcome in outcomes)


def test_a_rank_that_dies_is_noticed_by_those_who_wait_for_it(gang: Gang, saved: str) -> None:
    start = time.monotonic()
    outcomes = gang.run_outcomes(
        die_while_reading, saved, 16, 1, world=4, timeout=60.0, group_timeout=4.0
    )
    assert time.monotonic() - start < 40
    assert outcomes[1].kind == "died"
    assert {outcomes[rank].kind for rank in (0, 2, 3)} == {"error"}
    assert gang.run(load_replicas, saved, 16, world=2)


def load_while(
    path: str,
    count: int,
    victim: int,
    fault: Callable[[], AbstractContextManager[object]],
    prefix: str = "",
) -> None:
    """Load, while one rank has a fault."""
    with fault() if dist.get_rank() == victim else nullcontext():
        load_columns(path, count, prefix)


def change_what_is_passed_on() -> AbstractContextManager[object]:
    """What this rank passes on is no longer what it has read and verified."""

    def publish(self: Any, read: int, checksum: int) -> None:
        self.slot(read)[100] ^= 1
        patched.temp_original(self, read, checksum)

    patched = patch("shardwise.parts.sharing.shared_buffers.SharedBuffers.publish", publish)
    return patched


def plan_other_reads() -> AbstractContextManager[object]:
    """This rank divides what is read together in another way."""

    def in_small_reads(*wanted: object, **options: object) -> object:
        return patched.temp_original(*wanted, **{**options, "largest_read": 65536})

    patched = patch("shardwise.parts.sharing.strategy.share_reads", in_small_reads)
    return patched


def stop_reading() -> AbstractContextManager[object]:
    """This rank never ends a read in time."""
    return patch(READ, lambda *_, **__: time.sleep(5))


def save_foreign(path: Path, count: int) -> str:
    """The same tensors in a file without checksums."""
    torch.save({f"t{i}": reference(i) for i in range(count)}, path)
    return str(path)


@pytest.mark.parametrize("foreign", [False, True])
def test_what_neighbours_pass_on_is_verified(
    gang: Gang, saved: str, tmp_path: Path, foreign: bool
) -> None:
    path = save_foreign(tmp_path / "tensors.pt", 16) if foreign else saved
    prefix = "model." if foreign else ""
    gang.run(load_columns, path, 16, prefix, world=2)
    outcomes = gang.run_outcomes(load_while, path, 16, 1, change_what_is_passed_on, prefix, world=2)
    assert "rank 1 had read them" in str(outcomes[0].exception)
    assert [each.kind for each in outcomes] == ["error", "error"]


def test_ranks_that_plan_other_reads_read_nothing(gang: Gang, saved: str) -> None:
    outcomes = gang.run_outcomes(load_while, saved, 16, 1, plan_other_reads, world=3)
    for each in outcomes:
        assert "planned other reads than this rank" in str(each.exception)


def test_waiting_for_a_rank_ends_and_names_it(gang: Gang, saved: str) -> None:
    start = time.monotonic()
    outcomes = gang.run_outcomes(load_while, saved, 16, 2, stop_reading, world=3, group_timeout=2.0)
    assert time.monotonic() - start < 40
    said = [str(each.exception) for each in outcomes[:2]]
    assert any("rank 2: it did not finish read" in each and "within 2 s" in each for each in said)
    assert all(
        "reading together with the other ranks of the node failed" in each for each in said
    )  # the other may hear of it
