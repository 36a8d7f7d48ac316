"""The time to check a specification against a checkpoint of 4,096 ranks. Goal: at most 10 s.

The checkpoint is simulated. It has more than a trillion parameters.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.harness import NO_TENSORS, Bench, parse_arguments
from shardwise.parts.formats.reader import Builder, FileTree
from shardwise.parts.formats.specification import add_by_specification
from tests.formats.language.test_scale import DP, PP, SIZES, TP, Row, simulated

LAYERS = (3, 8)
"""Layers per pipeline stage: three are 1.2 trillion parameters, eight a million arrays."""


def main() -> None:
    bench = Bench("foreign_check", NO_TENSORS, parse_arguments())
    table = []
    for layers in LAYERS[:1] if bench.quick else LAYERS:
        rows, name = simulated(layers), f"check {layers * PP} layers"
        for _ in bench.rounds:
            tensors = bench.measure(name, partial(check, rows, bench.dir))
        table.append(
            {
                "layers": layers * PP,
                "ranks": TP * PP * DP,
                "stored arrays": len(rows),
                "global tensors": tensors,
            }
        )
        bench.goal(f"{name}: seconds", median(bench.seconds[name]), most=10)
    bench.table("What was checked", table)
    bench.finish()


def check(rows: list[Row], directory: Path) -> int:
    """Check the arrays of all ranks; return the number of global tensors."""
    builder = Builder(FileTree(directory))
    add_by_specification(builder, "megatron_llama", {"tp": TP, "pp": PP, "dp": DP}, rows, SIZES)
    return len(list(builder.tensor_names()))


if __name__ == "__main__":
    main()
