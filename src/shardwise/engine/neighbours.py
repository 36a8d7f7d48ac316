"""The ranks of one node: they exchange messages, and map each other's memory to read together.

All of them compute the shared reads from the same messages. A digest of the result heads each
ring and is compared before a byte is read: ranks that disagree would take each other's slots for
other bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from shardwise.engine.buffers import allocate_pages, map_pages
from shardwise.engine.exchange import Kept, exchange_keeping
from shardwise.engine.group import Group
from shardwise.engine.ring import READING, Awaited, Doorbell, RingLayout, Rings, T, find_bell, ring
from shardwise.errors import LostRankError, RankError
from shardwise.manifest.manifest import FileEntry
from shardwise.plan.load import SharedReads

DIGEST = 16
"""Bytes of the digest at the beginning of a ring."""


class _Member(msgspec.Struct, array_like=True):
    """A rank, and the file descriptors in its process at which others find its memory."""

    rank: int
    node: str
    process: int
    message: int
    ring: int
    bell: int


def meet_neighbours(
    group: Group, speak: Callable[[], tuple[Kept, bytes]], cleanup: ExitStack
) -> tuple[Kept, Neighbours]:
    """Find the ranks of this node, and read their messages. All ranks call it together.

    Args:
        speak: returns a value to keep, and this rank's message to the other ranks of its node; if
            it fails on one rank, it fails on all.
        cleanup: once it is closed, other ranks can no longer find this rank's memory.

    Raises:
        ShardwiseError: as for `exchange`.
    """
    message, ring_memory = (
        _create_memory(f"shardwise-{name}", cleanup) for name in ("message", "ring")
    )
    bell = Doorbell(cleanup)
    mine = _Member(group.rank, _node(), os.getpid(), message, ring_memory, bell.fd)

    def say() -> tuple[Kept, bytes]:
        kept, data = speak()
        os.write(message, data)
        return kept, msgspec.msgpack.encode(mine)

    def introduce(_: Kept, said: list[bytes]) -> list[bytes]:
        members = [msgspec.msgpack.decode(each, type=_Member) for each in said]
        nodes: dict[str, list[_Member]] = {}
        for member in members:
            nodes.setdefault(member.node, []).append(member)
        return [msgspec.msgpack.encode(nodes[member.node]) for member in members]

    kept, reply = exchange_keeping(group, "planning a load", say, introduce)
    members = msgspec.msgpack.decode(reply, type=list[_Member])
    return kept, Neighbours(members, group, ring_memory, bell, cleanup)


class Neighbours:
    """The ranks of this node, in the same order on each of them; see `meet_neighbours`.

    Attributes:
        index: this rank's place among them.
        ranks: the rank in the group of each of them.
        messages: the message of each of them.
    """

    def __init__(
        self,
        members: Sequence[_Member],
        group: Group,
        ring_memory: int,
        bell: Doorbell,
        cleanup: ExitStack,
    ) -> None:
        self._members = members
        self._ring_memory = ring_memory
        self._bell = bell
        self._cleanup = cleanup
        self._timeout = group.timeout.total_seconds()
        self.ranks = [member.rank for member in members]
        self.index = self.ranks.index(group.rank)
        self.messages = [_read_all(_open_memory(m.process, m.message, cleanup)) for m in members]

    def __len__(self) -> int:
        return len(self._members)

    def rings(
        self, reads: SharedReads, slots: int, slot_bytes: int, files: Sequence[FileEntry]
    ) -> Rings:
        """Map the rings of all of them, large enough for these reads.

        Args:
            reads: what they read together; the same on each of them.
            slots: how many reads a ring holds at a time.
            slot_bytes: bytes of a slot: whole blocks.
            files: the files that `reads` numbers.

        Raises:
            RankError: another rank has computed other reads.
            LostRankError: another rank died, or did not answer in time.
        """
        counts = np.bincount(reads.reader, minlength=len(self)).tolist()
        layout = RingLayout(counts, slots, slot_bytes)
        digest = _digest(reads, layout, files)
        size = layout.size(self.index)
        os.ftruncate(self._ring_memory, size)
        allocate_pages(self._ring_memory, size)
        os.pwrite(self._ring_memory, digest, 0)
        bells = [find_bell(each.process, each.bell, self._cleanup) for each in self._members]
        for bell in bells:
            ring(bell)
        maps = []
        for index, member in enumerate(self._members):
            memory = _open_memory(member.process, member.ring, self._cleanup)
            found = self._wait(
                partial(_digest_in, memory),
                partial(dict, {member.rank: "it has not prepared its memory"}),
            )
            if found != digest:
                raise RankError(READING, {member.rank: "it has planned other reads than this rank"})
            maps.append(map_pages(memory, 0, layout.size(index), writable=True, now=True))
        return Rings(reads, self.index, self.ranks, maps, layout, bells, self._wait)

    def _wait(self, look: Callable[[], T | None], awaited: Awaited) -> T:
        return self._bell.wait(look, self._check_alive, self._timeout, awaited)

    def _check_alive(self) -> None:
        """Raise if one of the processes has ended."""
        for member in self._members:
            if not Path(f"/proc/{member.process}").exists():
                raise LostRankError(READING, {member.rank: "its process has ended"})


def _create_memory(name: str, cleanup: ExitStack) -> int:
    """Create an anonymous file; it vanishes with the last process that has it open."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    cleanup.callback(os.close, fd)
    return fd


def _open_memory(process: int, fd: int, cleanup: ExitStack) -> int:
    """Open the anonymous file of another process."""
    opened = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    cleanup.callback(os.close, opened)
    return opened


def _read_all(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _digest(reads: SharedReads, layout: RingLayout, files: Sequence[FileEntry]) -> bytes:
    """Return a digest of what the numbers of reads and slots mean."""
    found = hashlib.blake2b(digest_size=DIGEST)
    for column in (reads.file, reads.low, reads.high, reads.reader, reads.wanted):
        found.update(str((column.dtype.str, column.shape)).encode())
        found.update(np.ascontiguousarray(column).data)
    found.update(repr((layout.slots, layout.slot_bytes)).encode())
    for number in np.unique(reads.file).tolist():
        found.update(msgspec.msgpack.encode(files[number]))
    return found.digest()


def _digest_in(fd: int) -> bytes | None:
    """Return the digest of a ring, which is written once all its pages are allocated."""
    found = os.pread(fd, DIGEST, 0)
    return found if any(found) else None


def _node() -> str:
    """Return a name that is equal for ranks that see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return f"{boot.strip()} {os.readlink('/proc/self/ns/pid')}"
