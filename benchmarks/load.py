"""The time of a load into the same sharding, with a cold and a warm page cache.

The second load, and the first load after a save, find in the page cache what the call before has
left there. They are measured by default, and with `page_cache=true`. Limit when cold: direct reads
of the same size; the goal is 0.85 of their bandwidth. Peer: DCP.
"""

from __future__ import annotations

import torch.distributed.checkpoint as dcp

import shardwise as sw
from benchmarks.harness import LARGE, ROWS, Bench, parse_arguments
from benchmarks.limits import direct_read, direct_write

GOALS = {"cold": 1.0, "second": 1.3, "after a save": 1.3, "warm": 1.5}


def main() -> None:
    bench = Bench("load", LARGE, parse_arguments())
    state = bench.state(ROWS)
    ours, theirs = bench.dir / "ours", bench.dir / "theirs"
    limit, share = bench.dir / f"limit-{bench.rank}", bench.size.total // bench.world
    sw.save(ours, state)
    dcp.save(state, checkpoint_id=theirs)
    cached = f"file://{ours.absolute()}?page_cache=true"
    loads = {
        "sw.load": lambda: sw.load(ours, state),
        "sw.load with page_cache=true": lambda: sw.load(cached, state),
        "dcp.load": lambda: dcp.load(state, checkpoint_id=theirs),
    }
    saves = {
        "sw.load": lambda: sw.save(ours, state, overwrite=True),
        "sw.load with page_cache=true": lambda: sw.save(cached, state, overwrite=True),
        "dcp.load": lambda: dcp.save(state, checkpoint_id=theirs),
    }
    for _ in bench.rounds:
        # As new as the checkpoints: the host of a virtual machine may have new files in memory.
        limit.unlink(missing_ok=True)
        direct_write(limit, share)
        # Another order each round: page cache that a load frees is faster to fill for the next one.
        loads = dict([*list(loads.items())[1:], *list(loads.items())[:1]])
        for name, job in {"direct read": lambda: direct_read(limit, share), **loads}.items():
            bench.drop_page_cache()
            bench.measure(f"cold: {name}", job)
            if name in saves:
                bench.measure(f"second: {name}", job)
        for name, load in loads.items():
            bench.drop_page_cache()
            bench.measure(f"save before: {name}", saves[name])
            bench.measure(f"after a save: {name}", load)
        bench.fill_page_cache()
        for name in ("sw.load", "dcp.load"):
            bench.measure(f"warm: {name}", loads[name])
    bench.compare("cold: sw.load", "cold: direct read", "cold: dcp.load")
    bench.goal(
        "cold: bandwidth, of direct reads",
        bench.ratio("cold: direct read", "cold: sw.load"),
        least=0.85,
    )
    for case, least in GOALS.items():
        for name in ("sw.load", "sw.load with page_cache=true")[: 1 if case == "warm" else 2]:
            bench.compare(f"{case}: {name}", f"{case}: dcp.load")
            times = bench.ratio(f"{case}: dcp.load", f"{case}: {name}")
            bench.goal(f"{case}: {name}, times faster than dcp.load", times, least=least)
    bench.finish()


if __name__ == "__main__":
    main()
