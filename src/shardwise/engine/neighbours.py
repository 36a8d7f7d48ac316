"""Ranks of one node that read together: each block is read once, and used by all who want it.

Every rank has a ring of slots in memory that the others can map. It reads its part of the shared
reads into its slots, in the common order, and uses those of the others from theirs. A slot is
used again when all who want its content are done with it. As all ranks keep to one order, the
earliest read that is not done can always go on, so that no ranks wait for each other in a circle.
Whoever has nothing to do sleeps until another rings its bell.

All ranks compute the shared reads from the same messages. A digest of the result heads each ring,
and is compared before a byte is read, as ranks that disagree would take each other's slots for
other bytes.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.engine.doorbell import Awaited, Doorbell, T, find_bell, ring
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.pages import allocate_pages, map_pages
from shardwise.errors import LostRankError, RankError
from shardwise.manifest.manifest import FileEntry
from shardwise.plan.share import SharedReads
from shardwise.store.store import Buffer

READY, FAILED = 1, 2
LAST = -1
HEAD, DIGEST = 4096, 16
"""Bytes before the first slot, which direct reads want aligned, and those of them in use."""
SUM = 4
READING = "reading together"


class _Card(msgspec.Struct, array_like=True):
    """How to find a rank's memory: by process and file descriptors, on one node."""

    rank: int
    node: str
    process: int
    message: int
    ring: int
    bell: int


@dataclass(frozen=True, slots=True)
class _Memory:
    """An anonymous file: it is gone with the last process that has it open, killed or not."""

    fd: int

    @classmethod
    def create(cls, name: str, cleanup: ExitStack) -> _Memory:
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        cleanup.callback(os.close, fd)
        return cls(fd)

    @classmethod
    def of(cls, process: int, fd: int, cleanup: ExitStack) -> _Memory:
        opened = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        cleanup.callback(os.close, opened)
        return cls(opened)


class Neighbours:
    """The ranks of this node, in a common order. Made by all ranks of a group together.

    Args:
        speak: makes what this rank has to say to the others of the node; if it fails on one rank,
            it fails on all.
        cleanup: when it is closed, the others can no longer find this rank's memory.

    Attributes:
        index: this rank's place among them.
        ranks: the rank in the group of each of them.
        messages: what each of them said.
    """

    def __init__(self, group: Group, speak: Callable[[], bytes], cleanup: ExitStack) -> None:
        spoken = _Memory.create("shardwise-message", cleanup)
        self._ring = _Memory.create("shardwise-ring", cleanup)
        self._bell = Doorbell(cleanup)
        mine = _Card(group.rank, _node(), os.getpid(), spoken.fd, self._ring.fd, self._bell.fd)

        def say() -> bytes:
            os.write(spoken.fd, speak())
            return msgspec.msgpack.encode(mine)

        def introduce(said: list[bytes]) -> list[bytes]:
            cards = [msgspec.msgpack.decode(each, type=_Card) for each in said]
            nodes: dict[str, list[int]] = {}
            for card in cards:
                nodes.setdefault(card.node, []).append(card.rank)
            return [
                msgspec.msgpack.encode([cards[rank] for rank in nodes[card.node]]) for card in cards
            ]

        answer = exchange(group, "planning a load", say, introduce)
        self._cards = msgspec.msgpack.decode(answer, type=list[_Card])
        self.ranks = [card.rank for card in self._cards]
        self.index = self.ranks.index(group.rank)
        self._timeout = group.timeout.total_seconds()
        self._cleanup = cleanup
        self.messages = [self._message(card) for card in self._cards]

    def __len__(self) -> int:
        return len(self._cards)

    def rings(
        self, reads: SharedReads, slots: int, slot_bytes: int, files: Sequence[FileEntry]
    ) -> Rings:
        """Map everyone's ring, large enough for these reads.

        Args:
            reads: what all of them read together; the same on each of them.
            slots: how many reads a ring holds at a time.
            slot_bytes: bytes of a slot: whole blocks.
            files: those that the reads count.

        Raises:
            RankError: another rank has computed other reads.
            LostRankError: another rank is gone, or does not answer in time.
        """
        counts = np.bincount(reads.reader, minlength=len(self)).tolist()
        layout = RingLayout(counts, slots, slot_bytes)
        digest = _digest(reads, layout, files)
        size = layout.size(self.index)
        os.ftruncate(self._ring.fd, size)
        allocate_pages(self._ring.fd, size)
        os.pwrite(self._ring.fd, digest, 0)
        bells = [find_bell(card.process, card.bell, self._cleanup) for card in self._cards]
        for bell in bells:
            ring(bell)
        maps = []
        for index, card in enumerate(self._cards):
            memory = _Memory.of(card.process, card.ring, self._cleanup)
            found = self._wait(
                partial(_digest_of, memory.fd),
                partial(dict, {card.rank: "it has not prepared its memory"}),
            )
            if found != digest:
                raise RankError(READING, {card.rank: "it has planned other reads than this rank"})
            maps.append(map_pages(memory.fd, 0, layout.size(index), writable=True, now=True))
        return Rings(reads, self.index, self.ranks, maps, layout, bells, self._wait)

    def _wait(self, look: Callable[[], T | None], awaited: Awaited) -> T:
        return self._bell.wait(look, self._alive, self._timeout, awaited)

    def _message(self, card: _Card) -> bytes:
        memory = _Memory.of(card.process, card.message, self._cleanup)
        return os.pread(memory.fd, os.fstat(memory.fd).st_size, 0)

    def _alive(self) -> None:
        """Raise if one of them is gone."""
        for card in self._cards:
            if not Path(f"/proc/{card.process}").exists():
                raise LostRankError(READING, {card.rank: "its process is gone"})


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


def _digest(reads: SharedReads, layout: RingLayout, files: Sequence[FileEntry]) -> bytes:
    """Equal where ranks mean the same by the number of a read, and by a slot."""
    found = hashlib.blake2b(digest_size=DIGEST)
    for column in (reads.file, reads.low, reads.high, reads.reader, reads.wanted):
        found.update(str((column.dtype.str, column.shape)).encode())
        found.update(np.ascontiguousarray(column).data)
    found.update(repr((layout.slots, layout.slot_bytes)).encode())
    for number in np.unique(reads.file).tolist():
        found.update(msgspec.msgpack.encode(files[number]))
    return found.digest()


def _digest_of(fd: int) -> bytes | None:
    """What heads a ring, once it is there: it is written when all pages are."""
    found = os.pread(fd, DIGEST, 0)
    return found if any(found) else None


def _node() -> str:
    """Equal for ranks that see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{boot.strip()} {os.readlink('/proc/self/ns/pid')}"
