"""The time to check a specification against a checkpoint of 4,096 ranks. Goal: at most 10 s.

The checkpoint is simulated. It has more than a trillion parameters.
"""

from __future__ import annotations

from statistics import median

from benchmarks.harness import NO_TENSORS, Bench, parse_arguments
from shardwise.formats.language import apply_spec
from shardwise.formats.specs import load_builtin
from tests.formats.language.test_scale import PP, SIZES, simulated

LAYERS = (3, 8)
"""Layers per pipeline stage: three are 1.2 trillion parameters, eight a million arrays."""


def main() -> None:
    bench = Bench("foreign_check", NO_TENSORS, parse_arguments())
    spec, rows = load_builtin("megatron_llama"), []
    for layers in LAYERS[:1] if bench.quick else LAYERS:
        catalogue, name = simulated(layers), f"check {layers * PP} layers"
        for _ in bench.rounds:
            foreign = bench.measure(name, lambda c=catalogue: apply_spec(spec, c, sizes=SIZES))
        rows.append(
            {
                "layers": layers * PP,
                "ranks": len(catalogue.files),
                "stored arrays": len(catalogue),
                "global tensors": len(foreign.tensors),
            }
        )
        bench.goal(f"{name}: seconds", median(bench.seconds[name]), most=10)
    bench.table("What was checked", rows)
    bench.finish()


if __name__ == "__main__":
    main()
