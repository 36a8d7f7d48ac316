"""Shared memory through which the ranks of one node pass file data to each other during a load.

Every rank has a ring buffer in shared memory. The rank reads its share of the data into the slots
of its own buffer, and copies the other data that it needs from the buffers of the other ranks. A
slot is reused when every rank that needs its data has copied the data. All ranks process the reads
in the same order, so the earliest unfinished read can always proceed, and ranks cannot deadlock. An
idle rank sleeps until another rank rings its doorbell.

If nodes share their reads, a rank has a second ring, for bytes that it receives from other nodes.
Another thread fills the slots of this ring, and sends bytes on (`sharing/links.py`). The ranks of
the node use both rings in the same way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.errors import RankError
from shardwise.layout.columns import Int
from shardwise.sharing.between_nodes import NOBODY
from shardwise.sharing.doorbell import OPERATION, LateRanks, ring_doorbell
from shardwise.sharing.within_node import SharedReads
from shardwise.store.store import Buffer

READY, FAILED = 1, 2
NO_MORE_READS = -1
ALIGNMENT = 4096
"""Direct reads need aligned slots."""
HEAD_SIZE = ALIGNMENT
"""Bytes before the first ring."""
CHECKSUM_SIZE = 4


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """The layout of the ranks' buffers.

    A buffer begins with a head. One or two rings follow: the first for reads from storage, the
    second for reads that the rank receives from other nodes. A ring has slots, a checksum for each
    read, a state for each read, and a flag for each pair of a read and one of its users. The users
    are the ranks of the node and, if there are two rings, the thread that sends to other nodes.

    Attributes:
        counts: the number of reads in each ring: the first ring of every rank, then the second.
        ranks: the number of ranks of the node.
        slots: the number of slots of each ring.
        slot_bytes: the size of a slot, in bytes.
    """

    counts: list[int]
    ranks: int
    slots: int
    slot_bytes: int

    @property
    def users(self) -> int:
        """The number of possible users of a read."""
        return self.ranks + (len(self.counts) > self.ranks)

    def size(self, rank: int) -> int:
        """Return the size of a rank's buffer, in bytes."""
        return HEAD_SIZE + sum(self._ring_size(ring) for ring in self._rings_of(rank))

    def start(self, ring: int) -> int:
        """Return the offset of a ring in the buffer of its rank, in bytes."""
        before = [each for each in self._rings_of(ring % self.ranks) if each < ring]
        return HEAD_SIZE + sum(self._ring_size(each) for each in before)

    @property
    def slots_size(self) -> int:
        """The size of the slots of a ring, in bytes."""
        return self.slots * self.slot_bytes

    def _rings_of(self, rank: int) -> range:
        return range(rank, len(self.counts), self.ranks)

    def _ring_size(self, ring: int) -> int:
        size = self.slots_size + self.counts[ring] * (CHECKSUM_SIZE + 1 + self.users)
        return -(-size // ALIGNMENT) * ALIGNMENT


class _Ring:
    """The slots of some reads, and the progress of each of these reads.

    Attributes:
        slots: the memory of the slots.
        checksums: the checksum of each read.
        states: `READY` or `FAILED` for each read, and else 0.
        used: whether each user has finished with each read, `(reads, users)`.
    """

    __slots__ = ("checksums", "slots", "states", "used")

    def __init__(self, memory: Buffer, layout: BufferLayout, ring: int) -> None:
        n, start = layout.counts[ring], layout.start(ring)
        self.slots: Buffer = memory[start : start + layout.slots_size]
        end = start + layout.slots_size + n * (CHECKSUM_SIZE + 1 + layout.users)
        table: Buffer = memory[start + layout.slots_size : end]
        checksums, states, used = np.split(table, [CHECKSUM_SIZE * n, (CHECKSUM_SIZE + 1) * n])
        self.checksums: npt.NDArray[np.uint32] = checksums.view(np.uint32)
        self.states: Buffer = states
        self.used: Buffer = used.reshape(n, layout.users)


class SharedBuffers:
    """The buffers of all ranks of a node, and the progress of every read.

    Args:
        reads: the reads that the ranks share.
        index: the index of this rank among the ranks of the node.
        ranks: the rank in the group of each rank of the node, for error messages.
        memory: the mapped buffer of each rank.
        layout: the layout of the buffers.
        doorbells: the doorbells of each rank.
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
        doorbells: Sequence[Sequence[int]],
        wait: Callable[[Callable[[], int | None], LateRanks], int],
    ) -> None:
        self._reads = reads
        self._index = index
        self._ranks = ranks
        self._layout = layout
        self._doorbells = doorbells
        self._wait = wait
        self._rings = [
            _Ring(memory[ring % layout.ranks], layout, ring) for ring in range(len(layout.counts))
        ]
        ring_of = rings_of(reads, layout.ranks)
        self._ring = ring_of.tolist()
        self._position = _position_in_ring(ring_of).tolist()
        self._in_ring = [np.flatnonzero(ring_of == each) for each in range(len(layout.counts))]
        self._users = reads.wanted
        if layout.users > layout.ranks:
            self._users = np.column_stack([reads.wanted, reads.target != NOBODY])
        self._turn_lock = threading.Lock()
        self._failed_rank: int | None = None
        own_first = sorted(range(len(layout.counts)), key=lambda ring: ring != index)
        self._pending = {ring: self._reads_to_process(ring) for ring in own_first}

    @property
    def index(self) -> int:
        """The index of this rank among the ranks of the node."""
        return self._index

    @property
    def failed_rank(self) -> int | None:
        """The rank in the group that failed first, as far as known; None if this rank works on."""
        return self._failed_rank

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
        """Return whether this rank makes the read, from storage."""
        return bool(self._ring[read] == self._index)

    def is_received(self, read: int) -> bool:
        """Return whether the bytes of a read come from another node."""
        return bool(self._reads.source[read] != NOBODY)

    def is_wanted(self, read: int) -> bool:
        """Return whether this rank uses the bytes of a read."""
        return bool(self._reads.wanted[read, self._index])

    def slot(self, read: int) -> Buffer:
        """Return the memory of the slot that holds the bytes of a read."""
        start = self._position[read] % self._layout.slots * self._layout.slot_bytes
        slots = self._rings[self._ring[read]].slots
        slot: Buffer = slots[start : start + self._layout.slot_bytes]
        return slot

    def reader_of(self, read: int) -> int:
        """Return the rank in the group that makes a read, or sends its bytes from another node."""
        source = int(self._reads.source[read])
        return source if source != NOBODY else self._ranks[self._ring[read]]

    def checksum(self, read: int) -> int:
        """Return the checksum that was passed to `publish`."""
        return int(self._rings[self._ring[read]].checksums[self._position[read]])

    def publish(self, read: int, checksum: int) -> None:
        """Mark the slot of a read of this rank as filled, and wake the ranks that use the read.

        Args:
            checksum: the checksum of the bytes in the slot, or 0.
        """
        ring, position = self._rings[self._ring[read]], self._position[read]
        ring.checksums[position] = checksum
        ring.states[position] = READY
        is_received = self._ring[read] != self._index
        for user in np.flatnonzero(self._users[read]).tolist():
            if user == self._layout.ranks or (user == self._index and is_received):
                self._wake(self._index)
            elif user != self._index:
                ring_doorbell(self._doorbells[user][0])

    def mark_used(self, read: int) -> None:
        """Mark a read as used by this rank. The last user wakes the rank that made the read."""
        self._mark(read, self._index)

    def mark_sent(self, read: int) -> None:
        """Mark a read of this rank as sent to another node."""
        self._mark(read, self._layout.ranks)

    def is_free(self, read: int) -> bool:
        """Return whether all users have finished with the previous read in the slot of a read."""
        position = self._position[read] - self._layout.slots
        if position < 0:
            return True
        users = self._users[self._in_ring[self._ring[read]][position]]
        return bool(self._rings[self._ring[read]].used[position][users].all())

    def is_filled(self, read: int) -> bool:
        """Return whether the slot of a read is filled.

        Raises:
            RankError: the rank that makes the read has failed.
        """
        state = self._rings[self._ring[read]].states[self._position[read]]
        if state == FAILED:
            holder = self._ranks[self._ring[read] % self._layout.ranks]
            why = "it could not read its share of the data; its error says why"
            raise RankError(OPERATION, {holder: why})
        return bool(state == READY)

    def mark_failed(self, error: BaseException) -> None:
        """Mark this rank as failed. Others stop waiting for it, and `next_read` returns None.

        Args:
            error: the reason, which may be that another rank failed.
        """
        if self._failed_rank is None:
            known = list(error.failures) if isinstance(error, RankError) else []
            self._failed_rank = known[0] if known else self._ranks[self._index]
        for number, ring in enumerate(self._rings):
            if number % self._layout.ranks == self._index:
                ring.states[ring.states == 0] = FAILED
                ring.used[:, self._layout.ranks :] = 1
            ring.used[:, self._index] = 1
        for rank in range(self._layout.ranks):
            self._wake(rank)

    def _mark(self, read: int, user: int) -> None:
        ring = self._ring[read]
        used = self._rings[ring].used[self._position[read]]
        used[user] = 1
        if used[self._users[read]].all():
            self._wake(ring % self._layout.ranks)

    def _wake(self, rank: int) -> None:
        for doorbell in self._doorbells[rank]:
            ring_doorbell(doorbell)

    def _find_next(self) -> int | None:
        if self._failed_rank is not None or not any(self._pending.values()):
            return NO_MORE_READS
        for ring, pending in self._pending.items():
            is_ready = self.is_free if ring == self._index else self.is_filled
            if pending and is_ready(pending[0]):
                return pending.popleft()
        return None

    def _reads_to_process(self, ring: int) -> deque[int]:
        """Return the reads of a ring that this rank makes, or else uses."""
        reads = self._in_ring[ring]
        if ring != self._index:
            reads = reads[self._reads.wanted[reads, self._index]]
        return deque(reads.tolist())

    def _late_ranks(self) -> dict[int, str]:
        """Return the ranks that this rank waits for, and for each the step it has not completed."""
        found: dict[int, str] = {}
        total = len(self._ring)
        for ring, pending in self._pending.items():
            if pending and ring != self._index:
                found[self.reader_of(pending[0])] = (
                    f"it did not finish read {pending[0]} of {total}"
                )
            elif pending:
                position = self._position[pending[0]] - self._layout.slots
                before = int(self._in_ring[ring][position])
                is_late = self._rings[ring].used[position] == 0
                for user in np.flatnonzero(self._users[before] & is_late).tolist():
                    rank = self._ranks[user] if user < len(self._ranks) else self._target(before)
                    found[rank] = f"it did not copy read {before} of {total}"
        return found

    def _target(self, read: int) -> int:
        return int(self._reads.target[read])


def rings_of(reads: SharedReads, ranks: int) -> Int:
    """Return the number of the ring of each read; see `BufferLayout`."""
    return np.where(reads.is_received, reads.reader + ranks, reads.reader)


def _position_in_ring(ring: Int) -> Int:
    """Return the position of each read among the reads of the same ring."""
    position = np.zeros(len(ring), np.int64)
    for each in np.unique(ring).tolist():
        rows = np.flatnonzero(ring == each)
        position[rows] = np.arange(len(rows))
    return position
