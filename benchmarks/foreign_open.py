"""The time to open ten thousand tensors in the files of 64 ranks.

Goal: at most 2 s. Peers: DCP's `read_metadata`, and
`torch.load` with mapped files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp

import shardwise as sw
from benchmarks import rank_files
from benchmarks.harness import NO_TENSORS, Bench, parse_arguments

TENSORS, TENSORS_QUICK = 10_000, 1_000
MAKERS = {
    "DCP": rank_files.by_dcp,
    "DeepSpeed ZeRO-3": rank_files.by_deepspeed,
    "torch.save": rank_files.by_ranks,
}


def main() -> None:
    bench = Bench("foreign_open", NO_TENSORS, parse_arguments())
    tensors = TENSORS_QUICK if bench.quick else TENSORS
    for name, make in MAKERS.items():
        make(bench.dir / name, tensors)
    spec = sw.spec(rank_files.SPEC, files=rank_files.PATTERN)
    table = []
    for name in MAKERS:
        place = bench.dir / name
        opening = partial(sw.open, place, spec=spec if name == "torch.save" else None)
        jobs: dict[str, Callable[[], object]] = {name: opening, **theirs(name, place)}
        for _ in bench.rounds:
            for way, job in jobs.items():
                bench.fill_page_cache()
                bench.measure(way, job)
        bench.compare(name, *list(jobs)[1:])
        bench.goal(f"{name}: seconds", median(bench.seconds[name]), most=2)
        files = [path for path in place.rglob("*") if path.is_file()]
        table.append(
            {
                "checkpoint": name,
                "files": len(files),
                "tensors": len(opening().tensors()),
                "bytes": sum(path.stat().st_size for path in files),
            }
        )
    bench.table("What was opened", table)
    bench.finish()


def theirs(name: str, place: Path) -> dict[str, Callable[[], object]]:
    """Return the peers' jobs: what each must do before it can read a tensor."""
    if name == "DCP":
        return {f"{name}: read_metadata": dcp.FileSystemReader(place).read_metadata}
    files = list(place.rglob("*.pt"))
    return {f"{name}: torch.load, mapped": lambda: [mapped(path) for path in files]}


def mapped(path: Path) -> object:
    """Load a file with mapped tensors."""
    return torch.load(path, mmap=True, weights_only=False)


if __name__ == "__main__":
    main()
