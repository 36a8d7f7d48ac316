"""Shared reads of the ranks of one node: rings of slots in shared memory, and bells.

Every rank has a ring of slots in shared memory. The rank reads its share of the data into its own
slots, and copies the other data that it needs from the slots of the other ranks. A slot is reused
when every rank that needs its data has copied it. All ranks process the reads in the same order, so
the earliest unfinished read can always proceed, and ranks cannot deadlock. A rank that has nothing
to do sleeps until another rank rings its bell.
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
"""Returns the ranks that this rank waits for, each with the action that it has not taken."""


class Doorbell:
    """A pipe that other processes open through `/proc` to wake this one. Rings are not counted.

    Args:
        cleanup: closes the pipe.

    Attributes:
        fd: the file descriptor to pass to `find_bell`, together with this process's id.
    """

    def __init__(self, cleanup: ExitStack) -> None:
        self._read_end, self.fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        cleanup.callback(os.close, self._read_end)
        cleanup.callback(os.close, self.fd)
        self._poll = select.poll()
        self._poll.register(self._read_end, select.POLLIN)

    def ring(self) -> None:
        """Wake the thread of this process that waits."""
        ring(self.fd)

    def wait(
        self,
        look: Callable[[], T | None],
        alive: Callable[[], None],
        timeout: float,
        awaited: Awaited,
    ) -> T:
        """Sleep until `look` returns a value, and return that value.

        Args:
            look: called at the start and after each ring; returns None to keep waiting.
            alive: called every 0.2 s; raises if waiting is pointless.
            timeout: the longest wait, in seconds.
            awaited: returns the ranks that this rank waits for.

        Raises:
            LostRankError: the timeout has passed; names the ranks of `awaited`.
        """
        start = time.monotonic()
        while (found := look()) is None:
            if self._poll.poll(LOOK_AROUND * 1000):
                os.read(self._read_end, 4096)
                continue
            alive()
            if time.monotonic() - start > timeout:
                late = {rank: f"{what} within {timeout:.0f} s" for rank, what in awaited().items()}
                raise LostRankError(READING, late)
        return found


def find_bell(process: int, fd: int, cleanup: ExitStack) -> int:
    """Return the bell of another process, as a file descriptor for `ring`."""
    found = os.open(f"/proc/{process}/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    cleanup.callback(os.close, found)
    return found


def ring(bell: int) -> None:
    """Ring a bell. Ringing has no effect if the pipe is full, or if its process has exited."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(bell, b"!")


@dataclass(frozen=True, slots=True)
class RingLayout:
    """The layout of a ring.

    A head comes first, then the slots, then a checksum for each read of the rank, then a state for
    each read, then a flag for each read and user.

    Attributes:
        counts: the number of reads that each rank makes.
        slots: the number of slots.
        slot_bytes: the size of a slot in bytes.
    """

    counts: list[int]
    slots: int
    slot_bytes: int

    def size(self, rank: int) -> int:
        """Return the size of a rank's ring in bytes."""
        return self.states + self.counts[rank] * (SUM + 1 + len(self.counts))

    @property
    def states(self) -> int:
        """The offset at which the slots end and the checksums begin."""
        return HEAD + self.slots * self.slot_bytes


class Rings:
    """The rings of all ranks of a node, and the progress of every read.

    Args:
        reads: the shared reads.
        index: the index of this rank among the ranks of the node.
        ranks: the rank in the group of each rank of the node, for errors.
        maps: the mapped ring of each rank.
        layout: the layout of the rings.
        bells: the bell of each rank.
        wait: sleeps until its first argument returns a value, as `Doorbell.wait` does. Its second
            argument returns the ranks that this rank waits for.
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
        self._failed = False
        others = [rank for rank in range(len(maps)) if rank != index]
        self._waiting = {rank: self._uses_of(rank) for rank in [index, *others]}

    def next(self) -> int | None:
        """Return the next read that this rank can make or use; None after the last.

        A read of this rank can start when its slot is free. A read of another rank can be used when
        that rank has filled its slot. The call sleeps while no read is ready. Threads take turns.

        Raises:
            RankError: another rank could not read its share.
            LostRankError: another rank died, or made no progress before the timeout.
        """
        with self._turn:
            found = self._wait(self._look, self._awaited)
            return None if found == LAST else found

    def leads(self, read: int) -> bool:
        """Return whether this rank makes a read."""
        return bool(self._reader[read] == self._index)

    def slot(self, read: int) -> Buffer:
        """Return the memory of the slot that holds the bytes of a read."""
        at = HEAD + self._number[read] % self._layout.slots * self._layout.slot_bytes
        memory: Buffer = self._maps[self._reader[read]]
        return memory[at : at + self._layout.slot_bytes]

    def reader_of(self, read: int) -> int:
        """Return the rank in the group that makes a read."""
        return self._ranks[int(self._reader[read])]

    def checksum(self, read: int) -> int:
        """Return the checksum that the reading rank passed to `publish`."""
        return int(self._sums[self._reader[read]][self._number[read]])

    def publish(self, read: int, checksum: int) -> None:
        """Mark the slot of a read of this rank as filled, and wake the ranks that use the read.

        Args:
            checksum: the checksum of the bytes in the slot, or 0.
        """
        self._sums[self._index][self._number[read]] = checksum
        self._state[self._index][self._number[read]] = READY
        for user in np.flatnonzero(self._reads.wanted[read]).tolist():
            if user != self._index:
                ring(self._bells[user])

    def finish(self, read: int) -> None:
        """Mark a read as used by this rank. The last user wakes the rank that made the read."""
        reader = self._reader[read]
        done = self._done[reader][self._number[read]]
        done[self._index] = 1
        if done[self._reads.wanted[read]].all():
            ring(self._bells[reader])

    def fail(self) -> None:
        """Mark this rank as failed: no rank waits for it, and `next` returns None from now on."""
        self._failed = True
        self._state[self._index][self._state[self._index] == 0] = FAILED
        for done in self._done:
            done[:, self._index] = 1
        for bell in self._bells:
            ring(bell)

    def _look(self) -> int | None:
        if self._failed or not any(self._waiting.values()):
            return LAST
        for reader, waiting in self._waiting.items():
            is_ready = self._is_free if reader == self._index else self._is_filled
            if waiting and is_ready(waiting[0]):
                return waiting.popleft()
        return None

    def _uses_of(self, reader: int) -> deque[int]:
        used = self._reads.wanted[:, self._index] & (self._reads.reader == reader)
        return deque(np.flatnonzero(used).tolist())

    def _is_free(self, read: int) -> bool:
        """Return whether all users have finished with the previous read in the slot of a read."""
        before = self._number[read] - self._layout.slots
        if before < 0:
            return True
        users = self._reads.wanted[self._mine[before]]
        return bool(self._done[self._index][before][users].all())

    def _is_filled(self, read: int) -> bool:
        reader = self._reader[read]
        state = self._state[reader][self._number[read]]
        if state == FAILED:
            raise RankError(
                READING, {self._ranks[reader]: "it could not read its share of the data"}
            )
        return bool(state == READY)

    def _awaited(self) -> dict[int, str]:
        """Return the ranks that this rank waits for, each with the action that it has not taken."""
        found: dict[int, str] = {}
        for reader, waiting in self._waiting.items():
            if waiting and reader != self._index:
                found[self._ranks[reader]] = f"it did not finish read {waiting[0]}"
            elif waiting:
                before = self._mine[self._number[waiting[0]] - self._layout.slots]
                late = self._reads.wanted[before] & (self._done[reader][self._number[before]] == 0)
                for user in np.flatnonzero(late).tolist():
                    found[self._ranks[user]] = f"it did not copy read {before}"
        return found


def _number_by_reader(reader: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the number of each read among the reads of its reader."""
    number = np.zeros(len(reader), np.int64)
    for rank in np.unique(reader).tolist():
        rows = np.flatnonzero(reader == rank)
        number[rows] = np.arange(len(rows))
    return number
