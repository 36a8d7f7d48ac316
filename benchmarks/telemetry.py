"""What telemetry costs: `python -m benchmarks.telemetry`.

It measures the CPU time of each part on one core: what a rank does in a save, what the ranks above
it in the tree do with messages of other ranks, and what the thread of rank 0 does afterwards. The
messages of the other ranks are made up, with the stages of a save through memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

from shardwise.kernel.events import Event, OperationRecord, Recorder
from shardwise.parts.ranks.tree import children_of
from shardwise.parts.telemetry.encoding import encode, encode_file
from shardwise.parts.telemetry.records import Telemetry
from shardwise.parts.telemetry.rows import (
    Operation,
    align,
    combine_messages,
    decode_message,
    join_messages,
    row_of,
)

STAGES = ("describe", "plan", "copy", "commit", "protect", "persist")


def cpu_seconds(work: Callable[[], object], repeat: int = 1) -> float:
    """Return the CPU time of one call: the least of some calls."""
    times = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def record_of(rank: int) -> OperationRecord:
    """What a rank did in a made-up save."""
    events = tuple(
        Event(name, 100.0 + at + rank * 1e-5, 0.5 + rank * 1e-6, 10**9 + rank, 0.1 + rank * 1e-7)
        for at, name in enumerate(STAGES)
    )
    return OperationRecord(
        began=99.9,
        ended=110.0,
        agreed=100.0 + rank * 1e-6,
        clock=1.8e9,
        events=events,
        axes={"pp": rank // 1024, "dp": rank // 8 % 128, "tp": rank % 8},
        save_id="ab" * 8,
    )


def row(rank: int, ranks: int) -> Telemetry:
    """The table of one rank."""
    operation = Operation(name="save", id="ab" * 8, step=100, path="/root/step-00000100")
    return row_of(operation, record_of(rank), rank, ranks, f"node-{rank // 8:05d}")


def record_stages(saves: int) -> None:
    """Record saves."""
    for _ in range(saves):
        recorder = Recorder()
        for name in STAGES:
            with recorder.stage(name), recorder.waiting():
                pass
        recorder.record()


def main() -> None:
    """Print the cost of each part, for several numbers of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 1024, 16_384, 131_072])
    sizes = parser.parse_args().ranks
    own = cpu_seconds(lambda: record_stages(1000), 5) / 1000
    made = cpu_seconds(lambda: [encode(row(7, 16_384)) for _ in range(100)], 5) / 100
    print(
        f"a rank records a save in {own * 1e6:.0f} µs, and makes its message in {made * 1e6:.0f} µs"
    )
    print(
        "| ranks | bytes of a leaf | rank above leaves | rank above these | rank 0 | its thread "
        "| bytes that rank 0 receives for each rank | file |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for ranks in sizes:
        measure(ranks)


def measure(ranks: int) -> None:
    """Print the cost for a number of ranks, on the tree of ranks."""
    messages = [encode(row(rank, ranks)) for rank in range(ranks)]
    leaf = len(messages[-1])
    above_leaves: list[float] = []
    above_these: list[float] = []
    for rank in reversed(range(1, ranks)):
        below = children_of(rank, ranks)
        if below:
            parts = [messages[each] for each in (rank, *below)]
            is_lowest = not children_of(below[0], ranks)
            start = time.process_time()
            messages[rank] = combine_messages(parts)
            (above_leaves if is_lowest else above_these).append(time.process_time() - start)
            for each in below:
                messages[each] = b""
    level = [messages[each] for each in (0, *children_of(0, ranks))]
    top = cpu_seconds(lambda: join_messages(level), 3)
    received = join_messages(level)
    tables: list[bytes] = []

    def store() -> None:
        (table,) = decode_message(received, "ranks")
        tables.append(encode_file(align(table)))

    background = cpu_seconds(store)
    print(
        f"| {ranks:,} | {leaf} | {median(above_leaves or [0.0]) * 1e3:.1f} ms "
        f"| {median(above_these or [0.0]) * 1e3:.1f} ms | {top * 1e3:.1f} ms | {background:.2f} s "
        f"| {len(received) / ranks:.0f} | {len(tables[-1]) / 1e6:.2f} MB |"
    )


if __name__ == "__main__":
    main()
