"""Doorbells: pipes with which the ranks of one node wake each other."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from shardwise.errors import LostRankError

OPERATION = "reading together with the other ranks of the node"
POLL_SECONDS = 0.2
T = TypeVar("T")
LateRanks = Callable[[], dict[int, str]]
"""Returns the ranks that this rank waits for, and for each the step that it has not completed."""


class Doorbell:
    """A pipe that other processes open through `/proc`, and write to, to wake this process.

    Args:
        cleanup: closes the pipe.

    Attributes:
        fd: the file descriptor of the pipe. Other processes pass this number and the id of this
            process to `open_doorbell`.
    """

    def __init__(self, cleanup: ExitStack) -> None:
        self._read_end, self.fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        cleanup.callback(os.close, self._read_end)
        cleanup.callback(os.close, self.fd)
        self._poller = select.poll()
        self._poller.register(self._read_end, select.POLLIN)

    def fileno(self) -> int:
        """Return a file descriptor that is readable after a ring, for `select.poll`."""
        return self._read_end

    def clear(self) -> None:
        """Forget all rings so far."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_end, 4096)

    def ring(self) -> None:
        """Wake the thread of this process that waits."""
        ring_doorbell(self.fd)

    def wait(
        self,
        poll: Callable[[], T | None],
        check_alive: Callable[[], None],
        timeout: float,
        late_ranks: LateRanks,
    ) -> T:
        """Sleep until `poll` returns a value, and return the value.

        Args:
            poll: called at the start and after each ring; returns None to keep waiting.
            check_alive: called every 0.2 s; raises if another rank has died.
            timeout: the longest wait, in seconds.
            late_ranks: called after the timeout, for the error message.

        Raises:
            LostRankError: the timeout has passed. The error names the late ranks.
        """
        start = time.monotonic()
        while (found := poll()) is None:
            if self._poller.poll(POLL_SECONDS * 1000):
                self.clear()
                continue
            check_alive()
            if time.monotonic() - start > timeout:
                steps = late_ranks().items()
                raise LostRankError(
                    OPERATION, {rank: f"{step} within {timeout:.0f} s" for rank, step in steps}
                )
        return found


def open_doorbell(process: int, fd: int, cleanup: ExitStack) -> int:
    """Open the doorbell of another process, and return the file descriptor for `ring_doorbell`.

    Args:
        process: the id of the other process.
        fd: the `Doorbell.fd` of that process.
        cleanup: closes the file descriptor.

    Raises:
        OSError: the process has exited.
    """
    found = os.open(f"/proc/{process}/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    cleanup.callback(os.close, found)
    return found


def ring_doorbell(fd: int) -> None:
    """Ring a doorbell. The call has no effect if the pipe is full, or if its process has exited."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(fd, b"!")
