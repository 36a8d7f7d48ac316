"""What several ranks of a node want is read once there, also when ranks fail in the middle."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.testing import Gang

ROWS, COLUMNS = 64, 4096


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


def load_columns(path: str, count: int) -> tuple[int, int]:
    """Load them divided by columns; bytes needed and read."""
    box, state = _columns(count)
    report = sw.load(path, state, staging_bytes=4 << 20)
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
    from shardwise.engine import datareader

    if dist.get_rank() == victim:
        calls = iter(range(1000))
        read = datareader.DataReader.read

        def killing(self: object, *args: object) -> object:
            if next(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return read(self, *args)  # type: ignore[arg-type]

        datareader.DataReader.read = killing  # type: ignore[method-assign, assignment]
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
    outcomes = gang.outcomes(load_columns, str(copy), 16, world=4)
    kinds = {type(outcome.exception).__name__ for outcome in outcomes}
    assert "CorruptionError" in kinds
    assert kinds <= {"CorruptionError", "RankError"}


def test_a_rank_that_dies_is_noticed_by_those_who_wait_for_it(gang: Gang, saved: str) -> None:
    start = time.monotonic()
    outcomes = gang.outcomes(die_while_reading, saved, 16, 1, world=4, timeout=60.0)
    assert time.monotonic() - start < 30
    assert outcomes[1].kind == "died"
    assert {outcomes[rank].kind for rank in (0, 2, 3)} == {"error"}
    assert gang.run(load_replicas, saved, 16, world=2)
