"""What all benchmarks share: rounds in which everything is measured in turn, medians, results."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard

RESULTS = Path(__file__).parent / "results"
CHUNK = 8 << 20
ROWS = Shard(0)


def arguments(rounds: int = 5) -> argparse.Namespace:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, default=Path("bench-out"))
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tensors", type=int, default=128)
    parser.add_argument("--side", type=int, default=2048, help="tensors are square")
    return parser.parse_args()


class Bench:
    """One benchmark on all ranks: what is measured takes turns, round by round."""

    def __init__(self, question: str, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh("cpu", (self.world,))
        self.question = question
        self.options = options
        self.dir = options.dir.resolve() / question
        self.seconds: dict[str, list[float]] = {}
        self.facts: dict[str, object] = {}

    def state(self, placement: Placement = ROWS, *, fill: bool = True) -> dict[str, DTensor]:
        """Tensors divided over the ranks."""
        side, dtype = self.options.side, getattr(torch, self.options.dtype)
        shape = [side, side]
        if isinstance(placement, Shard):
            shape[placement.dim] //= self.world
        make = torch.randn if fill else torch.zeros
        return {
            f"w{i}": DTensor.from_local(
                make(shape, dtype=dtype), self.mesh, [placement], run_check=False
            )
            for i in range(self.options.tensors)
        }

    @property
    def bytes(self) -> int:
        """Of the whole state."""
        size = self.options.tensors * self.options.side**2
        return size * getattr(torch, self.options.dtype).itemsize

    def measure(self, name: str, work: Callable[[], object], *, clear: bool = True) -> None:
        """Time one thing on all ranks, from a quiet disk on; the slowest rank counts."""
        if clear and self.rank == 0:
            shutil.rmtree(self.dir, ignore_errors=True)
            self.dir.mkdir(parents=True)
        self.settle()
        start = time.perf_counter()
        work()
        dist.barrier()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)

    def settle(self) -> None:
        """Let what was written or deleted before reach the disk."""
        dist.barrier()
        os.sync()
        time.sleep(0.5)
        dist.barrier()

    def drop_caches(self) -> None:
        """Forget all cached files (as root), or at least ours."""
        self.settle()
        if self.rank == 0:
            try:
                Path("/proc/sys/vm/drop_caches").write_text("1")
            except OSError:
                for path in self.dir.rglob("*"):
                    if path.is_file():
                        fd = os.open(path, os.O_RDONLY)
                        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                        os.close(fd)
        dist.barrier()

    def warm_caches(self) -> None:
        """Have all our files in the page cache."""
        if self.rank == 0:
            for path in self.dir.rglob("*"):
                if path.is_file():
                    path.read_bytes()
        dist.barrier()

    def direct_write(self, threads: int = 2) -> None:
        """The machine's limit: each rank's bytes from memory to a new file, past the cache."""
        self._direct(os.O_CREAT | os.O_EXCL | os.O_WRONLY, os.pwrite, threads, sync=True)

    def direct_read(self, threads: int = 2) -> None:
        """The machine's limit: each rank's bytes from the file that `direct_write` left."""
        self._direct(os.O_RDONLY, lambda fd, view, at: os.preadv(fd, [view], at), threads)

    def _direct(
        self,
        flags: int,
        move: Callable[[int, memoryview, int], int],
        threads: int,
        *,
        sync: bool = False,
    ) -> None:
        fd = os.open(self.dir / f"limit-{self.rank}", flags | os.O_DIRECT, 0o600)
        views = [memoryview(mmap.mmap(-1, CHUNK)) for _ in range(threads)]
        chunks = self.bytes // self.world // CHUNK

        def work(k: int) -> None:
            for i in range(k, chunks, threads):
                move(fd, views[k], i * CHUNK)

        workers = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if sync:
            os.fsync(fd)
        os.close(fd)

    def finish(self, ours: str, *others: str) -> None:
        """Write medians, and medians of the ratios of each round, to the results."""
        if self.rank == 0:
            shutil.rmtree(self.dir, ignore_errors=True)
            result = {
                "question": self.question,
                "processes": self.world,
                "dtype": self.options.dtype,
                "tensors": self.options.tensors,
                "megabytes": round(self.bytes / 1e6, 1),
                "rounds": self.options.rounds,
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "torch": torch.__version__,
                "median_seconds": {
                    name: round(statistics.median(all_), 4) for name, all_ in self.seconds.items()
                },
                "spread_seconds": {
                    name: [round(min(all_), 4), round(max(all_), 4)]
                    for name, all_ in self.seconds.items()
                },
                "median_ratio_to_ours": {
                    name: round(
                        statistics.median(
                            b / a
                            for a, b in zip(self.seconds[ours], self.seconds[name], strict=True)
                        ),
                        3,
                    )
                    for name in others
                },
                **self.facts,
            }
            RESULTS.mkdir(exist_ok=True)
            name = f"{self.question}-{self.world}-{self.options.dtype}.json"
            (RESULTS / name).write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result, indent=1), flush=True)
        dist.destroy_process_group()
