"""A restore says where its bytes came from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.memory.test_snapshots import COLUMNS, ROWS, memory_of, reference, train
from tests.tools.agents import end_agents, lose
from tests.tools.gang import Gang

CHECKSUMS = 1 << 13
"""What is read of a file's checksums, at the most: these files have a page of them."""
ORIGINS = {"local memory", "other nodes", "decoded", "root", "mirror", "start"}
WORLD = 4


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    """A directory for the homes of nodes, whose agents are ended afterwards."""
    directory = tmp_path / "shm"
    directory.mkdir()
    yield directory
    end_agents(directory)


def origins(
    root: str, shm: str, shift: int, step: int | None, **options: Any
) -> tuple[dict[str, int], int, str]:
    """Restore the rows of the rank that comes so many later; from where, the bytes read, and why
    nothing newer."""
    part, rows = (dist.get_rank() + shift) % WORLD, ROWS // WORLD
    box = sw.Box((rows * part, 0), (rows, COLUMNS))
    data = torch.zeros(box.shape)
    state = {"t": sw.Shards((ROWS, COLUMNS), torch.float32, [(box, data)])}
    with sw.Checkpointer(root, memory=memory_of(shm, WORLD, **options)) as cp:
        restored = cp.restore(state, step="newest" if step is None else step, strict=False)
        assert restored is not None
        assert torch.equal(data, reference(restored)[box.slices()])
        assert cp.last_restore is not None
        report = cp.last_restore
        return report.origins, report.load.bytes_read, str(report.skipped)


def check(found: tuple[dict[str, int], int, str], origin: str) -> None:
    """All bytes came from there, and nothing is counted twice."""
    counted, nbytes, _ = found
    assert set(counted) == ORIGINS
    assert nbytes > 0
    assert nbytes <= counted.pop(origin) <= nbytes + CHECKSUMS
    assert not any(counted.values())


def test_bytes_are_counted_by_where_they_came_from(gang: Gang, tmp_path: Path, shm: Path) -> None:
    root, options = str(tmp_path / "root"), {"parity": 1}
    gang.run(train, root, str(shm), WORLD, 3, 2, world=WORLD, **options)
    for found in gang.run(origins, root, str(shm), 0, None, world=WORLD, **options):
        check(found, "local memory")
    for found in gang.run(origins, root, str(shm), 1, None, world=WORLD, **options):
        check(found, "other nodes")
    lose(shm / "node2")
    for rank, found in enumerate(
        gang.run(origins, root, str(shm), 0, None, world=WORLD, **options)
    ):
        check(found, "decoded" if rank == 2 else "local memory")
    for node in (0, 1, 2):
        lose(shm / f"node{node}")
    for found in gang.run(origins, root, str(shm), 0, None, world=WORLD, **options):
        check(found, "root")
        assert "no reachable node has" in found[2]
