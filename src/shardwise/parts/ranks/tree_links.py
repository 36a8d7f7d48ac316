"""Connections of a tree of ranks, over which they send messages without waiting for each other."""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from contextlib import suppress
from enum import IntEnum

import msgspec

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.errors import LostRankError, RankError
from shardwise.parts.ranks.connections import watch_host

MOST_BYTES = 1 << 30
"""The largest message, in bytes."""
MOST_BYTES_OF_NEWS = 1 << 16
"""The largest message about failed or missing ranks, in bytes."""
MOST_REASONS, MOST_TEXT = 16, 500
"""Of how many failed ranks the reasons are told, and the most characters of each."""
CHUNK = 1 << 20
"""The most bytes to receive at once. Memory grows with what arrives, not with what is announced."""
MOST_CHUNKS = 256
"""How often to receive before the other connections, and the time-out, have their turn."""
MOST_WAITING = 1024
"""How many messages may wait until this rank takes them. The others stay in the connection."""
FRESH_SECONDS = 3.0
"""How long to believe what a rank has said about missing ranks. While it waits, it repeats it."""
_HEAD = struct.Struct("<4sBxxxQ")
_MAGIC = b"swm1"


class Kind(IntEnum):
    """What a message is."""

    REDUCE = 1
    """The combined data of a rank and those below it, for the rank above."""
    BROADCAST = 2
    """The data of rank 0, for the ranks below."""
    FAILED = 3
    """Ranks that failed."""
    MISSING = 4
    """Ranks that others wait for."""
    LEAVING = 5
    """This rank has sent its last message."""


@prepare_decoding
class Failure(msgspec.Struct, array_like=True, frozen=True):
    """Why ranks cannot go on.

    Attributes:
        operation: what failed.
        reasons: why, by rank.
        is_lost: whether these ranks are lost.
    """

    operation: str
    reasons: dict[int, str]
    is_lost: bool

    @classmethod
    def of(cls, error: RankError) -> Failure:
        """Return what an error says."""
        return cls(error.operation, error.failures, isinstance(error, LostRankError))

    def error(self) -> RankError:
        """Return the error that says this."""
        kind = LostRankError if self.is_lost else RankError
        return kind(self.operation, self.reasons)

    def shortened(self) -> Failure:
        """Return the part that fits into a message."""
        first = sorted(self.reasons.items())[:MOST_REASONS]
        reasons = {rank: text[:MOST_TEXT] for rank, text in first}
        return Failure(self.operation, reasons, self.is_lost)


class Link:
    """The connection of this rank to the rank above it, or to a rank below it.

    Args:
        rank: the rank at the other end.
        host: the name of its host.
        connection: the connection; this object closes it.

    Attributes:
        inbox: the data that has arrived, and was not taken yet.
        news: the messages about failed and missing ranks that were not taken yet.
        old_news: how many of these were sent before the last data: their ranks are not missing now.
        bytes_sent, bytes_received: the bytes of all messages.
        ended: why the connection has ended; empty if it has not.
        has_left: whether the other rank has said that it leaves.
        told: the ranks that this rank waits for, as the other rank was last told.
    """

    def __init__(self, rank: int, host: str, connection: socket.socket) -> None:
        self.rank, self.host = rank, host
        self.inbox = deque[bytes]()
        self.news = deque[tuple[Kind, bytes]]()
        self.old_news = 0
        self.bytes_sent = self.bytes_received = 0
        self.ended = ""
        self.has_left = False
        self.told: list[tuple[int, str]] = []
        self._reported: list[tuple[int, str]] = []
        self._reported_at = 0.0
        self._connection = connection
        self._outgoing = deque[memoryview]()
        self._head, self._body = bytearray(), bytearray()
        self._announced: tuple[Kind, int] | None = None
        connection.setblocking(False)
        watch_host(connection)

    def fileno(self) -> int:
        """Return the file descriptor of the connection."""
        return self._connection.fileno()

    @property
    def is_sending(self) -> bool:
        """Whether there are bytes to send."""
        return bool(self._outgoing)

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended, but the other rank did not leave after a message."""
        return bool(self.ended) and not (self.has_left and self.inbox)

    @property
    def is_full(self) -> bool:
        """Whether so many messages wait that no more are received."""
        return len(self.inbox) >= MOST_WAITING or sum(map(len, self.inbox)) > MOST_BYTES

    @property
    def reported(self) -> list[tuple[int, str]]:
        """The ranks that the other rank waits for, with their hosts; none if it does not say so."""
        is_fresh = time.monotonic() - self._reported_at < FRESH_SECONDS
        return self._reported if is_fresh else []

    def report(self, missing: list[tuple[int, str]]) -> None:
        """Note the ranks that the other rank waits for."""
        self._reported, self._reported_at = missing, time.monotonic()

    def missing(self) -> list[tuple[int, str]]:
        """Return the ranks without which the other rank cannot send its message."""
        return self.reported or [(self.rank, self.host)]

    def put(self, kind: Kind, data: bytes) -> None:
        """Send a message from now on. If the connection has ended, do nothing."""
        if self.ended:
            return
        if kind in {Kind.REDUCE, Kind.BROADCAST}:
            self.told = []  # the other rank forgets it when the message arrives
        self._outgoing += (memoryview(_HEAD.pack(_MAGIC, kind, len(data))), memoryview(data))
        self.bytes_sent += len(data)

    def send_and_receive(self, *, can_receive: bool) -> None:
        """Send what the connection takes now, and receive what has arrived; set `ended`."""
        try:
            if can_receive:
                self._receive()
            self._send()
        except OSError as error:
            with suppress(OSError):  # the other rank may have said why before it closed
                self._receive()
            host = f" from host {self.host}" if self.host else ""
            details = f" ({error})" if str(error) else ""
            self.end(
                f"its connection{host} was closed{details}: its process ended, or its network "
                "failed; look for the first error in its log"
            )

    def end(self, reason: str) -> None:
        """Send and receive nothing from now on."""
        self.ended = reason
        self._outgoing.clear()

    def _send(self) -> None:
        while self._outgoing:
            first = self._outgoing[0]
            try:
                sent = self._connection.send(first) if len(first) else 0
            except (BlockingIOError, InterruptedError):
                return
            if sent < len(first):
                self._outgoing[0] = first[sent:]
            else:
                self._outgoing.popleft()

    def _receive(self) -> None:
        for _ in range(MOST_CHUNKS):
            if self.ended or self.is_full:
                return
            announced = self._announced
            missing = _HEAD.size - len(self._head) if announced is None else announced[1]
            if announced is not None:
                missing -= len(self._body)
            try:
                data = self._connection.recv(min(missing, CHUNK)) if missing else b""
            except (BlockingIOError, InterruptedError):
                return
            if missing and not data:
                raise ConnectionResetError
            if announced is None:
                self._head += data
                self._read_head()
            else:
                self._body += data
                self._read_body(*announced)

    def _read_head(self) -> None:
        if len(self._head) < _HEAD.size:
            return
        magic, number, size = _HEAD.unpack(self._head)
        self._head.clear()
        most = MOST_BYTES if number in {Kind.REDUCE, Kind.BROADCAST} else MOST_BYTES_OF_NEWS
        if magic != _MAGIC or number not in set(Kind) or size > most:
            self.end("it sent an invalid message, or one that is too large")
            return
        self._announced = Kind(number), size

    def _read_body(self, kind: Kind, size: int) -> None:
        if len(self._body) < size:
            return
        self._announced = None
        data, self._body = bytes(self._body), bytearray()
        self.bytes_received += size
        if kind in {Kind.REDUCE, Kind.BROADCAST}:
            self.inbox.append(data)
            self.report([])
            self.old_news = len(self.news)
        else:
            self.news.append((kind, data))

    def detach(self) -> None:
        """Close this process's copy of the connection, and leave the connection alone."""
        self._connection.close()

    def close(self) -> None:
        """Close the connection. What was sent still arrives."""
        with suppress(OSError):  # unread bytes would make the kernel reset the connection
            self._receive()
        self._connection.close()
