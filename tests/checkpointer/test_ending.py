"""What is saved when a training ends."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.memory.test_snapshots import memory_of, reference, rows, shm
from tests.tools.gang import Gang

__all__ = ["shm"]


def train(
    root: Path, steps: int, memory: sw.Memory | None = None, **options: Any
) -> torch.nn.Linear:
    """Save after each step, of which every twentieth is due; the model as it is at the end."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer, "done": 0}
    with sw.Checkpointer(root, save_every=20, memory=memory, **options) as checkpointer:
        for step in range(1, steps + 1):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
            state["done"] = step
            checkpointer.save(step, state, metrics={"loss": 1 / step})
    return model


@pytest.mark.parametrize("snapshot_every", [None, 0, 1])
def test_the_last_step_is_saved_at_the_end(
    tmp_path: Path, shm: Path, snapshot_every: int | None
) -> None:
    """Straight to storage, in the background, or by persisting its snapshot."""
    memory = None
    if snapshot_every is not None:
        memory = sw.Memory(dir=str(shm), snapshot_every=snapshot_every, when_full="wait", wait=20.0)
    keep = sw.Keep(last=5, best=sw.Best("loss"))
    model = train(tmp_path / "root", 30, memory, keep=keep)
    with sw.Checkpointer(tmp_path / "root", memory=None) as checkpointer:
        assert checkpointer.steps() == [20, 30]
        target = {"model": torch.nn.Linear(4, 4), "done": 0}
        assert checkpointer.restore(target) == 30
    assert torch.equal(target["model"].weight, model.weight)  # type: ignore[union-attr]
    assert target["done"] == 30
    assert sw.open(tmp_path / "root").metrics == {"loss": 1 / 30}
    assert not list(shm.glob("**/free/*"))  # the memory is given back


def test_the_snapshot_that_is_persisted_is_of_its_step(tmp_path: Path, shm: Path) -> None:
    """Whatever has become of the state since."""
    state = {"t": torch.full((1000,), 3.0)}
    memory = sw.Memory(dir=str(shm), when_full="wait", wait=20.0)
    keep = sw.Keep(last=1)
    with sw.Checkpointer(tmp_path / "r", save_every=2, memory=memory, keep=keep) as checkpointer:
        for step in (2, 3):
            assert checkpointer.save(step, state) is not None
        state["t"].fill_(-1)
    target = {"t": torch.zeros(1000)}
    assert sw.load(tmp_path / "r", target).step == 3
    assert target["t"].tolist() == [3.0] * 1000
    assert checkpointer.steps() == [3]


def test_nothing_more_is_saved_where_that_would_be_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "asked", 30, save_at_end=False)
    train(tmp_path / "due", 40)
    with suppress(KeyError), sw.Checkpointer(tmp_path / "f", save_every=9, memory=None) as cp:
        cp.save(1, {"t": 1})
        raise KeyError
    state = {"t": 1}
    with sw.Checkpointer(tmp_path / "restored", save_every=9, memory=None) as cp:
        cp.save(9, state)
        cp.save(10, state)
        cp.restore(state)
    roots = ("asked", "due", "f", "restored")
    steps = [sw.Checkpointer(tmp_path / root, memory=None).steps() for root in roots]
    assert steps == [[20], [20, 40], [], [9]]

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    caplog.set_level(logging.WARNING, "shardwise")
    with sw.Checkpointer(tmp_path / "stepped", save_every=9, memory=None) as cp:
        cp.save(1, {"model": model, "optimizer": optimizer})
        optimizer.step()
    assert cp.steps() == []
    assert "step 1 is not saved at the end: an optimizer has stepped" in caplog.text
    caplog.clear()
    optimizer.step()
    assert not optimizer._optimizer_step_post_hooks


def test_force_saves_a_step_that_is_not_due(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path, save_every=10, memory=None) as checkpointer:
        assert checkpointer.save(3, {"t": 3}) is None
        assert checkpointer.save(4, {"t": 4}, force=True) is not None
    assert checkpointer.steps() == [4]


def end(root: str) -> list[int]:
    state = {"t": torch.full((1000,), 5.0)}
    with sw.Checkpointer(root, save_every=3, memory=None) as checkpointer:
        for step in (3, 4, 5):
            checkpointer.save(step, state)
    return checkpointer.steps()


def test_all_ranks_save_the_last_step(gang: Gang, tmp_path: Path) -> None:
    assert gang.run(end, str(tmp_path), world=2) == [[3, 5]] * 2
    assert sw.open(tmp_path).world_size == 2


def end_with_snapshots(root: str, shm: str) -> list[int]:
    memory = memory_of(shm, 2, copies=1)
    with sw.Checkpointer(root, save_every=100, memory=memory) as checkpointer:
        for step in (1, 2, 3):
            assert checkpointer.save(step, rows(step)) is not None
    return checkpointer.steps()


def test_the_nodes_persist_the_last_snapshot_together(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    root = tmp_path / "root"
    assert gang.run(end_with_snapshots, str(root), str(shm), world=2) == [[3]] * 2
    found = sw.open(root)
    assert torch.equal(found["t"][...], reference(3))
    found.verify()
    assert not list(shm.glob("**/free/*"))
