"""What planning costs: a first and a second save; and simulated, for up to 16,384 ranks."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from harness import Bench, arguments

import shardwise as sw
from shardwise.manifest.manifest import encode_tensors
from shardwise.plan.cache import PlanCache
from shardwise.plan.description import Description, columns_of
from shardwise.plan.save import plan_save


def main() -> None:
    options = arguments()
    options.tensors, options.side = 10_000, 64
    bench = Bench("planning", options)
    state = {"model": bench.state()}
    first, second = [], []
    for _ in range(options.rounds):
        plans = PlanCache()
        for reports in (first, second):
            bench.measure("save", partial(save, bench, state, plans, reports))
    bench.facts["second_over_first"] = {
        "planning_seconds": round(
            float(
                np.median(
                    [
                        b.seconds["plan"] / a.seconds["plan"]
                        for a, b in zip(first, second, strict=True)
                    ]
                )
            ),
            4,
        ),
        "bytes_communicated": round(
            max(
                b.bytes_communicated / max(a.bytes_communicated, 1)
                for a, b in zip(first, second, strict=True)
            ),
            4,
        ),
    }
    if bench.rank == 0:
        bench.facts["simulated"] = [simulate(ranks) for ranks in (64, 1024, 16384)]
    bench.finish("save")


def save(
    bench: Bench, state: dict[str, object], plans: PlanCache, reports: list[sw.SaveReport]
) -> None:
    """Save, and keep the report."""
    reports.append(sw.save(bench.dir / "ours", state, plans=plans))


def simulate(ranks: int, tensors: int = 1000) -> dict[str, float]:
    """Plan the save of a model of so many tensors, FSDP over so many ranks, on one process."""
    names = tuple(f"model.layers.{i // 10}.weight{i % 10}" for i in range(tensors))
    shape = (16384, 64)
    rows = shape[0] // ranks
    descriptions = [
        Description(
            names,
            ("float32",) * tensors,
            (shape,) * tensors,
            np.arange(tensors),
            columns_of([(rank * rows, 0)] * tensors, 2, 0),
            columns_of([(rows, 64)] * tensors, 2, 1),
        )
        for rank in range(ranks)
    ]
    start = time.perf_counter()
    plan = plan_save(descriptions)
    manifest = encode_tensors(plan.tensors)
    return {
        "ranks": ranks,
        "tensors": tensors,
        "seconds": round(time.perf_counter() - start, 2),
        "manifest_bytes": len(manifest),
    }


if __name__ == "__main__":
    main()
