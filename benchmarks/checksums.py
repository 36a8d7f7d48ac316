"""The part of a load's time that goes into verifying checksums. Goal: at most a tenth."""

from __future__ import annotations

from functools import partial

import shardwise as sw
from benchmarks.harness import LARGE, ROWS, Bench, parse_arguments


def main() -> None:
    bench = Bench("checksums", LARGE, parse_arguments())
    state = bench.state(ROWS)
    path = bench.dir / "ours"
    sw.save(path, state)
    for _ in bench.rounds:
        for cache, prepare in (("cold", bench.drop_page_cache), ("warm", bench.fill_page_cache)):
            for verify, name in ((True, "verified"), (False, "not verified")):
                prepare()
                bench.measure(f"{cache}: {name}", partial(sw.load, path, state, verify=verify))
    for cache in ("cold", "warm"):
        without = f"{cache}: not verified"
        bench.compare(f"{cache}: verified", without)
        cost = 1 - bench.ratio(without, f"{cache}: verified")
        bench.goal(f"{cache}: checksums, of the load's time", cost, most=0.1)
    bench.finish()


if __name__ == "__main__":
    main()
