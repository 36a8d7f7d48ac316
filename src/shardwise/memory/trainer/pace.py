"""How fast to copy beside a training: as slowly as it leaves time for, and no slower."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

OF_SLACK = 0.7
SAVES = 5


class Slack:
    """The seconds that a training leaves for a copy, as measured at its last saves."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=SAVES)
        self._waited = False

    def add(self, seconds: float, *, waited: bool) -> None:
        """Note what the training left between a save and its fence, and whether it then waited."""
        self._seconds.append(seconds)
        self._waited = waited

    def target(self) -> float:
        """The seconds within which to copy; 0: at full speed, as nothing is known, or it waited."""
        if self._waited or not self._seconds:
            return 0.0
        return OF_SLACK * median(self._seconds)


class Pace:
    """Spreads bytes evenly over time, from now on.

    Each begins when it is due. What is late is not waited for, so that a copy that cannot keep up
    goes at full speed.

    Args:
        total: bytes that are to come, at most.
        seconds: over which they are spread.
        clock: seconds that pass.
    """

    def __init__(
        self, total: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._a_byte = seconds / max(total, 1)
        self._clock = clock
        self._start = clock()
        self._begun = 0

    def seconds_for(self, nbytes: int) -> float:
        """Count them; how long to wait before they begin."""
        due = self._start + self._begun * self._a_byte
        self._begun += nbytes
        return max(0.0, due - self._clock())
