"""The time to save and load ten thousand tensors of 16 KB, where the cost per tensor dominates.

Peer: DCP; the goal is a tenth of its time.
"""

from __future__ import annotations

import torch.distributed.checkpoint as dcp

import shardwise as sw
from benchmarks.harness import COLUMNS, MANY, ROWS, Bench, parse_arguments


def main() -> None:
    bench = Bench("many_tensors", MANY, parse_arguments())
    rows, columns = bench.state(ROWS), bench.state(COLUMNS)
    ours, theirs = bench.dir / "ours", bench.dir / "theirs"
    for _ in bench.rounds:
        bench.clear()
        bench.measure("sw.save", lambda: sw.save(ours, rows))
        bench.measure("sw.load", lambda: sw.load(ours, rows))
        bench.measure("sw.load, resharded", lambda: sw.load(ours, columns))
        bench.measure("dcp.save", lambda: dcp.save(rows, checkpoint_id=theirs))
        bench.measure("dcp.load", lambda: dcp.load(rows, checkpoint_id=theirs))
        bench.measure("dcp.load, resharded", lambda: dcp.load(columns, checkpoint_id=theirs))
    for verb in ("save", "load", "load, resharded"):
        bench.compare(f"sw.{verb}", f"dcp.{verb}")
        times = bench.ratio(f"dcp.{verb}", f"sw.{verb}")
        bench.goal(f"{verb}: times faster than DCP", times, least=10)
    bench.finish()


if __name__ == "__main__":
    main()
