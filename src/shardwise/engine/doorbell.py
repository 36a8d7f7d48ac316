"""Waking other processes of the node: they sleep until something has changed in common memory."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from shardwise.errors import LostRankError

LOOK_AROUND = 0.2
T = TypeVar("T")
Awaited = Callable[[], dict[int, str]]
"""The ranks that are waited for, and what each has not done."""


class Doorbell:
    """A pipe that others find through `/proc` and ring; how often they rang is not counted.

    Args:
        cleanup: when it is closed, it can no longer be rung.

    Attributes:
        fd: what others need to find it, together with this process's number.
    """

    def __init__(self, cleanup: ExitStack) -> None:
        self._ears, self.fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        cleanup.callback(os.close, self._ears)
        cleanup.callback(os.close, self.fd)
        self._poll = select.poll()
        self._poll.register(self._ears, select.POLLIN)

    def ring(self) -> None:
        """Wake whoever of this process waits."""
        ring(self.fd)

    def wait(
        self,
        look: Callable[[], T | None],
        alive: Callable[[], None],
        timeout: float,
        awaited: Awaited,
    ) -> T:
        """Sleep until `look` finds something; it looks again whenever the bell rings.

        Args:
            alive: raises if waiting has become pointless; asked every 0.2 s.
            timeout: how long to wait, in seconds.
            awaited: says whom this rank waited for.

        Raises:
            LostRankError: it did not come in time; names who was waited for.
        """
        start = time.monotonic()
        while (found := look()) is None:
            if self._poll.poll(LOOK_AROUND * 1000):
                os.read(self._ears, 4096)
                continue
            alive()
            if time.monotonic() - start > timeout:
                late = {rank: f"{what} within {timeout:.0f} s" for rank, what in awaited().items()}
                raise LostRankError("reading together", late)
        return found


def find_bell(process: int, fd: int, cleanup: ExitStack) -> int:
    """Another process's bell, as a file descriptor to `ring`."""
    found = os.open(f"/proc/{process}/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    cleanup.callback(os.close, found)
    return found


def ring(bell: int) -> None:
    """Ring a bell. One that rings already, or that nobody hears any more, is left as it is."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(bell, b"!")
