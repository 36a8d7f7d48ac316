"""`MirrorWorker`: a thread that keeps a mirror up to date, and retries with growing delays."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from shardwise.retention import Keep
from shardwise.store import Store
from shardwise.tiers.decide import SavedSteps
from shardwise.tiers.mirroring import Mirroring
from shardwise.tiers.options import Mirror

CHECK_PERIOD = 60.0
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
NICENESS = 10
log = logging.getLogger("shardwise.mirror")


class MirrorWorker:
    """Keeps a mirror of a root up to date in a thread.

    Args:
        root, keep, mirror: as for `Mirroring`.
        wall_clock: seconds since 1970.
        clock: a monotonic clock, in seconds.
        lowers_priority: whether the thread runs with a lower priority than others.
    """

    def __init__(
        self,
        root: Store,
        keep: Keep,
        mirror: Mirror,
        *,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
        lowers_priority: bool = False,
    ) -> None:
        self.mirroring = Mirroring(root, keep, mirror, wall_clock)
        self._clock = clock
        self._lowers_priority = lowers_priority
        self._changed = threading.Condition()
        self._saved = SavedSteps()
        self._due_at = clock()
        self._failures = 0
        self._has_unseen_steps = True
        self._is_running = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="shardwise-mirror", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def set_saved(self, newest: int | None, damaged: Iterable[int] = ()) -> None:
        """Report what was saved to the root, as in `SavedSteps`; the thread copies it soon."""
        with self._changed:
            self._saved = SavedSteps(newest, frozenset(damaged))
            self._has_unseen_steps = True
            if not self._failures:
                self._due_at = self._clock()
            self._changed.notify_all()

    @property
    def is_current(self) -> bool:
        """Whether the mirror has all checkpoints that `set_saved` reported."""
        with self._changed:
            return not (self._has_unseen_steps or self._failures or self._is_running)

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt failed, and no other runs now."""
        with self._changed:
            return self._failures > 0 and not self._is_running

    def attempt(self) -> bool:
        """Bring the mirror up to date; return whether that succeeded. The thread calls this."""
        with self._changed:
            self._has_unseen_steps = False
            self._is_running = True
        try:
            is_current = self.mirroring.catch_up(lambda: self._saved)
        except Exception:
            log.exception("mirroring failed; trying again")
            is_current = False
        with self._changed:
            self._is_running = False
            self._failures = 0 if is_current else self._failures + 1
            delay = min(FIRST_DELAY * 2.0 ** (self._failures - 1), LONGEST_DELAY)
            wait = delay if self._failures else 0.0 if self._has_unseen_steps else CHECK_PERIOD
            self._due_at = self._clock() + wait
            self._changed.notify_all()
        return is_current

    def stop(self, timeout: float) -> bool:
        """Stop the thread between two chunks; return whether it ended within the timeout."""
        self.mirroring.stop()
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        if self._lowers_priority:
            with suppress(OSError):
                os.nice(NICENESS)  # on Linux, this applies to the thread
        while self._wait():
            self.attempt()

    def _wait(self) -> bool:
        """Wait until an attempt is due; return False if the thread stops."""
        with self._changed:
            while not self._is_stopping and (left := self._due_at - self._clock()) > 0:
                self._changed.wait(left)
            return not self._is_stopping
