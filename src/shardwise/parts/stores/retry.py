"""`Retry`: repeats an operation of a server that fails for a reason that may pass."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StoreUnavailableError
from shardwise.kernel.store.names import RETRY_SECONDS

WARNING_SECONDS = 10.0
LATE_SECONDS = 10.0
"""For so many seconds after a write, a server may say that the file does not exist."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 15.0  # seconds

T = TypeVar("T")
log = logging.getLogger("shardwise")


class Retry:
    """Repeats operations of a server, and remembers what was just written to the server.

    Args:
        seconds: how long to repeat an operation.
        warning_seconds: how long to repeat an operation before a warning is logged. There is one
            warning for each outage.
        clock: a monotonic clock, in seconds.
        sleep: the function that waits between two attempts.

    Attributes:
        repeated: how many attempts have failed and were repeated, so far.
    """

    def __init__(
        self,
        seconds: float = RETRY_SECONDS,
        warning_seconds: float = WARNING_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.seconds = seconds
        self._warning_seconds = warning_seconds
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._written_at: dict[str, float] = {}  # by place
        self._has_warned = False
        self.repeated = 0

    def __reduce__(self) -> tuple[type[Retry], tuple[float, float]]:
        return type(self), (self.seconds, self._warning_seconds)

    def call(self, act: Callable[[], T], is_late: Callable[[], bool] = lambda: False) -> T:
        """Return the result of an operation, which may be repeated.

        Args:
            act: the operation.
            is_late: returns whether the operation may miss a file because it was just written.

        Raises:
            OSError: of the last attempt.
        """
        begin = self._clock()
        failure: OSError | None = None
        deadline = Deadline(self.seconds, self._clock, self._sleep)
        for _ in deadline.attempts(pause=FIRST_PAUSE, longest_pause=LONGEST_PAUSE):
            if failure is not None:
                with self._lock:
                    self.repeated += 1
            try:
                result = act()
            except StoreUnavailableError as error:
                failure = error
            except OSError as error:
                if not (_is_missing(error) and is_late()):
                    raise
                failure = error
            else:
                self._has_warned = False
                return result
            self._warn(failure, begin)
        raise failure or StoreUnavailableError("not tried")

    def note_write(self, place: str) -> None:
        """Remember that a file was written."""
        with self._lock:
            self._forget_old()
            self._written_at[place] = self._clock()

    def forget_write(self, place: str) -> None:
        """Forget a file that is deleted."""
        with self._lock:
            self._written_at.pop(place, None)

    def has_written(self, place: str | None) -> bool:
        """Return whether a file was written a moment ago; with None, whether any file was."""
        with self._lock:
            self._forget_old()
            return bool(self._written_at) if place is None else place in self._written_at

    def _forget_old(self) -> None:
        limit = self._clock() - LATE_SECONDS
        self._written_at = {place: at for place, at in self._written_at.items() if at >= limit}

    def _warn(self, failure: OSError, begin: float) -> None:
        passed = self._clock() - begin
        if self._has_warned or passed < self._warning_seconds:
            return
        self._has_warned = True
        end = time.localtime(time.time() + max(0.0, self.seconds - passed))
        log.warning(
            "%s. This has failed for %.0f s, and is repeated until %s (the option retry=%g of the "
            "URL)",
            *(failure, passed, time.strftime("%H:%M:%S", end), self.seconds),
        )


def _is_missing(error: OSError) -> bool:
    """Return whether a server said that it does not find what a request is for."""
    return isinstance(error, FileNotFoundError) or error.errno == errno.ENOENT
