"""Threads can be the first to decode a manifest at the same time."""

from __future__ import annotations

import subprocess
import sys

CHILDREN = 100
SCRIPT = f"""
import os, sys, threading
from msgspec import Raw
from shardwise.kernel.manifest.manifest import Manifest, decode_manifest, encode_manifest

data = encode_manifest(Manifest(save_id="0" * 16, created="", world_size=1, step=None,
    metrics={{}}, tensors=Raw(b"[]"), objects=(), per_rank=(), files=()))

def decode():
    barrier.wait()
    decode_manifest(data)

sys.setswitchinterval(1e-6)
for _ in range({CHILDREN}):
    child = os.fork()  # in each child, no manifest has been decoded yet
    if child == 0:
        barrier = threading.Barrier(4)
        threads = [threading.Thread(target=decode) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_threads_decode_the_first_manifest_at_the_same_time() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout.split() == ["0"] * CHILDREN
