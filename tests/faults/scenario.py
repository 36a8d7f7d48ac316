"""The state that fault tests save on ranks and alone, and checks of the result."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.kernel.manifest.manifest import decode_manifest, names_of_checkpoint
from tests.tools.faulty_store import Fault, FaultyStore
from tests.tools.waiting import wait_until

ROWS, COLUMNS = 12, 64
State = dict[str, object]


def values_of(seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a step; no other step has the same values."""
    rows = torch.arange(ROWS * COLUMNS, dtype=torch.float64).reshape(ROWS, COLUMNS)
    return {"sharded": rows + 10_000 * seed, "replica": torch.full((COLUMNS,), float(seed))}


def state_of(seed: int, rank: int = 0, world: int = 1) -> State:
    """Return a rank's part of these values."""
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


def faulty(root: Path, fault: Fault) -> FaultyStore:
    """Return the root as a store with this fault."""
    return FaultyStore(root, fault)


def save_step(root: Path, step: int, seed: int, victim: int, at: int | None) -> list[str]:
    """Restore, save a step on a rank of a process group, keep only it, and return the operations.

    The victim dies at its operation with index `at`.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = Fault(at if rank == victim else None)
    with sw.Checkpointer(faulty(root, mine), keep=sw.Keep(last=1), memory=None) as checkpointer:
        found = checkpointer.restore(state_of(0, rank, world), only=["replica"])
        if found is not None and rank == 0:
            # A thread writes the report of a restore. After it, the operations have one order.
            wait_until(lambda: any(map(is_report, mine.operations)))
        checkpointer.save(step, state_of(seed, rank, world))
    return mine.operations


def is_report(operation: str) -> bool:
    return operation.startswith("published restore-")


def restored(root: Path) -> tuple[int | None, State]:
    """Restore the newest intact step in this process alone; return the step and the state."""
    state = state_of(0)
    with sw.Checkpointer(root, memory=None) as checkpointer:
        return checkpointer.restore(state), state


def assert_values(state: State, seed: int) -> None:
    """Check that the state has the values of a seed, byte for byte."""
    expected = values_of(seed)
    shards, replica = state["sharded"], state["replica"]
    assert isinstance(shards, sw.Shards)
    assert isinstance(replica, torch.Tensor)
    (fragment,) = shards.fragments
    assert fragment.data.numpy().tobytes() == expected["sharded"].numpy().tobytes()
    assert replica.numpy().tobytes() == expected["replica"].numpy().tobytes()
    assert state["seed"] == seed


def leftovers(root: Path) -> list[str]:
    """Return the files below a root that belong to no committed checkpoint."""
    found = []
    for step in sorted(root.glob("step-*")):
        names = {path.name for path in step.iterdir()}
        known = {"manifest.json"}
        if "manifest.json" in names:
            manifest = decode_manifest((step / "manifest.json").read_bytes())
            known |= names_of_checkpoint(manifest)
        found += [f"{step.name}/{name}" for name in sorted(names - known)]
        found += [f"{step.name}/ is empty"] * (not names)
    return found
