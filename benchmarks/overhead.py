"""The overhead of a snapshot at every step of a training: slow-down and processor time.

Limits: the same training without snapshots, and the processor time of one copy and its checksums.
Peers: those that can save at every step, into the same memory.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.harness import NO_TENSORS, Bench, parse_arguments
from benchmarks.limits import make_copier
from benchmarks.nodes import agents_below
from benchmarks.peers import Begun, Peer, local, nothing, peers
from benchmarks.processor import family, processor_seconds
from benchmarks.training import Shape, Training
from shardwise.kernel.manifest.checksums import block_checksums

MEMORY = Path("/dev/shm/shardwise-overhead")
STEPS, STEPS_QUICK, WARM = 20, 4, 2
COPIES = 5
NEVER = 1 << 30
WITHOUT = "no snapshots"
OVERLAPPED, AT_ONCE = "sw, overlapped", "sw, at once"
COPY = "one copy of a rank's share"
SHAPES = {
    1: Shape(layers=3, width=1024, heads=16, batch=1, length=192),
    2: Shape(layers=11, width=512, heads=8, batch=1, length=128),
}
QUICK = Shape(layers=2, width=64, heads=2, batch=1, length=16)


@dataclass
class Way:
    """One way to save at every step: the functions that the training loop calls."""

    save: Callable[[], object] = nothing
    before_step: Callable[[], object] = nothing
    finish: Callable[[], object] = nothing


@dataclass
class Figures:
    """The measurements of one way, for every step and every round."""

    steps: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    by_agent: list[float] = field(default_factory=list)


def main() -> None:
    bench = Bench("overhead", NO_TENSORS, parse_arguments())
    shape = QUICK if bench.quick else SHAPES[bench.world]
    training = Training(shape, torch.device("cpu"), divided=bench.world > 1)
    with ExitStack() as cleanup:
        cleanup.callback(clean, bench)
        ways = make_ways(bench, training, cleanup)
        for way in ways.values():
            run(training, way, WARM)
        training.fence_ends_here()
        found = {name: Figures() for name in ways}
        alone = Alone(bench, training)
        for _ in bench.rounds:
            for name, way in ways.items():
                measure(bench, training, way, found[name])
                bench.seconds.setdefault(name, []).append(found[name].means[-1])
            alone.measure()
        report(bench, training, found, alone)
        dist.barrier()
    bench.finish()


def make_ways(bench: Bench, training: Training, cleanup: ExitStack) -> dict[str, Way]:
    """Return the ways: no snapshots, ours, and peers that can save at every step."""
    if bench.rank == 0:
        shutil.rmtree(MEMORY, ignore_errors=True)
        MEMORY.mkdir()
    dist.barrier()
    chosen = ("dcp.async_save, thread, reused buffers", "torch_checkpointing")
    others = peers(training.tensors(), cleanup)
    ways = {
        WITHOUT: Way(),
        OVERLAPPED: ours(bench, training, cleanup, overlap=True),
        AT_ONCE: ours(bench, training, cleanup, overlap=False),
    }
    for name, peer in others.items():
        if name.startswith(chosen):
            ways[name] = theirs(bench, name, peer)
    return ways


def ours(bench: Bench, training: Training, cleanup: ExitStack, *, overlap: bool) -> Way:
    """Return our snapshots in memory, without skipping steps."""
    memory = sw.Memory(snapshot_every=1, overlap=overlap, dir=str(MEMORY), when_full="wait")
    root = bench.dir / f"root-{overlap}"
    checkpointer = sw.Checkpointer(root, save_every=NEVER, memory=memory)
    cleanup.callback(checkpointer.close, wait=False)
    checkpointer.prepare(training.state)
    handles: list[sw.SaveHandle] = []

    def save() -> None:
        handle = checkpointer.save(len(handles) + 1, training.state)
        if handle is None:
            raise RuntimeError("a save was skipped instead of waiting for a slot")
        handles.append(handle)

    return Way(save, finish=lambda: handles[-1].result())


def theirs(bench: Bench, name: str, peer: Peer) -> Way:
    """Return a peer's saves: each waits for the previous one; the last two are kept."""
    last = Begun(nothing)
    paths: list[Path] = []

    def save() -> None:
        nonlocal last
        last.result()
        if bench.rank == 0 and len(paths) > 1:
            shutil.rmtree(paths[-2])
        paths.append(MEMORY / f"{name}-{len(paths)}")
        last = peer.begin(paths[-1])

    return Way(save, lambda: last.staged(), lambda: last.result())


def run(training: Training, way: Way, steps: int) -> tuple[list[float], list[float]]:
    """Train for some steps; return the seconds of each, and the seconds it waited for saving."""
    training.wait_for_copy = way.before_step
    timed = training.run(steps, way.save)
    way.before_step()
    training.wait_for_copy = nothing
    way.finish()
    return timed.steps, timed.waited


def measure(bench: Bench, training: Training, way: Way, figures: Figures) -> None:
    """Measure one round of one way; the slowest rank counts."""
    steps = STEPS_QUICK if bench.quick else STEPS
    bench.wait_for_disk()
    before = used(bench)
    timed, waited = run(training, way, steps)
    dist.barrier()
    after = used(bench)
    slowest = [max(each) for each in zip(*bench.gather_values(timed), strict=True)]
    figures.steps += slowest
    figures.waited += [max(each) for each in zip(*bench.gather_values(waited), strict=True)]
    figures.means.append(statistics.mean(slowest))
    figures.processor.append((after[0] - before[0]) / steps)
    figures.by_agent.append((after[1] - before[1]) / steps)


def used(bench: Bench) -> tuple[float, float]:
    """Return the processor seconds used by all processes, and by the agents alone."""
    trainers = bench.gather_values(os.getpid())
    agents = family(agent_processes())
    return processor_seconds(family(trainers) | agents), processor_seconds(agents)


def agent_processes() -> list[int]:
    """Return the process ids of this benchmark's agents."""
    return [info.process for info in agents_below(MEMORY)]


class Alone:
    """The cost of copies and checksums alone.

    Attributes:
        processor: for each round, the processor seconds of all ranks for a copy and its checksums.
    """

    def __init__(self, bench: Bench, training: Training) -> None:
        tensors = local(training.tensors()).values()
        self._bench = bench
        self._copy_at_once, self._copy = make_copier(tensors, 4), make_copier(tensors, 1)
        self.nbytes = sum(each.nbytes for each in tensors)
        self.processor: list[float] = []

    def measure(self) -> None:
        """Measure one round."""
        bench = self._bench
        bench.wait_for_disk()
        start, seconds = time.process_time(), []
        for _ in range(COPIES):
            block_checksums(self._copy())
        used = (time.process_time() - start) / COPIES
        self.processor.append(sum(bench.gather_values(used)))
        for _ in range(COPIES):
            dist.barrier()
            began = time.perf_counter()
            self._copy_at_once()
            seconds.append(time.perf_counter() - began)
        slowest = max(bench.gather_values(statistics.median(seconds)))
        bench.seconds.setdefault(COPY, []).append(slowest)


def report(bench: Bench, training: Training, found: dict[str, Figures], alone: Alone) -> None:
    """Add the tables and the goals to the results."""
    bench.compare(WITHOUT, *(name for name in found if name != WITHOUT))
    without = found[WITHOUT]
    rows = [row(name, each, without, alone) for name, each in found.items()]
    mega = alone.nbytes / 1e6
    bench.table(f"Of a step; {mega:.0f} MB a rank, {len(without.steps)} steps of each", rows)
    dcp = [slowdown(each, without) for name, each in found.items() if name.startswith("dcp")]
    mine = slowdown(found[OVERLAPPED], without)
    bench.goal("slow-down by snapshots at every step, of DCP's best", mine / min(dcp), most=1 / 3)
    cost = added(found[OVERLAPPED], without) / statistics.median(alone.processor)
    bench.goal("added processor seconds, of copies and checksums alone", cost, most=1.2)
    if bench.world == 1:
        copy = statistics.median(bench.seconds[COPY])
        blocked = statistics.median(found[OVERLAPPED].waited) / copy
        bench.goal("with a core to spare: save and fence block, of a copy", blocked, most=0.1)


def row(name: str, figures: Figures, without: Figures, alone: Alone) -> dict[str, object]:
    """Return a row of the table."""
    more = partial(percent, base=statistics.mean(without.steps))
    late = partial(percent, base=percentile(without.steps))
    copies = statistics.median(alone.processor)
    extra = 0.0 if figures is without else added(figures, without)
    return {
        "way": name,
        "mean, ms": milliseconds(statistics.mean(figures.steps)),
        "slower": more(statistics.mean(figures.steps)),
        "p99, ms": milliseconds(percentile(figures.steps)),
        "p99 slower": late(percentile(figures.steps)),
        "waits, ms (median)": milliseconds(statistics.median(figures.waited)),
        "processor, added ms": milliseconds(extra),
        "of it the agent's": milliseconds(statistics.median(figures.by_agent)),
        "× copies and checksums": f"{extra / copies:.3g}",
    }


def slowdown(figures: Figures, without: Figures) -> float:
    """Return by how many seconds a step is slower: the median over the rounds."""
    pairs = zip(figures.means, without.means, strict=True)
    return statistics.median(a - b for a, b in pairs)


def added(figures: Figures, without: Figures) -> float:
    """Return the added processor seconds of a step: the median over the rounds."""
    pairs = zip(figures.processor, without.processor, strict=True)
    return statistics.median(a - b for a, b in pairs)


def percentile(values: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def percent(value: float, base: float) -> str:
    """Return by how many percent a value exceeds the base."""
    return f"{100 * (value / base - 1):.2f} %"


def milliseconds(value: float) -> float:
    """Return milliseconds, with two decimals."""
    return round(1000 * value, 2)


def clean(bench: Bench) -> None:
    """Stop the agents and delete the snapshots."""
    if bench.rank == 0:
        for process in agent_processes():
            os.kill(process, signal.SIGTERM)
        shutil.rmtree(MEMORY, ignore_errors=True)


if __name__ == "__main__":
    main()
