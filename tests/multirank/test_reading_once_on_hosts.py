"""Ranks on simulated hosts, with networks of their own, read once what both hosts want."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shardwise as sw
from examples.hosts import Hosts, HostsUnavailable

WORLD = 4
LOAD = """
import sys
import torch
import torch.distributed as dist
import shardwise as sw
dist.init_process_group("gloo")
expected = torch.arange(1 << 20, dtype=torch.float32)
state = {f"t{i}": torch.zeros(1 << 20) for i in range(8)}
report = sw.load(sys.argv[1], state, read_once=True)
assert all(torch.equal(state[f"t{i}"], expected + i) for i in range(8))
print("loaded", report.bytes_read, report.bytes_received)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.long
def test_two_hosts_read_a_state_once(on_disk: Path) -> None:
    expected = torch.arange(1 << 20, dtype=torch.float32)
    sw.save(on_disk / "checkpoint", {f"t{i}": expected + i for i in range(8)})
    try:
        hosts = Hosts(2, on_disk / "hosts").__enter__()
    except HostsUnavailable as error:
        pytest.skip(str(error))
    try:
        ranks = [
            hosts[rank % 2].run(
                [sys.executable, "-c", LOAD, str(on_disk / "checkpoint")],
                {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(WORLD),
                    "MASTER_ADDR": hosts[0].address,
                    "MASTER_PORT": "7100",
                    "OMP_NUM_THREADS": "1",
                },
                stdout=subprocess.PIPE,
            )
            for rank in range(WORLD)
        ]
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        hosts.close()
    assert [rank.returncode for rank in ranks] == [0] * WORLD
    moved = [[int(word) for word in output.split()[-2:]] for output in outputs]
    size = 8 * expected.nbytes
    assert size <= sum(read for read, _ in moved) <= 1.02 * size
    assert size <= sum(received for _, received in moved) <= 1.02 * size
    assert max(read for read, _ in moved) <= 0.5 * size
