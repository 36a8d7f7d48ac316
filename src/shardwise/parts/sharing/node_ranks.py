"""Find the ranks of a node, and map their memory, so that they can read together."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from shardwise.kernel.boxes.box import IntArray
from shardwise.kernel.deadline import Deadline
from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.buffers import allocate_pages, map_pages
from shardwise.kernel.engine.group import Group, node_name
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.errors import LostRankError, RankError
from shardwise.kernel.plan.load import Ranges
from shardwise.kernel.store.store import Buffer

OPERATION = "reading together with the other ranks of the node"
PAUSES = {"pause": 0.0001, "longest_pause": 0.0005}
"""How long to sleep between two polls of another rank's progress, in seconds."""
CHECK_EVERY = 400
"""Polls between two checks that the other ranks run."""
DIGEST_SIZE = 16
MOST_NODES = 64
"""How many nodes share their reads. With 64 nodes that want the same, each reads 1.6 % of it; more
nodes would spare little more, but their messages would grow with the number of nodes."""
AFTER_ALL_FILES = (1 << 62, 0)
T = TypeVar("T")
LateRanks = Callable[[], dict[int, str]]
"""Returns the ranks that this rank waits for, and for each the step that it has not completed."""


@prepare_decoding
class _Member(msgspec.Struct, array_like=True, frozen=True):
    """A rank, and the file descriptors in its process through which others open its memory.

    Attributes:
        rank: the rank in the group.
        process: the process id.
        wants, buffer: file descriptors in that process.
    """

    rank: int
    process: int
    wants: int
    buffer: int


@prepare_decoding
class _Node(msgspec.Struct, array_like=True, frozen=True):
    """The ranks of a node.

    Attributes:
        first: the file and position of the first byte that a rank of the node wants.
        members: its ranks.
    """

    first: tuple[int, int]
    members: list[_Member]


@prepare_decoding
class WantedReads(msgspec.Struct, array_like=True):
    """What a rank tells the other ranks of its node. From it, all plan the same shared reads.

    Attributes:
        are_mapped: whether all files that the rank reads are mapped into its memory.
        ranges: the byte ranges that the rank needs, encoded.
        largest_reads: the longest read of each file that the rank can make, in bytes, as int64.
    """

    are_mapped: bool
    ranges: bytes
    largest_reads: bytes

    def first_bytes(self) -> list[tuple[int, int]]:
        """Return the file and position of the first wanted byte, if there is one."""
        ranges = decode_ranges(self.ranges)
        order = np.lexsort((ranges.low, ranges.file))[:1]
        return list(zip(ranges.file[order].tolist(), ranges.low[order].tolist(), strict=True))


def find_node_ranks(group: Group, wants: WantedReads, cleanup: ExitStack) -> NodeRanks:
    """Find the ranks of this node, and read what they want. All ranks call this function together.

    Args:
        group: all ranks of the load.
        wants: what this rank wants.
        cleanup: closes this rank's memory, so that other ranks can no longer open it.

    Raises:
        ShardwiseError: as for `Round`.
    """

    with Round(group, "finding the ranks of a node") as all_ranks:
        fds = [os.memfd_create(f"shardwise-{each}", os.MFD_CLOEXEC) for each in ("wants", "buffer")]
        for fd in fds:
            cleanup.callback(os.close, fd)
        with open(fds[0], "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode(wants))
        me = _Member(group.rank, os.getpid(), *fds)
        node = hashlib.blake2b(node_name().encode(), digest_size=8).digest()
        first = min(wants.first_bytes(), default=AFTER_ALL_FILES)
        nodes = all_ranks.all_reduce({node: _Node(first, [me])}, dict[bytes, _Node], _unite_nodes)
    # Nodes that want the same bytes are neighbors.
    order = sorted(nodes, key=lambda each: (nodes[each].first, nodes[each].members[0].rank))
    circle = nodes_sharing_reads(order.index(node), len(order))
    near = [nodes[each] for each in order[circle.start : circle.stop]]
    neighbors = sorted(member.rank for each in near for member in each.members)
    return NodeRanks(nodes[node].members, group, cleanup, neighbors)


def _unite_nodes(messages: Sequence[dict[bytes, _Node]]) -> dict[bytes, _Node]:
    """Return the nodes of some ranks together, each with its ranks in ascending order."""
    members: dict[bytes, list[_Member]] = {}
    first: dict[bytes, tuple[int, int]] = {}
    for message in messages:
        for name, node in message.items():
            members.setdefault(name, []).extend(node.members)
            first[name] = min(node.first, first.get(name, node.first))
    return {
        name: _Node(first[name], sorted(each, key=lambda member: member.rank))
        for name, each in members.items()
    }


def nodes_sharing_reads(node: int, nodes: int) -> range:
    """Return the nodes with which a node shares reads, itself included.

    The nodes are cut into circles of about equal size, of at most `MOST_NODES` nodes each.
    """
    circles = -(-nodes // MOST_NODES)
    number = node * circles // nodes
    return range(-(-number * nodes // circles), -(-(number + 1) * nodes // circles))


class NodeRanks:
    """The ranks of this node, in the same order on each of them; see `find_node_ranks`.

    Attributes:
        rank: this rank.
        local_rank: the index of this rank among the ranks of the node.
        timeout: the longest time without progress, in seconds.
        ranks: the rank in the group of each rank of the node.
        neighbors: the ranks of the nodes with which this node may share reads, and of this node.
        wanted: the byte ranges that each rank of the node wants.
        largest_read: the longest read of each file that all ranks of the node can make, in bytes.
        are_mapped: whether all files that these ranks read are mapped into their memory.
    """

    def __init__(
        self,
        members: Sequence[_Member],
        group: Group,
        cleanup: ExitStack,
        neighbors: Sequence[int],
    ) -> None:
        self._members = members
        self.neighbors = neighbors
        self._cleanup = cleanup
        self.timeout = group.timeout.total_seconds()
        self.rank = group.rank
        self.ranks = [member.rank for member in members]
        self.local_rank = self.ranks.index(group.rank)
        wants = [self._read_wants(member) for member in members]
        self.wanted = [decode_ranges(each.ranges) for each in wants]
        self.largest_read: IntArray = np.minimum.reduce(
            [np.frombuffer(each.largest_reads, np.int64) for each in wants]
        )
        self.are_mapped = all(each.are_mapped for each in wants)

    def __len__(self) -> int:
        return len(self._members)

    def map_memory(self, sizes: Sequence[int], digest: bytes) -> list[Buffer]:
        """Allocate the memory that this rank shares, and map the memory of all ranks of the node.

        Ranks with different plans would confuse each other's memory. So a digest of the plan is at
        the beginning of the memory, which the other ranks compare before any byte is read.

        Args:
            sizes: the size of each rank's memory, in bytes.
            digest: a digest of the plan, not only zeros, of `DIGEST_SIZE` bytes.

        Raises:
            RankError: another rank has computed another plan.
            LostRankError: another rank died, or did not answer in time.
        """
        own = self._members[self.local_rank].buffer
        os.ftruncate(own, sizes[self.local_rank])
        allocate_pages(own, sizes[self.local_rank])
        os.pwrite(own, digest, 0)
        memory = []
        for size, member in zip(sizes, self._members, strict=True):
            fd = self._open(member, member.buffer)
            late = {member.rank: "it has not prepared its memory"}
            if self.wait(partial(_read_digest, fd), late.copy) != digest:
                reason = (
                    "it has planned other reads than this rank; use the same version of shardwise "
                    "on all ranks"
                )
                raise RankError(OPERATION, {member.rank: reason})
            memory.append(map_pages(fd, 0, size, writable=True, populate=True))
        return memory

    def wait(self, poll: Callable[[], T | None], late_ranks: LateRanks) -> T:
        """Wait until `poll` returns a value, and return the value.

        Args:
            poll: returns None to keep waiting.
            late_ranks: called after the timeout, for the error message.

        Raises:
            LostRankError: the timeout of the group has passed, or a rank of the node has died. The
                error names the late ranks.
        """
        for look, _ in enumerate(Deadline(self.timeout).attempts(**PAUSES)):
            if (found := poll()) is not None:
                return found
            if look % CHECK_EVERY == CHECK_EVERY - 1:
                self.check_alive()
        late = {rank: f"{step} within {self.timeout:.0f} s" for rank, step in late_ranks().items()}
        raise LostRankError(OPERATION, late)

    def check_alive(self) -> None:
        """Check that the processes of all ranks of the node run.

        Raises:
            LostRankError: a process has ended.
        """
        for member in self._members:
            if not _is_running(member.process):
                raise LostRankError(OPERATION, {member.rank: "its process has ended"})

    def _read_wants(self, member: _Member) -> WantedReads:
        with open(self._open(member, member.wants), "rb", closefd=False) as file:
            return msgspec.msgpack.decode(file.read(), type=WantedReads)

    def _open(self, member: _Member, fd: int) -> int:
        """Open an anonymous file of another process, given its file descriptor there."""
        own_fd = os.open(f"/proc/{member.process}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        self._cleanup.callback(os.close, own_fd)
        return own_fd


def encode_ranges(ranges: Ranges) -> bytes:
    """Encode byte ranges for a message."""
    return np.stack([ranges.file, ranges.low, ranges.high]).tobytes()


def decode_ranges(message: bytes) -> Ranges:
    """Decode what `encode_ranges` returned."""
    return Ranges(*np.frombuffer(message, np.int64).reshape(3, -1))


def _read_digest(fd: int) -> bytes | None:
    """Return the digest at the start of a buffer; None while the pages are being allocated."""
    digest = os.pread(fd, DIGEST_SIZE, 0)
    return digest if any(digest) else None


def _is_running(process: int) -> bool:
    """Return whether a process runs. One that has ended may still be listed, as a zombie."""
    try:
        state = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return state[0] not in (b"Z", b"X")
