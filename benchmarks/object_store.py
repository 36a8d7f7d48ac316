"""The time to upload to and download from an object store: SeaweedFS on this machine.

Limit: obstore alone, with as many bytes in parts of the same size; the goal is 0.9 of its speed.
Peers, if they are installed: DCP through s3fs, and through s3torchconnector. s3fs needs an older
boto3 than constraints.txt has, so install the peers in another environment.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import shardwise as sw
from benchmarks.harness import LARGE, ROWS, Bench, parse_arguments
from shardwise.kernel.store import StoreTraits
from shardwise.parts.stores.object_clients import Client
from shardwise.parts.stores.object_store import PART_MIB, UPLOAD_REQUESTS, parse_object_url
from tests.store.servers import BUCKET, start_seaweedfs

try:
    import s3fs
except ImportError:
    s3fs = None
try:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter
    from s3torchconnector.dcp.s3_file_system import S3FileSystem
    from s3torchconnector.s3reader import S3ReaderConstructor
except ImportError:
    S3StorageWriter = None

PART = PART_MIB << 20
REGION = "us-east-1"
OBSTORE, OURS = "obstore", "sw"
S3FS, CONNECTOR = "DCP through s3fs", "DCP through s3torchconnector"
PEER_GOALS = {S3FS: 3.0, CONNECTOR: 1.0}
"""How many times faster than each peer a save and a load have to be."""

Job = Callable[[], object]


def main() -> None:
    os.environ.update(
        AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench", AWS_EC2_METADATA_DISABLED="true"
    )
    bench = Bench("object_store", LARGE, parse_arguments())
    state = bench.state(ROWS)
    with ExitStack() as cleanup:
        endpoint = start_server(bench, cleanup)
        root = f"s3://{BUCKET}/bench?endpoint={endpoint}"
        client = Client(parse_object_url(root)).open()
        key, share = f"bare/{bench.rank}", bench.size.total // bench.world
        threads = StoreTraits().read_threads // bench.world
        ours = f"s3://{BUCKET}/ours?{root.partition('?')[2]}"
        jobs: dict[str, tuple[Job, Job]] = {
            OBSTORE: (
                lambda: upload(client, key, share),
                lambda: download(client, key, share, threads),
            ),
            OURS: (lambda: sw.save(ours, state, overwrite=True), lambda: sw.load(ours, state)),
            **peers(state, endpoint),
        }
        for _ in bench.rounds:
            for name, (save, load) in jobs.items():
                bench.measure(f"upload: {name}", save)
                bench.measure(f"download: {name}", load)
        dist.barrier()  # the server stops with rank 0
    for way in ("upload", "download"):
        others = [f"{way}: {name}" for name in jobs if name != OURS]
        bench.compare(f"{way}: {OURS}", *others)
        speed = bench.ratio(f"{way}: {OBSTORE}", f"{way}: {OURS}")
        bench.goal(f"{way}: speed, of bare obstore", speed, least=0.9)
        for name, least in PEER_GOALS.items():
            if name in jobs:
                times = bench.ratio(f"{way}: {name}", f"{way}: {OURS}")
                bench.goal(f"{way}: times faster than {name}", times, least=least)
    bench.finish()


def peers(state: dict[str, object], endpoint: str) -> dict[str, tuple[Job, Job]]:
    """Return the save and the load of each installed peer."""
    found: dict[str, tuple[Job, Job]] = {}
    if s3fs is not None:
        url = f"s3://{BUCKET}/s3fs"
        options: dict[str, Any] = {"client_kwargs": {"endpoint_url": endpoint}}
        found[S3FS] = (
            lambda: dcp.save(state, storage_writer=FsspecWriter(url, **options)),
            lambda: dcp.load(state, storage_reader=FsspecReader(url, **options)),
        )
    if S3StorageWriter is not None:
        place = f"s3://{BUCKET}/connector"
        config = S3ClientConfig(force_path_style=True)

        def connect(storage: Any, reader: object = None) -> Any:
            """Make the reader or writer use the endpoint, for which it has no argument."""
            client = S3Client(REGION, endpoint=endpoint, s3client_config=config)
            storage.fs = S3FileSystem(REGION, s3_client=client, reader_constructor=reader)
            return storage

        def load() -> None:
            reader = S3ReaderConstructor.dcp_optimized()
            storage = S3StorageReader(REGION, place, config, reader_constructor=reader)
            dcp.load(state, storage_reader=connect(storage, reader))

        found[CONNECTOR] = (
            lambda: dcp.save(state, storage_writer=connect(S3StorageWriter(REGION, place, config))),
            load,
        )
    return found


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
    step = StoreTraits().read_bytes
    read: Callable[[int], object] = lambda low: obstore.get_range(  # noqa: E731
        client, key, start=low, end=min(low + step, nbytes)
    )
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(read, range(0, nbytes, step)):
            pass


if __name__ == "__main__":
    main()
