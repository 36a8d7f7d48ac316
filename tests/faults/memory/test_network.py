"""Hosts that are slow, cut off, or hung, while others protect what they have and recover."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.manifest.manifest import decode_manifest
from shardwise.testing.hosts import Host, Hosts, HostsUnavailable
from tests.faults.memory import on_host

TESTS = Path(__file__).parents[3]
PORT = 29777


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Host]]:
    """Three of them."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts(3, tmp_path / "hosts", memory=64 << 20))
        except HostsUnavailable as error:
            pytest.skip(str(error))
        yield list(made)


Rank = subprocess.Popen[str]


def paths_of_tests() -> dict[str, str]:
    """The environment with which a host finds the library and the tests."""
    source = Path(shardwise.__file__).parents[1]
    return {"PYTHONPATH": os.pathsep.join([str(TESTS), str(source)])}


def start(hosts: Sequence[Host], *words: object) -> list[Rank]:
    """One rank on each of these hosts."""
    common = {
        **paths_of_tests(),
        "WORLD_SIZE": str(len(hosts)),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, on_host.__file__, *map(str, words)]
    return [
        host.run(command, {**common, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank, host in enumerate(hosts)
    ]


def said(rank: Rank) -> Any:
    """The next that a rank says."""
    assert rank.stdout is not None
    line = rank.stdout.readline()
    assert line, f"it ended: {rank.wait(10)}"
    return line.strip() if line == "ready\n" else json.loads(line)


def went(hosts: Sequence[Host], root: Path, until: int) -> list[Any]:
    """Have a rank on each host go on until a step; from where each did."""
    ranks = start(hosts, root, until)
    told = [said(rank) for rank in ranks]
    assert [rank.wait(60) for rank in ranks] == [0] * len(ranks)
    return told


def manifests(hosts: Sequence[Host], step: int) -> set[str]:
    """The saves of which hosts have a manifest of a step."""
    found = [
        path
        for host in hosts
        for path in host.directory.glob(f"node0/*/runs/*/step-{step:08d}/manifest.json")
    ]
    return {decode_manifest(path.read_bytes()).save_id for path in found}


@pytest.mark.timeout(300)
def test_a_host_that_is_cut_off_while_it_protects_and_returns(
    hosts: list[Host], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    ranks = start(hosts, root, 2, 3, tmp_path / "go")
    assert [said(rank)[0] for rank in ranks] == [None] * 3
    assert [said(rank) for rank in ranks] == ["ready"] * 3
    hosts[2].slow(rate=32 << 10)
    (tmp_path / "go").touch()
    assert [said(rank)[0] for rank in ranks] == [""] * 3, "the commit bears with a slow host"
    hosts[2].disconnect()
    for rank in ranks[:2]:
        failure, seconds = said(rank)
        assert "protect" in failure
        assert seconds < 20.0
    assert len(manifests(hosts, 3)) == 1
    for rank in ranks:
        rank.kill()
    told = went(hosts[:2], root, 4)
    assert [each[:2] for each in told] == [[2, "memory"]] * 2
    assert "no reachable node has" in told[0][2]
    assert max(each[3] for each in told) < 30.0
    hosts[2].connect()
    hosts[2].slow()
    assert [each[:2] for each in went(hosts, root, 5)] == [[4, "memory"]] * 3
    assert all(len(manifests(hosts, step)) <= 1 for step in range(6))


@pytest.mark.long  # tests/faults/memory/test_nodes.py stops the agent of a node, which hangs alike
@pytest.mark.timeout(300)
def test_a_host_that_hangs_holds_up_no_recovery(hosts: list[Host], tmp_path: Path) -> None:
    root = tmp_path / "root"
    went(hosts, root, 3)
    hosts[2].pause()
    told = went(hosts[:2], root, 3)
    assert [each[:2] for each in told] == [[3, "memory"]] * 2
    assert max(each[3] for each in told) < 30.0
