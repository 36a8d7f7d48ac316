"""Copying a rank's data into a slot, paced so that it does not slow down the training."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from statistics import median

from shardwise.errors import StoreError
from shardwise.store.store import Buffer

BUCKET = 8 << 20
Fill = Callable[[int, int, Buffer], None]
"""`fill(low, high, out)` copies bytes `low:high` of a file to `out`."""


def stage(fill: Fill, low: int, high: int, out: Buffer, pool: ThreadPoolExecutor) -> None:
    """Copy bytes `low:high` of a file to the same offsets of `out`, with the threads of `pool`."""

    def copy(at: int) -> None:
        stop = min(at + BUCKET, high)
        fill(at, stop, out[at:stop])

    starts = range(low, high, BUCKET)
    try:
        jobs = [pool.submit(copy, at) for at in starts]
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        for at in starts:
            copy(at)
        return
    try:
        for job in jobs:
            job.result()
    finally:  # nothing writes to `out` after this returns
        for job in jobs:
            job.cancel()
        wait(jobs)


OF_SLACK = 0.7
SAVES = 5


class Slack:
    """The time that the training leaves for a copy, measured at the last saves."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=SAVES)
        self._waited = False

    def add(self, seconds: float, *, waited: bool) -> None:
        """Record the time between a save and its fence, and whether the training then waited."""
        self._seconds.append(seconds)
        self._waited = waited

    def target(self) -> float:
        """Return the seconds over which to spread a copy; 0 for full speed."""
        if self._waited or not self._seconds:
            return 0.0
        return OF_SLACK * median(self._seconds)


class Pace:
    """Spreads a copy evenly over time, starting now. A copy that is late runs at full speed.

    Args:
        total: the largest number of bytes to copy.
        seconds: the time over which to spread them.
        clock: returns the time in seconds.
    """

    def __init__(
        self, total: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._a_byte = seconds / max(total, 1)
        self._clock = clock
        self._start = clock()
        self._begun = 0

    def seconds_for(self, nbytes: int) -> float:
        """Count the next bytes, and return how long to wait before copying them."""
        due = self._start + self._begun * self._a_byte
        self._begun += nbytes
        return max(0.0, due - self._clock())


class Copying:
    """The progress of copying a rank's part of a snapshot.

    Args:
        total: the largest number of bytes to copy.
        slack: the time that the training left for earlier copies, to pace this one. None: do not
            pace it.

    Attributes:
        issued: set once all data was read, or its copies were queued on streams of devices.
        done: set once the copy has succeeded or failed.
        failure: once done, why this rank's file was not staged, or "".
    """

    def __init__(self, total: int, slack: Slack | None) -> None:
        self._slack = slack
        self._pace = None if slack is None else Pace(total, slack.target())
        self._begun = time.monotonic()
        self._process = os.getpid()
        self._hurried = threading.Event()
        self.issued = threading.Event()
        self.done = threading.Event()
        self.failure = ""

    def is_elsewhere(self) -> bool:
        """Return whether this process was forked from the one that makes the copy."""
        return os.getpid() != self._process

    def paced(self, fill: Fill) -> Fill:
        """Return `fill`, delayed by the pace until `hurry` is called."""
        pace = self._pace
        if pace is None:
            return fill

        def copy(low: int, high: int, out: Buffer) -> None:
            self._hurried.wait(pace.seconds_for(high - low))
            fill(low, high, out)

        return copy

    def hurry(self) -> None:
        """Continue at full speed, because a caller waits."""
        if self._hurried.is_set():
            return
        self._hurried.set()
        if self._slack is not None:
            waited = not self.done.is_set()
            self._slack.add(time.monotonic() - self._begun, waited=waited)

    def end(self, failure: str) -> None:
        """Mark the copy as done."""
        self.failure = failure
        self.issued.set()
        self.done.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the copy is done, at full speed, and return whether it is.

        Raises:
            StoreError: this process was forked from the one that makes the copy.
        """
        self.hurry()
        if self.is_elsewhere() and not self.done.is_set():
            raise StoreError(
                f"process {self._process} makes the copy, so this forked child cannot wait for "
                "it: wait in the parent"
            )
        return self.done.wait(timeout)
