"""The time to load a ZeRO checkpoint of two ranks into another parallelism.

Peer: DeepSpeed's conversion to a universal checkpoint and the load of that; the goal is 20 times
its speed. Limit: a load of our own checkpoint of the same state; the goal is at most 1.3 times its
time, and to read at most 1.1 times the checkpoint's bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from benchmarks import zero
from benchmarks.harness import NO_TENSORS, Bench, parse_arguments, round_digits
from benchmarks.limits import bytes_read, read_files_into_cache

BLOCKS, BLOCKS_QUICK = 10, 1
ROUNDS = 3
LOADING = "load_universal"


def main() -> None:
    bench = Bench("foreign_resume", NO_TENSORS, parse_arguments())
    blocks = BLOCKS_QUICK if bench.quick else BLOCKS
    on_first(bench, lambda: zero.make(bench.dir, blocks, *zero.STAGES))
    read = [resume(bench, stage, blocks) for stage in zero.STAGES]
    bench.table("Bytes read over all ranks, of those of the checkpoint", read)
    for row in read:
        bench.goal(f"{row['checkpoint']}: bytes read, of the checkpoint", row["ours"], most=1.1)
    bench.finish()


def resume(bench: Bench, stage: int, blocks: int) -> dict[str, Any]:
    """Measure both ways in turn, from one checkpoint. Returns a table row of the bytes read."""
    name, place = f"ZeRO-{stage}", bench.dir / f"zero{stage}"
    native, universal = bench.dir / f"native{stage}", place / "universal"
    state, engine = ours(blocks), zero.engine_of(stage, blocks, universal=True)
    sw.load(place, state)
    sw.save(native, state)
    converted: list[tuple[float, int]] = []

    def convert() -> None:
        converted.append(zero.to_universal(place))

    jobs: dict[str, Callable[[], object]] = {
        "sw.load": lambda: sw.load(place, state),
        "sw.load of our own": lambda: sw.load(native, state),
        "ds_to_universal": lambda: on_first(bench, convert),
        LOADING: lambda: engine.load_checkpoint(str(place), tag=universal.name),
    }
    read = {}
    size = sum(file.stat().st_size for file in (place / zero.TAG).iterdir())
    for _ in bench.rounds[:ROUNDS]:
        for way, job in jobs.items():
            for files in (place, native):
                on_first(bench, partial(read_files_into_cache, files))
            before = bytes_read()
            bench.measure(f"{name}: {way}", job)
            read[way] = sum(bench.gather_values(bytes_read() - before)) / size
    same_weights(state, engine)
    engine.destroy()
    conversions = bench.gather_values(converted)[0]
    report(bench, name, [seconds for seconds, _ in conversions])
    return {
        "checkpoint": name,
        "bytes": size,
        "ours": round_digits(read["sw.load"]),
        "ds_to_universal": round_digits(conversions[-1][1] / size),
        "load_universal": round_digits(read[LOADING]),
    }


def report(bench: Bench, name: str, converting: list[float]) -> None:
    """Compare with the sum of DeepSpeed's two steps, with and without the start of its process."""
    base, both = f"{name}: sw.load", f"{name}: DeepSpeed, both"
    commands, loading = (bench.seconds[f"{name}: {n}"] for n in ("ds_to_universal", LOADING))
    bench.seconds[both] = [a + b for a, b in zip(commands, loading, strict=True)]
    begun = f"{both}, but for the start of a process"
    bench.seconds[begun] = [a + b for a, b in zip(converting, loading, strict=True)]
    bench.compare(base, both, begun, f"{name}: sw.load of our own")
    for way in (both, begun):
        bench.goal(f"{way}: sw.load is times as fast", bench.ratio(way, base), least=20)
    own = bench.ratio(base, f"{name}: sw.load of our own")
    bench.goal(f"{name}: a load, of that of our own checkpoint", own, most=1.3)


def ours(blocks: int) -> dict[str, Any]:
    """Return the same model under FSDP2 (or unsharded on one rank) and its optimizer."""
    model = zero.Model(blocks)
    if dist.get_world_size() > 1:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def same_weights(state: dict[str, Any], engine: Any) -> None:
    """Check that both ways load the same weights."""
    trained = zip(state["model"].parameters(), engine.module.parameters(), strict=True)
    for own, other in trained:
        whole = own.full_tensor() if isinstance(own, DTensor) else own
        if not torch.equal(whole, safe_get_full_fp32_param(other).view_as(whole)):
            raise RuntimeError("sw.load and load_universal loaded different weights")


def on_first(bench: Bench, job: Callable[[], None]) -> None:
    """Run a job on rank 0 while the others wait."""
    if bench.rank == 0:
        job()
    dist.barrier()


if __name__ == "__main__":
    main()
