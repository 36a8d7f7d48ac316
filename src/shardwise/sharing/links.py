"""Pass file data on between nodes during a load, over connections between ranks.

One thread of a rank moves all data of its connections. It receives into free slots of the rank's
buffer, and sends from filled slots. On each connection, the reads follow each other in the order in
which all ranks process them, so nodes cannot deadlock (see `sharing/shared_buffers.py`).
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from shardwise.errors import LostRankError, RankError
from shardwise.sharing.between_nodes import NOBODY
from shardwise.sharing.connections import OPERATION, Connections
from shardwise.sharing.doorbell import POLL_SECONDS, Doorbell
from shardwise.sharing.shared_buffers import SharedBuffers
from shardwise.sharing.within_node import SharedReads

SECONDS_TO_REPORT = 2.0
"""The longest time to tell a rank of another node that this rank has failed."""
_FRAME = struct.Struct("<QQQIq")
"""Before each read: its file, its range, its checksum, and the rank that has failed, or -1."""


class Links:
    """The connections of this rank to ranks of other nodes, during the reads of a load.

    Args:
        rank: this rank.
        outgoing, incoming: connections by rank; see `connect`.
        doorbell: wakes the thread that calls `run`.
        timeout: the longest time without progress, in seconds.
        check_alive: called every 0.2 s; raises if another rank of this node has died.
    """

    def __init__(
        self,
        rank: int,
        outgoing: Connections,
        incoming: Connections,
        doorbell: Doorbell,
        timeout: float,
        check_alive: Callable[[], None],
    ) -> None:
        self._rank = rank
        self._outgoing = outgoing
        self._incoming = incoming
        self._doorbell = doorbell
        self._timeout = timeout
        self._check_alive = check_alive

    def run(self, reads: SharedReads, nbytes: Sequence[int], buffers: SharedBuffers) -> None:
        """Receive and send all reads of this rank.

        If this rank fails, the ranks at the other ends of its connections are told, and stop.

        Args:
            reads: the reads of this node.
            nbytes: the length of each read, in bytes.
            buffers: the slots to fill, and to send from.

        Raises:
            RankError: a rank of another node has failed.
            LostRankError: a rank of another node died, or made no progress before the timeout.
        """
        ranges = list(
            zip(reads.file.tolist(), reads.low.tolist(), reads.high.tolist(), strict=True)
        )
        is_own = reads.reader == buffers.index
        streams: list[_Stream] = []
        for kind, links, column in (
            (_Receiver, self._incoming, reads.source),
            (_Sender, self._outgoing, reads.target),
        ):
            for rank, link in links.items():
                rows = deque(np.flatnonzero(is_own & (column == rank)).tolist())
                streams.append(kind(rank, link, ranges, nbytes, rows))
        for stream in streams:
            stream.link.setblocking(False)
        try:
            self._move(streams, buffers)
        except BaseException as error:
            buffers.mark_failed(error)
            raise
        finally:
            if buffers.failed_rank is not None:
                for stream in streams:
                    stream.report_failure(buffers.failed_rank)

    def report_failure(self) -> None:
        """Tell the ranks at the other ends that this rank failed; no effect if they know it."""
        for link in (*self._outgoing.values(), *self._incoming.values()):
            _send_failure(link, self._rank)

    def _move(self, streams: Sequence[_Stream], buffers: SharedBuffers) -> None:
        """Move bytes until all streams are done, or this rank fails."""
        progress = time.monotonic()
        while buffers.failed_rank is None:
            unfinished = [stream for stream in streams if stream.reads]
            if not unfinished:
                return
            self._doorbell.clear()
            if sum(stream.advance(buffers) for stream in unfinished):
                progress = time.monotonic()
                continue
            poller = select.poll()
            poller.register(self._doorbell.fileno(), select.POLLIN)
            for stream in unfinished:
                if stream.awaits:
                    poller.register(stream.link.fileno(), stream.awaits)
            if not poller.poll(POLL_SECONDS * 1000):
                self._check_alive()
            if time.monotonic() - progress > self._timeout:
                raise LostRankError(OPERATION, self._late_ranks(unfinished))

    def _late_ranks(self, unfinished: Sequence[_Stream]) -> dict[int, str]:
        """Return the ranks that this rank waits for, and what they have not done."""
        late = f"it sent or took no data for {self._timeout:.0f} s"
        found = {stream.rank: late for stream in unfinished if stream.is_stuck}
        here = f"the ranks of its node filled or emptied no buffer for {self._timeout:.0f} s"
        return found or {self._rank: here}


def _send_failure(link: socket.socket, failed: int) -> None:
    with suppress(OSError):
        link.settimeout(SECONDS_TO_REPORT)
        link.sendall(_FRAME.pack(0, 0, 0, 0, failed))
        link.shutdown(socket.SHUT_WR)


class _Stream:
    """The reads that one connection moves in one direction.

    Args:
        rank: the rank at the other end.
        link: the connection.
        ranges, nbytes: the file and range of each read of the node, and its length.
        reads: the reads to move, in order.

    Attributes:
        awaits: the events of the connection that can make it possible to move more.
    """

    def __init__(
        self,
        rank: int,
        link: socket.socket,
        ranges: Sequence[tuple[int, int, int]],
        nbytes: Sequence[int],
        reads: deque[int],
    ) -> None:
        self.rank = rank
        self.link = link
        self.reads = reads
        self.awaits = 0
        self._ranges = ranges
        self._nbytes = nbytes
        self._frame = bytearray(_FRAME.size)  # of the read that is received
        self._parts: list[memoryview] = []

    @property
    def is_stuck(self) -> bool:
        """Whether the other end of the connection has to act before anything can be moved."""
        return bool(self._parts)

    def advance(self, buffers: SharedBuffers) -> bool:
        """Move bytes as far as possible without waiting. Return whether anything was moved.

        Raises:
            RankError: the rank at the other end has failed.
            LostRankError: the rank at the other end died.
        """
        try:
            return self._advance(buffers)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(str(error)) from error

    def _advance(self, buffers: SharedBuffers) -> bool:
        raise NotImplementedError

    def report_failure(self, failed: int) -> None:
        """Tell the rank at the other end that a rank has failed. Errors are ignored."""
        with suppress(OSError):
            self.link.settimeout(SECONDS_TO_REPORT)
            self._finish_parts()
        _send_failure(self.link, failed)

    def _finish_parts(self) -> None:
        """Complete what was sent in part, so that a frame can follow."""

    def _lost(self, reason: str) -> LostRankError:
        return LostRankError(OPERATION, {self.rank: f"its connection ended: {reason}"})

    def _check_failure(self, frame: bytes) -> None:
        failed = _FRAME.unpack(frame)[-1]
        if failed != NOBODY:
            raise RankError(OPERATION, {failed: "it failed, or did not answer in time"})

    def _slot(self, buffers: SharedBuffers) -> memoryview:
        read = self.reads[0]
        return buffers.slot(read)[: self._nbytes[read]].data


class _Receiver(_Stream):
    """Receives reads into slots."""

    def _advance(self, buffers: SharedBuffers) -> bool:
        self.awaits = 0
        if not self._parts:
            if not buffers.is_free(self.reads[0]):
                return False
            self._parts = [memoryview(self._frame), self._slot(buffers)]
        self.awaits = select.POLLIN
        count = self.link.recv_into(self._parts[0])
        if not count:
            raise self._lost("its process has ended, or its load has failed")
        self._parts[0] = self._parts[0][count:]
        if not self._parts[0]:
            del self._parts[0]
            self._complete_part(buffers)
        return True

    def _complete_part(self, buffers: SharedBuffers) -> None:
        if self._parts:
            self._check_failure(bytes(self._frame))
            *sent, _, _ = _FRAME.unpack(self._frame)
            if tuple(sent) != self._ranges[self.reads[0]]:
                raise RankError(OPERATION, {self.rank: "it sends other reads than were planned"})
        else:
            checksum = _FRAME.unpack(self._frame)[3]
            buffers.publish(self.reads.popleft(), checksum)


class _Sender(_Stream):
    """Sends reads from slots."""

    def _advance(self, buffers: SharedBuffers) -> bool:
        self.awaits = select.POLLIN
        self._receive_failure()
        if not self._parts:
            read = self.reads[0]
            if not buffers.is_filled(read):
                return False
            frame = _FRAME.pack(*self._ranges[read], buffers.checksum(read), NOBODY)
            self._parts = [memoryview(frame), self._slot(buffers)]
        self.awaits = select.POLLIN | select.POLLOUT
        self._drop(self.link.sendmsg(self._parts))
        if not self._parts:
            buffers.mark_sent(self.reads.popleft())
        return True

    def _drop(self, count: int) -> None:
        """Remove bytes that were sent."""
        while self._parts and count >= len(self._parts[0]):
            count -= len(self._parts[0])
            del self._parts[0]
        if self._parts:
            self._parts[0] = self._parts[0][count:]

    def _receive_failure(self) -> None:
        """Raise an error if the other end sent a failure, or closed the connection."""
        with suppress(BlockingIOError):
            received = self.link.recv(_FRAME.size)
            if len(received) == _FRAME.size:
                self._check_failure(received)
            raise self._lost("its process has ended, or its load has failed")

    def _finish_parts(self) -> None:
        for part in self._parts:
            self.link.sendall(part)
