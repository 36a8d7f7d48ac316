"""Ranks of one node that read together: each block is read once, and used by all who want it.

Every rank has a ring of slots in memory that the others can map. It reads its part of the shared
reads into its slots, in the common order, and uses those of the others from theirs. A slot is
used again when all who want its content are done with it. As all ranks keep to one order, the
earliest read that is not done can always go on, so that no ranks wait for each other in a circle.
Whoever has nothing to do sleeps until another rings its bell.
"""

from __future__ import annotations

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

from shardwise.engine.doorbell import Doorbell, find_bell, ring
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.pages import allocate_pages, map_pages
from shardwise.errors import LostRankError, RankError
from shardwise.plan.share import SharedReads
from shardwise.store.store import Buffer

READY, FAILED = 1, 2
BLOCK = 512  # of st_blocks
LAST = -1


class _Card(msgspec.Struct, array_like=True):
    """How to find a rank's memory: by process and file descriptors, on one node."""

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
        messages: what each of them said.
    """

    def __init__(self, group: Group, speak: Callable[[], bytes], cleanup: ExitStack) -> None:
        spoken = _Memory.create("shardwise-message", cleanup)
        self._ring = _Memory.create("shardwise-ring", cleanup)
        self._bell = Doorbell(cleanup)
        mine = _Card(_node(), os.getpid(), spoken.fd, self._ring.fd, self._bell.fd)

        def say() -> bytes:
            os.write(spoken.fd, speak())
            return msgspec.msgpack.encode(mine)

        def introduce(said: list[bytes]) -> list[bytes]:
            cards = [msgspec.msgpack.decode(each, type=_Card) for each in said]
            nodes: dict[str, list[int]] = {}
            for rank, card in enumerate(cards):
                nodes.setdefault(card.node, []).append(rank)
            return [
                msgspec.msgpack.encode(
                    (nodes[card.node].index(rank), [cards[each] for each in nodes[card.node]])
                )
                for rank, card in enumerate(cards)
            ]

        answer = exchange(group, "planning a load", say, introduce)
        self.index, self._cards = msgspec.msgpack.decode(answer, type=tuple[int, list[_Card]])
        self._cleanup = cleanup
        self.messages = [self._message(card) for card in self._cards]

    def __len__(self) -> int:
        return len(self._cards)

    def rings(self, reads: SharedReads, slots: int, slot_bytes: int) -> Rings:
        """Map everyone's ring, large enough for these reads."""
        counts = np.bincount(reads.reader, minlength=len(self)).tolist()
        layout = RingLayout(counts, slots, slot_bytes)
        sizes = [layout.size(rank) for rank in range(len(self))]
        os.ftruncate(self._ring.fd, sizes[self.index])
        allocate_pages(self._ring.fd, sizes[self.index])
        bells = [find_bell(card.process, card.bell, self._cleanup) for card in self._cards]
        for bell in bells:
            ring(bell)
        maps = []
        for card, size in zip(self._cards, sizes, strict=True):
            memory = _Memory.of(card.process, card.ring, self._cleanup)
            self._bell.wait(partial(_has_pages, memory.fd, size), self._alive)
            maps.append(map_pages(memory.fd, 0, size, writable=True, now=True))
        wait = partial(self._bell.wait, alive=self._alive)
        return Rings(reads, self.index, maps, layout, bells, wait)

    def _message(self, card: _Card) -> bytes:
        memory = _Memory.of(card.process, card.message, self._cleanup)
        return os.pread(memory.fd, os.fstat(memory.fd).st_size, 0)

    def _alive(self) -> None:
        """Raise if one of them is gone."""
        for rank, card in enumerate(self._cards):
            if not Path(f"/proc/{card.process}").exists():
                raise LostRankError("reading together", {rank: "its process is gone"})


@dataclass(frozen=True, slots=True)
class RingLayout:
    """A rank's ring: slots, then a state for each of its reads, then one for each read and user.

    Attributes:
        counts: of each rank, how many reads it makes.
    """

    counts: list[int]
    slots: int
    slot_bytes: int

    def size(self, rank: int) -> int:
        """Bytes of a ring."""
        return self.slots * self.slot_bytes + self.counts[rank] * (1 + len(self.counts))


class Rings:
    """The rings of all neighbours, and how far each read has come.

    Args:
        maps: the ring of each rank.
        bells: of each rank; rung when something has changed that it may wait for.
        wait: sleeps until a look finds something; looks whenever this rank's bell rings.
    """

    def __init__(
        self,
        reads: SharedReads,
        index: int,
        maps: Sequence[Buffer],
        layout: RingLayout,
        bells: Sequence[int],
        wait: Callable[[Callable[[], int | None]], int],
    ) -> None:
        self._reads = reads
        self._index = index
        self._layout = layout
        self._bells = bells
        self._wait = wait
        self._maps = maps
        start = layout.slots * layout.slot_bytes
        pairs = list(zip(maps, layout.counts, strict=True))
        self._state = [m[start : start + n] for m, n in pairs]
        self._done = [m[start + n :].reshape(n, len(maps)) for m, n in pairs]
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
            RankError: another rank could not read its part, or is gone.
        """
        with self._turn:
            found = self._wait(self._look)
            return None if found == LAST else found

    def leads(self, read: int) -> bool:
        """Whether this rank makes a read."""
        return bool(self._reader[read] == self._index)

    def slot(self, read: int) -> Buffer:
        """Where a read's bytes are put, and taken from."""
        at = self._number[read] % self._layout.slots * self._layout.slot_bytes
        memory: Buffer = self._maps[self._reader[read]]
        return memory[at : at + self._layout.slot_bytes]

    def publish(self, read: int) -> None:
        """The slot of a read of this rank is filled."""
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
            raise RankError("reading together", {reader: "it could not read what it shares"})
        return bool(state == READY)


def _number_by_reader(reader: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each read's number among those of its reader."""
    number = np.zeros(len(reader), np.int64)
    for rank in np.unique(reader).tolist():
        rows = np.flatnonzero(reader == rank)
        number[rows] = np.arange(len(rows))
    return number


def _has_pages(fd: int, size: int) -> bool | None:
    found = os.fstat(fd)
    return (found.st_size >= size and found.st_blocks * BLOCK >= size) or None


def _node() -> str:
    """Equal for ranks that see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{boot.strip()} {os.readlink('/proc/self/ns/pid')}"
