"""Agents of several hosts upload to a bucket on another host, and a host is lost meanwhile."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from examples.hosts import Host, Hosts, HostsUnavailable
from tests.faults.memory import bucket_on_host
from tests.faults.memory.test_network import RankStarter, paths_of_tests, said, start
from tests.store.servers import Server
from tests.tools.agents import until

PORT = 9000
LOCK_SECONDS = 3
SECONDS = 60.0


@pytest.fixture
def hosts(on_disk: Path) -> Iterator[list[Host]]:
    """The host of the bucket, and three hosts of ranks."""
    pytest.importorskip("obstore", reason="this test needs obstore")
    pytest.importorskip("moto.moto_server.threaded_moto_server", reason="this test needs moto")
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Hosts(4, on_disk / "hosts", memory=64 << 20))
        except HostsUnavailable as error:
            pytest.skip(str(error))
        yield list(made)


def start_bucket_program(host: Host, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, bucket_on_host.__file__, *map(str, words)]
    return host.run(command, paths_of_tests(), stdout=subprocess.PIPE)


def look(host: Host, url: str) -> Any:
    """Verify the checkpoints in the bucket; return the committed steps, and stray files."""
    return said(start_bucket_program(host, "look", url))


@pytest.mark.long  # test_network.py loses a host, and test_object_kills.py a node with a bucket
@pytest.mark.timeout(300)
def test_a_host_is_lost_while_its_agent_uploads(hosts: list[Host], on_disk: Path) -> None:
    bucket, *nodes = hosts
    server = start_bucket_program(bucket, "serve", PORT)
    assert said(server) == "ready"
    url = Server("s3", f"http://{bucket.address}:{PORT}").new_url(
        allow_http="true", lock_seconds=str(LOCK_SECONDS), timeout="20", retry="20"
    )
    starters = [RankStarter(node, on_disk / f"{node.name}.fifo") for node in nodes]
    ranks = start(starters, url, 3, 4, on_disk / "go", 2)
    assert [said(rank)[0] for rank in ranks] == [None] * 3
    assert [said(rank) for rank in ranks] == ["ready"] * 3
    assert look(bucket, url) == [[2], []]
    bucket.slow(rate=16 << 10)  # a file takes about ten seconds
    (on_disk / "go").touch()
    for _ in ("committed", "protected"):
        assert [said(rank)[0] for rank in ranks] == [""] * 3
    nodes[2].destroy(silent=True)
    time.sleep(1.0)
    bucket.slow()
    until(lambda: look(bucket, url)[0] == [2, 4], SECONDS)
    for rank in ranks[:2]:
        rank.kill()

    ranks = start(starters[:2], url, 6, "", "", 2)
    assert [said(rank)[:2] for rank in ranks] == [[4, "memory"]] * 2
    assert [rank.wait() for rank in ranks] == [0, 0]
    for node in nodes:
        node.destroy()
        node.start()
    time.sleep(LOCK_SECONDS + 1.1)
    starters = [RankStarter(node, on_disk / f"{node.name}-again.fifo") for node in nodes]
    ranks = start(starters, url, 8, "", "", 2)
    assert [said(rank)[:2] for rank in ranks] == [[6, "storage"]] * 3
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert look(bucket, url) == [[2, 4, 6, 8], []]
