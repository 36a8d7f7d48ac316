"""What ranks do now: written by each rank, served by the agents, and summarized."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.kernel.errors import StoreError
from shardwise.kernel.events import Recorder
from shardwise.parts.memory.agent.watch import ProgressWatch
from shardwise.parts.memory.home import Home, Run
from shardwise.parts.memory.progress import (
    NodeProgress,
    RankProgress,
    make_watcher,
    read_progress,
    summarize,
)
from shardwise.parts.memory.rank_liveness import RankLock
from shardwise.parts.memory.records import AgentInfo
from shardwise.parts.memory.remote.client import AgentClient
from tests.memory.test_server import RUN, TOKEN, serve
from tests.memory.test_snapshots import shm
from tests.tools.agents import until
from tests.tools.gang import Gang

__all__ = ["shm"]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Home(tmp_path).run(RUN)


def test_each_stage_and_wait_is_seen(run: Run) -> None:
    clock, lock = Clock(), RankLock(run, 3)
    seen: list[RankProgress] = []

    def look() -> None:
        clock.now += 2.0
        (now,) = read_progress(run, clock)
        seen.append(now)

    look()
    recorder = Recorder(watcher=make_watcher(lock, "save", 7, clock))
    with recorder.stage("describe"):
        look()
        with recorder.waiting():
            look()
        look()
    with recorder.waiting():
        look()
    look()
    lock.release()
    assert read_progress(run, clock) == []
    assert [(each.operation, each.stage, each.waits) for each in seen] == [
        ("", "", False), ("save", "describe", False), ("save", "describe", True),
        ("save", "describe", False), ("save", "describe", True), ("", "", False),
    ]  # fmt: skip
    assert [each.seconds for each in seen[1:]] == [2.0] * 5
    assert {each.rank for each in seen} == {3}


def test_a_lost_rank_and_its_successor(run: Run) -> None:
    clock, lock = Clock(), RankLock(run, 0)
    make_watcher(lock, "save", 7, clock)("write", False)
    lock.release_as_lost()
    (lost,) = read_progress(run, clock)
    assert (lost.alive, lost.stage) == (False, "write")
    RankLock(run, 0)
    (new,) = read_progress(run, clock)
    assert new == RankProgress(0, True)


@pytest.mark.parametrize("note", [b"[", b"\xff" * 256, b'["save",-1]', b'["' + b"a" * 200 + b'"]'])
def test_a_damaged_note_says_nothing(run: Run, note: bytes) -> None:
    lock = RankLock(run, 0)
    lock.write_note(note)
    assert read_progress(run) == [RankProgress(0, True)]


def test_an_agent_tells_it(tmp_path: Path) -> None:
    home = Home(tmp_path)
    lock = RankLock(home.run(RUN), 5)
    make_watcher(lock, "save", 7)("write", False)
    with serve(home.path) as served:
        client = AgentClient(AgentInfo("here", f"http://127.0.0.1:{served.port}", TOKEN))
        (found,) = client.list_progress(RUN)
        assert (found.rank, found.alive, found.step, found.stage) == (5, True, 7, "write")
        assert client.list_progress("f" * 16) == []
        stranger = AgentClient(AgentInfo("here", f"http://127.0.0.1:{served.port}", "x" * 20))
        with pytest.raises(StoreError):
            stranger.list_progress(RUN)


def test_nodes_are_asked_and_a_lost_node_is_counted(tmp_path: Path) -> None:
    homes = [Home(tmp_path / name) for name in "ab"]
    locks = [RankLock(home.run(RUN), rank) for rank, home in enumerate(homes)]
    make_watcher(locks[0], "save", 7)("describe", True)
    make_watcher(locks[1], "save", 7)("describe", False)
    with serve(homes[1].path) as served:
        nodes = [
            AgentInfo("a", "http://127.0.0.1:9", TOKEN),
            AgentInfo("b", f"http://127.0.0.1:{served.port}", TOKEN),
            AgentInfo("gone", "http://127.0.0.1:9", TOKEN),
        ]
        homes[0].run(RUN).record_info("root", nodes)
        clock = Clock()
        watch = ProgressWatch(homes[0], clock=clock)
        (found,) = watch.read()
    assert (found.ranks, found.nodes) == (2, 4)  # without an agent, this node has no name
    assert found.unanswered == 2
    assert [(node, each.rank, each.stage) for node, each in found.slowest] == [("b", 1, "describe")]
    assert ("save", 7, "describe", True, 1) in found.counts
    clock.now += 60  # the agent of b has ended meanwhile
    (later,) = watch.read()
    assert (later.ranks, later.unanswered) == (1, 3)


def test_thousands_of_nodes_make_a_short_summary() -> None:
    def waiting(rank: int) -> RankProgress:
        return RankProgress(rank, True, "save", 7, "write", True, 3.0)

    nodes = [
        (f"node-{node}", [waiting(8 * node + each) for each in range(8)]) for node in range(4096)
    ]
    nodes[77][1][3] = RankProgress(8 * 77 + 3, True, "save", 7, "write", False, 40.0)
    nodes[99][1][0] = RankProgress(8 * 99, True)  # still training
    nodes[5][1][1] = RankProgress(41, False)
    found = summarize("run", nodes, unanswered=12)
    assert (found.ranks, found.nodes, found.lost) == (32_768, 4108, [41])
    assert [each.rank for _, each in found.slowest] == [792, 619]
    # The first has not begun, so the others' wait counts.
    assert [each.seconds for _, each in found.slowest] == [3.0, 40.0]
    assert found.counts[0] == ("save", 7, "write", True, 32_765)
    many = [("node", [RankProgress(rank, True, "save", 7, "write") for rank in range(4096)])]
    assert len(summarize("run", many, unanswered=0).slowest) == 10


def test_training_ranks_are_not_waited_for() -> None:
    nodes = [("node", [RankProgress(0, True), RankProgress(1, True)])]
    assert summarize("run", nodes, unanswered=0).slowest == []


class Slow:
    """A value that takes as long as a test wants."""

    def __init__(self, release: Path) -> None:
        self.release = release

    def state_dict(self) -> dict[str, int]:
        until(self.release.exists)
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Fast(Slow):
    def state_dict(self) -> dict[str, int]:
        return {"value": 1}


def save_slowly(root: Path, memory: sw.Memory, release: Path) -> None:
    value = (Slow if dist.get_rank() == 1 else Fast)(release)
    with sw.Checkpointer(root, memory=memory) as cp:
        cp.save(4, {"w": torch.ones(9), "slow": value})


@pytest.mark.ranks
def test_a_running_save_shows_the_rank_that_it_waits_for(
    tmp_path: Path, shm: Path, gang: Gang
) -> None:
    memory = sw.Memory(dir=str(shm), snapshot_every=0, slots=1)
    release = tmp_path / "release"
    watch = ProgressWatch(Home(shm))
    found: list[sw.RunProgress] = []

    def is_seen() -> bool:
        expected = {("save", 4, "describe", True, 2), ("save", 4, "describe", False, 1)}
        found[:] = [each for each in watch.read() if expected <= set(each.counts)]
        return bool(found)

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(gang.run, save_slowly, tmp_path / "run", memory, release, world=3)
        try:
            until(lambda: is_seen() or saving.done())
        finally:
            release.touch()
        saving.result()
    ((_, slowest),) = found[0].slowest
    assert (slowest.rank, slowest.step, slowest.stage) == (1, 4, "describe")


def test_writing_a_stage_takes_microseconds(run: Run) -> None:
    write = make_watcher(RankLock(run, 0), "save", 7)
    begin = time.perf_counter()
    for _ in range(1000):
        write("write", True)
    assert time.perf_counter() - begin < 1.0  # 1 ms each, on any machine


@pytest.mark.parametrize(
    "answer",
    [
        [{"rank": 1, "alive": True, "operation": "a" * 33}],
        [{"rank": -1, "alive": True}],
        [{"rank": 1, "alive": True}] * 5000,
        {"rank": 1},
    ],
    ids=["a long word", "a negative rank", "too many ranks", "no list"],
)
def test_an_answer_that_no_agent_gives_is_refused(answer: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps(answer), type=NodeProgress)
