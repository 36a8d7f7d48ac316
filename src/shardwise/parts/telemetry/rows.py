"""Tables of one row: what one rank did in an operation. Ranks send them to rank 0 as messages.

A message has one table for each operation, as lines of JSON. `combine_messages` combines the tables
of the same operation. It runs on the ranks of the tree, so it leaves large tables as they are: then
rank 0 combines them, in the background.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone

import numpy as np

from shardwise.kernel.boxes.box import IntArray
from shardwise.kernel.events import Event, OperationRecord
from shardwise.kernel.version import VERSION
from shardwise.parts.telemetry.encoding import decode, encode
from shardwise.parts.telemetry.records import (
    NOT_RUN,
    StageColumns,
    Telemetry,
    combine,
    sort_stages,
)

LARGEST_COMBINED = 1 << 19
"""Messages that have more bytes together are not decoded on their way to rank 0. The tables of
1,057 ranks (1 + 32 + 1,024: two levels below rank 0) have 0.3 MB."""
MICROSECONDS = 1_000_000
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:-]")
_NOT_IN_FILES = re.compile(r"[^A-Za-z0-9._/-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation, as one rank knows it.

    Attributes:
        name: one of `records.OPERATIONS`.
        id: the same on all ranks: the id of the save, or a name of the operation.
        step, path: as in `Telemetry`.
        phases: seconds by phase, for a recovery.
    """

    name: str
    id: str
    step: int | None
    path: str
    phases: dict[str, float] = field(default_factory=dict)


def row_of(
    operation: Operation, record: OperationRecord, rank: int, world_size: int, host: str
) -> Telemetry:
    """Return the table of one rank.

    Until `align` is called, `clock` is a time since 1970, and `began` is relative to the time when
    the ranks first had the same result. All ranks pass this time at once, whatever their clocks
    say.

    Args:
        operation: the operation.
        record: what this rank did.
        rank, world_size: this rank, and the number of ranks.
        host: the name of the host.
    """
    agreed = record.began if record.agreed is None else record.agreed
    at_begin = record.clock - (agreed - record.began)
    return Telemetry(
        operation=operation.name,
        id=operation.id,
        step=operation.step,
        path=operation.path[:1024],
        started=datetime.fromtimestamp(at_begin, timezone.utc).isoformat(),
        seconds=max(0.0, _end_of(record) - record.began),
        world_size=world_size,
        library=VERSION,
        ranks=_column(rank),
        hosts=(_NOT_IN_NAMES.sub("-", host)[:255] or "unknown",),
        host=_column(0),
        axes=tuple(name[:255] for name in list(record.axes)[:16]),
        coordinates=np.array(list(record.axes.values())[:16], np.int64).reshape(-1, 1),
        clock=_column(record.clock * MICROSECONDS),
        began=_column((record.began - agreed) * MICROSECONDS),
        stages=sort_stages(_stages_of(record)),
        phases={name: seconds for name, seconds in operation.phases.items() if seconds >= 0},
    )


def _end_of(record: OperationRecord) -> float:
    return max([record.ended, *(each.start + each.seconds for each in record.events)])


def _column(value: float) -> IntArray:
    return np.array([round(value)], np.int64)


def _stages_of(record: OperationRecord) -> Iterable[StageColumns]:
    """Yield the stages. If a stage ran several times, its numbers are added."""
    by_name: dict[str, list[Event]] = {}
    for event in record.events:
        by_name.setdefault(event.stage, []).append(event)
    for name, events in by_name.items():
        start = min(each.start for each in events) - record.began
        files = [_NOT_IN_FILES.sub("-", each.file)[:255] for each in events if each.file]
        yield StageColumns(
            name=name[:255],
            start=_column(max(0.0, start) * MICROSECONDS),
            duration=_column(sum(each.seconds for each in events) * MICROSECONDS),
            bytes=_column(sum(each.bytes for each in events)),
            retries=_column(sum(each.retries for each in events)),
            waited=_column(sum(each.waited for each in events) * MICROSECONDS),
            file=np.array([files[0].encode() if files else b""], np.bytes_),
        )


def align(table: Telemetry) -> Telemetry:
    """Return a table whose times are relative to the start: when the first rank entered.

    The clocks become offsets from that of the lowest rank in the table. Stages of agents begin when
    the stage before them has ended on their host; the time until they can work is a wait.
    """
    began = table.began - table.began.min()
    stages = {
        stage.name: replace(stage, start=np.where(stage.has_run, stage.start + began, NOT_RUN))
        for stage in table.stages
    }
    for name, before in _STAGE_BEFORE.items():
        if name in stages and before in stages:
            stages[name] = _count_waits(stages[name], stages[before], table.host)
    clock = table.clock - table.clock[0]
    return replace(table, began=began, clock=clock, stages=sort_stages(stages.values()))


_STAGE_BEFORE = {"commit": "copy", "protect": "commit", "persist": "commit"}


def _count_waits(stage: StageColumns, before: StageColumns, host: IntArray) -> StageColumns:
    """Return a stage of agents that begins when the stage before it has ended on the host.

    It waits until the stage before has ended on the whole host, and until the first agent has begun
    the stage, because a leader requests it from all agents. If an agent begins later than that, it
    is late itself.
    """
    runs = stage.has_run & before.has_run
    if not runs.any():
        return stage
    ready = np.full(int(host.max()) + 1, np.iinfo(np.int64).min)
    np.maximum.at(ready, host[runs], (before.start + before.duration)[runs])
    end, ready = stage.start + stage.duration, ready[host]
    start = np.where(runs, np.clip(np.minimum(stage.start, ready), 0, None), stage.start)
    can_work = np.maximum(ready, stage.start[runs].min())
    # A wait within the work: the agent had begun, but a rank of its host had not copied its part.
    late = np.clip(np.minimum(end, ready) - stage.start, 0, None)
    early = np.clip(np.minimum(stage.start, can_work) - start, 0, None)
    return replace(
        stage,
        start=start,
        duration=np.where(runs, end - start, stage.duration),
        waited=np.where(runs, stage.waited + late + early, stage.waited),
    )


def encode_message(tables: Iterable[Telemetry]) -> bytes:
    """Return tables as a message."""
    return b"\n".join(encode(table) for table in tables)


def decode_message(message: bytes, label: str) -> list[Telemetry]:
    """Return the tables in a message, one for each operation.

    Raises:
        FormatError: the message is damaged.
    """
    tables: dict[tuple[str, str], list[Telemetry]] = {}
    for line in message.split(b"\n"):
        if line:
            table = decode(line, label)
            tables.setdefault((table.operation, table.id), []).append(table)
    return [combine(each) for each in tables.values()]


def join_messages(messages: Sequence[bytes]) -> bytes:
    """Return one message with the tables of all messages, in any order, as they are."""
    return b"\n".join(filter(None, messages))


def combine_messages(messages: Sequence[bytes]) -> bytes:
    """Return one message with the tables of all messages, in any order."""
    joined = join_messages(messages)
    if len(joined) > LARGEST_COMBINED:
        return joined
    try:
        return encode_message(decode_message(joined, "a message"))
    except Exception:  # of any kind: rank 0 reports it, and the ranks must stay connected
        return joined
