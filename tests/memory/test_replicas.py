"""Redundancy that ranks make out of their own replicas: the same bytes, without the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.breadth import mostly_long
from tests.memory.test_snapshots import memory_of, shm
from tests.tools.agents import lose
from tests.tools.gang import Gang

__all__ = ["shm"]

SIZE = 700_000


def replicated(step: int) -> dict[str, Any]:
    """What all ranks hold alike, and a value that each has of its own."""
    big = torch.arange(SIZE, dtype=torch.float32) * step
    small = torch.full((5,), float(step))
    return {"big": big, "small": small, "step": step, "mine": sw.PerRank("x" * dist.get_rank())}


def hybrid(step: int, half: int) -> dict[str, Any]:
    """Rows that every other rank holds alike, as in hybrid sharding."""
    rows = torch.arange(8 * 40_000, dtype=torch.float32).reshape(8, -1) + step
    box = sw.Box((4 * half, 0), (4, 40_000))
    shards = sw.Shards((8, 40_000), torch.float32, [(box, rows[box.slices()].clone())])
    return {"t": shards, "step": step}


def save(root: str, shm: str, kind: str, steps: int, options: dict[str, Any]) -> list[int]:
    """Save some steps into the memory of as many nodes as ranks; what this node made for others."""
    memory = memory_of(shm, dist.get_world_size(), **options)
    cp = sw.Checkpointer(root, save_every=100, memory=memory)
    made = []
    for step in range(1, steps + 1):
        rank = dist.get_rank()
        state = replicated(step) if kind == "replicated" else hybrid(step, rank % 2)
        if kind == "unequal" and rank == 1:
            state["t"].fragments[0].data[2, 30_000] += 1
        handle = cp.save(step, state)
        assert handle is not None
        handle.protected(20.0)
        (place,) = Path(memory.dir).glob(f"*/runs/*/step-{step:08d}-*")
        part = json.loads((place / f"rank-{rank:05d}.json").read_bytes())["record"]
        names = {each.name for each in place.iterdir()}
        taken_up = [each["name"] in names and each["file"] not in names for each in part["made"]]
        assert all(taken_up)  # the agent has completed what the rank has made
        made.append(len(taken_up))
    cp.close(wait=False)
    return made


def recover(root: str, shm: str, kind: str, nodes: int) -> tuple[int | None, str, str]:
    """Restore all of it on every rank, and compare."""
    state: dict[str, Any]
    if kind == "replicated":
        state = {"big": torch.zeros(SIZE), "small": torch.zeros(5), "step": -1}
    else:
        state = {"t": torch.zeros(8, 40_000), "step": -1}
    with sw.Checkpointer(root, save_every=100, memory=memory_of(shm, nodes)) as cp:
        step = cp.restore(state, strict=False)
        if step is None or cp.last_restore is None:
            return None, "", ""
        if kind == "replicated":
            assert torch.equal(state["big"], torch.arange(SIZE, dtype=torch.float32) * step)
            assert state["small"].tolist() == [float(step)] * 5
        else:
            whole = torch.arange(8 * 40_000, dtype=torch.float32).reshape(8, -1) + step
            assert torch.equal(state["t"], whole)
        assert state["step"] == step
        return step, cp.last_restore.source, str(cp.last_restore.skipped)


@pytest.mark.parametrize(
    ("kind", "options"),
    mostly_long(
        [
            (kind, {what: number})
            for kind in ("replicated", "hybrid")
            for what in ("copies", "parity")
            for number in (1, 2)
        ],
        [("hybrid", {"parity": 2})],
    ),
    ids=str,
)
def test_a_lost_node_comes_back(
    gang: Gang, tmp_path: Path, shm: Path, kind: str, options: dict[str, Any]
) -> None:
    root = str(tmp_path / "root")
    made = gang.run(save, root, str(shm), kind, 4, options, world=4)
    lost = options.get("copies", 0) + options.get("parity", 0)
    ring = 4 if kind == "replicated" else 2
    expected = min(lost, ring - 1)
    assert made == [[expected] * 4] * 4
    for node in range(min(lost, ring - 1)):
        lose(shm / f"node{node if kind == 'replicated' else 2 * node}")
    found = gang.run(recover, root, str(shm), kind, 4, world=4)
    assert found == [(4, "memory", "()")] * 4


@pytest.mark.parametrize("options", mostly_long([{"copies": 1}, {"parity": 1}], [{"parity": 1}]))
def test_replicas_that_differ_are_not_taken_for_copies(
    gang: Gang, tmp_path: Path, shm: Path, options: dict[str, int]
) -> None:
    """What protects the owner's bytes is then made of the owner's bytes."""
    root = str(tmp_path / "root")
    gang.run(save, root, str(shm), "unequal", 1, options, world=4)
    lose(shm / "node3")
    assert gang.run(recover, root, str(shm), "hybrid", 4, world=4) == [(1, "memory", "()")] * 4
