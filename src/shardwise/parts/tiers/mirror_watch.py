"""`MirrorWatch`: reads the record of the mirror in the root, to report failures and wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from contextlib import suppress

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.engine.root import Root
from shardwise.kernel.errors import StoreError
from shardwise.kernel.events import Recorder
from shardwise.kernel.store import Store
from shardwise.parts.tiers.record import MirrorRecord

FAILURE_TIMEOUT = 60.0
LONGEST_COPY = 600.0
REPORT_PERIOD = 600.0
PAUSE, LONGEST_PAUSE = 0.01, 0.5
log = logging.getLogger("shardwise")


class MirrorWatch:
    """Follows the mirror of a root."""

    def __init__(self, root: Store) -> None:
        self._root = root
        self._reported: Set[tuple[int, str]] | None = None
        self._reported_at = 0.0

    def record(self) -> MirrorRecord | None:
        """Return the state of the mirror; None if the record is missing or cannot be read."""
        with suppress(OSError):
            return MirrorRecord.read(self._root)
        return None

    def describe_problem(self) -> str:
        """Return which checkpoints the mirror lacks, and why; "" if the mirror does not fail."""
        record = self.record()
        if record is None or record.failing_since is None:
            return ""
        minutes = max(0.0, time.time() - record.failing_since) / 60
        pinned = (
            f"; of them, {len(record.pinned)} stay in {self._root} only until they are copied"
            if record.pinned
            else ""
        )
        return (
            f"the mirror {record.place} has failed for {minutes:.0f} min. Checkpoints that it "
            f"lacks: {len(record.waiting)}{pinned}. Reason: {record.why_failing()}"
        )

    def report(self, recorder: Recorder) -> None:
        """Record copies since the last call as events, and log a failing mirror."""
        record = self.record()
        if record is None:
            self._reported = self._reported or set()
            return
        done = {(step, each.save_id): each.seconds for step, each in record.steps.items()}
        reported = done.keys() if self._reported is None else self._reported
        for copied, seconds in done.items():
            if copied not in reported:
                recorder.add("mirror", seconds)
        self._reported = done.keys()
        if record.failing_since is None:
            self._reported_at = 0.0
        elif time.time() - self._reported_at >= REPORT_PERIOD:
            self._reported_at = time.time()
            log.error("%s", self.describe_problem())

    def wait(self, step: int, timeout: float | None) -> None:
        """Wait until the root's checkpoint of a step is in the mirror.

        Returns at once if the root no longer has the step: a checkpoint is removed from the root
        only after it was copied, or if the rules of the mirror drop it.

        Raises:
            TimeoutError: `timeout` seconds have passed.
            StoreError: without `timeout`, the mirror has failed for `LONGEST_COPY` seconds.
        """
        start = time.time()
        for _ in Deadline(None).attempts(pause=PAUSE, longest_pause=LONGEST_PAUSE):
            record = self.record()
            if self._is_mirrored(record, step):
                return
            seconds = time.time() - start
            if timeout is not None and seconds >= timeout:
                raise TimeoutError(
                    f"step {step} is not in the mirror after {timeout:g} s; the copy continues: "
                    f"wait again, with a longer timeout. {self.describe_problem()}".rstrip()
                )
            since = record and record.failing_since
            if timeout is None and since and time.time() - since >= LONGEST_COPY:
                raise StoreError(
                    f"step {step} is not in the mirror: {self.describe_problem()}; remove the "
                    "cause, and the copy is tried again"
                )

    def wait_until_current(self, step: int | None) -> str:
        """Wait until the mirror has all checkpoints that it should have.

        Returns early if the mirror has failed for `FAILURE_TIMEOUT` seconds, or if no copy has
        ended for `LONGEST_COPY` seconds.

        Args:
            step: the step that was saved last; None if none was saved.

        Returns:
            Why the mirror lacks checkpoints; "" if it lacks none.
        """
        before: MirrorRecord | None = None
        changed_at = time.time()
        for _ in Deadline(None).attempts(pause=PAUSE, longest_pause=LONGEST_PAUSE):
            record = self.record()
            if record is not None and not record.waiting and self._is_mirrored(record, step):
                return ""
            now = time.time()
            if record != before:
                before, changed_at = record, now
            if record is not None and record.failing_since is not None:
                if now - record.failing_since >= FAILURE_TIMEOUT:
                    return self.describe_problem()
            elif now - changed_at >= LONGEST_COPY:
                return f"no checkpoint was copied to the mirror for {LONGEST_COPY:.0f} s"
        return ""

    def _is_mirrored(self, record: MirrorRecord | None, step: int | None) -> bool:
        """Return whether the mirror has the root's save of a step, or the root has no such save."""
        manifest = None if step is None else Root(self._root).at(step).saved()
        return manifest is None or (record is not None and record.has(step or 0, manifest.save_id))
