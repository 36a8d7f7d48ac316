"""Agents of a run take the memory again that they have made for others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

import shardwise as sw
from tests.breadth import mostly_long
from tests.memory.test_snapshots import memory_of, rows, shm
from tests.tools.gang import Gang

__all__ = ["shm"]


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
            files = [path for path in files if not path.name.lstrip(".").startswith(own)]
            found.append({path.stat().st_ino for path in [*files, *run.glob("free/agent-*")]})
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
