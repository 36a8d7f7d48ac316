"""Hosts that are slow, cut off, or hung, while others protect what they have and recover."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import shardwise
from examples.hosts import Host, Hosts, HostsUnavailable
from tests.faults.memory import on_host

TESTS = Path(__file__).parents[3]
PORT = 29777


@pytest.fixture
def hosts(on_disk: Path) -> Iterator[list[Host]]:
    """Three of them."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts(3, on_disk / "hosts", memory=64 << 20))
        except HostsUnavailable as error:
            pytest.skip(str(error))
        yield list(made)


@pytest.fixture
def starters(hosts: list[Host], on_disk: Path) -> list[RankStarter]:
    return [RankStarter(host, on_disk / f"{host.name}.fifo") for host in hosts]


def paths_of_tests() -> dict[str, str]:
    """The environment with which a host finds the library and the tests."""
    source = Path(shardwise.__file__).parents[1]
    return {"PYTHONPATH": os.pathsep.join([str(TESTS), str(source)])}


class RankStarter:
    """The process on a host that forks ranks.

    Args:
        fifo: a path for the pipe to that process.
    """

    def __init__(self, host: Host, fifo: Path) -> None:
        self.host = host
        os.mkfifo(fifo)
        self._requests = os.open(fifo, os.O_RDWR)
        command = [sys.executable, on_host.__file__, str(fifo)]
        environ = {**paths_of_tests(), "OMP_NUM_THREADS": "1"}
        self.process = host.run(command, environ, stdout=subprocess.PIPE)

    def ask(self, request: object) -> None:
        os.write(self._requests, f"{json.dumps(request)}\n".encode())

    def kill(self) -> None:
        """Kill the newest rank."""
        self.ask("kill")
        assert self.wait() == -signal.SIGKILL

    def wait(self) -> int:
        """Wait for the newest rank; its exit status."""
        self.ask("wait")
        while not isinstance(status := said(self), int):
            pass  # a line that the rank printed before it was killed
        return status


def start(starters: Sequence[RankStarter], *words: object) -> Sequence[RankStarter]:
    """One rank on each of these hosts."""
    common = {
        "WORLD_SIZE": str(len(starters)),
        "MASTER_ADDR": starters[0].host.address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    for rank, starter in enumerate(starters):
        starter.ask([[*map(str, words)], {**common, "RANK": str(rank)}])
    return starters


def said(source: RankStarter | subprocess.Popen[str]) -> Any:
    """The next line that a rank or a program says."""
    process = source.process if isinstance(source, RankStarter) else source
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"it ended: {process.wait(10)}"
    return line.strip() if line == "ready\n" else json.loads(line)


def went(starters: Sequence[RankStarter], root: Path, until: int) -> list[Any]:
    """Have a rank on each host go on until a step; from where each did."""
    ranks = start(starters, root, until)
    told = [said(rank) for rank in ranks]
    assert [rank.wait() for rank in ranks] == [0] * len(ranks)
    return told


def manifests(hosts: Sequence[Host], step: int) -> set[str]:
    """The saves of which hosts have a manifest of a step."""
    found = [
        path
        for host in hosts
        for path in host.directory.glob(f"node0/*/runs/*/step-{step:08d}-*/manifest.json")
    ]
    return {json.loads(path.read_bytes())["save_id"] for path in found}


@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_host_that_is_cut_off_while_it_protects_and_returns(
    hosts: list[Host], starters: list[RankStarter], on_disk: Path
) -> None:
    root = on_disk / "root"
    ranks = start(starters, root, 2, 3, on_disk / "go")
    assert [said(rank)[0] for rank in ranks] == [None] * 3
    assert [said(rank) for rank in ranks] == ["ready"] * 3
    hosts[2].slow(rate=32 << 10)
    (on_disk / "go").touch()
    assert [said(rank)[0] for rank in ranks] == [""] * 3, "the commit bears with a slow host"
    hosts[2].disconnect()
    for rank in ranks[:2]:
        failure, seconds = said(rank)
        assert "protect" in failure
        assert seconds < 40.0
    assert len(manifests(hosts, 3)) == 1
    for rank in ranks:
        rank.kill()
    told = went(starters[:2], root, 4)
    assert [each[:2] for each in told] == [[2, "memory"]] * 2
    assert "no reachable node has" in told[0][2]
    assert max(each[3] for each in told) < 50.0
    hosts[2].connect()
    hosts[2].slow()
    assert [each[:2] for each in went(starters, root, 5)] == [[4, "memory"]] * 3
    assert all(len(manifests(hosts, step)) <= 1 for step in range(6))


@pytest.mark.long  # tests/faults/memory/test_nodes.py stops the agent of a node, which hangs alike
@pytest.mark.timeout(300)
def test_a_host_that_hangs_holds_up_no_recovery(
    hosts: list[Host], starters: list[RankStarter], on_disk: Path
) -> None:
    root = on_disk / "root"
    went(starters, root, 3)
    hosts[2].pause()
    told = went(starters[:2], root, 3)
    assert [each[:2] for each in told] == [[3, "memory"]] * 2
    assert max(each[3] for each in told) < 50.0
