"""Shared memory through which the ranks of one node pass file data to each other during a load.

Every rank has a ring buffer in shared memory. The rank reads its share of the data into the slots
of its own buffer, and copies the other data that it needs from the buffers of the other ranks. A
slot is reused when every rank that needs its data has copied the data. All ranks process the reads
in the same order, so the earliest unfinished read can always proceed, and ranks cannot deadlock. An
idle rank sleeps until another rank rings its doorbell.
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
NO_MORE_READS = -1
HEAD_SIZE = 4096
"""Bytes before the first slot. Direct reads need aligned slots."""
CHECKSUM_SIZE = 4
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
                os.read(self._read_end, 4096)
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


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The layout of the ranks' buffers.

    A buffer begins with a head and the slots. After them come a checksum for each read of the rank,
    a state for each read, and a flag for each pair of a read and a rank that uses the read.

    Attributes:
        counts: the number of reads that each rank makes.
        slots: the number of slots of each buffer.
        slot_bytes: the size of a slot, in bytes.
    """

    counts: list[int]
    slots: int
    slot_bytes: int

    def size(self, rank: int) -> int:
        """Return the size of a rank's buffer, in bytes."""
        return self.slots_end + self.counts[rank] * (CHECKSUM_SIZE + 1 + len(self.counts))

    @property
    def slots_end(self) -> int:
        """The offset at which the slots end and the checksums begin, in bytes."""
        return HEAD_SIZE + self.slots * self.slot_bytes


class SharedBuffers:
    """The buffers of all ranks of a node, and the progress of every read.

    Args:
        reads: the reads that the ranks share.
        index: the index of this rank among the ranks of the node.
        ranks: the rank in the group of each rank of the node, for error messages.
        memory: the mapped buffer of each rank.
        layout: the layout of the buffers.
        doorbells: the doorbell of each rank.
        wait: sleeps until its first argument returns a value, as `Doorbell.wait` does. Its second
            argument returns the ranks that this rank waits for.
    """

    def __init__(
        self,
        reads: SharedReads,
        index: int,
        ranks: Sequence[int],
        memory: Sequence[Buffer],
        layout: BufferLayout,
        doorbells: Sequence[int],
        wait: Callable[[Callable[[], int | None], LateRanks], int],
    ) -> None:
        self._reads = reads
        self._index = index
        self._ranks = ranks
        self._layout = layout
        self._doorbells = doorbells
        self._wait = wait
        self._memory = memory
        self._checksums: list[npt.NDArray[np.uint32]] = []
        self._states: list[Buffer] = []
        self._used: list[Buffer] = []
        for buffer, n in zip(memory, layout.counts, strict=True):
            edges = [CHECKSUM_SIZE * n, (CHECKSUM_SIZE + 1) * n]
            checksums, states, used = np.split(buffer[layout.slots_end :], edges)
            self._checksums.append(checksums.view(np.uint32))
            self._states.append(states)
            self._used.append(used.reshape(n, len(memory)))
        self._position = _position_by_reader(reads.reader).tolist()
        self._reader = reads.reader.tolist()
        self._own_reads = np.flatnonzero(reads.reader == index).tolist()
        self._turn_lock = threading.Lock()
        self._failed = False
        others = [rank for rank in range(len(memory)) if rank != index]
        self._pending = {rank: self._reads_used_from(rank) for rank in [index, *others]}

    def next_read(self) -> int | None:
        """Return the next read that this rank can make or use; None after the last.

        A read of this rank can start when its slot is free. A read of another rank can be used when
        that rank has filled its slot. The call sleeps while no read is ready. Threads take turns.

        Raises:
            RankError: another rank could not read its share.
            LostRankError: another rank died, or made no progress before the timeout.
        """
        with self._turn_lock:
            found = self._wait(self._find_next, self._late_ranks)
            return None if found == NO_MORE_READS else found

    def is_own(self, read: int) -> bool:
        """Return whether this rank makes the read."""
        return bool(self._reader[read] == self._index)

    def slot(self, read: int) -> Buffer:
        """Return the memory of the slot that holds the bytes of a read."""
        start = HEAD_SIZE + self._position[read] % self._layout.slots * self._layout.slot_bytes
        memory: Buffer = self._memory[self._reader[read]]
        return memory[start : start + self._layout.slot_bytes]

    def reader_of(self, read: int) -> int:
        """Return the rank in the group that makes a read."""
        return self._ranks[int(self._reader[read])]

    def checksum(self, read: int) -> int:
        """Return the checksum that the rank that made a read passed to `publish`."""
        return int(self._checksums[self._reader[read]][self._position[read]])

    def publish(self, read: int, checksum: int) -> None:
        """Mark the slot of a read of this rank as filled, and wake the ranks that use the read.

        Args:
            checksum: the checksum of the bytes in the slot, or 0.
        """
        self._checksums[self._index][self._position[read]] = checksum
        self._states[self._index][self._position[read]] = READY
        for user in np.flatnonzero(self._reads.wanted[read]).tolist():
            if user != self._index:
                ring_doorbell(self._doorbells[user])

    def mark_used(self, read: int) -> None:
        """Mark a read as used by this rank. The last user wakes the rank that made the read."""
        reader = self._reader[read]
        used = self._used[reader][self._position[read]]
        used[self._index] = 1
        if used[self._reads.wanted[read]].all():
            ring_doorbell(self._doorbells[reader])

    def mark_failed(self) -> None:
        """Mark this rank as failed. Others stop waiting for it, and `next_read` returns None."""
        self._failed = True
        self._states[self._index][self._states[self._index] == 0] = FAILED
        for used in self._used:
            used[:, self._index] = 1
        for doorbell in self._doorbells:
            ring_doorbell(doorbell)

    def _find_next(self) -> int | None:
        if self._failed or not any(self._pending.values()):
            return NO_MORE_READS
        for reader, pending in self._pending.items():
            is_ready = self._is_free if reader == self._index else self._is_filled
            if pending and is_ready(pending[0]):
                return pending.popleft()
        return None

    def _reads_used_from(self, reader: int) -> deque[int]:
        used = self._reads.wanted[:, self._index] & (self._reads.reader == reader)
        return deque(np.flatnonzero(used).tolist())

    def _is_free(self, read: int) -> bool:
        """Return whether all users have finished with the previous read in the slot of a read."""
        before = self._position[read] - self._layout.slots
        if before < 0:
            return True
        users = self._reads.wanted[self._own_reads[before]]
        return bool(self._used[self._index][before][users].all())

    def _is_filled(self, read: int) -> bool:
        reader = self._reader[read]
        state = self._states[reader][self._position[read]]
        if state == FAILED:
            raise RankError(
                OPERATION, {self._ranks[reader]: "it could not read its share of the data"}
            )
        return bool(state == READY)

    def _late_ranks(self) -> dict[int, str]:
        """Return the ranks that this rank waits for, and for each the step it has not completed."""
        found: dict[int, str] = {}
        total = len(self._reader)
        for reader, pending in self._pending.items():
            if pending and reader != self._index:
                found[self._ranks[reader]] = f"it did not finish read {pending[0]} of {total}"
            elif pending:
                before = self._own_reads[self._position[pending[0]] - self._layout.slots]
                is_late = self._used[reader][self._position[before]] == 0
                for user in np.flatnonzero(self._reads.wanted[before] & is_late).tolist():
                    found[self._ranks[user]] = f"it did not copy read {before} of {total}"
        return found


def _position_by_reader(reader: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the position of each read among the reads of the same rank."""
    position = np.zeros(len(reader), np.int64)
    for rank in np.unique(reader).tolist():
        rows = np.flatnonzero(reader == rank)
        position[rows] = np.arange(len(rows))
    return position
