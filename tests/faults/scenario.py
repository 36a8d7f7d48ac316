"""What the fault tests save, on ranks and alone, and how they look at what became of it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.store import LocalStore, Store
from shardwise.testing.faulty import Fault, FaultyStore

ROWS, COLUMNS = 12, 64
State = dict[str, object]


def values_of(seed: int) -> dict[str, torch.Tensor]:
    """The tensors of a step, which no other step has."""
    rows = torch.arange(ROWS * COLUMNS, dtype=torch.float64).reshape(ROWS, COLUMNS)
    return {"sharded": rows + 10_000 * seed, "replica": torch.full((COLUMNS,), float(seed))}


def state_of(seed: int, rank: int = 0, world: int = 1) -> State:
    """What a rank holds of them."""
    values = values_of(seed)
    count = ROWS // world
    box = sw.Box((rank * count, 0), (count, COLUMNS))
    part = values["sharded"][box.slices()].clone()
    return {
        "sharded": sw.Shards((ROWS, COLUMNS), torch.float64, [(box, part)]),
        "replica": values["replica"],
        "seed": seed,
    }


def step_directory(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def faulty(root: Path, fault: Fault) -> Store:
    """The root as a rank with this fault sees it."""
    return FaultyStore(LocalStore(root), fault)


def save_step(root: Path, step: int, seed: int, victim: int, at: int | None) -> list[str]:
    """On a rank of a process group: save a step, and keep only that; the operations it took.

    The victim dies at its operation number `at`.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = Fault(at if rank == victim else None)
    with sw.Checkpointer(faulty(root, mine), keep=sw.Keep(last=1), memory=None) as checkpointer:
        checkpointer.save(step, state_of(seed, rank, world))
    return mine.seen


def restored(root: Path) -> tuple[int | None, State]:
    """The newest step that is intact, as this process alone restores it."""
    state = state_of(0)
    with sw.Checkpointer(root, memory=None) as checkpointer:
        return checkpointer.restore(state), state


def assert_values(state: State, seed: int) -> None:
    """Byte for byte those of a seed."""
    expected = values_of(seed)
    shards, replica = state["sharded"], state["replica"]
    assert isinstance(shards, sw.Shards)
    assert isinstance(replica, torch.Tensor)
    (fragment,) = shards.fragments
    assert fragment.data.numpy().tobytes() == expected["sharded"].numpy().tobytes()
    assert replica.numpy().tobytes() == expected["replica"].numpy().tobytes()
    assert state["seed"] == seed


def leftovers(root: Path) -> list[str]:
    """Files below a root that belong to no committed checkpoint."""
    found = []
    for step in sorted(root.iterdir()):
        names = {path.name for path in step.iterdir()}
        known = {"manifest.json"}
        if "manifest.json" in names:
            manifest = json.loads((step / "manifest.json").read_bytes())
            known |= {file["name"] for file in manifest["files"]}
        found += [f"{step.name}/{name}" for name in sorted(names - known)]
        found += [f"{step.name}/ is empty"] * (not names)
    return found
