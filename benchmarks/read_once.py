"""Loads of replicas on several nodes, from a store that all nodes together read at 200 MB/s.

Each process counts as a node of its own. Limit: the time of the store for one copy of the state.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch

import shardwise as sw
from benchmarks.harness import Bench, Size, parse_arguments
from shardwise.parts.sharing import node_ranks
from tests.tools.throttled_store import Meter, ThrottledStore

SIZE = Size(tensors=32)
RATE = 200e6
LIMIT, ALONE, ONCE, DEFAULT = "store", "each node alone", "read once", "default"
LOCAL = "warm local store: "


def main() -> None:
    bench = Bench("read_once", SIZE, parse_arguments())
    rows = bench.size.nbytes // bench.dtype.itemsize // bench.size.columns
    shape = rows, bench.size.columns
    state = {f"w{i}": torch.randn(shape, dtype=bench.dtype) for i in range(bench.size.tensors)}
    sw.save(bench.dir / "sw", {"model": state})
    bytes_read: dict[str, float] = {}
    name = f"node {bench.rank}"
    with patch.object(node_ranks, "node_name", lambda: name):
        for _ in bench.rounds:
            measure(bench, state, bytes_read)
    bench.compare(LIMIT, ONCE, DEFAULT, ALONE)
    bench.compare(f"{LOCAL}{ALONE}", f"{LOCAL}{DEFAULT}")
    bench.table(
        "bytes read from the store, of the state",
        [{"load": load, "bytes": f"{times:.3f}"} for load, times in bytes_read.items()],
    )
    for load in (ONCE, DEFAULT):
        bench.goal(f"{load}: bytes read, of the state", bytes_read[load], most=1.02)
        times = bench.ratio(ALONE, load)
        bench.goal(f"{load}: times faster than alone", times, least=0.75 * bench.world)
    local = bench.ratio(f"{LOCAL}{DEFAULT}", f"{LOCAL}{ALONE}")
    bench.goal(f"{LOCAL}default, of each node alone", local, most=1.1)
    bench.finish()


def measure(bench: Bench, state: dict[str, torch.Tensor], bytes_read: dict[str, float]) -> None:
    """Load with each option, from the slow store and from the local one."""
    meter = Meter(bench.dir / "meter", RATE)
    slow = ThrottledStore(bench.dir / "sw", meter)
    bench.fill_page_cache()
    bench.measure(LIMIT, wait_on_first(bench, meter))
    local = bench.dir / "sw"
    for load, option in ((ALONE, False), (ONCE, True), (DEFAULT, None)):
        load_from = partial(sw.load, state={"model": state}, read_once=option)
        before = meter.bytes_read()
        bench.measure(load, partial(load_from, slow))
        read = (meter.bytes_read() - before) / bench.size.total
        bytes_read[load] = max(read, bytes_read.get(load, 0.0))
        if option is not True:
            bench.measure(f"{LOCAL}{load}", partial(load_from, local))


def wait_on_first(bench: Bench, meter: Meter) -> Callable[[], None]:
    """Return a job in which rank 0 waits as long as the store needs for one copy of the state."""
    return lambda: meter.wait_for_bytes(bench.size.total) if bench.rank == 0 else None


if __name__ == "__main__":
    main()
