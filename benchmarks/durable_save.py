"""The time until a checkpoint is durable.

Limit: direct writes of the same size; the goal is 0.85 of their bandwidth. Peers: DCP and
torch_checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

import shardwise as sw
from benchmarks.harness import LARGE, ROWS, Bench, parse_arguments
from benchmarks.limits import direct_write, sync_files

try:
    import torch_checkpointing
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
except ImportError:
    torch_checkpointing = None

BY_TORCH_CHECKPOINTING = {
    "torch_checkpointing": "sync",
    "torch_checkpointing, in the background": "async",
}


def main() -> None:
    bench = Bench("durable_save", LARGE, parse_arguments())
    with ExitStack() as cleanup:
        measure(bench, saves(bench, bench.model(ROWS), cleanup))
    bench.finish()


def measure(bench: Bench, jobs: dict[str, Callable[[], object]]) -> None:
    """Measure every job in every round."""
    for job in jobs.values():  # warm up
        bench.clear()
        job()
    for _ in bench.rounds:
        for name, job in jobs.items():
            bench.clear()
            bench.measure(name, job)
    bench.compare("sw.save", *jobs)
    bench.goal("bandwidth, of direct writes", bench.ratio("direct write", "sw.save"), least=0.85)
    for peer in ("dcp.save", *BY_TORCH_CHECKPOINTING):
        if peer in jobs:
            bench.goal(f"times faster than {peer}", bench.ratio(peer, "sw.save"), least=2.5)


def saves(
    bench: Bench, model: dict[str, DTensor], cleanup: ExitStack
) -> dict[str, Callable[[], object]]:
    """Return the jobs to measure. Each starts with an empty directory."""
    state: dict[str, object] = {"model": model}
    to, share = bench.dir / "step", bench.size.total // bench.world

    def save_by_dcp(*, synced: bool) -> None:
        dcp.save(state, storage_writer=dcp.FileSystemWriter(to, sync_files=synced))

    jobs: dict[str, Callable[[], object]] = {
        "direct write": lambda: direct_write(bench.dir / f"limit-{bench.rank}", share),
        "sw.save": lambda: sw.save(to, state),
        "dcp.save": lambda: save_by_dcp(synced=True),
        "dcp.save, not synced": lambda: save_by_dcp(synced=False),
    }
    if torch_checkpointing is not None:
        for name, kind in BY_TORCH_CHECKPOINTING.items():
            jobs[name] = torch_checkpointing_save(bench, model, kind, cleanup)
    elif bench.rank == 0:
        print("torch_checkpointing is not installed: skipped (`make peers` installs it)")
    return jobs


def torch_checkpointing_save(
    bench: Bench, model: dict[str, DTensor], kind: str, cleanup: ExitStack
) -> Callable[[], None]:
    """Return a save by torch_checkpointing that ends when the files are durable.

    torch_checkpointing does not sync its files, so the job does. Writes are buffered, because its
    direct writes fail on ext4.
    """
    config = getattr(torch_checkpointing.CheckpointManager.Config, f"with_{kind}_save")()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = config.build()
    cleanup.callback(manager.close)
    local = {name: tensor.to_local() for name, tensor in model.items()}
    to = bench.dir / "step"

    def save() -> None:
        saved = manager.save(to, {"model": local})
        if saved is not None:  # in the background
            saved.result()
        dist.barrier()
        sync_files(to, bench.rank, bench.world)

    return save


if __name__ == "__main__":
    main()
