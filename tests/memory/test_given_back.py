"""Runs that have ended leave no memory behind, whatever became of their root."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import torch

import shardwise as sw
from shardwise.memory.agent.actions import Follower
from shardwise.memory.decide import UNTIL_FREED, UNTIL_FREED_IF_STORED, UNTIL_REMOVED
from shardwise.memory.home import Home
from shardwise.memory.identity import read_or_create_node_name
from shardwise.memory.rank_locks import RankLock
from shardwise.memory.seal import MappedFiles
from tests.cli.conftest import Run as RunCommand
from tests.cli.conftest import run as run_command
from tests.memory.reconciling import Attendant
from tests.memory.test_snapshots import shm, signal_agents
from tests.memory.test_supervise import until

__all__ = ["run_command", "shm"]
LINGER, LONGEST = UNTIL_FREED_IF_STORED, UNTIL_FREED


class Node:
    """A node after its trainer has left; time passes as the test says."""

    def __init__(self, shm: Path) -> None:
        self._agent = Attendant(Home(shm))
        self._agent.rescue = Follower(
            read_or_create_node_name(self._agent.home), MappedFiles()
        ).rescue

    def after(self, seconds: float) -> int:
        """Return how many snapshots are left so many seconds later."""
        self._agent.after(seconds)
        return sum(len(run.steps()) for run in self._agent.home.runs())

    def is_empty(self) -> bool:
        """Whether nothing of any run is left, a little later."""
        self._agent.after(UNTIL_REMOVED)
        home = self._agent.home
        return not home.runs() and not list(home.path.glob("**/*.slot"))


def train(root: Path, shm: Path, *, every: int, steps: int = 2, rescue: bool = True) -> None:
    """Save some steps into memory, and leave without giving it back."""
    memory = sw.Memory(dir=str(shm), when_full="wait", rescue=rescue)
    cp = sw.Checkpointer(root, save_every=every, memory=memory)
    for step in range(1, steps + 1):
        handle = cp.save(step, {"t": torch.full((1000,), step)})
        assert handle is not None
        handle.result(20.0)
    cp.close(wait=False)


def test_a_user_clears_runs_that_have_ended(
    tmp_path: Path, shm: Path, run_command: RunCommand
) -> None:
    train(tmp_path / "one", shm, every=1)
    home = Home(shm)
    (one,) = (run.name for run in home.runs())
    memory = sw.Memory(dir=str(shm), when_full="wait")
    with sw.Checkpointer(tmp_path / "two", save_every=1000, memory=memory) as cp:
        handle = cp.save(7, {"t": torch.full((1000,), 7)})
        assert handle is not None
        handle.result(20.0)
        (two,) = {run.name for run in home.runs()} - {one}

        listed = run_command("agent", "clear", "--dir", shm, "--json").document
        assert listed["cleared"] == []
        found = {each["run"]: each for each in listed["runs"]}
        steps = {name: [s["step"] for s in each["snapshots"]] for name, each in found.items()}
        assert steps == {one: [1, 2], two: [7]}
        persisted = {name: each["lag"]["persist"]["step"] for name, each in found.items()}
        assert persisted == {one: 2, two: None}
        assert [found[name]["training"] for name in (one, two)] == [False, True]
        assert found[one]["root"] == str(tmp_path / "one")
        assert found[one]["bytes"] > 2 * 8000

        shown = run_command("agent", "clear", "--dir", shm)
        assert "Nothing was removed" in shown.out
        assert "not 7" in shown.out
        refused = run_command("agent", "clear", "--dir", shm, "--all")
        assert refused.status == 2
        assert "nothing was removed" in refused.err
        assert {run.name for run in home.runs()} == {one, two}

        cleared = run_command("agent", "clear", "--dir", shm, "--run", one)
        assert cleared.status == 0
        assert "cleared 1 run" in cleared.out
        assert [run.name for run in home.runs()] == [two]
        assert run_command("agent", "clear", "--dir", shm, "--run", one).status == 2

        forced = run_command("agent", "clear", "--dir", shm, "--all", "--force", "--json")
        assert forced.document["cleared"] == [two]
        assert not list(shm.glob("**/*.slot"))
        assert not list(shm.glob("**/*.safetensors"))
        cp.close(wait=False)


def test_a_user_stops_the_agent_and_the_next_one_goes_on(
    tmp_path: Path, shm: Path, run_command: RunCommand
) -> None:
    assert run_command("agent", "stop", "--dir", shm).status == 2
    train(tmp_path / "root", shm, every=1000)
    home = Home(shm)
    rank = RankLock(home.runs()[0], 0)
    refused = run_command("agent", "stop", "--dir", shm)
    assert refused.status == 2
    assert "training runs on this node" in refused.err
    rank.release()
    assert home.has_agent()
    stopped = run_command("agent", "stop", "--dir", shm)
    assert stopped.status == 0
    assert "stopped the agent" in stopped.out
    assert not home.has_agent()
    found = torch.zeros(1000, dtype=torch.int64)
    with sw.Checkpointer(tmp_path / "root", memory=sw.Memory(dir=str(shm))) as cp:
        assert cp.restore({"t": found}) == 2
    assert torch.equal(found, torch.full((1000,), 2))


def test_the_last_step_is_saved_at_the_end_though_no_slot_was_free_for_it(
    tmp_path: Path, shm: Path
) -> None:
    memory = sw.Memory(dir=str(shm), snapshot_every=1, slots=1)
    values = torch.zeros(1000, dtype=torch.int64)
    with sw.Checkpointer(tmp_path / "root", save_every=1000, memory=memory) as cp:
        handles = []
        signal_agents(shm, signal.SIGSTOP)  # steps are faster than the agent
        for step in range(1, 5):
            values.fill_(step)
            handles.append(cp.save(step, {"t": values}))
        assert handles[-1] is None
        signal_agents(shm, signal.SIGCONT)
    found = torch.zeros_like(values)
    with sw.Checkpointer(tmp_path / "root", memory=memory) as cp:
        assert cp.restore({"t": found}) == 4
    assert torch.equal(found, values)


def test_what_storage_has_leaves_memory_half_an_hour_after_the_run(
    tmp_path: Path, shm: Path
) -> None:
    train(tmp_path / "root", shm, every=1)
    node = Node(shm)
    assert node.after(LINGER - 1) == 2
    assert node.after(20.0) == 0
    assert node.is_empty()


def test_what_only_memory_has_is_persisted_first(tmp_path: Path, shm: Path) -> None:
    root = tmp_path / "root"
    train(root, shm, every=1000)
    node = Node(shm)
    assert node.after(LINGER + 20) == 2
    until(lambda: list(root.glob("step-*/manifest.json")))
    found = torch.zeros(1000, dtype=torch.int64)
    sw.load(root / "step-00000002", {"t": found})
    assert torch.equal(found, torch.full((1000,), 2))
    assert node.after(20.0) == 0
    assert node.is_empty()


def test_a_run_whose_root_was_removed_leaves_memory_too(tmp_path: Path, shm: Path) -> None:
    train(tmp_path / "root", shm, every=1000)
    shutil.rmtree(tmp_path / "root")
    node = Node(shm)
    assert node.after(LINGER - 1) == 2
    assert node.after(20.0) == 0
    assert node.is_empty()


def test_what_is_not_to_be_persisted_stays_for_a_day(tmp_path: Path, shm: Path) -> None:
    train(tmp_path / "root", shm, every=1000, rescue=False)
    node = Node(shm)
    assert node.after(LONGEST - 1) == 2
    assert node.after(20.0) == 0
    assert node.is_empty()
