"""What telemetry costs: `python -m benchmarks.telemetry`.

It measures the CPU time of each part on one core: what a rank does in a save, what the processes of
the tree do with messages of other ranks, and what the thread of rank 0 does in the background. The
messages of the other ranks are made up, with the stages of a save through memory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from shardwise.events import Event, OperationRecord, Recorder
from shardwise.telemetry.encoding import encode, encode_file
from shardwise.telemetry.records import Telemetry
from shardwise.telemetry.rows import (
    Operation,
    align,
    combine_messages,
    decode_message,
    join_messages,
    row_of,
)

STAGES = ("describe", "plan", "stage", "commit", "protect", "persist")
FAN_OUT = 32


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


def record_stages() -> None:
    """Record a save."""
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
    own = cpu_seconds(lambda: [record_stages() for _ in range(1000)], 5) / 1000
    made = cpu_seconds(lambda: [encode(row(7, 16_384)) for _ in range(100)], 5) / 100
    print(
        f"a rank records a save in {own * 1e6:.0f} µs, and makes its message in {made * 1e6:.0f} µs"
    )
    print("| ranks | leader of a node | aggregator | rank 0 | its thread | bytes a rank | file |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ranks in sizes:
        measure(ranks)


def measure(ranks: int) -> None:
    """Print the cost for a number of ranks, on a tree of nodes with 8 ranks each."""
    messages = [encode(row(rank, ranks)) for rank in range(ranks)]
    leader = cpu_seconds(lambda: combine_messages(messages[:8]), 5)
    level = [combine_messages(messages[at : at + 8]) for at in range(0, ranks, 8)]
    aggregator = 0.0
    while len(level) > FAN_OUT:
        children = level[:FAN_OUT]
        aggregator = max(aggregator, cpu_seconds(lambda: combine_messages(children), 3))  # noqa: B023
        level = [combine_messages(level[at : at + FAN_OUT]) for at in range(0, len(level), FAN_OUT)]
    top = cpu_seconds(lambda: join_messages(level), 3)
    received = join_messages(level)
    tables: list[bytes] = []

    def store() -> None:
        (table,) = decode_message(received, "ranks")
        tables.append(encode_file(align(table)))

    background = cpu_seconds(store)
    print(
        f"| {ranks:,} | {leader * 1e3:.1f} ms | {aggregator * 1e3:.1f} ms | {top * 1e3:.1f} ms | "
        f"{background:.2f} s | {len(received) / ranks:.0f} | {len(tables[-1]) / 1e6:.2f} MB |"
    )


if __name__ == "__main__":
    main()
