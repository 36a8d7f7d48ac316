"""How long a tiny save takes on several ranks of one node, again and again.

The state is so small that only the fixed cost of a save remains: agreement, records, and the start
of the copy. The slowest rank counts.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from itertools import count

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.harness import NO_TENSORS, Bench, parse_arguments
from benchmarks.steady_save import (
    SAVES,
    SAVES_QUICK,
    WARM,
    begin_ours,
    make_checkpointer,
    make_memory,
    milliseconds,
    percentile,
)

PAUSE = 0.02  # seconds from the end of a save to the next, as of a short step
TENSORS, NUMEL = 20, 256


def main() -> None:
    bench = Bench("steady_ranks", NO_TENSORS, parse_arguments())
    torch.manual_seed(1)  # the tensors are replicas
    state: dict[str, object] = {
        "model": {f"w{i}": torch.randn(NUMEL) for i in range(TENSORS)},
        "rank": sw.PerRank(bench.rank),
    }
    slowest: list[float] = []
    with ExitStack() as cleanup:
        make_memory(bench, cleanup)
        checkpointer = make_checkpointer(bench, "ranks", cleanup)
        checkpointer.prepare(state)
        steps = count(1)
        measure(bench, checkpointer, state, steps, WARM)
        for _ in bench.rounds:
            found = measure(bench, checkpointer, state, steps, saves_of(bench))
            bench.seconds.setdefault("a tiny save", []).append(statistics.median(found))
            slowest += found
        dist.barrier()
    report(bench, slowest)
    bench.finish()


def saves_of(bench: Bench) -> int:
    """Return how often to save in a round."""
    return SAVES_QUICK if bench.quick else SAVES


def measure(
    bench: Bench,
    checkpointer: sw.Checkpointer,
    state: dict[str, object],
    steps: count[int],
    saves: int,
) -> list[float]:
    """Return the seconds until each save has returned on all ranks."""
    seconds = []
    for _ in range(saves):
        time.sleep(PAUSE)
        dist.barrier()
        start = time.perf_counter()
        begun = begin_ours(checkpointer, state, steps)
        seconds.append(time.perf_counter() - start)
        begun.staged()
        begun.result()
    return [max(each) for each in zip(*bench.gather_values(seconds), strict=True)]


def report(bench: Bench, slowest: list[float]) -> None:
    """Add the table and the goals to the results."""
    median, p90 = statistics.median(slowest), percentile(slowest, 90)
    row = {
        "saves": len(slowest),
        "median, ms": milliseconds(median),
        "p90": milliseconds(p90),
        "longest": milliseconds(max(slowest)),
    }
    bench.table("Until a tiny save has returned on the slowest rank", [row])
    bench.goal("a tiny save, the slowest rank: median, ms", 1000 * median, most=5)
    bench.goal("a tiny save, the slowest rank: p90, ms", 1000 * p90, most=8)


if __name__ == "__main__":
    main()
