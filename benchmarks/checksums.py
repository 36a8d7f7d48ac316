"""What verifying checksums adds to a load. `goals.py` has the goal."""

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
        bench.compare(f"{cache}: verified", f"{cache}: not verified")
    bench.finish()


if __name__ == "__main__":
    main()
