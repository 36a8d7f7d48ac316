"""What the training waits for when it saves in the background, and how fast it comes back."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import ROWS, Bench, Size, arguments
from limits import direct_write
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor

import shardwise as sw

THREADS = 4
HALF = Size(tensors=64)  # memory holds it about ten times over, with all peers
MEMORY = Path("/dev/shm/shardwise-bench")
COPY = "copy into memory that was touched before"
OURS, OURS_DURABLE = "sw: save", "sw: save, until it is durable"
RECOVERED, FROM_DISK = "sw: restore from memory", "sw: load from disk, cold"
Begin = Callable[[Path], Callable[[], object]]
"""Begins to save to a path, and returns when training may go on; gives what to wait for then."""


def main() -> None:
    bench = Bench("snapshots", HALF, arguments())
    model = bench.model(ROWS)
    state: dict[str, object] = {"model": model}
    root = bench.dir.parent / "snapshots-root"
    with ExitStack() as cleanup:
        cleanup.callback(clean, bench, root)
        checkpointer = make_checkpointer(bench, root)
        checkpointer.prepare(state)
        ways = {OURS: ours(bench, checkpointer, state)} | by_dcp(state)
        copy = copier(model)
        copy()
        for name, begin in ways.items():
            bench.measure(f"{name}: the first", partial(begin, bench.dir / "first"))()
        for step in bench.rounds:
            bench.measure(COPY, copy)
            bench.clear()
            bench.measure("direct write", lambda: direct_write(written(bench), share(bench)))
            for name, begin in ways.items():
                bench.clear()
                bench.measure(name, partial(begin, bench.dir / f"{step}"))()
            bench.measure(OURS_DURABLE, lambda: ways[OURS](bench.dir)())
            recover(bench, checkpointer, state, root)
        report(bench, list(ways))
        bench.table(
            "What was saved, if the tensors change as soon as the call returns",
            [
                {"way": name, "saved what it was given": keeps(bench, model, begin, root)}
                for name, begin in ways.items()
            ],
        )
        checkpointer.close(wait=False)
    bench.finish()


def make_checkpointer(bench: Bench, root: Path) -> sw.Checkpointer:
    """Snapshots of all ranks in one memory; every save is persisted too."""
    if bench.rank == 0:
        shutil.rmtree(root, ignore_errors=True)
        MEMORY.mkdir(exist_ok=True)
    dist.barrier()
    memory = sw.Memory(dir=str(MEMORY), when_full="wait", slots=2)
    return sw.Checkpointer(root, keep=sw.Keep(last=1), memory=memory)


def ours(bench: Bench, checkpointer: sw.Checkpointer, state: dict[str, object]) -> Begin:
    """By the agent of the node."""
    steps = iter(range(1, 1 << 30))

    def begin(_: Path) -> Callable[[], object]:
        handle = checkpointer.save(next(steps), state)
        if handle is None:
            raise RuntimeError("a save that waits for a slot was left out")
        return handle.result

    return begin


def by_dcp(state: dict[str, object]) -> dict[str, Begin]:
    """By DCP: as it comes, with a stager that keeps its memory, and in a process of its own."""
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=True,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )

    def begin(kind: AsyncCheckpointerType, *, cached: bool) -> Begin:
        def save(path: Path) -> Callable[[], object]:
            options = {"async_stager": stager} if cached else {}
            saved = dcp.async_save(
                state, checkpoint_id=path, async_checkpointer_type=kind, **options
            )
            if hasattr(saved, "staging_completion"):
                saved.staging_completion.result()
                return saved.upload_completion.result
            return saved.result

        return save

    return {
        "dcp.async_save, thread": begin(AsyncCheckpointerType.THREAD, cached=False),
        "dcp.async_save, thread, memory kept": begin(AsyncCheckpointerType.THREAD, cached=True),
        "dcp.async_save, process": begin(AsyncCheckpointerType.PROCESS, cached=False),
    }


def copier(model: dict[str, DTensor]) -> Callable[[], None]:
    """The machine's limit: all of this rank's share, once, by as many threads as ours."""
    sources = [t.to_local().view(torch.uint8).numpy().reshape(-1) for t in model.values()]
    ends = np.cumsum([len(each) for each in sources]).tolist()
    out = np.frombuffer(mmap.mmap(-1, ends[-1]), np.uint8)
    out[:] = 0
    targets = [out[end - len(each) : end] for each, end in zip(sources, ends, strict=True)]
    pool = ThreadPoolExecutor(THREADS)
    return lambda: list(pool.map(np.copyto, targets, sources)) and None


def recover(
    bench: Bench, checkpointer: sw.Checkpointer, state: dict[str, object], root: Path
) -> None:
    """Restore the newest from memory, and load the same from disk, cold."""
    step = bench.measure(RECOVERED, lambda: checkpointer.restore(state))
    report = checkpointer.last_restore
    if report is None or report.source != "memory":
        raise RuntimeError("it was not restored from memory")
    path = root / f"step-{step:08d}"
    if bench.rank == 0:
        os.sync()
        for file in path.iterdir():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    bench.measure(FROM_DISK, lambda: sw.load(path, state))


def report(bench: Bench, ways: list[str]) -> None:
    """Compare with the copy, and say which goals are reached."""
    firsts = [f"{name}: the first" for name in ways]
    for name in [*ways, *firsts]:
        if name in firsts:
            bench.seconds[name] *= len(bench.rounds)
    bench.compare(COPY, *ways, *firsts, RECOVERED, FROM_DISK)
    bench.compare("direct write", OURS_DURABLE)
    bench.goal("save blocks, of a copy", bench.ratio(OURS, COPY), most=1.15)
    best = min(statistics.median(bench.seconds[name]) for name in ways if "thread" in name)
    blocked = statistics.median(bench.seconds[OURS])
    bench.goal("save blocks, of dcp.async_save by a thread, its best", blocked / best, most=1)
    bench.goal("the first save, of a later one", bench.ratio(firsts[0], OURS), most=2)
    durable = bench.ratio("direct write", OURS_DURABLE)
    bench.goal("until it is durable, of direct-write bandwidth", durable, least=0.8)
    bench.goal("restore from memory, of copy bandwidth", bench.ratio(COPY, RECOVERED), least=0.7)
    bench.goal("restore, times faster than from disk", bench.ratio(FROM_DISK, RECOVERED), least=3)


def keeps(bench: Bench, model: dict[str, DTensor], begin: Begin, root: Path) -> str:
    """Whether what is saved is what was given, though it is changed right after the call."""
    bench.clear()
    for tensor in model.values():
        tensor.to_local().fill_(1)
    wait = begin(bench.dir / "kept")
    for tensor in model.values():
        tensor.to_local().fill_(2)
    wait()
    dist.barrier()
    target = {name: torch.zeros_like(tensor) for name, tensor in model.items()}
    if (bench.dir / "kept").exists():
        dcp.load({"model": target}, checkpoint_id=bench.dir / "kept")
    else:
        sw.load(max(root.glob("step-*")), {"model": target})
    intact = all(bool((tensor.to_local() == 1).all()) for tensor in target.values())
    return "yes" if all(bench.gathered(intact)) else "no"


def share(bench: Bench) -> int:
    """Bytes of a rank."""
    return bench.size.total // bench.world


def written(bench: Bench) -> Path:
    """A file of this rank."""
    return bench.dir / f"limit-{bench.rank}"


def clean(bench: Bench, root: Path) -> None:
    """End the agent, and leave nothing in memory or on the disk."""
    dist.barrier()
    if bench.rank == 0:
        for card in MEMORY.glob("*/agent.json"):
            os.kill(msgspec.json.decode(card.read_bytes())["process"], signal.SIGTERM)
        shutil.rmtree(MEMORY, ignore_errors=True)
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
