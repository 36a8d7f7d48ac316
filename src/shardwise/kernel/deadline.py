"""A limit for waiting, and the pauses between attempts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator


class Deadline:
    """A limit for waiting.

    Args:
        seconds: time from now to the deadline; None if it never passes.
        clock: a monotonic clock, in seconds.
        sleep: sleeps for a number of seconds. It may return earlier.
    """

    def __init__(
        self,
        seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._clock = clock
        self._sleep = sleep
        self._end = math.inf if seconds is None else clock() + seconds

    def seconds_left(self) -> float:
        """Return the seconds until the deadline, 0.0 if it has passed."""
        return max(0.0, self._end - self._clock())

    def extend(self, seconds: float) -> None:
        """Move the deadline to a later time, or, if negative, to an earlier one."""
        self._end += seconds

    def has_passed(self) -> bool:
        """Return whether the deadline has passed."""
        return self._clock() > self._end

    def attempts(
        self, *, pause: float = 0.02, longest_pause: float | None = None
    ) -> Iterator[None]:
        """Yield once, and again after each pause, until the deadline has passed.

            for _ in Deadline(10.0).attempts():
                if path.exists():
                    return
            raise StoreError(f"{path} did not appear within 10 s")

        Args:
            pause: the first pause, in seconds.
            longest_pause: pauses double up to this many seconds; None for constant pauses.
        """
        yield
        while not self.has_passed():
            self._sleep(pause)
            pause = min(2 * pause, longest_pause or pause)
            yield
