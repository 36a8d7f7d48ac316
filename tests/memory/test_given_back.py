"""Users clear runs and stop agents; a run that ends leaves its last step in storage."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

import shardwise as sw
from tests.cli.conftest import Run as RunCommand
from tests.cli.conftest import run as run_command
from tests.memory.test_snapshots import shm
from tests.tools.agents import signal_agents

__all__ = ["run_command", "shm"]


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
    node = sw.NodeAgent(shm)
    (one,) = (run.run for run in node.runs())
    memory = sw.Memory(dir=str(shm), when_full="wait")
    with sw.Checkpointer(tmp_path / "two", save_every=1000, memory=memory) as cp:
        handle = cp.save(7, {"t": torch.full((1000,), 7)})
        assert handle is not None
        handle.result(20.0)
        (two,) = {run.run for run in node.runs()} - {one}

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
        assert {run.run for run in node.runs()} == {one, two}

        cleared = run_command("agent", "clear", "--dir", shm, "--run", one)
        assert cleared.status == 0
        assert "cleared 1 run" in cleared.out
        assert [run.run for run in node.runs()] == [two]
        assert run_command("agent", "clear", "--dir", shm, "--run", one).status == 2

        forced = run_command("agent", "clear", "--dir", shm, "--all", "--force", "--json")
        assert forced.document["cleared"] == [two]
        assert not list(shm.glob("**/free/*"))
        assert not list(shm.glob("**/*.safetensors"))
        cp.close(wait=False)


def test_a_user_stops_the_agent_and_the_next_one_goes_on(
    tmp_path: Path, shm: Path, run_command: RunCommand
) -> None:
    assert run_command("agent", "stop", "--dir", shm).status == 2
    train(tmp_path / "root", shm, every=1000)
    memory = sw.Memory(dir=str(shm))
    node, found = sw.NodeAgent(shm), torch.zeros(1000, dtype=torch.int64)
    training = sw.Checkpointer(tmp_path / "root", memory=memory)
    assert training.restore({"t": found}) == 2
    refused = run_command("agent", "stop", "--dir", shm)
    assert refused.status == 2
    assert "training runs on this node" in refused.err
    training.close(wait=False)
    assert node.status().alive
    stopped = run_command("agent", "stop", "--dir", shm)
    assert stopped.status == 0
    assert "stopped the agent" in stopped.out
    assert not node.status().alive
    found.zero_()
    with sw.Checkpointer(tmp_path / "root", memory=memory) as cp:
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
