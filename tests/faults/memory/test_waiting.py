"""Whoever waits for an agent that is stopped, or for a rank that fails, is told so."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import shardwise as sw
from shardwise.memory.node.notes import Done
from shardwise.memory.snapshots.handle import Stages
from shardwise.testing import Gang
from tests.faults.memory.scenario import Cluster, begin, signal_agents, steps_in

PATIENCE = 1.0
SECONDS = 12.0
STOPPED = re.compile(
    r"step 1: \w+: the agent of node [\w-]+ \(process \d+ of .*\) has not answered"
)


def timed(operation: Callable[[], object]) -> tuple[str, float]:
    """What it says when it fails, and after how long."""
    started = time.monotonic()
    try:
        operation()
    except sw.ShardwiseError as error:
        return str(error), time.monotonic() - started
    return "", time.monotonic() - started


def wait_for_stopped(cluster: Cluster, stopped: int) -> list[tuple[str, float]]:
    """All agents, or that of a node, are stopped: what is said by a handle, and by closing; and
    when they go on."""
    told = []
    with cluster.open() as cp:
        _, state, _ = begin(cp, cluster.columns, "rows")
        if dist.get_rank() == 0:
            signal_agents(cluster.directory(stopped), signal.SIGSTOP)
        dist.barrier()
        handle = cp.save(1, state)
        assert handle is not None
        told.append(timed(handle.result))
        told.append(timed(cp.close))
        dist.barrier()
        if dist.get_rank() == 0:
            signal_agents(cluster.directory(stopped), signal.SIGCONT)
        dist.barrier()
        told.append(timed(handle.result))
    return told


def test_an_agent_that_is_stopped_is_not_waited_for_forever(
    gang: Gang, root: Path, shm: Path
) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=2, every=1, options={"wait": PATIENCE})
    for result, closing, at_last in gang.run(wait_for_stopped, cluster, 0, world=2):
        assert STOPPED.match(result[0]), result
        assert "has not answered" in closing[0], closing
        assert max(result[1], closing[1]) < SECONDS
        assert at_last[0] == ""
    assert steps_in(root) == [1]


def close_though_one_fails(cluster: Cluster) -> tuple[str, str, float]:
    """One rank alone finds that something has failed: how closing ends, and after how long."""
    cp = cluster.open()
    _, state, _ = begin(cp, cluster.columns, "rows")
    cp.save(1, state)
    wait_all = Stages.wait_all

    def fail(stages: Stages, timeout: float | None) -> Done:
        raise sw.StoreError("its disk is full")

    if dist.get_rank() == 1:
        Stages.wait_all = fail  # type: ignore[method-assign]
    started = time.monotonic()
    try:
        with pytest.raises(sw.ShardwiseError) as caught:
            cp.close()
    finally:
        Stages.wait_all = wait_all  # type: ignore[method-assign]
    return type(caught.value).__name__, str(caught.value), time.monotonic() - started


def test_closing_fails_on_all_ranks_if_it_does_on_one(gang: Gang, root: Path, shm: Path) -> None:
    cluster = Cluster(root=root, shm=shm, every=1)
    (first, said, _), (second, _, _), *_ = told = gang.run(close_though_one_fails, cluster, world=2)
    assert (first, second) == ("RankError", "StoreError")
    assert "finishing what was begun" in said
    assert "rank 1: StoreError: its disk is full" in said
    assert max(took for *_, took in told) < SECONDS
