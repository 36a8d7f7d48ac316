"""How long until a checkpoint is durable: ours, the peers', and the machine's direct writes."""

from __future__ import annotations

import torch.distributed.checkpoint as dcp
from harness import Bench, arguments
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.plan.cache import PlanCache

try:
    import torch_checkpointing
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
except ImportError:
    torch_checkpointing = None


def main() -> None:
    bench = Bench("durable_save", arguments())
    state = bench.state()
    plans = PlanCache()
    ours, theirs = bench.dir / "ours", bench.dir / "theirs"
    for _ in range(bench.options.rounds + 1):
        bench.measure("direct write", bench.direct_write)
        bench.measure("sw.save", lambda: sw.save(ours, {"model": state}, plans=plans))
        # FileSystemWriter syncs its files by default, not the directory.
        bench.measure("dcp.save", lambda: dcp.save({"model": state}, checkpoint_id=theirs))
        if torch_checkpointing is not None:
            bench.measure(
                "torch_checkpointing", lambda: save_with_torch_checkpointing(bench, state)
            )
    for seconds in bench.seconds.values():
        del seconds[0]  # the round that fills caches and starts what is started once
    peers = [name for name in bench.seconds if name != "sw.save"]
    bench.finish("sw.save", *peers)


def save_with_torch_checkpointing(bench: Bench, state: dict[str, DTensor]) -> None:
    """Until it is durable: synchronously, and buffered, as its direct writes fail on ext4."""
    local = {name: tensor.to_local() for name, tensor in state.items()}
    config = torch_checkpointing.CheckpointManager.Config.with_sync_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = config.build()
    saved = manager.save(str(bench.dir / "theirs"), {"model": local})
    if saved is not None:
        saved.result()
    manager.close()


if __name__ == "__main__":
    main()
