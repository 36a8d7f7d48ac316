"""Measures one rank of a very large job, in a process of its own; see `scale.py`."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory import status
from benchmarks.scale_messages import SavingRank, load_group
from benchmarks.scale_states import Job
from shardwise.kernel.engine.buffers import Arena
from shardwise.kernel.engine.load import plan_reads
from shardwise.kernel.manifest.manifest import decode_manifest
from shardwise.kernel.manifest.validate import layout_of_manifest
from shardwise.kernel.state.name_lookup import SavedNames
from shardwise.kernel.store.places import open_store

CACHED_PLANS = 9
"""How often a cached plan is measured."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a part of a save cost one process.

    Attributes:
        seconds: processor seconds.
        received, sent: bytes.
        rounds: how often messages went up and down the tree of ranks.
        memory: the growth of the process's memory, in MB.
    """

    seconds: float
    received: int
    sent: int
    rounds: int
    memory: float


@dataclass(frozen=True, slots=True)
class CostOfRank:
    """The cost of the parts of a save: plans, and the round after which rank 0 publishes."""

    first_plan: Cost
    cached_plan: Cost
    publish: Cost
    publish_again: Cost
    manifest: bytes


def measure_rank(job: Job, rank: int, directory: Path) -> CostOfRank:
    """Measure a first and a cached save of one rank."""
    own, group = SavingRank.of(job, rank, directory), load_group(job, rank, directory)
    costs: list[Cost] = []

    @contextmanager
    def measured() -> Iterator[None]:
        with without_gc():
            reset_peak()
            memory, start = status("VmRSS"), time.process_time()
            before = group.bytes_received, group.bytes_sent, group.rounds
            yield
            seconds = time.process_time() - start
            after = group.bytes_received, group.bytes_sent, group.rounds
            received, sent, rounds = (b - a for a, b in zip(before, after, strict=True))
            growth = round(status("VmHWM") - memory, 1)
            costs.append(Cost(seconds, received, sent, rounds, growth))

    with measured():
        own.plan(group)
    begin = group.rounds
    for _ in range(CACHED_PLANS):
        group.rewind(begin)
        with measured():
            planned = own.plan(group)
    cached = sorted(costs[1:], key=lambda cost: cost.seconds)[CACHED_PLANS // 2]
    begin = group.rounds
    for _ in range(2):
        group.rewind(begin)
        with measured():
            manifest = own.publish(group, planned)
    return CostOfRank(costs[0], cached, costs[-2], costs[-1], manifest)


@contextmanager
def without_gc() -> Iterator[None]:
    """Pause the garbage collector, as every save and load does."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def reset_peak() -> None:
    """Forget the largest size of this process's memory so far."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def load_rank(job: Job, path: Path) -> tuple[float, float, float, int]:
    """Open a manifest and plan the load of a middle rank: seconds, MB and reads."""
    store, arena = open_store(path.parent), Arena(1 << 20)
    state = job.state(job.world // 2)
    with without_gc():
        reset_peak()
        memory, start = status("VmRSS"), time.process_time()
        layout = layout_of_manifest(decode_manifest(path.read_bytes()))
        opened = time.process_time()
        reads = plan_reads(state.tensors, SavedNames(layout), store, arena, verify=True)
        planned = time.process_time()
        grown = round(status("VmHWM") - memory, 1)
    return opened - start, planned - opened, grown, len(reads.spans)
