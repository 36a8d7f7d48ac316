"""`TelemetryHook`: gathers the telemetry of a Checkpointer's operations, and stores it.

Every rank sends the records that it has to rank 0, along the tree of ranks, and does not wait for
an answer: at the end of a restore and of a save to storage, and at the beginning of a save that
agents complete, because at its end rank 0 would wait for the slowest copy. Rank 0 stores the
records in a thread. A failure is logged, and changes nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Callable
from dataclasses import replace

from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.root import Root
from shardwise.kernel.engine.save import SaveReport
from shardwise.kernel.errors import ShardwiseError
from shardwise.kernel.events import Event, OperationRecord
from shardwise.parts.telemetry.rows import (
    Operation,
    combine_messages,
    encode_message,
    join_messages,
    row_of,
)
from shardwise.parts.telemetry.storing import TelemetryWriter
from shardwise.ports.hooks import RestoreReport, Run, RunHook

MOST_WAITING = 64
"""The most saves that wait for their agents. Of older ones, only the ranks' own stages are sent."""
LONGEST_END = 10.0
"""Seconds. The end of a run waits at most this long until its telemetry is stored."""

log = logging.getLogger("shardwise")


class TelemetryHook(RunHook):
    """Gathers the records of all ranks.

    Args:
        run: the run.
        group: the ranks.
        take_ended: returns the stages of agents, for the saves that ended since the last call, by
            id. None: saves are durable when `staged` is called.
        host: the name of this host.
    """

    def __init__(
        self,
        run: Run,
        group: Group,
        take_ended: Callable[[], dict[str, tuple[Event, ...]]] | None,
        host: str | None = None,
    ) -> None:
        self._run, self._group, self._take_ended = run, group, take_ended
        self._host = socket.gethostname() if host is None else host
        self._waiting: dict[str, tuple[Operation, OperationRecord]] = {}
        self._ready: list[tuple[Operation, OperationRecord]] = []
        self._last_snapshot: tuple[Operation, OperationRecord] | None = None
        self._restores = 0
        self._writer = TelemetryWriter(run.root) if group.rank == 0 else None
        self._has_failed = False

    def begun(self, step: int) -> None:
        """Send the records of the saves that agents have ended."""
        if self._take_ended is not None:
            self._gather()

    def staged(self, report: SaveReport, *, durable: bool) -> None:
        """Send the record of the save, unless agents still work on it."""
        name = "save" if durable else "snapshot"
        operation = Operation(
            name=name, id=report.record.save_id, step=report.step, path=report.path
        )
        if self._take_ended is None:
            self._ready.append((operation, report.record))
            self._gather()
        else:
            self._waiting[operation.id] = operation, report.record

    def restored(self, report: RestoreReport) -> None:
        """Send the record of a restore."""
        self._restores += 1
        # All ranks make the same id without a message.
        text = f"{self._run.root} {report.step} {self._restores}"
        operation = Operation(
            name="restore",
            id=hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
            step=report.step,
            path=report.load.path,
            phases={name: each for name, each in report.seconds.items() if name != "total"},
        )
        self._ready.append((operation, report.record))
        self._gather()

    def closed(self, *, completed: bool) -> None:
        """Send the rest, and wait a while until rank 0 has stored it."""
        if completed:
            self._gather(most_waiting=0)
        if self._writer is not None:
            self._writer.close(LONGEST_END if completed else 0.0)

    def _take_rows(self, most_waiting: int) -> bytes:
        """Return the message of this rank; empty if there is nothing to send, or this fails."""
        run = self._run
        try:
            ended = {} if self._take_ended is None else self._take_ended()
            for save_id, events in ended.items():
                self._add_ended(save_id, events)
            while len(self._waiting) > most_waiting:
                self._ready.append(self._waiting.pop(next(iter(self._waiting))))
            return encode_message(
                row_of(operation, record, run.rank, run.world_size, self._host)
                for operation, record in self._ready
            )
        except Exception:  # of any kind: the other ranks wait for this rank's message
            log.exception("rank %d sends no telemetry; checkpoints are not affected", run.rank)
            return b""
        finally:
            self._ready = []

    def _add_ended(self, save_id: str, events: tuple[Event, ...]) -> None:
        """Add a save that agents have ended."""
        found = self._waiting.pop(save_id, None)
        last = self._last_snapshot
        if found is None and last is not None and last[0].id == save_id:
            found = last  # it is persisted at the end of the run
        if found is None:
            return
        operation, record = found
        if operation.name == "snapshot":
            self._last_snapshot = found
            if any(event.stage == "persist" for event in events):
                place = Root(self._run.root).at(operation.step or 0)
                operation = replace(operation, name="save", path=str(place))
        self._ready.append((operation, replace(record, events=(*record.events, *events))))

    def _gather(self, most_waiting: int = MOST_WAITING) -> None:
        message = self._take_rows(most_waiting)
        if self._has_failed:
            return
        # Rank 0 combines in its thread.
        combine = combine_messages if self._writer is None else join_messages
        try:
            message = self._group.reduce(message, combine)
        except ShardwiseError as error:
            self._has_failed = True
            log.warning("the telemetry of the last operations is lost: %s", error)
            return
        if self._writer is not None and message:
            self._writer.add(message)
