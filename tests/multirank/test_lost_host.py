"""A host that loses its power or network is noticed within seconds, though nothing closes its
connections."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.hosts import Hosts, HostsUnavailable

TIMEOUT = 60  # seconds, of the process group
SAVE = """
import json, sys, time
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
if dist.get_rank() == 1:
    time.sleep(600)
start = time.monotonic()
try:
    checkpointer.save(2, state)
except sw.LostRankError as error:
    print(json.dumps([time.monotonic() - start, str(error)]), flush=True)
import os
os._exit(0)
"""


@pytest.mark.long
def test_a_lost_host_is_noticed_within_seconds(on_disk: Path) -> None:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(Hosts(2, on_disk / "hosts"))
        except HostsUnavailable as error:
            pytest.skip(str(error))
        ranks = [
            host.run(
                [sys.executable, "-c", SAVE, str(on_disk / "root"), str(TIMEOUT)],
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
        hosts[1].destroy(silent=True)
        output, _ = ranks[0].communicate(timeout=2 * TIMEOUT)
    seconds, message = json.loads(output)
    assert "a rank died" in message
    assert seconds < 10, "on a busy machine; usually three"
