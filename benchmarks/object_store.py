"""The time to upload to and download from an object store: SeaweedFS on this machine.

Limit: obstore alone, with as many bytes in parts of the same size; the goal is 0.9 of its speed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import obstore
import torch.distributed as dist

import shardwise as sw
from benchmarks.harness import LARGE, ROWS, Bench, parse_arguments
from shardwise.store.object_clients import Client
from shardwise.store.object_store import PART_MIB, UPLOAD_REQUESTS, parse_object_url
from shardwise.store.store import REMOTE_TRANSFER
from tests.store.servers import BUCKET, start_seaweedfs

PART = PART_MIB << 20


def main() -> None:
    os.environ.update(
        AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench", AWS_EC2_METADATA_DISABLED="true"
    )
    bench = Bench("object_store", LARGE, parse_arguments())
    state = bench.state(ROWS)
    with ExitStack() as cleanup:
        root = f"s3://{BUCKET}/bench?endpoint={start_server(bench, cleanup)}"
        client = Client(parse_object_url(root)).open()
        key, share = f"bare/{bench.rank}", bench.size.total // bench.world
        threads = REMOTE_TRANSFER.read_threads // bench.world
        ours = f"s3://{BUCKET}/ours?{root.partition('?')[2]}"
        for _ in bench.rounds:
            bench.measure("upload: obstore", lambda: upload(client, key, share))
            bench.measure("upload: sw.save", lambda: sw.save(ours, state, overwrite=True))
            bench.measure("download: obstore", lambda: download(client, key, share, threads))
            bench.measure("download: sw.load", lambda: sw.load(ours, state))
        dist.barrier()  # the server stops with rank 0
    for name, method in (("upload", "sw.save"), ("download", "sw.load")):
        bench.compare(f"{name}: {method}", f"{name}: obstore")
        speed = bench.ratio(f"{name}: obstore", f"{name}: {method}")
        bench.goal(f"{name}: speed, of bare obstore", speed, least=0.9)
    bench.finish()


def start_server(bench: Bench, cleanup: ExitStack) -> str:
    """Start SeaweedFS on rank 0, and return its endpoint on all ranks."""
    found = [""]
    if bench.rank == 0:
        folder = cleanup.enter_context(tempfile.TemporaryDirectory(dir=bench.dir))
        found = [cleanup.enter_context(start_seaweedfs(Path(folder)))]
    dist.broadcast_object_list(found)
    return found[0]


def upload(client: obstore.store.ObjectStore, key: str, nbytes: int) -> None:
    """Upload random bytes, in parts of the size that shardwise uses. Servers store zeros faster."""
    part = np.random.default_rng().integers(0, 256, PART, np.uint8)

    def parts() -> Iterator[memoryview]:
        for low in range(0, nbytes, PART):
            yield part[: min(PART, nbytes - low)].data

    obstore.put(client, key, parts(), chunk_size=PART, max_concurrency=UPLOAD_REQUESTS)


def download(client: obstore.store.ObjectStore, key: str, nbytes: int, threads: int) -> None:
    """Download an object, by as many and as long requests as shardwise makes."""
    step = REMOTE_TRANSFER.read_bytes
    read: Callable[[int], object] = lambda low: obstore.get_range(  # noqa: E731
        client, key, start=low, end=min(low + step, nbytes)
    )
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(read, range(0, nbytes, step)):
            pass


if __name__ == "__main__":
    main()
