"""The time to load a checkpoint into other shardings and on half of the ranks.

Limit: a load into the same sharding; the goal is at most 1.2 times its time. Peer: DCP.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

import shardwise as sw
from benchmarks.harness import COLUMNS, LARGE, ROWS, Bench, parse_arguments

SAME = "same sharding"
TARGETS = {
    SAME: ([ROWS], False),
    "rows to columns": ([COLUMNS], False),
    "half the ranks": ([ROWS], True),
    "half the ranks, FSDP to TP": ([COLUMNS, ROWS], True),
}


def main() -> None:
    bench = Bench("reshard", LARGE, parse_arguments())
    state = bench.state(ROWS)
    sw.save(bench.dir / "sw", state)
    dcp.save(state, checkpoint_id=bench.dir / "dcp")
    del state
    half = dist.new_group(list(range(bench.world // 2)))
    for _ in bench.rounds:
        for name, (placements, halved) in TARGETS.items():
            measure(bench, name, placements, half if halved else dist.group.WORLD)
    for cache in ("cold", "warm"):
        base = f"{cache}: sw.load, {SAME}"
        for name in TARGETS:
            ours, theirs = f"{cache}: sw.load, {name}", f"{cache}: dcp.load, {name}"
            bench.compare(base, ours, theirs)
            if name != SAME:
                bench.goal(f"{cache}: {name}, of {SAME}", bench.ratio(ours, base), most=1.2)
            times = bench.ratio(theirs, ours)
            bench.goal(f"{cache}: {name}, times faster than dcp.load", times, least=1)
    bench.finish()


def measure(bench: Bench, name: str, placements: list[Shard], group: Any) -> None:
    """Load one target with both libraries, cold and warm; ranks outside the group wait."""
    mine = group != dist.GroupMember.NON_GROUP_MEMBER
    mesh = DeviceMesh.from_group(group, "cpu") if mine else None
    state = bench.state(*placements, mesh=mesh) if mine else {}
    loads = {
        "sw": lambda: sw.load(bench.dir / "sw", state, group=group),
        "dcp": lambda: dcp.load(state, checkpoint_id=bench.dir / "dcp", process_group=group),
    }
    for cache, prepare in (("cold", bench.drop_page_cache), ("warm", bench.fill_page_cache)):
        for library, load in loads.items():
            prepare()
            bench.measure(f"{cache}: {library}.load, {name}", load if mine else lambda: None)


if __name__ == "__main__":
    main()
