"""Whoever waits for an agent that is stopped, or for a rank that fails, is told so."""

from __future__ import annotations

import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.breadth import mostly_long
from tests.faults.memory.scenario import SLOTS, Cluster, Logged, assert_tidy, begin, steps_in, train
from tests.tools.agents import signal_agents, until
from tests.tools.gang import Gang

PATIENCE = 1.0
SECONDS = 30.0
STOPPED = re.compile(
    r"step 1: the stage '\w+' of .* failed: "
    r"the agent of node [\w-]+ \(process \d+ of .*\) has not answered"
)
LEADER_STOPPED = re.compile(
    r"step 1: the stage '\w+' of .* failed: "
    r"the agent of node [\w-]+ has failed for \d+ s to work on this save: "
    r"the node that leads the save does not answer"
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


@pytest.mark.long
def test_an_agent_that_is_stopped_is_not_waited_for_forever(
    gang: Gang, root: Path, shm: Path
) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=2, every=1, options={"wait": PATIENCE})
    told = gang.run(wait_for_stopped, cluster, 0, world=2)
    for expected, (result, closing, at_last) in zip((STOPPED, LEADER_STOPPED), told, strict=True):
        assert expected.match(result[0]), result
        assert re.search("has not answered|does not answer", closing[0]), closing
        assert max(result[1], closing[1]) < SECONDS
        assert at_last[0] == ""
    assert steps_in(root) == [1]


def end_beside_a_stopped_agent(
    cluster: Cluster, stopped: int, seconds: float | None
) -> tuple[str, float, bool]:
    """The agent of a node is stopped when the training ends, and goes on after some seconds, or
    after the end: what this says, after how long, and whether the last save counts as durable."""
    cp = cluster.open(save_at_end=True)
    values, state, _ = begin(cp, cluster.columns, "rows")
    for step in (1, 2):
        train(values, step)
        state["step"] = step
        handle = cp.save(step, state)
    assert handle is not None
    handle.protected(SECONDS)
    dist.barrier()
    if dist.get_rank() == 0:
        signal_agents(cluster.directory(stopped), signal.SIGSTOP)
        go_on = (cluster.directory(stopped), signal.SIGCONT)
        if seconds is not None:
            threading.Timer(seconds, signal_agents, go_on).start()
    dist.barrier()
    said, took = timed(cp.close)
    dist.barrier()
    signal_agents(cluster.directory(stopped), signal.SIGCONT)
    return said, took, handle.durable


@pytest.mark.parametrize("stopped", mostly_long([1, 0], [1]))
def test_the_end_of_a_training_waits_for_a_silent_agent_as_a_save_does(
    gang: Gang, root: Path, shm: Path, stopped: int
) -> None:
    """Only the rescue after a lost trainer waits less, 5 s."""
    cluster = Cluster(root=root, shm=shm, nodes=2, options={"wait": 60.0})
    for said, took, durable in gang.run(end_beside_a_stopped_agent, cluster, stopped, 9.0, world=2):
        assert said == ""
        assert took > 6.0
        assert durable
    assert steps_in(root) == [2]


def save_again_at_the_end(cluster: Cluster) -> int | None:
    with cluster.open() as cp:
        _, state, went = begin(cp, cluster.columns, "rows")
        assert cp.save(went.step or 0, state, force=True) is not None
    return went.step


@pytest.mark.long
def test_an_end_that_fails_says_how_to_persist_the_last_snapshot(
    gang: Gang, root: Path, shm: Path
) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=2, options={"wait": 2.0})
    (said, _, _), (other, *_) = gang.run(end_beside_a_stopped_agent, cluster, 1, None, world=2)
    assert "start the training again, and after restore(), save(2, state, force=True)" in said
    assert other
    assert steps_in(root) == []
    assert gang.run(save_again_at_the_end, cluster, world=2) == [2, 2]
    assert steps_in(root) == [2]


def train_past_a_stopped_agent(cluster: Cluster) -> tuple[list[str], list[str]]:
    """What a training raises, and logs, whose agent is stopped for longer than slots last."""
    cp = cluster.open()
    values, state, _ = begin(cp, cluster.columns, "rows")
    raised, logged = [], Logged()
    for step in range(1, 11):
        train(values, step)
        state["step"] = step
        if step in (2, 9) and dist.get_rank() == 0:
            signal_agents(cluster.shm, signal.SIGSTOP if step == 2 else signal.SIGCONT)
        if step == 10:  # the agent has caught up
            slot = f"*/*/runs/*/free/rank-{dist.get_rank():05}-*"
            until(lambda: list(cluster.shm.glob(slot)))  # noqa: B023
        dist.barrier()
        try:
            # The slots of what is to be persisted are never freed by age, so that all are taken.
            handle = cp.save(step, state, force=step <= SLOTS)
        except sw.ShardwiseError as error:
            raised.append(f"{step}: {error}")
        if step == 1 and handle is not None:  # an agent that is stopped while it works fails
            handle.result(SECONDS)
    assert handle is not None
    handle.result(20.0)
    assert begin(cp, cluster.columns, "rows")[2].step == 10
    cp.close(wait=False)
    return raised, logged.end()


def test_a_training_outlives_an_agent_that_is_stopped(gang: Gang, root: Path, shm: Path) -> None:
    """What finds no slot is left out, which is warned of; but not what is to be persisted."""
    cluster = Cluster(root=root, shm=shm, every=7, options={"wait": 1.0})
    for raised, logged in gang.run(train_past_a_stopped_agent, cluster, world=2):
        assert [each[:3] for each in raised] == ["8: "], raised
        assert "staging step 7: no slot became free" in raised[0]
        left_out = [each for each in logged if "is skipped: no slot became free" in each]
        steps = {each[:25] for each in left_out}
        assert steps >= {f"the snapshot of step {n} is" for n in (4, 5, 6)}
    assert_tidy(shm, 2)


def time_steps(cluster: Cluster, hit: tuple[int, ...], number: int) -> list[float]:
    """How long each step takes, of which agents of some nodes get a signal before the third."""
    cp = cluster.open()
    values, state, _ = begin(cp, cluster.columns, "rows")
    seconds = []
    for step in range(1, 21):
        dist.barrier()
        if step == 3 and dist.get_rank() == 0:
            for node in hit:
                signal_agents(cluster.directory(node), signal.Signals(number))
        dist.barrier()
        started = time.monotonic()
        train(values, step)
        state["step"] = step
        cp.save(step, state)
        seconds.append(time.monotonic() - started)
        time.sleep(0.05)
    dist.barrier()
    if dist.get_rank() == 0:
        for node in hit:
            signal_agents(cluster.directory(node), signal.SIGCONT)
    dist.barrier()
    cp.close(wait=False)
    return seconds


@pytest.mark.parametrize(
    ("hit", "number"),
    mostly_long(
        [
            (hit, number)
            for number in (signal.SIGSTOP, signal.SIGKILL)
            for hit in ((1,), (0,), (1, 2))
        ],
        [((1, 2), signal.SIGSTOP), ((0,), signal.SIGKILL)],
    ),
    ids=str,
)
def test_no_step_waits_for_agents_that_are_slow_or_dead(
    gang: Gang, root: Path, shm: Path, hit: tuple[int, ...], number: int
) -> None:
    """Each node asks one other, so that most requests pass through the agents that are hit."""
    options = {"copies": 1, "wait": 60.0, "when_full": "skip"}
    cluster = Cluster(root=root, shm=shm, nodes=4, fan_out=1, options=options)
    for seconds in gang.run(time_steps, cluster, hit, int(number), world=4):
        # The first step starts agents and allocates memory. After a death, a step waits until
        # another agent has started, which takes seconds on a busy machine; but not for lost ones.
        assert max(seconds[2:]) < (20.0 if number == signal.SIGKILL else 1.0), seconds


def wait_for_what_cannot_be_staged(cluster: Cluster, failing: int) -> list[str]:
    """A rank has no room for its part of step 1: what every wait says, and the next saves."""
    cp = cluster.open()
    _, state, _ = begin(cp, cluster.columns, "rows")
    cp.prepare(state)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == failing:  # its slots cannot grow
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    handle = cp.save(1, {**state, "more": torch.zeros(1 << 20)})
    assert handle is not None
    said = []
    for wait in (handle.result, handle.committed, handle.protected):
        with pytest.raises(sw.StoreError) as caught:
            wait(SECONDS)
        said.append(str(caught.value))
    assert handle.done()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(sw.ShardwiseError, match=r"staging step 1: .*make the file system larger"):
        cp.save(2, state)
    with suppress(sw.ShardwiseError):  # ranks that staged theirs are told of the commit, too
        cp.save(2, state)
    handle = cp.save(3, state)
    assert handle is not None
    handle.result(SECONDS)
    cp.close()
    return said


@pytest.mark.parametrize("failing", mostly_long([0, 1], [0]))
def test_every_wait_ends_with_what_a_rank_could_not_stage(
    gang: Gang, root: Path, shm: Path, failing: int
) -> None:
    """Rank 0 leads: without its pending manifest, no agent would end the save."""
    cluster = Cluster(root=root, shm=shm, nodes=2, every=1)
    for said in gang.run(wait_for_what_cannot_be_staged, cluster, failing, world=2):
        assert all("staging step 1: " in each for each in said), said
        assert all("make the file system larger" in each for each in said), said
    assert set(steps_in(root)) in ({3}, {2, 3})


def close_though_one_fails(root: Path, shm: Path) -> tuple[str, str, float]:
    """Rank 0 alone waits for the removal of an old checkpoint, which fails: how closing ends, and
    after how long."""
    memory = sw.Memory(dir=str(shm), when_full="wait", wait=20.0)
    cp = sw.Checkpointer(root, keep=sw.Keep(last=1), memory=memory)
    if dist.get_rank() == 0:
        signal_agents(shm, signal.SIGSTOP)
        threading.Timer(0.5, signal_agents, (shm, signal.SIGCONT)).start()
    dist.barrier()
    cp.save(1, {"t": sw.PerRank(1)}, overwrite=True)
    started = time.monotonic()
    with pytest.raises(sw.ShardwiseError) as caught:
        cp.close()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - started


def test_closing_fails_on_all_ranks_if_it_does_on_one(gang: Gang, root: Path, shm: Path) -> None:
    old = root / "step-00000000"
    sw.save(old, {"t": torch.zeros(1)})
    (data,) = old.glob("*.safetensors")
    data.unlink()
    data.mkdir()  # cannot be deleted as a file
    (first, _, _), (second, said, _) = told = gang.run(close_though_one_fails, root, shm, world=2)
    assert (first, second) == ("StoreError", "RankError")
    assert "deleting old checkpoints failed on 1 rank" in said
    assert "rank 0: StoreError: step 1: the stage 'retain' of" in said
    assert max(took for *_, took in told) < SECONDS
