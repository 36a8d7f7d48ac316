"""A node that is lost is noticed by who waits, and named; one that only lost its agent is not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

import shardwise as sw
from shardwise.memory.trainer import node_watch
from shardwise.memory.trainer.copying import CopyProgress
from shardwise.memory.trainer.staging import SnapshotPart, Staging
from tests.memory.test_snapshots import memory_of, rows, shm
from tests.tools.agents import signal_agents
from tests.tools.gang import Gang

__all__ = ["shm"]
WAIT = 60.0


def error_of(work: Callable[[], object]) -> tuple[str, str, float]:
    """What `work` raises, its type, and after how many seconds."""
    start = time.monotonic()
    try:
        work()
    except sw.ShardwiseError as error:
        return str(error), type(error).__name__, time.monotonic() - start
    return "", "", time.monotonic() - start


def lose_a_node(root: str, shm: str) -> list[tuple[str, str, float]]:
    """The second node takes part in two saves but stages nothing, and is lost then."""

    def stage_nothing(_: Staging, part: SnapshotPart, copying: CopyProgress) -> None:
        if part.planned.sample is not None:
            part.planned.sample.cancel()
        copying.finish("")

    memory = replace(memory_of(shm, 2, slots=1, overlap=True), wait=WAIT)
    cp = sw.Checkpointer(root, save_every=100, memory=memory)
    first = cp.save(1, rows(1))
    assert first is not None
    first.result(WAIT)
    if dist.get_rank() == 1:
        with patch.object(Staging, "_stage", stage_nothing):
            cp.save(2, rows(2))
            cp.save(3, rows(3))
            signal_agents(Path(shm) / "node1", signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
    second, third = cp.save(2, rows(2)), cp.save(3, rows(3))
    assert second is not None
    assert third is not None
    return [error_of(third.staged), error_of(second.result)]


def test_a_save_that_waits_for_a_slot_names_the_node_that_is_lost(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    outcomes = gang.run_outcomes(
        lose_a_node, str(tmp_path / "root"), str(shm), world=2, timeout=90.0
    )
    assert outcomes[1].signal == signal.SIGKILL
    assert outcomes[0].kind == "value", outcomes[0].report
    for said, _, seconds in outcomes[0].value:
        assert "rank 1: its node" in said, said
        assert "is lost: its first rank does not answer (Connection refused)" in said
        assert "slots" not in said
        assert seconds < WAIT / 4  # on a machine that is idle: two seconds
    assert outcomes[0].value[1][1] == "LostRankError"


def watch(root: str, shm: str) -> list[str]:
    """A node without an agent, one that is suspended, and one whose ranks have ended."""
    memory = memory_of(shm, 2)
    cp = sw.Checkpointer(root, save_every=100, memory=memory)
    assert cp._saver is not None
    nodes = cp._saver._staging.watch
    assert nodes is not None
    other, said = Path(shm) / f"node{1 - dist.get_rank()}", []
    dist.barrier()
    said.append(error_of(nodes.check)[0])
    # This process did not run until the time had passed: the answers count nevertheless.
    with patch.multiple(node_watch, FIRST_TIMEOUT=0.0, SECOND_TIMEOUT=0.0):
        said.append(error_of(nodes.check)[0])
    dist.barrier()
    signal_agents(other, signal.SIGSTOP)
    said.append(error_of(nodes.check)[0])
    signal_agents(other, signal.SIGCONT)
    dist.barrier()
    nodes.close()
    dist.barrier()
    said.append(error_of(nodes.check)[0])
    dist.barrier()
    cp.close(wait=False)
    return said


def test_a_node_whose_agent_or_ranks_go_on_is_not_lost(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    assert gang.run(watch, str(tmp_path / "root"), str(shm), world=2) == [["", "", "", ""]] * 2
