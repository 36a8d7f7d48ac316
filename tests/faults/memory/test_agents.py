"""Agents that are killed or stopped: training learns of it in bounded time, and work goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import shardwise as sw
from tests.breadth import mostly_long
from tests.faults.memory import deaths
from tests.faults.memory.scenario import Cluster, assert_tidy, begin, go_on, steps_in, train
from tests.tools.agents import agents_below, end_agents, is_running, signal_agents, until
from tests.tools.gang import Gang

SECONDS = 30.0
STATES = 7  # how often each agent writes the state of a durable save that is protected
NOTES: list[tuple[int, str, deaths.When]] = [
    (0, r"manifest\.json", "within"),
    (1, r"manifest\.json", "within"),
    (0, r"manifest\.json", "after"),
    (1, r"pending\.json", "within"),
    (1, r"pending\.json", "after"),
    *[(0, rf"save\.json#{number}", "within") for number in range(1, STATES + 1)],
    *[(1, rf"save\.json#{number}", "after") for number in range(1, STATES + 1)],
]
SOME = [NOTES[7], NOTES[-2]]


def start_mortal(home: Path, pattern: str, when: deaths.When) -> subprocess.Popen[bytes]:
    """An agent that dies at the first note whose name has this pattern."""
    end_agents(home)
    (home / f"shardwise-{os.getuid()}" / "agent.json").unlink()
    command = [sys.executable, deaths.__file__, pattern, when, "agent", "run", f"--dir={home}"]
    agent = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    until(lambda: agents_below(home))
    return agent


def outlive(cluster: Cluster, steps: int) -> tuple[list[float], list[str]]:
    """Save so many steps, each as soon as what became of the one before is known on this rank; how
    long that took, and what was said. In the end, the last is as durable as if nothing had been."""
    cp = cluster.open()
    values, state, went = begin(cp, cluster.columns, "rows")
    took, said = [], []
    for step in range((went.step or 0) + 1, (went.step or 0) + steps + 1):
        train(values, step)
        state["step"] = step
        started = time.monotonic()
        try:
            handle = cp.save(step, state)
            assert handle is not None
            handle.result(4.0)
        except (sw.ShardwiseError, TimeoutError) as error:
            said.append(str(error))
        took.append(time.monotonic() - started)
        dist.barrier()
    assert handle is not None
    handle.result(20.0)
    cp.close(wait=False)
    return took, said


def die_and_go_on(
    gang: Gang, cluster: Cluster, node: int, pattern: str, when: deaths.When, *, world: int = 2
) -> None:
    """An agent dies at a note of a step; that and the next are as durable as if nothing had
    been, in bounded time."""
    where = f"node {node}, {when} {pattern}"
    (before, *_) = steps_in(cluster.root)[::-1]
    agent = start_mortal(cluster.directory(node), pattern, when)
    told = gang.run(outlive, cluster, 2, world=world)
    assert agent.wait(20.0) == -signal.SIGKILL, where
    assert max(max(took) for took, _ in told) < SECONDS, (where, told)
    assert steps_in(cluster.root)[-1] == before + 2, where


@pytest.fixture
def copied(gang: Gang, root: Path, shm: Path) -> Cluster:
    """Two nodes that keep copies of each other's files, and one step that is durable."""
    cluster = Cluster(root=root, shm=shm, nodes=2, every=1, options={"copies": 1})
    gang.run(go_on, cluster, 1, world=2)
    return cluster


@pytest.mark.timeout(300)  # many deaths, one after another
@pytest.mark.parametrize(
    "records", [SOME, pytest.param(NOTES, marks=pytest.mark.long)], ids=["some", "all"]
)
def test_agents_that_die_at_any_note_are_followed_by_others_that_go_on(
    gang: Gang, shm: Path, copied: Cluster, records: list[tuple[int, str, deaths.When]]
) -> None:
    for node, pattern, when in records:
        die_and_go_on(gang, copied, node, pattern, when)
    last = 1 + 2 * len(records)
    went = gang.run(go_on, copied, last + 3, world=2, by="columns")
    assert {(each.step, each.source) for each in went} == {(last, "memory")}
    assert len(agents_below(shm)) == 2
    assert_tidy(shm, 2)


INNER: list[tuple[int, str, deaths.When]] = [
    (1, r"pending\.json", "after"),
    (1, r"manifest\.json", "within"),
    *[(1 + number % 2, rf"save\.json#{number}", "after") for number in range(1, STATES)],
]


@pytest.mark.long  # tests/faults/memory/test_waiting.py kills such agents, at any moment
@pytest.mark.timeout(300)
@pytest.mark.parametrize("records", [[INNER[1], INNER[4]], INNER], ids=["some", "all"])
def test_agents_that_die_while_they_ask_others_are_followed_by_others_that_go_on(
    gang: Gang, root: Path, shm: Path, records: list[tuple[int, str, deaths.When]]
) -> None:
    """Each of four nodes asks one other."""
    cluster = Cluster(
        root=root, shm=shm, nodes=4, every=1, fan_out=1, options={"copies": 1, "wait": 30.0}
    )
    gang.run(go_on, cluster, 1, world=4)
    for node, pattern, when in records:
        die_and_go_on(gang, cluster, node, pattern, when, world=4)
    last = 1 + 2 * len(records)
    went = gang.run(go_on, cluster, last + 3, world=4, by="columns")
    assert {(each.step, each.source) for each in went} == {(last, "memory")}
    assert_tidy(shm, 4)


EFFECTS = 24  # as many changes an agent makes in two saves, at least


@pytest.mark.timeout(600)
@pytest.mark.parametrize("node", mostly_long([0, 1], [0]))
@pytest.mark.parametrize(
    "effects", [[5], pytest.param([*range(1, EFFECTS + 1)], marks=pytest.mark.long)],
    ids=["some", "all"],
)  # fmt: skip
def test_agents_that_die_before_any_change_are_followed_by_others_that_go_on(
    gang: Gang, shm: Path, copied: Cluster, node: int, effects: list[int]
) -> None:
    for number in effects:
        die_and_go_on(gang, copied, node, f"effect#{number}", "before")
    last = 1 + 2 * len(effects)
    went = gang.run(go_on, copied, last + 3, world=2, by="columns")
    assert {(each.step, each.source) for each in went} == {(last, "memory")}
    assert_tidy(shm, 2)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("node", mostly_long([0, 1], [0]))
@pytest.mark.parametrize("hit", mostly_long(
    ["answer#2", "answer#3", *(f"stop#{number}" for number in (1, 3, 5, 7, 9, 12))], ["answer#2"]
))  # fmt: skip
def test_agents_to_which_answers_are_lost_or_that_are_stopped_complete_their_saves(
    gang: Gang, shm: Path, copied: Cluster, node: int, hit: str
) -> None:
    """Who is stopped for seven seconds has been silent for longer than others wait to ask on."""
    patient = replace(copied, options={**copied.options, "wait": 60.0})
    agent = start_mortal(copied.directory(node), hit, "before")
    gang.run(go_on, patient, 5, world=2, timeout=120.0, group_timeout=100.0)
    until(lambda: steps_in(copied.root)[-1] == 5)
    assert agent.poll() is None
    end_agents(copied.directory(node))
    went = gang.run(go_on, copied, 8, world=2, by="columns")
    assert {(each.step, each.source) for each in went} == {(5, "memory")}
    assert_tidy(shm, 2)


def leftovers(root: Path) -> list[str]:
    """What lies in a root beside whole checkpoints and telemetry."""
    below = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
    known = {"manifest.json", "run.json"}
    files = [path for path in below if path.parts[0] != "nodes" and "telemetry" not in str(path)]
    return [str(path) for path in files if path.name not in known and path.suffix != ".safetensors"]


def kill_while_persisting(cluster: Cluster) -> tuple[float, str]:
    """The agents are killed when the first bytes are in storage; when and how that ends."""
    cp = cluster.open()
    values, state, _ = begin(cp, cluster.columns, "rows")
    for step in (1, 2):
        train(values, step)
        state["step"] = step
        handle = cp.save(step, state)
        assert handle is not None
        if step == 1:
            handle.committed(10.0)
            until(lambda: list(cluster.root.glob("step-*/*.safetensors")))
            dist.barrier()
            if dist.get_rank() == 0:
                end_agents(cluster.shm)
            dist.barrier()
            started = time.monotonic()
            said = ""
            try:
                handle.result(20.0)
            except sw.StoreError as error:
                said = str(error)
            took = time.monotonic() - started
    handle.result(20.0)
    cp.close(wait=False)
    return took, said


def test_agents_killed_while_persisting_are_followed_by_others_that_persist(
    gang: Gang, root: Path, shm: Path
) -> None:
    large = 4 * 1024  # three quarters of a megabyte for each rank
    cluster = Cluster(root=root, shm=shm, nodes=2, every=1, columns=large)
    cluster.options["max_bytes_per_second"] = 1 << 20
    for took, said in gang.run(kill_while_persisting, cluster, world=2):
        assert took < SECONDS
        assert not said or "is gone" in said
    until(lambda: steps_in(root) == [1, 2])
    assert leftovers(root) == []
    assert_tidy(shm, 2)


def save_beside_stopped(cluster: Cluster, stopped: int) -> tuple[list[float], list[str]]:
    """Save three steps while the agent of a node is stopped, and two when it goes on."""
    cp = cluster.open()
    values, state, _ = begin(cp, cluster.columns, "rows")
    took, said = [], []
    for step in range(1, 7):
        if dist.get_rank() == 0 and step in (2, 5):
            number = signal.SIGSTOP if step == 2 else signal.SIGCONT
            signal_agents(cluster.directory(stopped), number)
        dist.barrier()
        train(values, step)
        state["step"] = step
        started = time.monotonic()
        try:
            handle = cp.save(step, state)
            if handle is not None:
                handle.committed(2.0)
        except (sw.ShardwiseError, TimeoutError) as error:
            said.append(str(error))
        took.append(time.monotonic() - started)
        dist.barrier()
        if step == 5:
            time.sleep(1.0)
    assert handle is not None
    handle.result(20.0)
    cp.close(wait=False)
    return took, said


@pytest.mark.parametrize(
    ("stopped", "when_full"), mostly_long([(0, "skip"), (1, "wait")], [(0, "skip")])
)
def test_an_agent_that_is_stopped_holds_nobody_up_for_long(
    gang: Gang, root: Path, shm: Path, stopped: int, when_full: str
) -> None:
    options = {"wait": 1.0, "when_full": when_full}
    cluster = Cluster(root=root, shm=shm, nodes=2, options=options)
    for took, said in gang.run(save_beside_stopped, cluster, stopped, world=2):
        assert max(took) < 10.0, took
        assert said
    (went, _) = gang.run(go_on, cluster, 7, world=2)
    assert (went.step, went.source) == (6, "memory")
    assert_tidy(shm, 2)


def test_a_card_of_an_agent_that_is_gone_is_not_taken_for_one(shm: Path) -> None:
    """Not even if another process has its number by now."""
    home = shm / f"shardwise-{os.getuid()}"
    home.mkdir(mode=0o700)
    info = {"node": "n", "url": "http://127.0.0.1:1", "token": "t", "process": 1}
    (home / "agent.json").write_text(json.dumps(info))
    root = shm / "root"
    with sw.Checkpointer(root, memory=sw.Memory(dir=str(shm))) as cp:
        assert cp.restore({"step": 0}) is None
        (found,) = agents_below(shm)
        assert found["process"] != 1
        assert is_running(found["process"])
