"""A part of a snapshot on its way into memory, as the training that goes on meanwhile sees it."""

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
"""`fill(low, high, out)` copies these bytes of a file to `out`."""


def stage(fill: Fill, low: int, high: int, out: Buffer, pool: ThreadPoolExecutor) -> None:
    """Copy bytes `low:high` of a file to where they belong in `out`, which has room for all."""

    def copy(at: int) -> None:
        stop = min(at + BUCKET, high)
        fill(at, stop, out[at:stop])

    starts = range(low, high, BUCKET)
    try:
        jobs = [pool.submit(copy, at) for at in starts]
    except RuntimeError:  # the process is ending, and gives threads no more work
        for at in starts:
            copy(at)
        return
    try:
        for job in jobs:
            job.result()
    finally:  # when this returns, nothing is copied to `out` any more
        for job in jobs:
            job.cancel()
        wait(jobs)


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


class Copying:
    """What a part has come to.

    Args:
        total: bytes to copy, at most.
        slack: what trainings left for earlier ones, by which it is paced; None: not at all.

    Attributes:
        issued: all has been read, or is put on the streams of devices.
        done: nothing more comes of it.
        failure: why this rank's file was not staged, once it is done; "" if it was.
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
        """Whether this process was forked since: it has a state of its own, that nobody copies."""
        return os.getpid() != self._process

    def paced(self, fill: Fill) -> Fill:
        """The same, where each call waits until it is due, or somebody waits for all."""
        pace = self._pace
        if pace is None:
            return fill

        def copy(low: int, high: int, out: Buffer) -> None:
            self._hurried.wait(pace.seconds_for(high - low))
            fill(low, high, out)

        return copy

    def hurry(self) -> None:
        """Go at full speed from now on: somebody waits."""
        if self._hurried.is_set():
            return
        self._hurried.set()
        if self._slack is not None:
            waited = not self.done.is_set()
            self._slack.add(time.monotonic() - self._begun, waited=waited)

    def end(self, failure: str) -> None:
        """Nothing more comes of it."""
        self.failure = failure
        self.issued.set()
        self.done.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing more comes of it, at full speed; whether that is so.

        Raises:
            StoreError: this process was forked meanwhile: its parent copies, and cannot tell it.
        """
        self.hurry()
        if self.is_elsewhere() and not self.done.is_set():
            raise StoreError(
                f"process {self._process} makes the copy, and this forked child cannot wait for "
                "it: wait in the parent"
            )
        return self.done.wait(timeout)
