"""Shared memory through which the ranks of one node pass file data to each other during a load.

Every rank has a ring of slots in shared memory. The rank reads its share of the data into its own
slots, and copies the other data that it needs from the slots of the other ranks. What the rank
receives from another node goes into its slots, too (`parts/sharing/links.py`). A slot is reused
when every rank that needs its data has copied the data. All ranks of all nodes process the reads in
the same order, so the earliest unfinished read can always proceed, and ranks cannot deadlock.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque

import numpy as np
import numpy.typing as npt

from shardwise.kernel.errors import RankError
from shardwise.kernel.store.store import Buffer
from shardwise.parts.sharing.node_ranks import DIGEST_SIZE, OPERATION, NodeRanks
from shardwise.parts.sharing.reads import NO_RANK, Reads

READY, FAILED = 1, 2
NO_MORE_READS = -1
HEAD_SIZE = 4096
"""Bytes before the slots. Direct reads need slots that begin at a multiple of 4096 bytes."""
CHECKSUM_SIZE = 4


class _Ring:
    """The slots of a rank, and the progress of each read that fills one of them.

    Attributes:
        slots: the memory of the slots.
        checksums: the checksum of each read.
        states: `READY` or `FAILED` for each read, and else 0.
        used: whether each user has finished with each read, `(reads, users)`. The users are
            the ranks of the node and, last, the thread that sends to another node.
    """

    __slots__ = ("checksums", "slots", "states", "used")

    def __init__(self, memory: Buffer, reads: int, users: int, slots_size: int) -> None:
        end = HEAD_SIZE + slots_size
        self.slots: Buffer = memory[HEAD_SIZE:end]
        checksums, states, used = np.split(
            memory[end:], [CHECKSUM_SIZE * reads, (CHECKSUM_SIZE + 1) * reads]
        )
        self.checksums: npt.NDArray[np.uint32] = checksums.view(np.uint32)
        self.states: Buffer = states
        self.used: Buffer = used.reshape(reads, users)


class SharedBuffers:
    """The slots of all ranks of a node, and the progress of every read.

    The users of a read are the ranks of the node that want it and, after them, the thread that
    sends it to another node.

    For example, two ranks with one slot each share the reads 0, 1 and 2, and rank 0 makes the reads
    0 and 2. So read 2 is at position 1 in the ring of rank 0. It uses the same slot as read 0, and
    starts when all users have finished with read 0.

    Args:
        reads: the reads that the ranks share; the same on each of them.
        node: the ranks of the node.
        slots: the number of slots of a rank, each for one read.
        slot_bytes: the size of a slot, in bytes; a multiple of the block size.

    Attributes:
        local_rank: the index of this rank among the ranks of the node.
        failed_rank: None until `mark_failed`; then the rank in the group whose failure caused it.

    Raises:
        RankError: another rank has computed other reads.
        LostRankError: another rank died, or did not answer in time.
    """

    def __init__(self, reads: Reads, node: NodeRanks, slots: int, slot_bytes: int) -> None:
        self._reads, self._node = reads, node
        self._slots, self._slot_bytes = slots, slot_bytes
        self.local_rank = node.local_rank
        self.failed_rank: int | None = None
        self._users = np.column_stack([reads.wanted, reads.target != NO_RANK])
        self._ring = reads.reader.tolist()  # of each read
        # The reads of each ring, in order, and for each read its position among them.
        self._in_ring = [np.flatnonzero(reads.reader == each) for each in range(len(node))]
        position = np.zeros(len(reads), np.int64)
        for rows in self._in_ring:
            position[rows] = np.arange(len(rows))
        self._position = position.tolist()
        row_size = CHECKSUM_SIZE + 1 + self._users.shape[1]
        sizes = [HEAD_SIZE + slots * slot_bytes + len(rows) * row_size for rows in self._in_ring]
        digest = hashlib.blake2b(repr((slots, slot_bytes)).encode(), digest_size=DIGEST_SIZE)
        for column in (reads.file, reads.low, reads.high, reads.reader, reads.source, self._users):
            digest.update(np.ascontiguousarray(column).data)
        memory = node.map_memory(sizes, digest.digest())
        self._rings = [
            _Ring(each, len(rows), self._users.shape[1], slots * slot_bytes)
            for each, rows in zip(memory, self._in_ring, strict=True)
        ]
        self._turn_lock = threading.Lock()
        read_here = (reads.reader == self.local_rank) & (reads.source == NO_RANK)
        # This rank's reads from storage; and, for each ring, the reads whose bytes it copies.
        self._to_read: deque[int] = deque(np.flatnonzero(read_here).tolist())
        copied_here = reads.wanted[:, self.local_rank] & ~read_here
        self._to_copy: list[deque[int]] = [
            deque(rows[copied_here[rows]].tolist()) for rows in self._in_ring
        ]

    def next_read(self) -> int | None:
        """Return the next read that this rank can read from storage or copy; None after the last.

        A read of this rank can start when its slot is free. A read of another rank can be copied
        when that rank has filled its slot. The call waits while no read is ready. Threads take
        turns.

        Raises:
            RankError: another rank could not read its share.
            LostRankError: another rank died, or made no progress before the timeout.
        """
        with self._turn_lock:
            found = self._node.wait(self._find_next, self._late_ranks)
            return None if found == NO_MORE_READS else found

    def is_read_here(self, read: int) -> bool:
        """Return whether this rank reads the bytes from storage."""
        return self._ring[read] == self.local_rank and not self.is_received(read)

    def is_received(self, read: int) -> bool:
        """Return whether the bytes of a read come from another node."""
        return bool(self._reads.source[read] != NO_RANK)

    def is_wanted(self, read: int) -> bool:
        """Return whether this rank uses the bytes of a read."""
        return bool(self._reads.wanted[read, self.local_rank])

    def slot(self, read: int) -> Buffer:
        """Return the memory of the slot that holds the bytes of a read."""
        start = self._position[read] % self._slots * self._slot_bytes
        slot: Buffer = self._rings[self._ring[read]].slots[start : start + self._slot_bytes]
        return slot

    def reader_of(self, read: int) -> int:
        """Return the rank in the group that makes a read, or sends its bytes from another node."""
        source = int(self._reads.source[read])
        return source if source != NO_RANK else self._node.ranks[self._ring[read]]

    def checksum(self, read: int) -> int:
        """Return the checksum that was passed to `publish`."""
        return int(self._rings[self._ring[read]].checksums[self._position[read]])

    def publish(self, read: int, checksum: int) -> None:
        """Mark the slot of a read as filled.

        Args:
            checksum: the checksum of the bytes in the slot, or 0.
        """
        ring, position = self._rings[self._ring[read]], self._position[read]
        ring.checksums[position] = checksum
        ring.states[position] = READY

    def mark_used(self, read: int) -> None:
        """Mark a read as used by this rank."""
        self._rings[self._ring[read]].used[self._position[read], self.local_rank] = 1

    def mark_sent(self, read: int) -> None:
        """Mark a read of this rank as sent to another node."""
        self._rings[self._ring[read]].used[self._position[read], -1] = 1

    def is_free(self, read: int) -> bool:
        """Return whether all users have finished with the read that used the slot before."""
        return not len(self._unfinished_users(read))

    def is_filled(self, read: int) -> bool:
        """Return whether the slot of a read is filled.

        Raises:
            RankError: the rank that makes the read has failed.
        """
        state = self._rings[self._ring[read]].states[self._position[read]]
        if state == FAILED:
            why = "it could not read its share of the data"
            raise RankError(OPERATION, {self._node.ranks[self._ring[read]]: why})
        return bool(state == READY)

    def mark_failed(self, error: BaseException) -> None:
        """Mark this rank as failed. Others stop waiting for it, and `next_read` returns None.

        Args:
            error: the reason, which may be that another rank failed.
        """
        if self.failed_rank is None:
            known = list(error.failures) if isinstance(error, RankError) else []
            self.failed_rank = known[0] if known else self._node.ranks[self.local_rank]
        own = self._rings[self.local_rank]
        own.states[own.states == 0] = FAILED
        own.used[:, -1] = 1
        for ring in self._rings:
            ring.used[:, self.local_rank] = 1

    def _previous(self, read: int) -> int:
        """Return the read that used the slot of `read` before; `NO_MORE_READS` if there is none."""
        position = self._position[read] - self._slots
        return int(self._in_ring[self._ring[read]][position]) if position >= 0 else NO_MORE_READS

    def _unfinished_users(self, read: int) -> npt.NDArray[np.int64]:
        """Return the users that have not finished with the read that used the slot before."""
        before = self._previous(read)
        if before == NO_MORE_READS:
            return np.zeros(0, np.int64)
        used = self._rings[self._ring[before]].used[self._position[before]]
        return np.flatnonzero(self._users[before] & (used == 0))

    def _find_next(self) -> int | None:
        if self.failed_rank is not None or not (self._to_read or any(self._to_copy)):
            return NO_MORE_READS
        if self._to_read and self.is_free(self._to_read[0]):
            return self._to_read.popleft()
        ready = (each for each in self._to_copy if each and self.is_filled(each[0]))
        found = next(ready, None)
        return None if found is None else found.popleft()

    def _late_ranks(self) -> dict[int, str]:
        """Return the ranks that this rank waits for, and for each the step it has not completed."""
        found: dict[int, str] = {}
        total = len(self._reads)
        if self._to_read:
            before = self._previous(self._to_read[0])
            ranks = [*self._node.ranks, int(self._reads.target[before])]
            for user in self._unfinished_users(self._to_read[0]).tolist():
                found[ranks[user]] = f"it did not copy read {before} of {total}"
        for pending in filter(None, self._to_copy):
            found[self.reader_of(pending[0])] = f"it did not finish read {pending[0]} of {total}"
        return found
