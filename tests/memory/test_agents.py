"""Runs whose agents speak TLS, die, or are started beside them: to the byte, as if they did not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.memory.certificates import Authority
from tests.memory.test_snapshots import columns, memory_of, recover, rows, shm, train
from tests.tools.agents import agents_below, end_agents, lose, until
from tests.tools.gang import Gang

__all__ = ["shm"]
NICENESS = 10
BESIDE = {"start_agent": False}


@contextmanager
def started(directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`shardwise agent run`, as it is started beside training."""
    command = [sys.executable, "-m", "shardwise", "agent", "run", f"--dir={directory}", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)
        if process.stderr is not None:
            process.stderr.close()


def home_of(directory: Path) -> Path:
    """The directory of a node within that of `Memory(dir=…)`."""
    return directory / f"shardwise-{os.getuid()}"


def living(directory: Path) -> sw.NodeStatus:
    """The status of the agent of a node, once it lives."""
    found = []

    def answers() -> bool:
        found[:] = [sw.NodeAgent(directory).status()]
        return found[0].alive and found[0].process is not None

    until(answers)
    return found[0]


def secret_of(directory: Path) -> str:
    """The secret that the agent of a node accepts."""
    (agent,) = agents_below(directory)
    return str(agent["token"])


def recover_at_the_first_node(root: str, shm: str, **options: Any) -> Any:
    """Restore on fewer nodes than there were."""
    return recover(root, shm, 1, **options)


def test_nodes_that_speak_tls_protect_and_serve_each_other(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    root, tls = str(tmp_path / "root"), Authority(tmp_path / "authority").issue("node")
    gang.run(train, root, str(shm), 2, 2, 2, world=2, copies=1, tls=tls)
    urls = [living(shm / f"node{n}").url for n in range(2)]
    assert all(url is not None and url.startswith("https:") for url in urls)
    (copy,) = (shm / "node0").glob("**/step-00000002-*/r00001-*.safetensors")
    (original,) = (shm / "node1").glob("**/step-00000002-*/r00001-*.safetensors")
    assert copy.read_bytes() == original.read_bytes()
    copy.unlink()
    got = gang.run(recover_at_the_first_node, root, str(shm), tls=tls, world=1)
    assert got[0][:2] == (2, "memory")


def save_while_agents_die(root: str, shm: str) -> list[int]:
    """All agents are killed while a save is under way, which nothing follows."""
    with sw.Checkpointer(root, save_every=3, memory=memory_of(shm, 2, copies=1)) as cp:
        for step in (1, 2, 3):
            handle = cp.save(step, rows(step))
            if step == 3:
                dist.barrier()
                if dist.get_rank() == 0:
                    end_agents(Path(shm))
                dist.barrier()
            assert handle is not None
            start = time.monotonic()
            handle.protected(30.0)
            handle.result(30.0)
            assert time.monotonic() - start < 20
        return cp.steps()


@pytest.mark.long  # tests/faults/memory/test_agents.py kills agents in mid-work
def test_agents_that_die_in_mid_work_are_followed_and_nobody_else_has_to_save(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    assert gang.run(save_while_agents_die, str(tmp_path / "root"), str(shm), world=2)[0] == [3]


def test_a_node_without_trainers_is_found_though_its_agent_is_another(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    root = str(tmp_path / "root")
    gang.run(train, root, str(shm), 2, 3, 100, world=2)
    before, secret = living(shm / "node1"), secret_of(shm / "node1")
    end_agents(shm / "node1")
    until(lambda: not sw.NodeAgent(shm / "node1").status().alive)
    with started(shm / "node1"):
        after = living(shm / "node1")
        assert after.process != before.process
        assert (after.url, secret_of(shm / "node1")) == (before.url, secret)
        assert gang.run(recover_at_the_first_node, root, str(shm), world=1)[0][:2] == (3, "memory")


def test_an_agent_that_is_started_beside_training_stays(
    tmp_path: Path, shm: Path, gang: Gang
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a-secret-that-was-given")
    with started(shm / "node0", f"--secret-file={secret}", "--domain=rack") as process:
        found = living(shm / "node0")
        assert (found.domain, found.process) == ("rack", process.pid)
        assert secret_of(shm / "node0") == "a-secret-that-was-given"
        gang.run(train, str(tmp_path / "root"), str(shm), 1, 2, 2, world=2, **BESIDE)
        assert living(shm / "node0").process == process.pid
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert not (home_of(shm / "node0") / "agent.json").exists()


def niceness_of(process: int) -> dict[int, int]:
    """Of each of its threads, by their ids; that of the process itself is its main thread's."""
    found = {}
    for path in Path(f"/proc/{process}/task").glob("*/stat"):
        with suppress(OSError):  # the thread has just ended
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[16])
    return found


def test_who_works_in_the_background_gives_way_and_who_serves_others_does_not(
    tmp_path: Path, shm: Path
) -> None:
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    with (
        started(shm) as process,
        sw.Checkpointer(tmp_path / "root", memory=sw.Memory(dir=str(shm), **BESIDE)) as cp,
    ):
        living(shm)
        lowered: set[int] = set()  # one observes; others seal, commit and persist
        for step in range(1, 100):
            handle = cp.save(step, {"t": torch.zeros(1 << 20)})
            assert handle is not None
            while not handle.done():
                found = niceness_of(process.pid)
                lowered |= {
                    thread for thread, each in found.items() if each == min(usual + NICENESS, 19)
                }
            if len(lowered) >= 4:
                break
        assert len(lowered) >= 4, found
        assert found[process.pid] == usual


def test_a_second_agent_is_refused(shm: Path) -> None:
    with started(shm):
        living(shm)
        with started(shm) as second:
            assert second.stderr is not None
            assert second.wait(60) == 2
            assert "another agent runs in" in second.stderr.read()


def test_tls_takes_three_files(shm: Path) -> None:
    with started(shm, "--tls-cert=a.pem") as process:
        assert process.stderr is not None
        assert process.wait(60) == 2
        assert "give all three of" in process.stderr.read()


def go_on(root: str, shm: str) -> list[int]:
    """Go on from step 3, and be durable in a time in which no lost node is waited for."""
    with sw.Checkpointer(root, save_every=5, memory=memory_of(shm, 4, copies=1)) as cp:
        _, state = columns()
        assert cp.restore(state, strict=False) == 3
        for step in (4, 5):
            handle = cp.save(step, rows(step))
            assert handle is not None
            handle.result(8.0)
        return cp.steps()


@pytest.mark.long  # tests/faults/memory/test_nodes.py loses a node, too
def test_a_run_goes_on_without_a_node_that_is_lost(gang: Gang, tmp_path: Path, shm: Path) -> None:
    root = str(tmp_path / "root")
    gang.run(train, root, str(shm), 4, 3, 100, world=4, copies=1)
    lose(shm / "node3")
    assert gang.run(go_on, root, str(shm), world=4)[0] == [5]


def test_an_agent_needs_no_torch() -> None:
    script = "import sys, shardwise.parts.memory.agent.process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
