"""Shared reads of the ranks of one node: rings of slots in shared memory, and bells to wake others.

Every rank has a ring of slots in memory that the others can map. It reads its part of the shared
reads into its slots, in the common order, and takes the others' reads from their slots. A slot is
reused once every rank that wants its content has taken it. All ranks follow one order, so the
earliest unfinished read can always proceed: ranks never wait for each other in a circle. A rank
with nothing to do sleeps until another rank rings its bell.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from shardwise.errors import LostRankError, RankError
from shardwise.plan.load import SharedReads
from shardwise.store.store import Buffer

READY, FAILED = 1, 2
LAST = -1
HEAD = 4096
"""Bytes before the first slot: direct reads need aligned slots."""
SUM = 4
READING = "reading together"
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


@dataclass(frozen=True, slots=True)
class RingLayout:
    """A rank's ring: its head, slots, then a checksum and a state for each of its reads, then a
    state for each read and user.

    Attributes:
        counts: of each rank, how many reads it makes.
    """

    counts: list[int]
    slots: int
    slot_bytes: int

    def size(self, rank: int) -> int:
        """Bytes of a ring."""
        return self.states + self.counts[rank] * (SUM + 1 + len(self.counts))

    @property
    def states(self) -> int:
        """Where the slots end."""
        return HEAD + self.slots * self.slot_bytes


class Rings:
    """The rings of all neighbours, and how far each read has come.

    Args:
        reads: what they read together.
        index: this rank's place among them.
        ranks: the rank in the group of each of them, for errors.
        maps: the ring of each of them.
        bells: of each of them; rung when something has changed that it may wait for.
        wait: sleeps until a look finds something; looks whenever this rank's bell rings. Given
            also what says whom it waits for, should that take too long.
    """

    def __init__(
        self,
        reads: SharedReads,
        index: int,
        ranks: Sequence[int],
        maps: Sequence[Buffer],
        layout: RingLayout,
        bells: Sequence[int],
        wait: Callable[[Callable[[], int | None], Awaited], int],
    ) -> None:
        self._reads = reads
        self._index = index
        self._ranks = ranks
        self._layout = layout
        self._bells = bells
        self._wait = wait
        self._maps = maps
        self._sums: list[npt.NDArray[np.uint32]] = []
        self._state: list[Buffer] = []
        self._done: list[Buffer] = []
        for ring_map, n in zip(maps, layout.counts, strict=True):
            sums, state, done = np.split(ring_map[layout.states :], [SUM * n, (SUM + 1) * n])
            self._sums.append(sums.view(np.uint32))
            self._state.append(state)
            self._done.append(done.reshape(n, len(maps)))
        self._number = _number_by_reader(reads.reader).tolist()
        self._reader = reads.reader.tolist()
        self._mine = np.flatnonzero(reads.reader == index).tolist()
        self._turn = threading.Lock()
        self._given_up = False
        others = [rank for rank in range(len(maps)) if rank != index]
        self._waiting = {rank: self._uses_of(rank) for rank in [index, *others]}

    def next(self) -> int | None:
        """The next read that this rank makes or uses, once it can go on; None after the last.

        One of its own can go on when its slot is free, one of another rank when that has filled
        its slot. Sleeps while none can. Threads take turns.

        Raises:
            RankError: another rank could not read its part.
            LostRankError: another rank is gone, or nothing has moved for too long.
        """
        with self._turn:
            found = self._wait(self._look, self._awaited)
            return None if found == LAST else found

    def leads(self, read: int) -> bool:
        """Whether this rank makes a read."""
        return bool(self._reader[read] == self._index)

    def slot(self, read: int) -> Buffer:
        """Where a read's bytes are put, and taken from."""
        at = HEAD + self._number[read] % self._layout.slots * self._layout.slot_bytes
        memory: Buffer = self._maps[self._reader[read]]
        return memory[at : at + self._layout.slot_bytes]

    def reader_of(self, read: int) -> int:
        """The rank in the group that makes a read."""
        return self._ranks[int(self._reader[read])]

    def checksum(self, read: int) -> int:
        """What its reader said of the bytes in the slot of a read, as `publish` was given it."""
        return int(self._sums[self._reader[read]][self._number[read]])

    def publish(self, read: int, checksum: int) -> None:
        """The slot of a read of this rank is filled; a checksum goes with it, or 0."""
        self._sums[self._index][self._number[read]] = checksum
        self._state[self._index][self._number[read]] = READY
        for user in np.flatnonzero(self._reads.wanted[read]).tolist():
            if user != self._index:
                ring(self._bells[user])

    def finish(self, read: int) -> None:
        """This rank is done with a read. The last one to be wakes the reader."""
        reader = self._reader[read]
        done = self._done[reader][self._number[read]]
        done[self._index] = 1
        if done[self._reads.wanted[read]].all():
            ring(self._bells[reader])

    def fail(self) -> None:
        """This rank gives up: nobody is to wait for it, and there is no next read."""
        self._given_up = True
        self._state[self._index][self._state[self._index] == 0] = FAILED
        for done in self._done:
            done[:, self._index] = 1
        for bell in self._bells:
            ring(bell)

    def _look(self) -> int | None:
        if self._given_up or not any(self._waiting.values()):
            return LAST
        for reader, waiting in self._waiting.items():
            can_go_on = self._is_free if reader == self._index else self._is_filled
            if waiting and can_go_on(waiting[0]):
                return waiting.popleft()
        return None

    def _uses_of(self, reader: int) -> deque[int]:
        used = self._reads.wanted[:, self._index] & (self._reads.reader == reader)
        return deque(np.flatnonzero(used).tolist())

    def _is_free(self, read: int) -> bool:
        """Whether all are done with what was in the slot of a read before."""
        before = self._number[read] - self._layout.slots
        if before < 0:
            return True
        users = self._reads.wanted[self._mine[before]]
        return bool(self._done[self._index][before][users].all())

    def _is_filled(self, read: int) -> bool:
        reader = self._reader[read]
        state = self._state[reader][self._number[read]]
        if state == FAILED:
            raise RankError(READING, {self._ranks[reader]: "it could not read what it shares"})
        return bool(state == READY)

    def _awaited(self) -> dict[int, str]:
        """Whom this rank waits for, and what for."""
        found: dict[int, str] = {}
        for reader, waiting in self._waiting.items():
            if waiting and reader != self._index:
                found[self._ranks[reader]] = f"it has not made read {waiting[0]}"
            elif waiting:
                before = self._mine[self._number[waiting[0]] - self._layout.slots]
                late = self._reads.wanted[before] & (self._done[reader][self._number[before]] == 0)
                for user in np.flatnonzero(late).tolist():
                    found[self._ranks[user]] = f"it has not taken read {before}"
        return found


def _number_by_reader(reader: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each read's number among those of its reader."""
    number = np.zeros(len(reader), np.int64)
    for rank in np.unique(reader).tolist():
        rows = np.flatnonzero(reader == rank)
        number[rows] = np.arange(len(rows))
    return number
