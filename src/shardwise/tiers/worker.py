"""`MirrorWorker`: a thread that keeps a mirror up to date, and retries with growing delays."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from shardwise.retention import Keep
from shardwise.store import Store
from shardwise.tiers.decide import SavedSteps
from shardwise.tiers.mirroring import Mirroring
from shardwise.tiers.options import Mirror

CHECK_PERIOD = 60.0
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
log = logging.getLogger("shardwise.mirror")


class MirrorWorker:
    """Keeps a mirror of a root up to date in a thread.

    Args:
        root, keep, mirror: as for `Mirroring`.
        wall_clock: seconds since 1970.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        root: Store,
        keep: Keep,
        mirror: Mirror,
        *,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mirroring = Mirroring(root, keep, mirror, wall_clock)
        self._clock = clock
        self._changed = threading.Condition()
        self._saved = SavedSteps()
        self._due_at = clock()
        self._failures = 0
        self._has_unseen_steps = True
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

    def attempt(self) -> bool:
        """Bring the mirror up to date; return whether that succeeded. The thread calls this."""
        with self._changed:
            self._has_unseen_steps = False
        try:
            is_current = self.mirroring.catch_up(lambda: self._saved)
        except Exception:
            log.exception("mirroring failed; trying again")
            is_current = False
        with self._changed:
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
        while self._wait():
            self.attempt()

    def _wait(self) -> bool:
        """Wait until an attempt is due; return False if the thread stops."""
        with self._changed:
            while not self._is_stopping and (left := self._due_at - self._clock()) > 0:
                self._changed.wait(left)
            return not self._is_stopping
