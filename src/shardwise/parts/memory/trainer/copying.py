"""Copies a rank's data into a slot, so slowly that the copy does not slow down the training."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from statistics import median

from shardwise.kernel.errors import StoreError
from shardwise.kernel.store.store import Buffer

BYTES_AT_ONCE = 8 << 20
"""The number of bytes that a thread copies at a time."""
BYTES_AT_ONCE_FROM_DEVICES = 64 << 20
"""The same for copies that a device makes. To queue 8 MiB takes longer than to copy them."""
SLACK_SHARE = 0.7
"""A copy is spread over this fraction of the time that the training leaves for it (`Slack`)."""
SAVES_MEASURED = 5
Fill = Callable[[int, int, Buffer], None]
"""`fill(low, high, out)` copies bytes `low:high` of a file to `out`."""


def copy_range(
    fill: Fill,
    low: int,
    high: int,
    out: Buffer,
    pool: ThreadPoolExecutor,
    *,
    from_devices: bool = False,
    on_progress: Callable[[int], object] = lambda copied: None,
) -> None:
    """Copy bytes `low:high` of a file to the same offsets of `out`, with the threads of `pool`.

    Args:
        from_devices: whether `fill` queues copies that devices make.
        on_progress: called after each bucket, with the offset before which all are copied.
    """
    size = BYTES_AT_ONCE_FROM_DEVICES if from_devices else BYTES_AT_ONCE

    def copy_bucket(start: int) -> None:
        stop = min(start + size, high)
        fill(start, stop, out[start:stop])

    starts = range(low, high, size)
    try:
        jobs = [pool.submit(copy_bucket, start) for start in starts]
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        for start in starts:
            copy_bucket(start)
        return
    try:
        for start, job in zip(starts, jobs, strict=True):
            job.result()
            on_progress(min(start + size, high))
    finally:  # nothing writes to `out` after this returns
        for job in jobs:
            job.cancel()
        wait(jobs)


class Slack:
    """The time that the training leaves for a copy, measured at the last saves."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=SAVES_MEASURED)
        self._has_waited = False

    def add(self, seconds: float, *, has_waited: bool) -> None:
        """Record a save.

        Args:
            seconds: the time between the save and the moment when the training needed the copy to
                be complete: at the optimizer's step, or in `handle.staged()`.
            has_waited: whether the training had to wait for the copy at that moment.
        """
        self._seconds.append(seconds)
        self._has_waited = has_waited

    def seconds_to_spread(self) -> float:
        """Return the seconds over which to spread a copy; 0 for full speed."""
        if self._has_waited or not self._seconds:
            return 0.0
        return SLACK_SHARE * median(self._seconds)


class Pace:
    """Spreads a copy evenly over time, starting now. A late copy runs at full speed.

    Args:
        total: an upper bound on the number of bytes to copy.
        seconds: the time over which to spread them.
        clock: returns the time in seconds.
    """

    def __init__(
        self, total: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds_per_byte = seconds / max(total, 1)
        self._clock = clock
        self._start = clock()
        self._bytes_begun = 0

    def seconds_for(self, nbytes: int) -> float:
        """Count the next bytes, and return the seconds to wait before copying them."""
        due = self._start + self._bytes_begun * self._seconds_per_byte
        self._bytes_begun += nbytes
        return max(0.0, due - self._clock())


class CopyProgress:
    """The progress of copying a rank's part of a snapshot.

    Args:
        total: an upper bound on the number of bytes to copy.
        slack: the time that the training left for earlier copies, which sets the pace. None: copy
            at full speed.

    Attributes:
        all_queued: set when all data on the host has been copied, and all copies from devices are
            queued in their streams.
        done: set once the copy has succeeded or failed.
        failure: the reason why this rank's file was not staged; "" if the file was staged, or the
            copy is not done yet.
        began, ended: when the copy began and ended, in seconds of `time.perf_counter`; `ended` is
            0.0 until then.
    """

    def __init__(self, total: int, slack: Slack | None) -> None:
        self._slack = slack
        self._pace = None if slack is None else Pace(total, slack.seconds_to_spread())
        self._start = time.monotonic()
        self.began, self.ended = time.perf_counter(), 0.0
        self._process = os.getpid()
        self._at_full_speed = threading.Event()
        self.all_queued = threading.Event()
        self.done = threading.Event()
        self.failure = ""

    @property
    def is_background(self) -> bool:
        """Whether the training goes on during the copy."""
        return self._slack is not None

    def belongs_to_parent_process(self) -> bool:
        """Return whether this process was forked from the one that makes the copy."""
        return os.getpid() != self._process

    def pace_fill(self, fill: Fill) -> Fill:
        """Return `fill`, delayed by the pace until `hurry` is called."""
        pace = self._pace
        if pace is None:
            return fill

        def copy(low: int, high: int, out: Buffer) -> None:
            self._at_full_speed.wait(pace.seconds_for(high - low))
            fill(low, high, out)

        return copy

    def hurry(self) -> None:
        """Continue at full speed, because a caller waits."""
        if self._at_full_speed.is_set():
            return
        self._at_full_speed.set()
        if self._slack is not None:
            has_waited = not self.done.is_set()
            self._slack.add(time.monotonic() - self._start, has_waited=has_waited)

    def finish(self, failure: str) -> None:
        """Mark the copy as done. `failure` says why it failed, or is ""."""
        self.failure, self.ended = failure, time.perf_counter()
        self.all_queued.set()
        self.done.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Let the copy run at full speed, wait until it is done, and return whether it is.

        Args:
            timeout: seconds to wait at most; None to wait without a limit.

        Raises:
            StoreError: this process was forked from the one that makes the copy.
        """
        self.hurry()
        if self.belongs_to_parent_process() and not self.done.is_set():
            raise StoreError(
                f"this forked child (process {os.getpid()}) cannot wait for the copy that process "
                f"{self._process} makes: wait in that process"
            )
        return self.done.wait(timeout)
