"""The harness of all benchmarks: measurements in turn, in rounds; medians; results."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.goals import GOALS, judge
from benchmarks.limits import drop_files_from_cache, read_files_into_cache

ROWS, COLUMNS = Shard(0), Shard(1)
REPEATS = 3
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of a state: a number of equal tensors with `columns` columns."""

    tensors: int = 128
    nbytes: int = 16 << 20
    columns: int = 2048

    @property
    def total(self) -> int:
        """Bytes of the whole state."""
        return self.tensors * self.nbytes


LARGE = Size()
MANY = Size(tensors=10_000, nbytes=16 << 10, columns=64)
NO_TENSORS = Size(tensors=0, nbytes=0)
"""For benchmarks that create their own state."""


def parse_arguments() -> argparse.Namespace:
    """Parse the options that every benchmark has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, default=Path("bench-out"), help="working directory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--quick", action="store_true", help="two rounds, an eighth of the tensors")
    parser.add_argument("--results", type=Path, help="directory of results (default: DIR/results)")
    return parser.parse_args()


class Bench:
    """One benchmark on all ranks. In each round, every job is measured once."""

    def __init__(self, question: str, size: Size, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.mesh: DeviceMesh = init_device_mesh("cpu", (self.world,))
        self.question = question
        self.quick: bool = options.quick
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        tensors = size.tensors // 8 if options.quick else size.tensors
        self.size = Size(tensors=tensors, nbytes=size.nbytes, columns=size.columns)
        self.rounds = range(min(options.rounds, 2) if options.quick else options.rounds)
        self.results = options.results or options.dir / "results"
        self.dir = options.dir.resolve() / question
        self.seconds: dict[str, list[float]] = {}
        self._ratios: dict[str, dict[str, object]] = {}
        self._goals: list[dict[str, object]] = []
        self._tables: dict[str, Sequence[Mapping[str, object]]] = {}
        self.clear()

    def state(self, *placements: Shard, mesh: DeviceMesh | None = None) -> dict[str, object]:
        """Return a state to save: a model."""
        return {"model": self.model(*placements, mesh=mesh)}

    def model(self, *placements: Shard, mesh: DeviceMesh | None = None) -> dict[str, DTensor]:
        """Return random tensors, sharded over a mesh; they take the placements in turn."""
        mesh = mesh or self.mesh
        rows = self.size.nbytes // self.dtype.itemsize // self.size.columns
        model = {}
        for i in range(self.size.tensors):
            shard = placements[i % len(placements)]
            shape = [rows, self.size.columns]
            shape[shard.dim] //= mesh.size()
            values = torch.randn(shape, dtype=self.dtype)
            model[f"w{i}"] = DTensor.from_local(values, mesh, [shard], run_check=False)
        return model

    def measure(self, name: str, work: Callable[[], T]) -> T:
        """Measure a job on all ranks, after pending writes are done; the slowest rank counts."""
        self.wait_for_disk()
        start = time.perf_counter()
        done = work()
        dist.barrier()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return done

    def measure_repeatedly(self, once: Callable[[], T]) -> T:
        """Repeat a measurement, and keep the median of the later half as one sample.

        On some virtual machines, memory that was idle for a minute is several times slower at its
        next access. A library may also alternate between up to three buffers.
        """
        before = {name: len(seconds) for name, seconds in self.seconds.items()}
        for _ in range(2 * REPEATS):
            done = once()
        for name, seconds in self.seconds.items():
            if later := seconds[before.get(name, 0) :][-REPEATS:]:
                seconds[before.get(name, 0) :] = [statistics.median(later)]
        return done

    def clear(self) -> None:
        """Empty the working directory, when no rank writes to it any more."""
        dist.barrier()
        if self.rank == 0:
            if self.dir.exists():
                shutil.rmtree(self.dir)
            self.dir.mkdir(parents=True)
        self.wait_for_disk()

    def wait_for_disk(self) -> None:
        """Wait until earlier writes and deletions have reached the disk."""
        dist.barrier()
        if self.rank == 0:
            os.sync()
            time.sleep(0.5)
        dist.barrier()

    def drop_page_cache(self) -> None:
        """Drop all files of this benchmark from the page cache."""
        self.wait_for_disk()
        if self.rank == 0:
            drop_files_from_cache(self.dir)
        dist.barrier()

    def fill_page_cache(self) -> None:
        """Read all files of this benchmark into the page cache."""
        if self.rank == 0:
            read_files_into_cache(self.dir)
        dist.barrier()

    def gather_values(self, value: T) -> list[T]:
        """Return the values of all ranks."""
        values: list[T] = [value] * self.world
        dist.all_gather_object(values, value)
        return values

    def ratio(self, name: str, base: str) -> float:
        """Return the median over the rounds of the ratio of two jobs' times."""
        pairs = zip(self.seconds[name], self.seconds[base], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def compare(self, base: str, *names: str) -> None:
        """Add to the results how many times as long as `base` each job takes."""
        for name in names:
            self._ratios[name] = {"to": base, "median": round_digits(self.ratio(name, base))}

    def goal(
        self, text: str, measured: float, *, least: float = -math.inf, most: float = math.inf
    ) -> None:
        """Add to the results whether a goal is reached.

        Raises:
            ValueError: the goals of this benchmark are in `goals.py`.
        """
        if self.question in GOALS:
            raise ValueError(f"the goals of {self.question} are in benchmarks/goals.py: add {text}")
        wanted = f"≥ {least:g}" if least > -math.inf else f"≤ {most:g}"
        reached = least <= measured <= most
        goal = {
            "goal": text,
            "wanted": wanted,
            "measured": round_digits(measured),
            "reached": reached,
        }
        self._goals.append(goal)

    def table(self, title: str, rows: Sequence[Mapping[str, object]]) -> None:
        """Add a table to the results; all rows have the same keys."""
        self._tables[title] = rows

    def finish(self) -> None:
        """Write the results and clean up."""
        if self.rank == 0:
            shutil.rmtree(self.dir, ignore_errors=True)
            dtype = str(self.dtype).removeprefix("torch.")
            self.results.mkdir(parents=True, exist_ok=True)
            path = self.results / f"{self.question}-{self.world}-{dtype}.json"
            text = json.dumps(self._result(dtype), indent=1, ensure_ascii=False)
            path.write_text(text + "\n")
            print(text, flush=True)
        dist.destroy_process_group()

    def _result(self, dtype: str) -> dict[str, object]:
        result = {
            "question": self.question,
            "processes": self.world,
            "dtype": dtype,
            "tensors": self.size.tensors,
            "tensor_bytes": self.size.nbytes,
            "rounds": len(self.rounds),
            "machine": machine(),
            "seconds": {name: list(map(round_digits, all_)) for name, all_ in self.seconds.items()},
            "ratios": self._ratios,
            "goals": self._goals,
            "tables": self._tables,
        }
        return {**result, "goals": judge(result)}


def round_digits(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


def machine() -> dict[str, object]:
    """Describe this machine."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": f"{platform.machine()}, {os.cpu_count()} cores",
        "memory": f"{pages / 1e9:.0f} GB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
