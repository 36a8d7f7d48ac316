"""Trainers that are killed or stopped: what was committed before is had again, to the byte."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.breadth import mostly_long
from tests.faults.memory.deaths import When, die, die_at_bucket, die_at_note
from tests.faults.memory.scenario import (
    Act,
    Cluster,
    Logged,
    assert_tidy,
    begin,
    go_on,
    steps_in,
    train,
)
from tests.tools.agents import end_agents, until
from tests.tools.gang import Gang

BUCKETS = 3
LARGE = BUCKETS * (8 << 20) // (24 * 8)  # columns of which a rank's rows take so many buckets
SECONDS = 40.0
NOTES: list[tuple[int, str, When, bool]] = [
    (0, r"rank-00000\.json", "before", False),
    (0, r"rank-00000\.json", "within", False),
    (0, r"rank-00000\.json", "after", False),
    (0, "pending", "within", False),
    (0, "pending", "after", False),
    (1, r"rank-00001\.json", "within", False),
    (1, r"rank-00001\.json", "after", False),
]


def killed(gang: Gang, cluster: Cluster, step: int, victims: tuple[int, ...], fault: Act) -> None:
    """Run until a step at which these ranks die, and the others notice."""
    started = time.monotonic()
    outcomes = gang.run_outcomes(
        go_on, cluster, step + 1, world=2, fault=fault, at=step, victims=victims,
        timeout=90.0, group_timeout=60.0,
    )  # fmt: skip
    for outcome in outcomes:
        assert outcome.kind == ("died" if outcome.rank in victims else "error"), outcome.report
    assert time.monotonic() - started < SECONDS


@pytest.mark.parametrize(
    "buckets",
    [[1], pytest.param([*range(BUCKETS)], marks=pytest.mark.long)],
    ids=["some", "all"],
)
def test_killed_at_each_bucket_the_older_step_is_had(
    gang: Gang, root: Path, shm: Path, buckets: list[int]
) -> None:
    cluster = Cluster(root=root, shm=shm, every=2, columns=LARGE)
    gang.run(go_on, cluster, 2, world=2)
    for bucket in buckets:
        killed(gang, cluster, 3, (1,), partial(die_at_bucket, bucket))
        assert gang.run(go_on, cluster, 2, world=2)[0].step == 2
        assert steps_in(root) == [2]
        assert_tidy(shm, 2)
    killed(gang, cluster, 3, (0, 1), partial(die_at_bucket, BUCKETS - 1))
    went = gang.run(go_on, cluster, 4, world=2, by="columns")
    assert {(each.step, each.source) for each in went} == {(2, "memory")}
    assert steps_in(root) == [2, 4]
    assert_tidy(shm, 2)


def test_killed_in_a_durable_copy_the_older_step_is_rescued_at_once(
    gang: Gang, root: Path, shm: Path
) -> None:
    """The agent that writes what was copied does not wait for the rest, which never comes."""
    cluster = Cluster(root=root, shm=shm, every=4, columns=LARGE, options={"wait": 600.0})
    killed(gang, cluster, 4, (0, 1), partial(die_at_bucket, 1))
    until(lambda: steps_in(root) == [3], 30.0)
    assert gang.run(go_on, cluster, 4, world=2)[0].step == 3
    assert_tidy(shm, 2)


@pytest.mark.parametrize(
    "notes", [NOTES[1::3], pytest.param(NOTES, marks=pytest.mark.long)], ids=["some", "all"]
)
def test_killed_at_each_note_a_step_is_had_whole_or_not_at_all(
    gang: Gang, root: Path, shm: Path, notes: list[tuple[int, str, When, bool]]
) -> None:
    cluster = Cluster(root=root, shm=shm, every=1)
    last = 2
    gang.run(go_on, cluster, last, world=2)
    for victim, pattern, when, whole in notes:
        killed(gang, cluster, last + 1, (victim,), partial(die_at_note, pattern, when))
        last += whole
        (went, _) = gang.run(go_on, cluster, last, world=2)
        assert (went.step, went.source) == (last, "memory"), (victim, pattern, when)
        assert whole or f"({last + 1}, 'memory: not committed')" in went.skipped
        assert_tidy(shm, 2)
        until(lambda: steps_in(root)[-1] == last)  # noqa: B023


def test_killed_while_idle_together_with_the_agent(gang: Gang, root: Path, shm: Path) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=2)
    gang.run(go_on, cluster, 3, world=2)
    outcomes = gang.run_outcomes(go_on, cluster, 4, world=2, fault=die, at=4, victims=(0, 1))
    assert [outcome.signal for outcome in outcomes] == [signal.SIGKILL] * 2
    end_agents(shm)
    went = gang.run(go_on, cluster, 4, world=2, by="columns")
    assert {(each.step, each.source) for each in went} == {(3, "memory")}
    assert_tidy(shm, 2)


def stop_in_mid_copy(seconds: float) -> None:
    """In the next copy, be stopped for so long."""
    resume = f"sleep {seconds}; kill -CONT {os.getpid()}"

    def stopping(*args: object) -> None:
        filling.stop()
        subprocess.Popen(["sh", "-c", resume], start_new_session=True)
        # To this thread: the other threads could take the signal later than the copy ends.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        fill(*args)

    filling = mock.patch("shardwise.kernel.engine.write_file.FileSource.fill", stopping)
    filling.start()
    fill = filling.temp_original


def save_while_one_is_stopped(
    cluster: Cluster, seconds: float
) -> tuple[float, list[str], list[str]]:
    """Rank 1 is stopped in the copy of step 2: after how long, and how, that is heard of; and what
    is logged of it."""
    cp = cluster.open()
    values, state, _ = begin(cp, cluster.columns, "rows")
    said: list[str] = []
    took = 0.0
    logged = Logged()
    for step in (1, 2, 3):
        train(values, step)
        state["step"] = step
        if step == 2 and dist.get_rank() == 1:
            stop_in_mid_copy(seconds)
        started = time.monotonic()
        try:
            handle = cp.save(step, state)
            assert handle is not None
            handle.committed(20.0)
        except sw.StoreError as error:
            said.append(str(error))
        took = max(took, time.monotonic() - started)
        dist.barrier()
    handle = cp.save(4, state)
    assert handle is not None
    handle.result(20.0)
    cp.close(wait=False)
    return took, said, logged.end()


@pytest.mark.parametrize(
    ("seconds", "patience"), mostly_long([(1.0, 8.0), (5.0, 1.0)], [(5.0, 1.0)])
)
def test_a_trainer_that_is_stopped_is_waited_for_within_bounds(
    gang: Gang, root: Path, shm: Path, seconds: float, patience: float
) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=2, options={"wait": patience})
    told = gang.run(save_while_one_is_stopped, cluster, seconds, world=2)
    for rank, (took, said, logged) in enumerate(told):
        assert took < 30.0
        assert len(said) == (0 if seconds < patience else 1), (said, took)
        assert all("step 2: the stage 'commit' of " in each for each in said)
        assert len(logged) == (len(said) if rank == 0 else 0), logged
        assert all("training continues: step 2: the stage 'commit' of " in each for each in logged)
    assert_tidy(shm, 2)


LEAVE = """
import sys, torch, shardwise as sw
root, shm, how = sys.argv[1:]
t = torch.arange(1 << 20)
cp = sw.Checkpointer(root, memory=sw.Memory(dir=shm, overlap=True))
cp.save(1, {"t": t})
if how == "close":
    cp.close()
elif how == "error":
    with cp:
        raise RuntimeError("this ends the training")
"""


@pytest.mark.parametrize("how", mostly_long(["leave", "close", "error"], ["leave"]))
def test_a_process_that_ends_right_after_a_save_has_saved(root: Path, shm: Path, how: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LEAVE, root, shm, how], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == (how == "error"), ended.stderr
    assert ended.stderr.count("Error") == (how == "error"), ended.stderr
    until(lambda: steps_in(root) == [1], 0.0 if how == "close" else 10.0)
    target = {"t": torch.zeros(1 << 20, dtype=torch.int64)}
    with sw.Checkpointer(root, memory=sw.Memory(dir=str(shm))) as cp:
        assert cp.restore(target) == 1
    assert torch.equal(target["t"], torch.arange(1 << 20))
