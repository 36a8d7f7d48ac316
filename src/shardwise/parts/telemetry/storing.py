"""`TelemetryWriter`: a thread of rank 0 that combines, logs and stores telemetry."""

from __future__ import annotations

import errno
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from shardwise.kernel.engine.root import Root
from shardwise.kernel.events import format_bytes
from shardwise.kernel.manifest.manifest import telemetry_file
from shardwise.kernel.store import Store
from shardwise.parts.telemetry import files
from shardwise.parts.telemetry.records import Telemetry, combine
from shardwise.parts.telemetry.rows import MICROSECONDS, align, decode_message

LARGEST_CLOCK_OFFSET = 5.0
"""Seconds. If the clock of a rank is off by more, a warning names the rank."""
SNAPSHOT_PERIOD = 60.0
"""Seconds. The telemetry of at most one snapshot is stored in this time."""
KEPT_TABLES = 64
"""The most tables without all ranks. Ranks may learn at different times that the agents have
completed a save."""
MOST_MESSAGES = 16
"""The most messages that wait for a store. Further ones are dropped."""
MOST_RANKS_SHOWN = 5
READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM)
"""It is normal that a user who restores may not write to the root."""

log = logging.getLogger("shardwise")


class TelemetryWriter:
    """Combines the messages of the ranks, and stores the tables in the background.

    Args:
        root: the root of the run.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, root: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._messages: queue.Queue[bytes | None] = queue.Queue(MOST_MESSAGES)
        self._tables: dict[tuple[str, str], Telemetry] = {}
        self._last_snapshot: tuple[str, float] | None = None
        self._warned_ranks: set[int] = set()
        self._thread: threading.Thread | None = None

    def add(self, message: bytes) -> None:
        """Store the tables of a message, without waiting for it."""
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            log.warning(
                "%s: telemetry is not stored: the store did not answer while %d messages arrived; "
                "checkpoints are not affected",
                *(self._root, MOST_MESSAGES),
            )
        if self._thread is None:
            # A daemon, because a store that does not answer must not keep the process alive.
            self._thread = threading.Thread(
                target=self._work, name="shardwise-telemetry", daemon=True
            )
            self._thread.start()

    def close(self, timeout: float) -> None:
        """Wait at most `timeout` seconds until everything is stored."""
        with suppress(queue.Full):  # then the thread is a daemon that is left behind
            self._messages.put(None, timeout=timeout)
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive() and timeout:
                log.warning("%s: the telemetry of the last operations is not stored", self._root)

    def _work(self) -> None:
        while (message := self._messages.get()) is not None:
            self._add_message(message)

    def _add_message(self, message: bytes) -> None:
        try:
            for table in decode_message(message, "the telemetry of the ranks"):
                self._add_table(table)
        except Exception as error:  # of any kind: the thread goes on with the next message
            is_read_only = getattr(error, "errno", None) in READ_ONLY_ERRORS
            log.log(
                logging.INFO if is_read_only else logging.WARNING,
                "%s: telemetry is not stored: %s; checkpoints are not affected",
                *(self._root, error),
            )

    def _add_table(self, table: Telemetry) -> None:
        key = table.operation, table.id
        earlier = self._tables.pop(key, None)
        if earlier is not None:
            table = combine([earlier, table])
        if len(table.ranks) < table.world_size:
            self._tables[key] = table
        while len(self._tables) > KEPT_TABLES:
            self._tables.pop(next(iter(self._tables)))
        table = align(table)
        self._warn_of_clocks(table)
        if len(table.ranks) == table.world_size:
            log.info("%s", describe(table), extra={"shardwise": summarize(table)})
        self._store(table)

    def _store(self, table: Telemetry) -> None:
        if table.operation == "save":
            checkpoint = Root(self._root).at(table.step or 0)
            if checkpoint.state() == "committed":  # otherwise, it is removed already
                files.write_of_save(checkpoint.store, table)
                if checkpoint.state() != "committed":  # it was removed meanwhile
                    checkpoint.store.delete(telemetry_file(table.id))
            return
        if table.operation == "snapshot":
            now = self._clock()
            last_id, stored_at = self._last_snapshot or ("", now - SNAPSHOT_PERIOD)
            if table.id != last_id and now - stored_at < SNAPSHOT_PERIOD:
                return
            self._last_snapshot = table.id, now if table.id != last_id else stored_at
        files.write_operation(self._root, table)

    def _warn_of_clocks(self, table: Telemetry) -> None:
        is_off = np.abs(table.clock) > LARGEST_CLOCK_OFFSET * MICROSECONDS
        new = [
            row for row in np.flatnonzero(is_off) if int(table.ranks[row]) not in self._warned_ranks
        ]
        if not new:
            return
        self._warned_ranks.update(int(table.ranks[row]) for row in new)
        shown = [
            f"rank {table.ranks[row]} on {table.hosts[table.host[row]]} by "
            f"{table.clock[row] / MICROSECONDS:+.1f} s"
            for row in new[:MOST_RANKS_SHOWN]
        ]
        more = f", and {len(new) - len(shown)} more" if len(new) > len(shown) else ""
        log.warning(
            "clocks differ from that of rank %d: %s%s. Checkpoints are not affected, but file "
            "times and log times are misleading: check NTP on these hosts",
            *(table.ranks[0], ", ".join(shown), more),
        )


def describe(table: Telemetry) -> str:
    """Return one line about an operation, which names the slowest rank of its longest stage."""
    step = "" if table.step is None else f" of step {table.step}"
    text = f"{table.operation}{step}: {table.seconds:.2f} s on {table.world_size} ranks"
    stages = table.with_arrival().stages
    if not stages:
        return text
    stage = max(stages, key=lambda each: each.slowest[1])
    row, seconds = stage.slowest
    nbytes = f" ({format_bytes(int(stage.bytes[row]))})" if stage.bytes[row] else ""
    host = table.hosts[table.host[row]]
    who = f"rank {table.ranks[row]} on {host}"
    return f"{text}; longest in {stage.name}: {who}, {seconds:.2f} s{nbytes}"


def summarize(table: Telemetry) -> dict[str, object]:
    """Return the numbers of an operation for structured logs.

    The seconds of a stage are the self time of its slowest rank.
    """
    stages = [(each.name, *each.slowest) for each in table.stages]
    return {
        "operation": table.operation,
        "id": table.id,
        "step": table.step,
        "path": table.path,
        "seconds": table.seconds,
        "ranks": len(table.ranks),
        "bytes": table.bytes,
        "retries": table.retries,
        "stages": {
            name: {"seconds": seconds, "slowest_rank": int(table.ranks[row])}
            for name, row, seconds in stages
        },
    }
