"""How long a background save blocks the training, and how fast a restore from memory is.

Limits: a copy of the state in memory, direct writes, and a load from disk. Peers: background saves
of DCP, torch_checkpointing and torchsnapshot.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

import shardwise as sw
from benchmarks.goals import (
    COPIED_LATER,
    COPY,
    DIVIDED,
    FIRST,
    FROM_DISK,
    FROM_MEMORY,
    OURS,
    OURS_DURABLE,
    RECOVERED,
)
from benchmarks.harness import ROWS, Bench, Size, parse_arguments, round_digits
from benchmarks.limits import direct_write, direct_write_from, filled_memory, make_copier
from benchmarks.nodes import agents_below
from benchmarks.peers import Begun, Peer, Tensors, local, peers
from shardwise.checkpointer.replica_checks import LARGEST_SHARE

THREADS = 4
HALF = Size(tensors=64)  # with all peers, memory holds about ten copies
MEMORY = Path("/dev/shm/shardwise-bench")
UNCOMPARED, COMPARED = "sw: save of replicas", "sw: save of replicas, all compared"
HOT = "direct write of one buffer"


def main() -> None:
    ask(Bench("snapshots", HALF, parse_arguments()), beside=lambda _: True)


def ask(bench: Bench, beside: Callable[[str], bool]) -> None:
    """Measure ours and the peers whose names `beside` accepts."""
    tensors: Tensors = {**bench.model(ROWS)}
    state: dict[str, object] = {"model": tensors}
    root = bench.dir.parent / "snapshots-root"
    with ExitStack() as cleanup:
        cleanup.callback(clean, bench, root)
        checkpointer = make_checkpointer(bench, root)
        checkpointer.prepare(state)
        ways = {OURS: ours(checkpointer, state, root)}
        ways |= {name: way for name, way in peers(tensors, cleanup).items() if beside(name)}
        copy = make_copier(local(tensors).values(), THREADS)
        copy()
        for name, way in ways.items():
            bench.clear()
            bench.measure(name + FIRST, partial(waited, way, bench.dir / "first"))()
        for step in bench.rounds:
            bench.measure_repeatedly(lambda: bench.measure(COPY, copy))
            measure_direct_writes(bench)
            for name, way in ways.items():
                bench.measure_repeatedly(partial(once, bench, name, way, bench.dir / f"{step}"))
            bench.measure(OURS_DURABLE, lambda: ways[OURS].begin(bench.dir).result())
            recover(bench, checkpointer, state, root)
        report(bench, list(ways))
        bench.table(
            "What was saved, if the tensors change as soon as the call returns",
            [
                {"way": name, "saved what it was given": keeps(bench, tensors, way)}
                for name, way in ways.items()
            ],
        )
        divide_replicas(bench, checkpointer)
        checkpointer.close(wait=False)
        compare_replicas(bench, root)
    bench.finish()


def measure_direct_writes(bench: Bench) -> None:
    """Measure direct writes of a rank's share: from one small buffer, and from a copy in memory."""
    share = bench.size.total // bench.world
    path = bench.dir / f"limit-{bench.rank}"
    bench.clear()
    bench.measure(HOT, partial(direct_write, path, share))
    bench.clear()
    with filled_memory(MEMORY / path.name, share) as source:
        bench.measure(FROM_MEMORY, partial(direct_write_from, path, source))


def once(bench: Bench, name: str, way: Peer, path: Path) -> None:
    """Measure one save, and wait until it is durable."""
    bench.clear()
    begin(bench, name, way, path).result()


def begin(bench: Bench, name: str, way: Peer, path: Path) -> Begun:
    """Measure a save until the call returns, and, if it copies later, until the copy is made."""
    if name not in COPIED_LATER:
        return bench.measure(name, partial(way.begin, path))
    bench.wait_for_disk()
    start = time.perf_counter()
    begun = way.begin(path)
    dist.barrier()
    returned = time.perf_counter()
    begun.staged()
    dist.barrier()
    bench.seconds.setdefault(name, []).append(returned - start)
    copied = time.perf_counter() - start
    bench.seconds.setdefault(f"{name}: until it is copied", []).append(copied)
    return begun


def waited(way: Peer, path: Path) -> Callable[[], object]:
    """Start a save and wait until tensors may change; return the function that waits for it."""
    begun = way.begin(path)
    begun.staged()
    return begun.result


def make_checkpointer(bench: Bench, root: Path) -> sw.Checkpointer:
    """Open a Checkpointer whose ranks share a node; every save is persisted, too."""
    if bench.rank == 0:
        shutil.rmtree(root, ignore_errors=True)
        MEMORY.mkdir(exist_ok=True)
    dist.barrier()
    memory = sw.Memory(dir=str(MEMORY), when_full="wait", slots=2)
    return sw.Checkpointer(root, keep=sw.Keep(last=1), memory=memory)


def ours(checkpointer: sw.Checkpointer, state: dict[str, object], root: Path) -> Peer:
    """Return our way: a save by the node's agent."""
    steps = iter(range(1, 1 << 30))

    def begin(_: Path) -> Begun:
        handle = checkpointer.save(next(steps), state)
        if handle is None:
            raise RuntimeError("a save was skipped instead of waiting for a slot")
        return Begun(handle.result)

    return Peer(begin, lambda _, target: sw.load(max(root.glob("step-*")), {"model": target}))


def divide_replicas(bench: Bench, checkpointer: sw.Checkpointer) -> None:
    """Save a replicated state, as under DDP, and report the bytes that each rank copies."""
    torch.manual_seed(0)
    replicas = {f"w{i}": torch.randn(1024, 1024) for i in range(16)}
    total = sum(each.nbytes for each in replicas.values())
    handle = checkpointer.save(1 << 30, {"model": replicas})
    if handle is None:
        raise RuntimeError("a save was skipped instead of waiting for a slot")
    copied = bench.gather_values(handle.result().bytes_written)
    rows = [
        {
            "rank": rank,
            "has, bytes": total,
            "copies, bytes": each,
            "of it": round_digits(each / total),
        }
        for rank, each in enumerate(copied)
    ]
    bench.table(DIVIDED, rows)


def compare_replicas(bench: Bench, root: Path) -> None:
    """Measure how long a comparison of all replicas takes, and how often it is thus made."""
    torch.manual_seed(0)
    tensors = bench.size.tensors // 4
    replicas = {f"w{i}": torch.randn(bench.size.nbytes // 4096, 1024) for i in range(tensors)}
    state: dict[str, object] = {"model": replicas}
    total = sum(each.nbytes for each in replicas.values())
    steps = iter(range(1, 1 << 30))
    memory = sw.Memory(dir=str(MEMORY), when_full="wait", slots=1)
    with ExitStack() as cleanup:
        reactions: dict[str, Literal["ignore", "raise"]]
        reactions = {UNCOMPARED: "ignore", COMPARED: "raise"}
        ways = {}
        for name, reaction in reactions.items():
            way = sw.Checkpointer(
                root / reaction,
                save_every=1 << 30,
                memory=memory,
                check_replicas_every=1,
                on_divergence=reaction,
            )
            cleanup.callback(way.close, wait=False)
            way.prepare(state)
            ways[name] = way

        def save_both() -> None:
            for name, way in ways.items():
                step = next(steps)
                handle = bench.measure(name, partial(way.save, step, state))
                if handle is None:
                    raise RuntimeError("a save was skipped instead of waiting for a slot")
                handle.result()

        for _ in bench.rounds:
            bench.measure_repeatedly(save_both)
    bench.compare(UNCOMPARED, COMPARED)
    cost = bench.ratio(COMPARED, UNCOMPARED) - 1
    bench.table(
        "The comparison of all replicas",
        [
            {
                "bytes of a rank": total,
                "seconds, of those of a save": round_digits(cost),
                "saves between comparisons, by default": round(cost / LARGEST_SHARE),
            }
        ],
    )


def recover(
    bench: Bench, checkpointer: sw.Checkpointer, state: dict[str, object], root: Path
) -> None:
    """Restore the newest step from memory, and load the same step from disk, cold."""
    step = bench.measure_repeatedly(
        lambda: bench.measure(RECOVERED, lambda: checkpointer.restore(state))
    )
    report = checkpointer.last_restore
    if report is None or report.source != "memory":
        raise RuntimeError(f"step {step} was not restored from memory")
    path = root / f"step-{step:08d}"
    if bench.rank == 0:
        os.sync()
        for file in path.iterdir():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    bench.measure(FROM_DISK, lambda: sw.load(path, state))


def report(bench: Bench, ways: Sequence[str]) -> None:
    """Compare with the limits; the goals follow from the results (`goals.py`)."""
    later = [name for name in bench.seconds if name.endswith(": until it is copied")]
    firsts = [name + FIRST for name in ways]
    for name in firsts:
        bench.seconds[name] *= len(bench.rounds)
    bench.compare(COPY, *ways, *later, *firsts, RECOVERED, FROM_DISK)
    bench.compare(FROM_MEMORY, HOT, OURS_DURABLE)


def keeps(bench: Bench, model: Tensors, way: Peer) -> str:
    """Return whether a save has the original values if they change right after the call."""
    bench.clear()
    fill(model, 1)
    begun = way.begin(bench.dir / "kept")
    fill(model, 2)
    begun.staged()
    begun.result()
    dist.barrier()
    target = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    way.load(bench.dir / "kept", target)
    intact = all(bool((tensor == 1).all()) for tensor in local(target).values())
    return "yes" if all(bench.gather_values(intact)) else "no"


def fill(model: Tensors, value: float) -> None:
    """Fill all tensors in place."""
    for tensor in local(model).values():
        tensor.fill_(value)


def clean(bench: Bench, root: Path) -> None:
    """Stop the agent; delete the snapshots and the root."""
    dist.barrier()
    if bench.rank == 0:
        for info in agents_below(MEMORY):
            os.kill(info.process, signal.SIGTERM)
        shutil.rmtree(MEMORY, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
