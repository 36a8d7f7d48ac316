"""The cost of planning a first and a second save. `scale.py` simulates many ranks.

Limit: a second save may take 5% of the first one's planning time and communication.
"""

from __future__ import annotations

import statistics
from functools import partial

import shardwise as sw
from benchmarks.harness import MANY, ROWS, Bench, parse_arguments, round_digits
from shardwise.kernel.plan.save import PlanCache


def main() -> None:
    bench = Bench("planning", MANY, parse_arguments())
    state = bench.state(ROWS)
    seconds, sent = [], []
    for _ in bench.rounds:
        plans = PlanCache()
        reports = []
        for name in ("first save", "second save"):
            bench.clear()
            reports.append(
                bench.measure(name, partial(sw.save, bench.dir / "ours", state, plan_cache=plans))
            )
        both = [bench.gather_values((r.seconds["plan"], r.bytes_communicated)) for r in reports]
        seconds.append([max(rank[0] for rank in ranks) for ranks in both])
        sent.append([sum(rank[1] for rank in ranks) for ranks in both])
    bench.table(
        f"Planning a save of {bench.size.tensors:,} tensors",
        [row(k, seconds, sent) for k in (0, 1)],
    )
    times = statistics.median(second / first for first, second in seconds)
    bench.goal("seconds of planning, second save of first", times, most=0.05)
    share = max(second / first for first, second in sent)
    bench.goal("bytes communicated, second save of first", share, most=0.05)
    bench.finish()


def row(k: int, seconds: list[list[float]], sent: list[list[int]]) -> dict[str, object]:
    """Return a table row for the first or second save: medians over the rounds."""
    return {
        "save": k + 1,
        "planning, seconds": round_digits(statistics.median(each[k] for each in seconds)),
        "bytes communicated": int(statistics.median(each[k] for each in sent)),
    }


if __name__ == "__main__":
    main()
