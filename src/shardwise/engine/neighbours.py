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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from shardwise.engine.buffers import allocate_pages, map_pages
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.ring import READING, Awaited, Doorbell, RingLayout, Rings, T, find_bell, ring
from shardwise.errors import LostRankError, RankError
from shardwise.manifest.manifest import FileEntry
from shardwise.plan.load import SharedReads

DIGEST = 16
"""Bytes of the digest at the beginning of a ring."""


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
