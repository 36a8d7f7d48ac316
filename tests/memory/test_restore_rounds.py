"""A restore takes few rounds, and each of them raises the errors of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.ports.read_strategy import Round
from tests.tools.agents import end_agents
from tests.tools.gang import Gang

ROUNDS = [
    "listing steps",
    "asking what was staged",
    "listing snapshots",
    "opening a checkpoint",
    "checking a checkpoint",
    "matching names",
    "finding the ranks of a node",
    "loading",
    "restoring",
    "discarding newer snapshots",
    "agreeing on a save",
    "allocating slots",
]


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    """The home of the node, whose agent is ended afterwards."""
    yield tmp_path / "shm"
    end_agents(tmp_path / "shm")


def restore(root: str, shm: str) -> tuple[int | None, list[str]]:
    """Save two steps to memory, and restore; return the step, and the rounds of the restore."""
    state = {"t": torch.zeros(8)}
    begun: list[str] = []
    begin = Round.__enter__

    def note(self: Round) -> Round:
        begun.append(self._operation)
        return begin(self)

    with sw.Checkpointer(root, memory=sw.Memory(dir=shm)) as checkpointer:
        for step in (1, 2):
            handle = checkpointer.save(step, state)
            assert handle is not None
            handle.result()
        with patch.object(Round, "__enter__", note):
            return checkpointer.restore(state), begun


def test_a_restore_from_memory_takes_these_rounds(gang: Gang, tmp_path: Path, shm: Path) -> None:
    found = gang.run(restore, str(tmp_path / "root"), str(shm), world=2)
    assert found == [(2, ROUNDS)] * 2


def restore_different_steps(root: str, shm: str) -> tuple[str, float]:
    """Restore step 1 on rank 0, and step 2 on rank 1; return the error, and the state."""
    state = {"t": torch.ones(8)}
    with sw.Checkpointer(root, memory=sw.Memory(dir=shm)) as checkpointer:
        for step in (1, 2):
            handle = checkpointer.save(step, state)
            assert handle is not None
            handle.result()
        state["t"].zero_()
        try:
            checkpointer.restore(state, step=1 + dist.get_rank())
        except sw.MismatchError as error:
            return str(error), float(state["t"].sum())
    return "", float(state["t"].sum())


def test_different_steps_are_refused_on_all_ranks(gang: Gang, tmp_path: Path, shm: Path) -> None:
    for error, total in gang.run(
        restore_different_steps, str(tmp_path / "root"), str(shm), world=2
    ):
        assert "rank 0: step=1" in error
        assert "rank 1: step=2" in error
        assert total == 0


def test_a_root_that_cannot_be_listed_at_the_end_costs_the_restore_only(
    tmp_path: Path, shm: Path
) -> None:
    """The run has a new epoch by then, in which it goes on to save."""
    state = {"t": torch.ones(8)}
    with sw.Checkpointer(tmp_path / "root", memory=sw.Memory(dir=str(shm))) as checkpointer:
        first = checkpointer.save(1, state)
        assert first is not None
        first.result()
        name = "shardwise.checkpointer.restoring.Restoring.finds_later_step"
        with (
            patch(name, side_effect=sw.StoreError("the listing failed")),
            pytest.raises(sw.StoreError, match=r"newer steps in .*: the listing failed; try again"),
        ):
            checkpointer.restore(state)
        second = checkpointer.save(2, state)
        assert second is not None
        second.result()
    assert sw.open(tmp_path / "root").step == 2
