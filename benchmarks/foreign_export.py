"""The time and memory to export checkpoints of DCP and ZeRO-3 to Hugging Face's safetensors.

Limits: a direct write of the same size, and read again. Peers: DCP's consolidation
and DeepSpeed's zero_to_fp32.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_state_dict
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint._consolidate_hf_safetensors import (
    consolidate_safetensors_files_on_every_rank as consolidate,
)

import shardwise as sw
from benchmarks import zero
from benchmarks.harness import ROWS, Bench, Size, parse_arguments
from benchmarks.limits import direct_read, direct_write, sync_files
from benchmarks.memory import peak_beyond

SIZE = Size(tensors=64)
FILES = 4
MOST_MEMORY = 256 << 20
AGAIN = "direct write, and read again"
BLOCKS, BLOCKS_QUICK = 20, 1


def main() -> None:
    bench = Bench("foreign_export", SIZE, parse_arguments())
    files = make(bench)
    target = bench.dir / "target"
    of_dcp, of_zero, limit = bench.dir / "dcp", bench.dir / "zero3", target / f"{bench.rank}"
    size, part = bench.size.total // FILES, bench.size.total // bench.world
    export = partial(sw.export, target=target, max_file=size)
    jobs: dict[str, Callable[[], object]] = {
        "direct write": lambda: direct_write(limit, part),
        AGAIN: partial(write_and_read, limit, part),
        "DCP: sw.export": lambda: export(of_dcp),
        "DCP: consolidate": lambda: synced(bench, target, partial(by_dcp, bench, files)),
        "ZeRO-3: sw.export": lambda: export(of_zero, only=["model.*"]),
        "ZeRO-3: zero_to_fp32": lambda: synced(bench, target, partial(by_zero, bench, of_zero)),
    }
    peaks: dict[str, float] = {}
    for _ in bench.rounds:
        for name, job in jobs.items():
            empty(bench, target)
            bench.fill_page_cache()
            peaks[name] = max(peaks.get(name, 0), peak_beyond(bench, name, job))
    report(bench, peaks)


def write_and_read(path: Path, nbytes: int) -> None:
    """Write a file past the page cache, and read it again."""
    direct_write(path, nbytes)
    direct_read(path, nbytes)


def make(bench: Bench) -> dict[str, int]:
    """Save the sources: with DCP, with DCP as parts to consolidate, and with DeepSpeed.

    Returns:
        The number of the output file for each name.
    """
    model = bench.model(ROWS)
    dcp.save({"model": model}, checkpoint_id=bench.dir / "dcp")
    writer = HuggingFaceStorageWriter(str(bench.dir / "parts"), save_distributed=True)
    dcp.save(model, storage_writer=writer)
    if bench.rank == 0:
        zero.make(bench.dir, BLOCKS_QUICK if bench.quick else BLOCKS, 3)
    dist.barrier()
    return {name: 1 + i * FILES // len(model) for i, name in enumerate(model)}


def empty(bench: Bench, target: Path) -> None:
    """Empty the target directory."""
    if bench.rank == 0:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
    dist.barrier()


def by_dcp(bench: Bench, files: dict[str, int], target: Path) -> None:
    """Consolidate with DCP: each rank writes some of the files."""
    consolidate(str(bench.dir / "parts"), str(target), files, num_threads=2)


def by_zero(bench: Bench, source: Path, target: Path) -> None:
    """Convert with DeepSpeed, which uses a single process."""
    if bench.rank == 0:
        convert_zero_checkpoint_to_state_dict(
            str(source), str(target), max_shard_size=None, safe_serialization=True
        )


def synced(bench: Bench, target: Path, job: Callable[[Path], object]) -> None:
    """Run a job and sync its files, which neither peer does."""
    job(target)
    dist.barrier()
    sync_files(target, bench.rank, bench.world)


def report(bench: Bench, peaks: dict[str, float]) -> None:
    """Compare times and memory with the limits and the peers."""
    dcp_, zero_ = "DCP: sw.export", "ZeRO-3: sw.export"
    bench.compare(dcp_, "direct write", AGAIN, "DCP: consolidate")
    bench.compare(zero_, "ZeRO-3: zero_to_fp32")
    bench.table(
        "Peak memory of a process beyond what it had",
        [{"way": name, "MB": peak} for name, peak in peaks.items()],
    )
    again = bench.ratio(AGAIN, dcp_)
    bench.goal("bandwidth of writing and reading again, of direct", again, least=0.7)
    for name, other in ((dcp_, "DCP: consolidate"), (zero_, "ZeRO-3: zero_to_fp32")):
        bench.goal(f"{name}: times faster than {other}", bench.ratio(other, name), least=1)
        bench.goal(f"{name}: MB of memory", peaks[name], most=round(MOST_MEMORY / 1e6))
    bench.finish()


if __name__ == "__main__":
    main()
