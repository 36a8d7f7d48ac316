"""Too little memory, and full disks: said at the start, and where it fails, on all ranks."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.breadth import mostly_long
from tests.faults.memory.scenario import WAIT, Cluster, begin, go_on, steps_in, train
from tests.tools.agents import end_agents
from tests.tools.gang import Gang

MEGABYTE = 1 << 20
ENOUGH = 17 * MEGABYTE  # for the slots of two ranks with 1.5 each, and no more
Mount = Callable[[str, int], Path]


@pytest.fixture
def mount(place: Path) -> Iterator[Mount]:
    """Makes small file systems in memory."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system that is small")
    with ExitStack() as stack:

        def made(name: str, size: int) -> Path:
            directory = place / name
            directory.mkdir()
            options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
            subprocess.run(["mount", *options], check=True)
            stack.callback(subprocess.run, ["umount", "-l", str(directory)], check=True)
            stack.callback(end_agents, directory)
            return directory

        yield made


def refusal(cluster: Cluster) -> str:
    """What the start of a run says where it is refused."""
    cp = cluster.open()
    try:
        begin(cp, cluster.columns, "rows")
    except sw.ShardwiseError as error:
        return str(error)
    finally:
        cp.close(wait=False)
    return ""


@pytest.mark.parametrize("size", [MEGABYTE, 8 * MEGABYTE])
def test_too_little_memory_is_an_error_at_the_start(
    gang: Gang, root: Path, mount: Mount, size: int
) -> None:
    """In the larger one, each rank has room, and not both."""
    cluster = Cluster(root=root, shm=mount("small", size), columns=8192)
    for _ in range(2):  # nor does what was begun then make it seem enough
        said = gang.run(refusal, cluster, world=2)
        assert all(re.search(r"need [\d,]{7,} more: make the file", each) for each in said), said


@pytest.mark.parametrize("protection", mostly_long([{"copies": 1}, {"parity": 1}], [{"copies": 1}]))
def test_too_little_memory_to_protect_others_is_an_error_at_the_start(
    gang: Gang, root: Path, mount: Mount, protection: dict[str, int]
) -> None:
    """There is room for what ranks stage, and not for what agents make of it for each other."""
    unprotected = Cluster(root=root, shm=mount("enough", ENOUGH), nodes=2, columns=8192)
    assert gang.run(refusal, unprotected, world=2) == ["", ""]
    lacking = replace(unprotected, shm=mount("lacking", ENOUGH), options=protection)
    for _ in range(2):
        said = gang.run(refusal, lacking, world=2)
        assert any("stores for others needs" in each for each in said), said


@contextmanager
def collected(said: list[str]) -> Iterator[None]:
    """Have what is raised in the block be said."""
    try:
        yield
    except (sw.ShardwiseError, TimeoutError) as error:
        said.append(str(error))


def grow(root: Path, shm: Path) -> list[str]:
    """Save a state that grows beyond the memory there is, and again; what is said."""
    said = []
    memory = sw.Memory(dir=str(shm), when_full="wait", wait=WAIT)
    cp = sw.Checkpointer(root, save_every=1000, memory=memory)
    for step, size in enumerate((1, 8, 8, 8, 1), start=1):
        with collected(said):
            handle = cp.save(step, {"t": torch.full((size * MEGABYTE // 4,), float(step))})
            assert handle is not None
            handle.result(2.0)
    target = {"t": torch.zeros(MEGABYTE // 4)}
    found = cp.restore(target)
    assert found in (1, 5)
    assert torch.equal(target["t"], torch.full((MEGABYTE // 4,), float(found)))
    cp.close(wait=False)
    return said


def test_a_state_that_outgrows_the_memory_is_an_error_and_no_bus_error(
    gang: Gang, root: Path, mount: Mount
) -> None:
    (said,) = gang.run(grow, root, mount("small", 16 * MEGABYTE), world=1)
    assert any("make the file system larger" in each for each in said)


def persist_to_a_full_disk(cluster: Cluster) -> tuple[list[str], list[int]]:
    """Save every step, every second of them to a disk that takes but one; what is said, and of
    which steps there are snapshots. The file system does not say how full it is."""
    with patch("shardwise.kernel.engine.planning.free_bytes", lambda store: None):
        return _persist_to_a_full_disk(cluster)


def _persist_to_a_full_disk(cluster: Cluster) -> tuple[list[str], list[int]]:
    cp = cluster.open()
    values, state, _ = begin(cp, cluster.columns, "rows")
    said, committed = [], []
    for step in range(1, 8):
        train(values, step)
        state["step"] = step
        try:
            handle = cp.save(step, state)
            assert handle is not None
            handle.committed(10.0)
            committed.append(step)
            if step in (4, 6):
                handle.result(10.0)
        except sw.ShardwiseError as error:
            said.append(f"{step}: {error}")
        dist.barrier()
    cp.close(wait=False)
    return said, committed


def test_a_full_disk_stops_no_snapshots_and_is_told_on_all_ranks(
    gang: Gang, place: Path, shm: Path, mount: Mount
) -> None:
    root = mount("disk", 3 * MEGABYTE // 4)
    cluster = Cluster(root=root, shm=shm, every=2)
    for said, committed in gang.run(persist_to_a_full_disk, cluster, world=2):
        assert committed == [1, 2, 3, 4, 6]
        assert [each[:2] for each in said] == ["4:", "5:", "6:", "7:"]
        assert all("persist" in each and "No space left" in each for each in said), said
    assert steps_in(root) == [2]
    (went, _) = gang.run(go_on, cluster, 6, world=2)
    assert (went.step, went.source) == (6, "memory")
