"""What the state of data loaders adds to a save, and its size: 8 workers, a mixture, packing.

Limit: a save of the same weights without loaders.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import shardwise as sw
from benchmarks.harness import NO_TENSORS, Bench, parse_arguments, round_digits
from shardwise.data import (
    BestFitPacker,
    ElasticBatchSampler,
    ElasticStreamDataset,
    ElasticStreamLoader,
)
from shardwise.kernel.state.plain_values import encode

MEMORY = Path("/dev/shm/shardwise-data-loader")
WORKERS, STREAMS, LENGTH = 8, 16, 4096
STEPS, STEPS_QUICK, WARM = 40, 5, 4
NEVER = 1 << 30
WEIGHTS, WITH_LOADERS = "save: weights", "save: weights and loaders"


@dataclass(frozen=True)
class Documents:
    """A source of random documents; each segment has ten."""

    segment_count: int
    seed: int

    def read(self, segment: int, start: int) -> Iterator[np.ndarray]:
        """Return the documents of a segment."""
        generator = np.random.default_rng((self.seed, segment))
        for i, length in enumerate(generator.integers(10, 3000, 10)):
            if i >= start:
                yield np.arange(length)


def main() -> None:
    bench = Bench("data_loader", NO_TENSORS, parse_arguments())
    dataset = ElasticStreamDataset(
        {f"source {i}": Documents(10_000, i) for i in range(4)},
        streams=STREAMS,
        packer=partial(BestFitPacker, LENGTH),
    )
    loader = ElasticStreamLoader(dataset, num_workers=WORKERS)
    sampler = ElasticBatchSampler(10**9, global_batch=STREAMS)
    weights = {"weights": torch.zeros(16, 1 << 20)}
    states: dict[str, dict[str, Any]] = {
        WEIGHTS: weights,
        WITH_LOADERS: {**weights, "loader": loader, "sampler": sampler},
    }
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, MEMORY, ignore_errors=True)
        shutil.rmtree(MEMORY, ignore_errors=True)
        savers = {name: make_saver(bench, i, cleanup) for i, name in enumerate(states)}
        steps = iter(train(loader, sampler))
        for name, saver in savers.items():
            saver.prepare(states[name])
            for _ in range(WARM):
                saver.save(next(steps), states[name])
        for _ in bench.rounds:
            seconds: dict[str, list[float]] = {name: [] for name in savers}
            for _ in range(STEPS_QUICK if bench.quick else STEPS):
                for name, saver in savers.items():
                    step = next(steps)
                    seconds[name].append(seconds_of(saver, step, states[name]))
            for name, each in seconds.items():
                bench.seconds.setdefault(name, []).append(statistics.median(each))
        report(bench, loader, sampler)
        for saver in savers.values():
            saver.close(wait=False)
    bench.finish()


def make_saver(bench: Bench, number: int, cleanup: ExitStack) -> sw.Checkpointer:
    """Return a Checkpointer that keeps snapshots in memory."""
    MEMORY.mkdir(exist_ok=True)
    memory = sw.Memory(snapshot_every=1, dir=str(MEMORY), when_full="wait", overlap=False)
    saver = sw.Checkpointer(
        bench.dir / str(number), save_every=NEVER, memory=memory, save_at_end=False
    )
    cleanup.callback(saver.close, wait=False)
    return saver


def train(loader: ElasticStreamLoader, sampler: ElasticBatchSampler) -> Iterator[int]:
    """Take a batch of both loaders for each step, and count it."""
    for step, _ in enumerate(zip(loader, sampler, strict=False), 1):
        loader.advance()
        sampler.advance()
        yield step


def seconds_of(saver: sw.Checkpointer, step: int, state: dict[str, Any]) -> float:
    """Return the seconds that a save takes, after earlier saves are done."""
    start = time.perf_counter()
    handle = saver.save(step, state)
    seconds = time.perf_counter() - start
    if handle is None:
        raise RuntimeError("a save was skipped instead of waiting for a slot")
    handle.committed()
    return seconds


def report(bench: Bench, loader: ElasticStreamLoader, sampler: ElasticBatchSampler) -> None:
    """Add the sizes, the table and the goals to the results."""
    saved: dict[str, Any] = {"loader": loader.state_dict(), "sampler": sampler.state_dict()}
    sizes: dict[str, int] = {}
    for name, each in saved.items():
        tensors: dict[str, sw.Shards] = {}
        plain = msgspec.json.encode(encode(each, name, tensors.__setitem__))
        sizes[name] = len(plain)
        for key, shards in tensors.items():
            sizes[key] = sum(each.data.nbytes for each in shards.fragments)
    took = {"loader": seconds_of_call(loader.state_dict)}
    took["sampler"] = seconds_of_call(sampler.state_dict)
    bench.table(
        f"Of the loaders' state; {STREAMS} streams, {WORKERS} workers",
        [
            {
                "part": name,
                "bytes": size,
                "state_dict(), ms": round_digits(1000 * took[name]) if name in took else "",
            }
            for name, size in sizes.items()
        ],
    )
    added = statistics.median(
        a - b for a, b in zip(bench.seconds[WITH_LOADERS], bench.seconds[WEIGHTS], strict=True)
    )
    bench.compare(WEIGHTS, WITH_LOADERS)
    bench.goal("ms that both loaders add to a step with a save", 1000 * added, most=5)
    beside = sum(sizes.values()) - sizes["loader.buffers"]
    bench.goal("MB of state beside the token buffers", beside / 1e6, most=1)


def seconds_of_call(function: Any) -> float:
    """Return the median of the seconds of ten calls."""
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
