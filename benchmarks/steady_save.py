"""What a repeated save of a small state costs the thread of the training.

The states are a GPT of 788 tensors, and 10,000 plain tensors. Limit: one `_foreach_copy_` of all
tensors. Peers: DCP with buffers that it reuses.
"""

from __future__ import annotations

import gc
import os
import resource
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from types import CodeType, FrameType

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.harness import NO_TENSORS, Bench, parse_arguments, round_digits
from benchmarks.nodes import agents_below
from benchmarks.peers import Begun, by_dcp
from benchmarks.small_states import SmallState, gpt, many

MEMORY = Path("/dev/shm/shardwise-steady-save")
PACKAGE = str(Path(sw.__file__).parent)
NEVER = 1 << 30
WARM, SAVES, SAVES_QUICK = 8, 20, 3  # in each round
PEER_WARM, PEER_SAVES = 2, 4  # DCP needs seconds for a save of 10,000 tensors
MANY, MANY_QUICK = 10_000, 1_000
OURS, COPY = "sw: save", "one _foreach_copy_ of all tensors"
PEERS = (
    "dcp.async_save, thread, reused buffers",
    "dcp.async_save, thread, reused buffers, async staging",
)
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
BALLAST = 10_000
REPEATS = 5


@dataclass(frozen=True)
class Way:
    """One way to save, with how often it is measured in a round."""

    begin: Callable[[], Begun]
    warm: int
    saves: int


@dataclass
class Costs:
    """The costs of each save of one way, in seconds."""

    returns: list[float] = field(default_factory=list)
    of_thread: list[float] = field(default_factory=list)
    until_staged: list[float] = field(default_factory=list)


def main() -> None:
    bench = Bench("steady_save", NO_TENSORS, parse_arguments())
    torch.manual_seed(1)
    # DCP's stagers open a file of shared memory for each tensor.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with ExitStack() as cleanup:
        make_memory(bench, cleanup)
        ask(bench, gpt(), most_ms=2, cleanup=cleanup)
        ask(bench, many(MANY_QUICK if bench.quick else MANY), most_ms=10, cleanup=cleanup)
    bench.finish()


def make_memory(bench: Bench, cleanup: ExitStack) -> None:
    """Make the directory of snapshots; `cleanup` stops its agent and removes it."""
    cleanup.callback(clean, bench)
    if bench.rank == 0:
        shutil.rmtree(MEMORY, ignore_errors=True)
        MEMORY.mkdir()
    dist.barrier()


def ask(bench: Bench, small: SmallState, *, most_ms: float, cleanup: ExitStack) -> None:
    """Measure the saves of one state on one rank."""
    tensors = small.tensors()
    title = f"{len(tensors):,} tensors"
    checkpointer = make_checkpointer(bench, title, cleanup)
    checkpointer.prepare(small.state)
    ways = make_ways(bench, small, checkpointer, cleanup)
    for way in ways.values():
        for _ in range(way.warm):
            save(way, Costs())
    found = {name: Costs() for name in ways}
    for _ in bench.rounds:
        for name, way in ways.items():
            bench.wait_for_disk()
            costs = Costs()
            for _ in range(way.saves):
                save(way, costs)
            median = statistics.median(costs.returns)
            bench.seconds.setdefault(f"{title}: {name}", []).append(median)
            found[name].returns += costs.returns
            found[name].of_thread += costs.of_thread
            found[name].until_staged += costs.until_staged
    bench.compare(f"{title}: {COPY}", *(f"{title}: {name}" for name in ways if name != COPY))
    bench.table(f"Of a save of {title}", [row(name, found[name], len(tensors)) for name in ways])
    ours = ways[OURS].begin
    containers = statistics.median(containers_of(ours) for _ in range(REPEATS))
    ran = codes_of(ours)
    functions, modules = len(ran), len({code.co_filename for code in ran})
    bench.table(
        f"Of Python in our save of {title}",
        [{"containers": containers, "functions": functions, "modules": modules}],
    )
    thread = 1000 * statistics.median(found[OURS].of_thread)
    bench.goal(f"{title}: CPU of the calling thread, ms", thread, most=most_ms)
    staged = 1e6 * statistics.median(found[OURS].until_staged) / len(tensors)
    bench.goal(f"{title}: CPU until staged, µs a tensor", staged, most=4)
    bench.goal(f"{title}: containers that a save allocates", containers, most=100)
    bench.goal(f"{title}: functions that run on the calling thread", functions, most=60)
    bench.goal(f"{title}: modules that run on the calling thread", modules, most=15)
    checkpointer.close(wait=False)


def make_checkpointer(bench: Bench, name: str, cleanup: ExitStack) -> sw.Checkpointer:
    """Open a Checkpointer that keeps snapshots in memory only."""
    memory = sw.Memory(dir=str(MEMORY), slots=2, overlap=True, when_full="wait")
    checkpointer = sw.Checkpointer(
        bench.dir / name, save_every=NEVER, save_at_end=False, memory=memory
    )
    cleanup.callback(checkpointer.close, wait=False)
    return checkpointer


def make_ways(
    bench: Bench, small: SmallState, checkpointer: sw.Checkpointer, cleanup: ExitStack
) -> dict[str, Way]:
    """Return our save, those of DCP, and the copy that is the limit.

    The stagers of DCP open a file of shared memory for each tensor, so they are left out if this
    process may not open as many.
    """
    tensors = small.tensors()
    may_open = resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 4 * len(tensors)
    saves = SAVES_QUICK if bench.quick else SAVES
    ways = {OURS: Way(partial(begin_ours, checkpointer, small.state, count(1)), WARM, saves)}
    for name, peer in by_dcp(tensors, cleanup).items():
        if name in PEERS and may_open:
            begin = partial(begin_theirs, peer.begin, MEMORY / name)
            ways[name] = Way(begin, PEER_WARM, min(saves, PEER_SAVES))
    sources = list(tensors.values())
    targets = [torch.empty_like(each) for each in sources]

    def copy() -> Begun:
        torch._foreach_copy_(targets, sources)
        return Begun(lambda: None)

    return {**ways, COPY: Way(copy, WARM, saves)}


def begin_ours(checkpointer: sw.Checkpointer, state: dict[str, object], steps: count[int]) -> Begun:
    """Begin our save."""
    handle = checkpointer.save(next(steps), state)
    if handle is None:
        raise RuntimeError("a save was skipped instead of waiting for a slot")
    return Begun(handle.result, handle.staged)


def begin_theirs(begin: Callable[[Path], Begun], path: Path) -> Begun:
    """Begin a peer's save, whose files are removed when it is done."""
    begun = begin(path)

    def result() -> None:
        begun.result()
        shutil.rmtree(path)

    return Begun(result, begun.staged)


def save(way: Way, costs: Costs) -> None:
    """Save once, and add what it cost."""
    start, of_thread, of_all = time.perf_counter(), time.thread_time(), time.process_time()
    begun = way.begin()
    costs.of_thread.append(time.thread_time() - of_thread)
    costs.returns.append(time.perf_counter() - start)
    begun.staged()
    costs.until_staged.append(time.process_time() - of_all)
    begun.result()


def containers_of(begin: Callable[[], Begun]) -> int:
    """Return how many more containers the garbage collector tracks after a save returns."""
    gc.collect()
    gc.disable()
    try:
        ballast: list[list[int]] = [[] for _ in range(BALLAST)]  # the counter stays above zero
        before = gc.get_count()[0]
        begun = begin()
        after = gc.get_count()[0]
        del ballast
    finally:
        gc.enable()
    begun.staged()
    begun.result()
    return after - before


def codes_of(begin: Callable[[], Begun]) -> set[CodeType]:
    """Return the functions of shardwise that run on the calling thread in a save."""
    found: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found.add(code)

    sys.setprofile(note)
    try:
        begun = begin()
    finally:
        sys.setprofile(None)
    begun.staged()
    begun.result()
    return {code for code in found if code.co_name not in COMPREHENSIONS}


def row(name: str, costs: Costs, tensors: int) -> dict[str, object]:
    """Return a row of the table of one state."""
    return {
        "way": name,
        "saves": len(costs.returns),
        "returns, ms": milliseconds(statistics.median(costs.returns)),
        "p99": milliseconds(percentile(costs.returns, 99)),
        "longest": milliseconds(max(costs.returns)),
        "CPU of the thread, ms": milliseconds(statistics.median(costs.of_thread)),
        "CPU until staged, µs a tensor": round_digits(
            1e6 * statistics.median(costs.until_staged) / tensors
        ),
    }


def percentile(values: list[float], percent: int) -> float:
    """Return a percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def milliseconds(seconds: float) -> float:
    """Return milliseconds, with four significant digits."""
    return round_digits(1000 * seconds)


def clean(bench: Bench) -> None:
    """Stop the agent and delete the snapshots."""
    dist.barrier()
    if bench.rank == 0:
        for info in agents_below(MEMORY):
            os.kill(info.process, signal.SIGTERM)
        shutil.rmtree(MEMORY, ignore_errors=True)


if __name__ == "__main__":
    main()
