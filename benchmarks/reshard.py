"""Saved by four ranks, loaded by two of them; and FSDP's shards loaded as tensor-parallel ones."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import Bench, arguments
from load import save_both
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

import shardwise as sw


def main() -> None:
    bench = Bench("reshard", arguments())
    ours, theirs = bench.dir / "ours", bench.dir / "theirs"
    bench.measure("setup", lambda: save_both(bench))
    del bench.seconds["setup"]
    pair = dist.new_group([0, 1])
    targets = {
        "4 to 4, same": ({"model": bench.state(fill=False)}, None),
        "4 to 2": (on_two(bench, pair, [Shard(0), Shard(0)]), pair),
        "FSDP on 4 to TP on 2": (on_two(bench, pair, [Shard(0), Shard(1)]), pair),
    }
    for _ in range(bench.options.rounds):
        for name, (target, group) in targets.items():
            for library, load in (
                ("sw.load", lambda t=target, g=group: sw.load(ours, t, group=g)),
                ("dcp.load", lambda t=target, g=group: dcp.load(
                    t, checkpoint_id=theirs, process_group=g
                )),
            ):  # fmt: skip
                bench.drop_caches()
                mine = group is None or bench.rank < 2
                bench.measure(f"{name}: {library}", load if mine else lambda: None, clear=False)
    bench.finish("4 to 4, same: sw.load", *bench.seconds)


def on_two(bench: Bench, pair: dist.ProcessGroup, cycle: list[Placement]) -> dict[str, object]:
    """The same tensors, divided over ranks 0 and 1 alone."""
    if bench.rank > 1:
        return {}
    mesh = DeviceMesh.from_group(pair, "cpu")
    side, dtype = bench.options.side, getattr(torch, bench.options.dtype)
    state = {}
    for i in range(bench.options.tensors):
        placement = cycle[i % len(cycle)]
        shape = [side, side]
        shape[placement.dim] //= 2  # type: ignore[attr-defined]
        local = torch.zeros(shape, dtype=dtype)
        state[f"w{i}"] = DTensor.from_local(local, mesh, [placement], run_check=False)
    return {"model": state}


if __name__ == "__main__":
    main()
