"""How long a background save blocks the training, with a local root and with an object store.

The object store is SeaweedFS on this machine. Limit: a copy of the state in memory.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

import shardwise as sw
from benchmarks.harness import ROWS, Bench, Size, parse_arguments
from benchmarks.limits import make_copier
from benchmarks.object_store import start_server
from benchmarks.peers import local
from tests.store.servers import BUCKET

SIZE = Size(tensors=16)
MEMORY = Path("/dev/shm/shardwise-bench")
COPY, LOCAL, BUCKET_ROOT = "copy", "local root", "root in an object store"


def main() -> None:
    os.environ.update(
        AWS_ACCESS_KEY_ID="bench", AWS_SECRET_ACCESS_KEY="bench", AWS_EC2_METADATA_DISABLED="true"
    )
    bench = Bench("stall", SIZE, parse_arguments())
    model = bench.model(ROWS)
    state: dict[str, object] = {"model": model}
    copy = make_copier(local({**model}).values(), threads=4)
    if bench.rank == 0:
        MEMORY.mkdir(exist_ok=True)
    dist.barrier()
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, MEMORY, ignore_errors=True)
        endpoint = start_server(bench, cleanup)
        roots = {
            LOCAL: str((bench.dir / "root").absolute()),
            BUCKET_ROOT: f"s3://{BUCKET}/run?endpoint={endpoint}",
        }
        runs = {name: cleanup.enter_context(open_run(root)) for name, root in roots.items()}
        for run in runs.values():
            run.prepare(state)
        for step in range(1, len(bench.rounds) + 2):
            for name, run in runs.items():
                is_first = " the first" if step == 1 else ""
                handle = bench.measure(f"{name}:{is_first} save", lambda: run.save(step, state))  # noqa: B023
                if handle is None:
                    raise RuntimeError("a save was skipped instead of waiting for a slot")
                bench.measure(f"{name}:{is_first} until it is durable", handle.result)
            if step > 1:
                bench.measure(COPY, copy)
        dist.barrier()  # the server stops with rank 0
    bench.compare(f"{LOCAL}: save", f"{BUCKET_ROOT}: save", COPY)
    ratio = bench.ratio(f"{BUCKET_ROOT}: save", f"{LOCAL}: save")
    bench.goal("blocking of a save to an object store, of a local root", ratio, most=1.1)
    bench.finish()


def open_run(root: str) -> sw.Checkpointer:
    """Open a Checkpointer whose ranks share a node; every save is persisted, too."""
    memory = sw.Memory(dir=str(MEMORY), when_full="wait", slots=2)
    return sw.Checkpointer(root, keep=sw.Keep(last=1), memory=memory)


if __name__ == "__main__":
    main()
