"""`TelemetryHook`: gathers the telemetry of a Checkpointer's operations, and stores it.

At the end of each save and restore, every rank sends the records that it has to rank 0, along the
tree of ranks, and does not wait for an answer. Rank 0 stores them in a thread. A failure is logged,
and changes nothing else.
"""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Callable
from dataclasses import replace

from shardwise.engine.group import Group
from shardwise.engine.save import SaveReport
from shardwise.errors import LostRankError
from shardwise.events import Event, OperationRecord
from shardwise.ports.hooks import RestoreReport, Run, RunHook
from shardwise.telemetry.rows import (
    Operation,
    combine_messages,
    encode_message,
    join_messages,
    row_of,
)
from shardwise.telemetry.storing import TelemetryWriter

MOST_WAITING = 64
"""Saves whose agents have not ended. Of older ones, only the ranks' own stages are sent."""
LONGEST_END = 10.0
"""Seconds for which the end of a run waits until its telemetry is stored."""

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
        self._restores = 0
        self._writer = TelemetryWriter(run.root) if group.rank == 0 else None
        self._has_failed = False

    def staged(self, report: SaveReport, *, durable: bool) -> None:
        """Send what has ended; the save itself too, unless agents still work on it."""
        name = "save" if durable else "snapshot"
        operation = Operation(
            name=name, id=report.record.save_id, step=report.step, path=report.path
        )
        if self._take_ended is None:
            self._ready.append((operation, report.record))
        else:
            self._waiting[operation.id] = operation, report.record
        self._gather()

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
        self._waiting.clear()  # agents discard what is newer
        self._ready.append((operation, report.record))
        self._gather()

    def closed(self, *, completed: bool) -> None:
        """Send the rest, and wait a while until rank 0 has stored it."""
        if completed:
            self._gather()
        if self._writer is not None:
            self._writer.close(LONGEST_END if completed else 0.0)

    def _take_rows(self) -> bytes:
        """Return the message of this rank; empty if there is nothing to send, or this fails."""
        try:
            ended = {} if self._take_ended is None else self._take_ended()
            for save_id, events in ended.items():
                if save_id in self._waiting:
                    operation, record = self._waiting.pop(save_id)
                    record = replace(record, events=(*record.events, *events))
                    self._ready.append((operation, record))
            while len(self._waiting) > MOST_WAITING:
                self._ready.append(self._waiting.pop(next(iter(self._waiting))))
            run = self._run
            return encode_message(
                row_of(operation, record, run.rank, run.world_size, self._host)
                for operation, record in self._ready
            )
        except Exception:  # the other ranks wait for this rank's message
            log.exception("rank %d has no telemetry", self._run.rank)
            return b""
        finally:
            self._ready = []

    def _gather(self) -> None:
        message = self._take_rows()
        if self._has_failed:
            return
        # Rank 0 combines in its thread.
        combine = combine_messages if self._writer is None else join_messages
        try:
            message = self._group.reduce(message, combine)
        except LostRankError as error:
            self._has_failed = True
            log.warning("the telemetry of the last operations is lost: %s", error)
            return
        if self._writer is not None and message:
            self._writer.add(message)
