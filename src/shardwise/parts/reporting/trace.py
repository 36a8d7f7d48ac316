"""Write operations as a trace of Chrome's trace event format, which Perfetto opens.

Hosts are the processes, and ranks their threads. Each stage of a rank is a complete event (`X`),
with times in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from shardwise.kernel.boxes.box import IntArray
from shardwise.parts.reporting.stragglers import find_stragglers
from shardwise.parts.telemetry.records import Telemetry
from shardwise.parts.words import parse_time

MOST_EVENTS = 200_000
"""Perfetto opens a trace of 200,000 events (30 MB) within seconds."""


def encode_trace(operations: Sequence[Telemetry]) -> bytes:
    """Return a trace of operations, in JSON.

    If there would be more than 200,000 events, the trace has all stragglers, and of the other
    ranks only every second, third, ….
    """
    total = sum(int(stage.has_run.sum()) for each in operations for stage in each.stages)
    every = -(-total // MOST_EVENTS) or 1
    names = dict.fromkeys(host for each in operations for host in each.hosts)
    hosts = {name: at for at, name in enumerate(names, start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
        for name, pid in hosts.items()
    ]
    began = _offsets(operations)
    named: set[tuple[int, int]] = set()
    for each, start in zip(operations, began, strict=True):
        rows = _rows(each, every)
        pids = [hosts[each.hosts[at]] for at in each.host[rows].tolist()]
        for pid, rank in zip(pids, each.ranks[rows].tolist(), strict=True):
            if (pid, rank) not in named:
                named.add((pid, rank))
                names = {"name": f"rank {rank}"}
                events.append(
                    {"ph": "M", "name": "thread_name", "pid": pid, "tid": rank, "args": names}
                )
        events += _events(each, rows, pids, start)
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": _about(every)}
    return msgspec.json.encode(document)


def _events(
    telemetry: Telemetry, rows: IntArray, pids: Sequence[int], offset: int
) -> Iterator[dict[str, Any]]:
    step = {} if telemetry.step is None else {"step": telemetry.step}
    for stage in telemetry.stages:
        columns = (stage.start, stage.duration, stage.waited, stage.bytes, stage.retries)
        numbers = zip(*(column[rows].tolist() for column in columns), strict=True)
        ranks = telemetry.ranks[rows].tolist()
        for rank, pid, (start, duration, waited, nbytes, retries) in zip(
            ranks, pids, numbers, strict=True
        ):
            if start < 0:
                continue
            yield {
                "ph": "X",
                "name": stage.name,
                "cat": telemetry.operation,
                "pid": pid,
                "tid": rank,
                "ts": offset + start,
                "dur": duration,
                "args": {**step, "waited_us": waited, "bytes": nbytes, "retries": retries},
            }


def _rows(telemetry: Telemetry, every: int) -> IntArray:
    """Return the rows to write: every n-th, and those of stragglers."""
    chosen = np.zeros(len(telemetry.ranks), bool)
    chosen[::every] = True
    for each in find_stragglers(telemetry):
        chosen[np.searchsorted(telemetry.ranks, each.group.ranks[: MOST_EVENTS // 1000])] = True
    return np.flatnonzero(chosen)


def _about(every: int) -> dict[str, str]:
    ranks = "all ranks" if every == 1 else f"stragglers, and one of {every} others"
    return {"writer": "shardwise report", "ranks": ranks}


def _offsets(operations: Sequence[Telemetry]) -> list[int]:
    """Return the starts of operations in microseconds after the first one; 0 if unknown."""
    moments = [parse_time(each.started) for each in operations]
    first = min((each for each in moments if each is not None), default=None)
    return [
        0 if each is None or first is None else int((each - first).total_seconds() * 1e6)
        for each in moments
    ]
