"""Ten thousand tensors of 16 KB: all work is per tensor, and none of it is bytes."""

from __future__ import annotations

import torch.distributed.checkpoint as dcp
from harness import Bench, arguments
from torch.distributed.tensor import Shard

import shardwise as sw


def main() -> None:
    options = arguments(rounds=5)
    options.tensors, options.side = 10_000, 64
    bench = Bench("many_tensors", options)
    rows = {"model": bench.state()}
    columns = {"model": bench.state(Shard(1), fill=False)}
    ours, theirs = bench.dir / "ours", bench.dir / "theirs"
    for _ in range(options.rounds):
        bench.measure("sw.save", lambda: sw.save(ours, rows))
        bench.measure("sw.load", lambda: sw.load(ours, rows), clear=False)
        bench.measure("sw.load, resharded", lambda: sw.load(ours, columns), clear=False)
        bench.measure("dcp.save", lambda: dcp.save(rows, checkpoint_id=theirs))
        bench.measure("dcp.load", lambda: dcp.load(rows, checkpoint_id=theirs), clear=False)
        bench.measure(
            "dcp.load, resharded", lambda: dcp.load(columns, checkpoint_id=theirs), clear=False
        )
    bench.facts["times_faster"] = {
        verb: round(min_ratio(bench, verb), 1) for verb in ("save", "load", "load, resharded")
    }
    bench.finish("sw.save", "dcp.save")


def min_ratio(bench: Bench, verb: str) -> float:
    """The median over the rounds of their seconds over ours."""
    pairs = zip(bench.seconds[f"dcp.{verb}"], bench.seconds[f"sw.{verb}"], strict=True)
    ratios = sorted(theirs / ours for theirs, ours in pairs)
    return ratios[len(ratios) // 2]


if __name__ == "__main__":
    main()
