"""The cost of planning a first and a second save, and, simulated, for up to 16,384 ranks.

Limit: a second save may take 5% of the first one's planning time and communication.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

import shardwise as sw
from benchmarks.harness import MANY, ROWS, Bench, parse_arguments, round_digits
from shardwise.plan.save import PlanCache, plan_save
from shardwise.plan.structure import AxisSplit, Description, Structure

SIMULATED = (64, 1024, 16384)


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
                bench.measure(
                    name, lambda p=plans: sw.save(bench.dir / "ours", state, plan_cache=p)
                )
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
    if bench.rank == 0:
        simulated = [simulate(ranks) for ranks in SIMULATED]
        bench.table("Planning for a thousand tensors, FSDP, simulated on one process", simulated)
    bench.finish()


def row(k: int, seconds: list[list[float]], sent: list[list[int]]) -> dict[str, object]:
    """Return a table row for the first or second save: medians over the rounds."""
    return {
        "save": k + 1,
        "planning, seconds": round_digits(statistics.median(each[k] for each in seconds)),
        "bytes communicated": int(statistics.median(each[k] for each in sent)),
    }


def simulate(ranks: int, tensors: int = 1000) -> dict[str, float]:
    """Plan the save of a model under FSDP over many ranks, on one process."""
    names = tuple(f"model.layers.{i // 10}.weight{i % 10}" for i in range(tensors))
    shape = (max(SIMULATED), 64)
    rule = (AxisSplit(0, ranks, 1, 0),)
    structure = Structure(
        names, ("float32",) * tensors, (shape,) * tensors, (rule,), (0,) * tensors
    )
    coordinates = [(i,) for i in range(ranks)]
    offset = np.zeros((tensors, 2), np.int64)
    part = np.tile(np.array([shape[0] // ranks, shape[1]], np.int64), (tensors, 1))
    description = Description(structure, (0,), np.arange(tensors), offset, part)
    start = time.perf_counter()
    plan = plan_save([(structure, np.arange(ranks))], coordinates, 0, description)
    encoded = plan.encoded_tensors
    seconds = time.perf_counter() - start
    return {"ranks": ranks, "seconds": round_digits(seconds), "manifest, bytes": len(encoded)}


if __name__ == "__main__":
    main()
