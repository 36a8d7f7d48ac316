"""A host that loses its power or network is noticed within seconds, though nothing closes its
connections; a pause of the network of some seconds ends nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.hosts import Hosts, HostsUnavailable

TIMEOUT = 60  # seconds, of the process group
PAUSE = 5  # seconds
MOST_SECONDS = 30  # on a busy machine; usually eleven
SAVE = """
import json, os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import shardwise as sw
dist.init_process_group("gloo")
state = {"x": torch.ones(3)}
timeout = timedelta(seconds=int(sys.argv[2]))
checkpointer = sw.Checkpointer(sys.argv[1], memory=None, timeout=timeout)
checkpointer.save(1, state)
print("saved", flush=True)
while dist.get_rank() == 1 and not os.path.exists(sys.argv[1] + ".go"):
    time.sleep(0.1)
start = time.monotonic()
try:
    checkpointer.save(2, state)
    message = "saved"
except sw.LostRankError as error:
    message = str(error)
print(json.dumps([time.monotonic() - start, message]), flush=True)
os._exit(0)
"""


@pytest.fixture
def hosts(on_disk: Path) -> Iterator[Hosts]:
    try:
        with Hosts(2, on_disk / "hosts") as two:
            yield two
    except HostsUnavailable as error:
        pytest.skip(str(error))


def start_ranks(hosts: Hosts, root: Path) -> list[subprocess.Popen[str]]:
    """Start a rank on each host. Rank 0 saves step 2; rank 1 does so once the file
    `<root>.go` exists."""
    ranks = [
        host.run(
            [sys.executable, "-c", SAVE, str(root), str(TIMEOUT)],
            {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "7100",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
        )
        for rank, host in enumerate(hosts)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "saved\n"
    return ranks


@pytest.mark.long
def test_a_lost_host_is_noticed_within_seconds(hosts: Hosts, on_disk: Path) -> None:
    ranks = start_ranks(hosts, on_disk / "root")
    hosts[1].destroy(silent=True)
    output, _ = ranks[0].communicate(timeout=2 * TIMEOUT)
    seconds, message = json.loads(output)
    assert "rank 1: its connection" in message
    assert "host-1" in message
    assert seconds < MOST_SECONDS


@pytest.mark.long
def test_a_network_that_stops_for_seconds_ends_nothing(hosts: Hosts, on_disk: Path) -> None:
    ranks = start_ranks(hosts, on_disk / "root")
    hosts[1].disconnect()
    time.sleep(PAUSE)
    hosts[1].connect()
    (on_disk / "root.go").touch()
    output, _ = ranks[0].communicate(timeout=2 * TIMEOUT)
    seconds, message = json.loads(output)
    assert message == "saved"
    assert seconds > PAUSE - 1, "rank 0 waited during the pause"
