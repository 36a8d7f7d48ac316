"""A node that is lost is noticed by who waits, and named; one that only lost its agent is not."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import shardwise as sw
from shardwise.parts.memory.trainer.node_watch import MOST_WATCHED, choose_watched
from tests.breadth import mostly_long
from tests.memory.test_snapshots import memory_of, rows, shm
from tests.tools.agents import signal_agents
from tests.tools.gang import Gang

__all__ = ["shm"]
WAIT = 60.0
NOTICED = 3.0  # seconds in which a node that is lost would be noticed


@pytest.mark.parametrize("count", [1, 2, 33, 34, 100, 2048])
def test_each_node_is_watched_by_as_many_as_it_watches(count: int) -> None:
    nodes = [f"n{index}" for index in range(count)]
    watchers: Counter[str] = Counter()
    for own in nodes:
        watched = choose_watched(nodes, own)
        assert len(set(watched)) == len(watched) == min(count - 1, MOST_WATCHED)
        assert own not in watched
        watchers.update(watched)
    assert set(watchers.values()) <= {min(count - 1, MOST_WATCHED)}
    if count == 2048:  # a rack is watched by others than itself
        rack = set(nodes[100:164])
        assert all(not {*choose_watched(nodes, own)} <= rack for own in rack)


def error_of(work: Callable[[], object]) -> tuple[str, str, float]:
    """What `work` raises, its type, and after how many seconds."""
    start = time.monotonic()
    try:
        work()
    except sw.ShardwiseError as error:
        return str(error), type(error).__name__, time.monotonic() - start
    return "", "", time.monotonic() - start


def lose_a_node(root: str, shm: str) -> list[tuple[str, str, float]]:
    """The agent of the second node is stopped; the node takes part in two saves, and is lost."""
    memory = replace(memory_of(shm, 2, slots=1, overlap=True), wait=WAIT)
    cp = sw.Checkpointer(root, save_every=100, memory=memory)
    first = cp.save(1, rows(1))
    assert first is not None
    first.result(WAIT)
    if dist.get_rank() == 1:
        signal_agents(Path(shm) / "node1", signal.SIGSTOP)
    second, third = cp.save(2, rows(2)), cp.save(3, rows(3))
    if dist.get_rank() == 1:
        signal_agents(Path(shm) / "node1", signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
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


def wait_for_a_silent_node(root: str, shm: str, victim: str) -> str:
    """Of the second node, the agent is lost, or is stopped while its rank lives or is killed."""
    cp = sw.Checkpointer(root, save_every=1, memory=memory_of(shm, 2))
    if dist.get_rank() == 1:
        number = signal.SIGKILL if victim == "agent" else signal.SIGSTOP
        signal_agents(Path(shm) / "node1", number)
    dist.barrier()
    handle = cp.save(1, rows(1))
    assert handle is not None
    if dist.get_rank() == 1 and victim == "rank":
        os.kill(os.getpid(), signal.SIGKILL)
    if victim != "agent":
        with pytest.raises(TimeoutError):
            handle.result(NOTICED)
        if dist.get_rank() == 0:
            signal_agents(Path(shm) / "node1", signal.SIGCONT)
    report = handle.result(WAIT)
    cp.close(wait=False)
    return str(report.step)


@pytest.mark.parametrize("victim", mostly_long(["agent", "nobody", "rank"], ["agent", "rank"]))
def test_a_node_whose_agent_or_ranks_go_on_is_not_lost(
    gang: Gang, tmp_path: Path, shm: Path, victim: str
) -> None:
    root = tmp_path / "root"
    outcomes = gang.run_outcomes(
        wait_for_a_silent_node, str(root), str(shm), victim, world=2, timeout=90.0
    )
    assert outcomes[0].kind == "value", outcomes[0].report
    assert outcomes[1].kind == ("died" if victim == "rank" else "value"), outcomes[1].report
    sw.open(root / "step-00000001").verify()
