"""A state of many reads, restored by ranks in whose memories different files lie."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.breadth import mostly_long
from tests.faults.memory.scenario import Cluster
from tests.tools.agents import lose
from tests.tools.gang import Gang

SHAPE = (1000, 768)
TENSORS = 6


def reference(i: int) -> torch.Tensor:
    """Values that tell where they belong."""
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + 1e6 * i


def box_of(by: str) -> sw.Box:
    """What this rank has of each tensor."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if by == "all":
        return sw.Box((0, 0), SHAPE)
    axis = 0 if by == "rows" else 1
    first, last = (SHAPE[axis] * each // world for each in (rank, rank + 1))
    shape, offset = list(SHAPE), [0, 0]
    offset[axis], shape[axis] = first, last - first
    return sw.Box(tuple(offset), tuple(shape))


def state_of(box: sw.Box) -> dict[str, sw.Shards]:
    """Empty tensors."""
    return {
        f"t{i}": sw.Shards(SHAPE, torch.float32, [(box, torch.full(box.shape, -1.0))])
        for i in range(TENSORS)
    }


def save(cluster: Cluster, by: str) -> None:
    """Save and protect one step, and leave without a word."""
    cp = cluster.open()
    box = box_of(by)
    state = state_of(box)
    for i, shards in enumerate(state.values()):
        shards.fragments[0].data.copy_(reference(i)[box.slices()])
    cp.restore(state)
    handle = cp.save(5, state)
    assert handle is not None
    handle.protected(30.0)
    cp.close(wait=False)


def restore(cluster: Cluster, by: str) -> tuple[int | None, int]:
    """The step that was restored, and how many values are wrong."""
    cp = cluster.open()
    box = box_of(by)
    state = state_of(box)
    step = cp.restore(state)
    assert cp.last_restore is not None
    assert cp.last_restore.source == "memory"
    wrong = sum(
        int((shards.fragments[0].data != reference(i)[box.slices()]).sum())
        for i, shards in enumerate(state.values())
    )
    cp.close(wait=False)
    return step, wrong


@pytest.mark.parametrize(
    ("node_of", "by", "lost"),
    mostly_long(
        [
            ((0, 1), "columns", ()),
            ((1, 3), "columns", (2,)),
            ((0, 1, 2, 3), "columns", ()),
            ((1, 1, 3, 1), "columns", ()),
            ((0, 3), "all", ()),
            ((2, 0, 3), "rows", (1,)),
        ],
        [((1, 3), "columns", (2,))],
    ),
)
def test_ranks_whose_memories_differ_restore_every_byte(
    gang: Gang, root: Path, shm: Path, node_of: tuple[int, ...], by: str, lost: tuple[int, ...]
) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=4, options={"parity": 1})
    gang.run(save, cluster, "rows", world=4)
    for node in lost:
        lose(shm / f"node{node}")
    found = gang.run(
        restore, replace(cluster, node_of=node_of), by, world=len(node_of), timeout=60.0
    )
    assert found == [(5, 0)] * len(node_of)


def flip_a_bit(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def restore_before_all_answer(cluster: Cluster, by: str) -> tuple[int | None, int]:
    """Restore, while each node answers late but the one that rank 2 was on."""

    def answer_late(*args: Any) -> object:
        held = asking.temp_original(*args)
        if not any("rank-00002.json" in files for files in held.snapshots.values()):
            time.sleep(0.5)
        return held

    asking = mock.patch("shardwise.parts.memory.remote.search.Search._list_files", answer_late)
    with asking:
        return restore(cluster, by)


@pytest.mark.parametrize(
    "restoring", mostly_long([restore, restore_before_all_answer], [restore_before_all_answer])
)
@pytest.mark.parametrize(
    ("options", "at"),
    mostly_long([({"copies": 1}, 5 << 20), ({"parity": 1}, -4)], [({"parity": 1}, -4)]),
)
def test_damage_on_an_idle_node_is_made_up_for(
    gang: Gang,
    root: Path,
    shm: Path,
    options: dict[str, int],
    at: int,
    restoring: Callable[[Cluster, str], tuple[int | None, int]],
) -> None:
    """No rank runs there that would notice; what is read from it fails its checksum."""
    cluster = Cluster(root=root, shm=shm, nodes=3, options=options)
    gang.run(save, cluster, "rows", world=3)
    holders = {}
    for path in shm.glob("node*/shardwise-*/runs/*/step-*/r00002-*.safetensors"):
        holders[int(path.relative_to(shm).parts[0].removeprefix("node"))] = path
    flip_a_bit(holders[2], at % holders[2].stat().st_size)
    moved = replace(cluster, node_of=(min({0, 1} - holders.keys(), default=1),))
    assert gang.run(restoring, moved, "rows", world=1, timeout=60.0) == [(5, 0)]
