"""Groups of ranks that send each other small messages on the CPU. Tensor data is never sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from shardwise.kernel.events import Recorder

TIMEOUT = timedelta(minutes=10)
Combine = Callable[[list[bytes]], bytes]
Decode = Callable[[bytes], object]


class UndecodableError(ValueError):
    """A message of another rank cannot be decoded.

    Attributes:
        index: its place among the messages that were to be combined.
    """

    def __init__(self, index: int, reason: str) -> None:
        self.index = index
        super().__init__(f"it sent a message that cannot be decoded: {reason}")


class Group(Protocol):
    """The ranks of one save or load. All ranks call every method, in the same order."""

    @property
    def rank(self) -> int:
        """The index of this rank in the group."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def number(self) -> int:
        """The number of this rank in errors: in a part of a group, its rank in the whole group."""
        ...

    @property
    def bytes_sent(self) -> int:
        """The bytes of the messages that this rank has sent so far."""
        ...

    @property
    def bytes_received(self) -> int:
        """The bytes of the messages that this rank has received so far."""
        ...

    @property
    def timeout(self) -> timedelta:
        """The longest time that ranks wait for each other."""
        ...

    def reduce(self, data: bytes, combine: Combine) -> bytes:
        """Combine the data of all ranks.

        Args:
            data: what this rank adds.
            combine: makes one message of several. It must be associative, and must not depend on
                the order of the messages. It may raise `UndecodableError`.

        Returns:
            The combined data on rank 0, and `b""` on other ranks.
        """
        ...

    def broadcast(self, data: bytes, decode: Decode = bytes) -> bytes:
        """Send rank 0's data to all ranks, and return it.

        Args:
            data: the data; ignored on other ranks.
            decode: gets the data on each rank. If it cannot decode them, all ranks raise an error.
        """
        ...

    def part(self, ranks: Sequence[int], cleanup: ExitStack) -> Group:
        """Return a group of some of the ranks, in which the first of them is rank 0.

        All ranks call this at the same time, each for a part to which it belongs.

        Args:
            ranks: the ranks of the part, the same on all of these.
            cleanup: closes the connections of the part.
        """
        ...


class TimedGroup:
    """A group that counts the time of its methods as waits for other ranks.

    Args:
        group: the ranks.
        recorder: gets the waits, and the time of the first agreement.
    """

    def __init__(self, group: Group, recorder: Recorder) -> None:
        self._group, self._recorder = group, recorder
        self.rank, self.number, self.size = group.rank, group.number, group.size
        self.timeout = group.timeout
        self._sent_before = group.bytes_sent

    @property
    def bytes_sent_here(self) -> int:
        """The bytes that this rank has sent since this object was made."""
        return self._group.bytes_sent - self._sent_before

    @property
    def bytes_sent(self) -> int:
        """See `Group.bytes_sent`."""
        return self._group.bytes_sent

    @property
    def bytes_received(self) -> int:
        """See `Group.bytes_received`."""
        return self._group.bytes_received

    def reduce(self, data: bytes, combine: Combine) -> bytes:
        """See `Group.reduce`."""
        with self._recorder.waiting():
            return self._group.reduce(data, combine)

    def broadcast(self, data: bytes, decode: Decode = bytes) -> bytes:
        """See `Group.broadcast`."""
        with self._recorder.waiting():
            received = self._group.broadcast(data, decode)
        self._recorder.note_agreement()
        return received

    def part(self, ranks: Sequence[int], cleanup: ExitStack) -> TimedGroup:
        """See `Group.part`."""
        return TimedGroup(self._group.part(ranks, cleanup), self._recorder)


class SoloGroup:
    """A group of only this process, as `group=` of `save` and `load` in a job of several processes.

    Example:

        if rank == 0:
            sw.save(path, state, group=sw.SoloGroup())
    """

    rank = number = 0
    size = 1
    bytes_sent = bytes_received = 0
    timeout = TIMEOUT

    def reduce(self, data: bytes, combine: Combine) -> bytes:
        """Return the data of the only rank."""
        return data

    def broadcast(self, data: bytes, decode: Decode = bytes) -> bytes:
        """Return the data."""
        decode(data)
        return data

    def part(self, ranks: Sequence[int], cleanup: ExitStack) -> SoloGroup:
        """Return this group."""
        return self


def node_name() -> str:
    """Return a name that is equal on ranks whose processes see each other in `/proc`."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    return f"{boot_id.strip()} {os.readlink('/proc/self/ns/pid')}"
