"""The time of a load into the same sharding, with a cold and a warm page cache.

Limit when cold: direct reads of the same size; the goal is 0.85 of their bandwidth. Peer: DCP.
"""

from __future__ import annotations

import torch.distributed.checkpoint as dcp

import shardwise as sw
from benchmarks.harness import LARGE, ROWS, Bench, parse_arguments
from benchmarks.limits import direct_read, direct_write


def main() -> None:
    bench = Bench("load", LARGE, parse_arguments())
    state = bench.state(ROWS)
    ours, theirs = bench.dir / "ours", bench.dir / "theirs"
    limit, share = bench.dir / f"limit-{bench.rank}", bench.size.total // bench.world
    sw.save(ours, state)
    dcp.save(state, checkpoint_id=theirs)
    direct_write(limit, share)
    loads = {
        "sw.load": lambda: sw.load(ours, state),
        "dcp.load": lambda: dcp.load(state, checkpoint_id=theirs),
    }
    for _ in bench.rounds:
        for name, job in {"direct read": lambda: direct_read(limit, share), **loads}.items():
            bench.drop_page_cache()
            bench.measure(f"cold: {name}", job)
        bench.fill_page_cache()
        for name, job in loads.items():
            bench.measure(f"warm: {name}", job)
    bench.compare("cold: sw.load", "cold: direct read", "cold: dcp.load")
    bench.compare("warm: sw.load", "warm: dcp.load")
    bench.goal(
        "cold: bandwidth, of direct reads",
        bench.ratio("cold: direct read", "cold: sw.load"),
        least=0.85,
    )
    for cache in ("cold", "warm"):
        times = bench.ratio(f"{cache}: dcp.load", f"{cache}: sw.load")
        bench.goal(f"{cache}: times faster than dcp.load", times, least=1.5)
    bench.finish()


if __name__ == "__main__":
    main()
