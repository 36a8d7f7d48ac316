"""The ranks of one node, which exchange messages and map each other's memory to read together.

Each rank computes the shared reads from the same messages. Ranks with different results would
confuse the slots of each other's buffers. So each buffer begins with a digest of the shared reads,
which the other ranks compare before any byte is read.
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

from shardwise.decoding import prepare_decoding
from shardwise.engine.buffers import allocate_pages, map_pages
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group, node_name
from shardwise.errors import LostRankError, RankError
from shardwise.manifest.layout import StoredFile
from shardwise.sharing.doorbell import (
    OPERATION,
    Doorbell,
    LateRanks,
    T,
    open_doorbell,
    ring_doorbell,
)
from shardwise.sharing.shared_buffers import BufferLayout, SharedBuffers, rings_of
from shardwise.sharing.within_node import SharedReads

PLAN_HEAD_SIZE = 8
"""The size of the length before a plan, in bytes."""
DIGEST_SIZE = 16
"""The size of the digest at the beginning of a buffer, in bytes."""


@prepare_decoding
class _Member(msgspec.Struct, array_like=True):
    """A rank, and the file descriptors in its process through which others open its memory.

    Attributes:
        rank: the rank in the group.
        node: the name of the node.
        process: the process id.
        message, plan, buffer, doorbell, link_doorbell: file descriptors in that process.
    """

    rank: int
    node: str
    process: int
    message: int
    plan: int
    buffer: int
    doorbell: int
    link_doorbell: int


def find_node_ranks(group: Group, message: bytes, cleanup: ExitStack) -> NodeRanks:
    """Find the ranks of this node, and read their messages. All ranks call this function together.

    Args:
        group: all ranks of the load.
        message: this rank's message to the ranks of its node.
        cleanup: closes this rank's memory, so that other ranks can no longer open it.

    Raises:
        ShardwiseError: as for `exchange`.
    """
    doorbell, link_doorbell = Doorbell(cleanup), Doorbell(cleanup)

    def make_message() -> bytes:
        message_fd, plan_fd, buffer_fd = (
            _create_memory(f"shardwise-{name}", cleanup) for name in ("message", "plan", "buffer")
        )
        _write_all(message_fd, message, 0)
        memory = message_fd, plan_fd, buffer_fd
        doorbells = doorbell.fd, link_doorbell.fd
        me = _Member(group.rank, node_name(), os.getpid(), *memory, *doorbells)
        return msgspec.msgpack.encode(me)

    def make_reply(messages: list[bytes]) -> list[bytes]:
        members = [msgspec.msgpack.decode(each, type=_Member) for each in messages]
        members_of: dict[str, list[_Member]] = {}
        for member in members:
            members_of.setdefault(member.node, []).append(member)
        return [msgspec.msgpack.encode(members_of[member.node]) for member in members]

    reply = exchange(group, "finding the ranks of a node", make_message, make_reply)
    members = msgspec.msgpack.decode(reply, type=list[_Member])
    return NodeRanks(members, group, doorbell, link_doorbell, cleanup)


class NodeRanks:
    """The ranks of this node, in the same order on each of them; see `find_node_ranks`.

    Attributes:
        index: the index of this rank among the ranks of the node.
        ranks: the rank in the group of each of them.
        messages: the message of each of them.
        link_doorbell: wakes the thread of this rank that exchanges bytes with other nodes.
    """

    def __init__(
        self,
        members: Sequence[_Member],
        group: Group,
        doorbell: Doorbell,
        link_doorbell: Doorbell,
        cleanup: ExitStack,
    ) -> None:
        self._members = members
        self._doorbell = doorbell
        self.link_doorbell = link_doorbell
        self._cleanup = cleanup
        self._timeout = group.timeout.total_seconds()
        self.ranks = [member.rank for member in members]
        self.index = self.ranks.index(group.rank)
        self.messages = [_read_all(_open_memory(m, m.message, cleanup)) for m in members]

    def __len__(self) -> int:
        return len(self._members)

    def map_buffers(
        self, reads: SharedReads, slots: int, slot_bytes: int, files: Sequence[StoredFile]
    ) -> SharedBuffers:
        """Allocate this rank's buffer, and map the buffers of all ranks of the node.

        Args:
            reads: the reads that the ranks share; the same on each of them.
            slots: the number of slots of a buffer, each for one read.
            slot_bytes: the size of a slot, in bytes; a multiple of the block size.
            files: the files that `reads` refers to.

        Raises:
            RankError: another rank has computed other reads.
            LostRankError: another rank died, or did not answer in time.
        """
        rings = len(self) * (2 if reads.crosses_nodes else 1)
        counts = np.bincount(rings_of(reads, len(self)), minlength=rings).tolist()
        layout = BufferLayout(counts, len(self), slots, slot_bytes)
        digest = _digest(reads, layout, files)
        buffer_fd, size = self._members[self.index].buffer, layout.size(self.index)
        os.ftruncate(buffer_fd, size)
        allocate_pages(buffer_fd, size)
        os.pwrite(buffer_fd, digest, 0)
        doorbells = self._open_doorbells(links=reads.crosses_nodes)
        for doorbell, *_ in doorbells:
            ring_doorbell(doorbell)
        memory = []
        for index, member in enumerate(self._members):
            fd = _open_memory(member, member.buffer, self._cleanup)
            other_digest = self._wait(
                partial(_read_digest, fd),
                partial(dict, {member.rank: "it has not prepared its memory"}),
            )
            if other_digest != digest:
                reason = (
                    "it has planned other reads than this rank; use the same version of shardwise "
                    "on all ranks"
                )
                raise RankError(OPERATION, {member.rank: reason})
            memory.append(map_pages(fd, 0, layout.size(index), writable=True, populate=True))
        return SharedBuffers(reads, self.index, self.ranks, memory, layout, doorbells, self._wait)

    def share_plan(self, plan: bytes | None) -> bytes:
        """Return the plan that the first rank of the node received, on all ranks of the node.

        Args:
            plan: the plan; None on the other ranks.

        Raises:
            LostRankError: the first rank died, or did not answer in time.
        """
        first = self._members[0]
        if plan is not None:
            _write_all(first.plan, plan, PLAN_HEAD_SIZE)
            os.pwrite(first.plan, len(plan).to_bytes(PLAN_HEAD_SIZE, "little"), 0)
            for doorbell, *_ in self._open_doorbells(links=False):
                ring_doorbell(doorbell)
            return plan
        fd = _open_memory(first, first.plan, self._cleanup)
        size = self._wait(
            lambda: int.from_bytes(os.pread(fd, PLAN_HEAD_SIZE, 0), "little") or None,
            partial(dict, {first.rank: "it did not pass on the plan"}),
        )
        return os.pread(fd, size, PLAN_HEAD_SIZE)

    def _open_doorbells(self, *, links: bool) -> list[list[int]]:
        """Open the doorbells of all ranks; also the doorbells of their links, if `links`."""
        return [
            [
                open_doorbell(member.process, fd, self._cleanup)
                for fd in (member.doorbell, member.link_doorbell)[: 1 + links]
            ]
            for member in self._members
        ]

    def _wait(self, poll: Callable[[], T | None], late_ranks: LateRanks) -> T:
        return self._doorbell.wait(poll, self.check_alive, self._timeout, late_ranks)

    def check_alive(self) -> None:
        """Check that the processes of all ranks of the node run.

        Raises:
            LostRankError: a process has ended.
        """
        for member in self._members:
            if not Path(f"/proc/{member.process}").exists():
                raise LostRankError(OPERATION, {member.rank: "its process has ended"})


def _create_memory(name: str, cleanup: ExitStack) -> int:
    """Create an anonymous file, which the kernel removes when the last process closes it."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    cleanup.callback(os.close, fd)
    return fd


def _open_memory(member: _Member, fd: int, cleanup: ExitStack) -> int:
    """Open an anonymous file of another process, given its file descriptor there."""
    own_fd = os.open(f"/proc/{member.process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    cleanup.callback(os.close, own_fd)
    return own_fd


def _write_all(fd: int, data: bytes, offset: int) -> None:
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _read_all(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _digest(reads: SharedReads, layout: BufferLayout, files: Sequence[StoredFile]) -> bytes:
    """Return a digest of the reads, the files that they refer to, and the layout of buffers."""
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for column in reads.columns():
        digest.update(str((column.dtype.str, column.shape)).encode())
        digest.update(np.ascontiguousarray(column).data)
    digest.update(repr((layout.slots, layout.slot_bytes)).encode())
    for index in np.unique(reads.file).tolist():
        digest.update(msgspec.msgpack.encode(files[index]))
    return digest.digest()


def _read_digest(fd: int) -> bytes | None:
    """Return the digest at the start of a buffer; None while the pages are being allocated."""
    digest = os.pread(fd, DIGEST_SIZE, 0)
    return digest if any(digest) else None
