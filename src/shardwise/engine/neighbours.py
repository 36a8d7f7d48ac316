"""Ranks of one node that read together: each block is read once, and used by all who want it.

Every rank has a ring of slots in memory that the others can map. It reads its part of the shared
reads into its slots, in the common order, and uses those of the others from theirs. A slot is
used again when all who want its content are done with it. As all ranks keep to one order, the
earliest read that is not done can always go on, so that no ranks wait for each other in a circle.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.errors import LostRankError, RankError
from shardwise.plan.share import SharedReads
from shardwise.store.store import Buffer

PAUSE = 100e-6
PATIENCE = 600.0
READY, FAILED = 1, 2


class _Card(msgspec.Struct, array_like=True):
    """How to find a rank's memory: by process and file descriptors, on one node."""

    node: str
    process: int
    message: int
    ring: int


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
        mine = _Card(_node(), os.getpid(), spoken.fd, self._ring.fd)

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
        sizes = [ring_bytes(count, len(self), slots, slot_bytes) for count in counts]
        os.posix_fallocate(self._ring.fd, 0, sizes[self.index])
        maps = []
        for card, size in zip(self._cards, sizes, strict=True):
            ring = _Memory.of(card.process, card.ring, self._cleanup)
            _wait(partial(_has_size, ring.fd, size), self._alive)
            maps.append(np.frombuffer(mmap.mmap(ring.fd, size), np.uint8))
        return Rings(reads, self.index, maps, counts, slots, slot_bytes, self._alive)

    def _message(self, card: _Card) -> bytes:
        memory = _Memory.of(card.process, card.message, self._cleanup)
        return os.pread(memory.fd, os.fstat(memory.fd).st_size, 0)

    def _alive(self) -> None:
        """Raise if one of them is gone."""
        for rank, card in enumerate(self._cards):
            if not Path(f"/proc/{card.process}").exists():
                raise LostRankError("reading together", {rank: "its process is gone"})


def ring_bytes(reads: int, ranks: int, slots: int, slot_bytes: int) -> int:
    """Size of a ring: slots, then a state for each read, then one for each read and user."""
    return slots * slot_bytes + reads * (1 + ranks)


class Rings:
    """The rings of all neighbours, and how far each read has come."""

    def __init__(
        self,
        reads: SharedReads,
        index: int,
        maps: Sequence[Buffer],
        counts: Sequence[int],
        slots: int,
        slot_bytes: int,
        alive: Callable[[], None],
    ) -> None:
        self._reads = reads
        self._index = index
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._alive = alive
        self._maps = maps
        start = slots * slot_bytes
        self._state = [m[start : start + n] for m, n in zip(maps, counts, strict=True)]
        ranks = len(maps)
        self._done = [m[start + n :].reshape(n, ranks) for m, n in zip(maps, counts, strict=True)]
        self._number = _number_by_reader(reads.reader)
        self._reader = reads.reader.tolist()
        self._mine = np.flatnonzero(reads.reader == index).tolist()

    def mine(self) -> list[int]:
        """The reads that this rank makes, in order."""
        return self._mine

    def others(self) -> list[int]:
        """The reads of others that this rank uses, in order."""
        used = self._reads.wanted[:, self._index] & (self._reads.reader != self._index)
        return np.flatnonzero(used).tolist()

    def slot_for(self, read: int) -> Buffer:
        """The slot to read into, once all are done with what was there before."""
        number = int(self._number[read])
        if number >= self._slots:
            before = self._before(read)
            done = self._done[self._index][number - self._slots]
            _wait(lambda: bool(done[before].all()), self._alive)
        return self._slot(self._index, number)

    def publish(self, read: int, *, failed: bool = False) -> None:
        """The slot of a read is filled; or never will be."""
        self._state[self._index][self._number[read]] = FAILED if failed else READY

    def take(self, read: int) -> Buffer:
        """The slot of another rank's read, once it is filled.

        Raises:
            RankError: that rank could not read it, or is gone.
        """
        reader, number = self._reader[read], int(self._number[read])
        state = self._state[reader]
        _wait(lambda: bool(state[number]), self._alive)
        if state[number] == FAILED:
            raise RankError("reading together", {reader: "it could not read what it shares"})
        return self._slot(reader, number)

    def finish(self, read: int) -> None:
        """This rank is done with a read."""
        self._done[self._reader[read]][self._number[read], self._index] = 1

    def fail(self) -> None:
        """This rank gives up: nobody is to wait for it."""
        self._state[self._index][self._state[self._index] == 0] = FAILED
        for done in self._done:
            done[:, self._index] = 1

    def _before(self, read: int) -> npt.NDArray[np.bool_]:
        previous = self._mine[int(self._number[read]) - self._slots]
        users: npt.NDArray[np.bool_] = self._reads.wanted[previous]
        return users

    def _slot(self, rank: int, number: int) -> Buffer:
        at = number % self._slots * self._slot_bytes
        return self._maps[rank][at : at + self._slot_bytes]


def _number_by_reader(reader: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Each read's number among those of its reader."""
    number = np.zeros(len(reader), np.int64)
    for rank in np.unique(reader).tolist():
        rows = np.flatnonzero(reader == rank)
        number[rows] = np.arange(len(rows))
    return number


def _wait(ready: Callable[[], bool], alive: Callable[[], None]) -> None:
    start = checked = time.monotonic()
    while not ready():
        time.sleep(PAUSE)
        now = time.monotonic()
        if now - start > PATIENCE:
            raise LostRankError("reading together", {-1: f"no progress in {PATIENCE:.0f} s"})
        if now - checked > 0.2:
            checked = now
            alive()


def _has_size(fd: int, size: int) -> bool:
    return os.fstat(fd).st_size >= size


def _node() -> str:
    """Equal for ranks that see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{boot.strip()} {os.readlink('/proc/self/ns/pid')}"
