"""Peak host memory beyond the state, of each process, for several values of `max_buffer`."""

from __future__ import annotations

from pathlib import Path

from harness import Bench, arguments
from torch.distributed.tensor import Shard

import shardwise as sw


def main() -> None:
    bench = Bench("memory", arguments(rounds=1))
    rows = {"model": bench.state()}
    columns = {"model": bench.state(Shard(1), fill=False)}
    path = bench.dir / "ours"
    beyond: dict[str, dict[str, float]] = {}
    for megabytes in (4, 64, 256):
        budget = megabytes << 20
        for name, work in (
            ("save", lambda b=budget: sw.save(path, rows, max_buffer=b, overwrite=True)),
            ("load", lambda b=budget: sw.load(path, rows, max_buffer=b)),
            ("load, resharded", lambda b=budget: sw.load(path, columns, max_buffer=b)),
        ):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            before = status("VmRSS")
            bench.measure(name, work, clear=False)
            beyond.setdefault(f"max_buffer {megabytes} MiB", {})[name] = round(
                status("VmHWM") - before, 1
            )
    bench.facts["megabytes_beyond_the_state"] = beyond
    bench.finish("save")


def status(field: str) -> float:
    """A field of this process's memory, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1e3


if __name__ == "__main__":
    main()
