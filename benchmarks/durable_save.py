"""How long until a checkpoint is durable: ours, the peers', and the machine's direct writes."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import LARGE, ROWS, Bench, arguments
from limits import direct_write, sync_files
from torch.distributed.tensor import DTensor

import shardwise as sw

try:
    import torch_checkpointing
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
except ImportError:
    torch_checkpointing = None


def main() -> None:
    bench = Bench("durable_save", LARGE, arguments())
    jobs = saves(bench, bench.model(ROWS))
    for job in jobs.values():  # starts what is started once, and fills caches
        bench.clear()
        job()
    for _ in bench.rounds:
        for name, job in jobs.items():
            bench.clear()
            bench.measure(name, job)
    bench.compare("sw.save", *jobs)
    bench.goal("bandwidth, of direct writes", bench.ratio("direct write", "sw.save"), least=0.85)
    for peer in ("dcp.save", "torch_checkpointing"):
        if peer in jobs:
            bench.goal(f"times faster than {peer}", bench.ratio(peer, "sw.save"), least=2.5)
    bench.finish()


def saves(bench: Bench, model: dict[str, DTensor]) -> dict[str, Callable[[], object]]:
    """What is timed. Each begins in an empty directory."""
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
        jobs["torch_checkpointing"] = torch_checkpointing_save(bench, model)
    elif bench.rank == 0:
        print("torch_checkpointing is not installed, and left out")
    return jobs


def torch_checkpointing_save(bench: Bench, model: dict[str, DTensor]) -> Callable[[], None]:
    """Until it is durable: it does not sync. Buffered, as its direct writes fail on ext4."""
    config = torch_checkpointing.CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = config.build()
    local = {name: tensor.to_local() for name, tensor in model.items()}
    to = bench.dir / "step"

    def save() -> None:
        manager.save(to, {"model": local})
        dist.barrier()
        sync_files(to, bench.rank, bench.world)

    return save


if __name__ == "__main__":
    main()
