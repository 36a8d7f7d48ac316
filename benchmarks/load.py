"""How long a load takes, same sharding and others, with a cold and with a warm page cache."""

from __future__ import annotations

import statistics

import torch.distributed.checkpoint as dcp
from harness import Bench, arguments
from torch.distributed.tensor import Shard

import shardwise as sw


def main() -> None:
    bench = Bench("load", arguments())
    ours, theirs = bench.dir / "ours", bench.dir / "theirs"
    bench.measure("setup", lambda: save_both(bench))
    bench.direct_write()
    del bench.seconds["setup"]
    rows = {"model": bench.state(fill=False)}
    columns = {"model": bench.state(Shard(1), fill=False)}
    work = {
        "sw.load": lambda: sw.load(ours, rows),
        "dcp.load": lambda: dcp.load(rows, checkpoint_id=theirs),
        "sw.load, rows to columns": lambda: sw.load(ours, columns),
        "dcp.load, rows to columns": lambda: dcp.load(columns, checkpoint_id=theirs),
    }
    unverified = {"sw.load, not verified": lambda: sw.load(ours, rows, verify=False)}
    for _ in range(bench.options.rounds):
        for name, job in ({"direct read": bench.direct_read} | work).items():
            bench.drop_caches()
            bench.measure(f"cold: {name}", job, clear=False)
        bench.warm_caches()
        for name, job in (work | unverified).items():
            bench.measure(f"warm: {name}", job, clear=False)
    cold = [name for name in bench.seconds if name.startswith("cold")]
    bench.facts["warm_ratio_to_ours"] = ratios(bench, "warm: sw.load")
    bench.finish("cold: sw.load", *cold)


def save_both(bench: Bench) -> None:
    """What is loaded later, by ours and by DCP."""
    state = {"model": bench.state()}
    sw.save(bench.dir / "ours", state)
    dcp.save(state, checkpoint_id=bench.dir / "theirs")


def ratios(bench: Bench, ours: str) -> dict[str, float]:
    """Medians of the ratios of each round, warm."""
    return {
        name: round(
            statistics.median(
                b / a for a, b in zip(bench.seconds[ours], bench.seconds[name], strict=True)
            ),
            3,
        )
        for name in bench.seconds
        if name.startswith("warm")
    }


if __name__ == "__main__":
    main()
