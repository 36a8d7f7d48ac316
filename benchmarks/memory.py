"""The peak memory of a save and a load beyond the state, for several values of `staging_bytes`.

Limit: `staging_bytes` plus 256 MB for each process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import shardwise as sw
from benchmarks.harness import COLUMNS, LARGE, ROWS, Bench, parse_arguments

BUFFERS = (16, 64, 256)
ALLOWED = 256
"""MB allowed beyond the state and `staging_bytes`."""


def main() -> None:
    bench = Bench("memory", LARGE, parse_arguments())
    rows, columns = bench.state(ROWS), bench.state(COLUMNS)
    path = bench.dir / "ours"
    table = []
    for mebibytes in BUFFERS:
        budget = mebibytes << 20
        jobs: dict[str, Callable[[], object]] = {
            "save": partial(sw.save, path, rows, staging_bytes=budget, overwrite=True),
            "load": partial(sw.load, path, rows, staging_bytes=budget),
            "load, resharded": partial(sw.load, path, columns, staging_bytes=budget),
        }
        peaks = {
            name: max(peak_beyond(bench, f"{name}, {mebibytes} MiB", job) for _ in bench.rounds)
            for name, job in jobs.items()
        }
        table.append({"staging_bytes, MiB": mebibytes, **{f"{k}, MB": v for k, v in peaks.items()}})
        bench.goal(
            f"MB beyond the state, staging_bytes {mebibytes} MiB",
            max(peaks.values()),
            most=ALLOWED + round(budget / 1e6),
        )
    bench.table("Peak memory of a process beyond the state", table)
    bench.finish()


def peak_beyond(bench: Bench, name: str, job: Callable[[], object]) -> float:
    """Measure a job; return the largest growth of any process's memory during it, in MB."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # reset the peak
    before = status("VmRSS")
    bench.measure(name, job)
    return max(bench.gather_values(round(status("VmHWM") - before, 1)))


def status(field: str) -> float:
    """Return a memory field of this process's status, in MB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
