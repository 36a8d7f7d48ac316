"""A part of a snapshot on its way into memory, as the training that goes on meanwhile sees it."""

from __future__ import annotations

import os
import threading
import time

from shardwise.errors import StoreError
from shardwise.memory.trainer.pace import Pace, Slack
from shardwise.memory.trainer.stage import Fill
from shardwise.store.store import Buffer


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
