"""Connections between ranks of different nodes, over which they pass on file data during a load.

Each rank listens on a port of its own. Rank 0 sends the addresses, and a secret token with which
each connection begins, over the process group. The data is neither encrypted nor compressed, as in
the process group itself.

Each connection has a thread: it receives into free slots of the rank's buffer, or sends from filled
slots. On each connection, the reads follow each other in the order in which all ranks process them,
so nodes cannot deadlock (see `parts/sharing/shared_buffers.py`).
"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import LostRankError, RankError
from shardwise.parts.ranks.connections import (
    HELLO_TIMEOUT,
    TOKEN_SIZE,
    Address,
    is_token,
    receive_before,
    remaining,
    watch_host,
)
from shardwise.parts.sharing.node_ranks import NodeRanks
from shardwise.parts.sharing.reads import NO_RANK, Reads
from shardwise.parts.sharing.shared_buffers import SharedBuffers

OPERATION = "passing on data between nodes"
SECONDS_TO_REPORT = 2.0
"""The longest time to tell a rank of another node that this rank has failed."""
POLL_SECONDS = 0.2
_HELLO = struct.Struct(f"<{TOKEN_SIZE}sq")
_FRAME = struct.Struct("<QQQIq")
"""Before each read: its file, its range, its checksum, and the rank that has failed, or -1."""

Connections = dict[int, socket.socket]
PlannedRead = tuple[int, int, tuple[int, int, int]]
"""The index of a read, its length in bytes, and its file and range."""


def connect(
    rank: int,
    targets: Mapping[int, Address],
    sources: Iterable[int],
    listener: socket.socket,
    token: bytes,
    timeout: float,
    cleanup: ExitStack,
) -> tuple[Connections, Connections]:
    """Connect to some ranks, and accept the connections of others.

    Args:
        rank: this rank.
        targets: the addresses of the ranks to connect to.
        sources: the ranks that connect to this rank.
        listener: from `listen`.
        token: the secret that all ranks know.
        timeout: the longest wait, in seconds.
        cleanup: closes the connections.

    Returns:
        The connections to `targets` and from `sources`.

    Raises:
        LostRankError: a rank cannot be reached, or did not connect in time.
    """
    deadline = Deadline(timeout)
    outgoing: Connections = {}
    for target, address in targets.items():
        try:
            made = socket.create_connection(address, remaining(deadline))
            outgoing[target] = cleanup.enter_context(made)
            made.sendall(_HELLO.pack(token, rank))
        except OSError as error:  # noqa: PERF203 - of which rank
            reason = f"it cannot be reached at {address[0]}:{address[1]}: {error}"
            raise LostRankError(OPERATION, {target: reason}) from error
    missing = set(sources)
    incoming: Connections = {}
    while missing:
        try:
            listener.settimeout(remaining(deadline))
            accepted = cleanup.enter_context(listener.accept()[0])
        except OSError as error:
            late = dict.fromkeys(sorted(missing), f"did not connect within {timeout:.0f} s")
            raise LostRankError(OPERATION, late) from error
        with suppress(OSError):
            patience = Deadline(min(HELLO_TIMEOUT, remaining(deadline)))
            sent, source = _HELLO.unpack(receive_before(patience, accepted, _HELLO.size))
            if is_token(sent, token) and source in missing:
                missing.remove(source)
                incoming[source] = accepted
    for connection in (*outgoing.values(), *incoming.values()):
        watch_host(connection)
    return outgoing, incoming


class Links:
    """The connections of this rank to ranks of other nodes, during the reads of a load.

    Args:
        outgoing, incoming: connections by rank; see `connect`.
        node: the ranks of this node.
    """

    def __init__(self, outgoing: Connections, incoming: Connections, node: NodeRanks) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._node = node

    def run(self, reads: Reads, nbytes: Sequence[int], buffers: SharedBuffers) -> None:
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
        is_own = reads.reader == buffers.local_rank
        jobs: list[Callable[[], None]] = []
        for links, column, move in (
            (self._incoming, reads.source, _Stream.receive),
            (self._outgoing, reads.target, _Stream.send),
        ):
            for rank, link in links.items():
                stream = _Stream(rank, link, buffers, self._node)
                rows = np.flatnonzero(is_own & (column == rank)).tolist()
                places = [(int(reads.file[i]), int(reads.low[i]), int(reads.high[i])) for i in rows]
                planned = [(i, nbytes[i], place) for i, place in zip(rows, places, strict=True)]
                jobs.append(partial(move, stream, planned))

        def run(job: Callable[[], None]) -> None:
            try:
                job()
            except BaseException as error:
                buffers.mark_failed(error)
                raise

        try:
            with ThreadPoolExecutor(max(1, len(jobs)), "shardwise-link") as pool:
                for done in as_completed([pool.submit(run, job) for job in jobs]):
                    done.result()
        finally:
            if buffers.failed_rank is not None:
                self.report_failure(buffers.failed_rank)

    def report_failure(self, failed: int | None = None) -> None:
        """Tell the ranks at the other ends that a rank failed; by default, this rank."""
        frame = _FRAME.pack(0, 0, 0, 0, self._node.rank if failed is None else failed)
        for link in (*self._outgoing.values(), *self._incoming.values()):
            with suppress(OSError):
                link.settimeout(SECONDS_TO_REPORT)
                link.sendall(frame)
                link.shutdown(socket.SHUT_WR)


class _Stream:
    """What one connection moves in one direction.

    Args:
        rank: the rank at the other end.
        link: the connection.
        buffers: the slots to fill, and to send from.
        node: the ranks of this node.
    """

    def __init__(
        self, rank: int, link: socket.socket, buffers: SharedBuffers, node: NodeRanks
    ) -> None:
        self._rank = rank
        self._link = link
        self._buffers = buffers
        self._node = node
        link.settimeout(POLL_SECONDS)

    def receive(self, reads: Sequence[PlannedRead]) -> None:
        """Receive reads into slots, until this rank fails.

        Raises:
            RankError: the rank at the other end, or another rank, has failed.
            LostRankError: the rank at the other end died, or made no progress before the timeout.
        """
        for read, nbytes, place in reads:
            frame = bytearray(_FRAME.size)
            if not self._wait(partial(self._buffers.is_free, read)):
                return
            if not self._move(memoryview(frame), self._link.recv_into):
                return
            _check_frame(frame)
            *sent, checksum, _ = _FRAME.unpack(frame)
            if tuple(sent) != place:
                advice = "use the same version of shardwise on all nodes"
                why = f"it sends other reads than were planned: {advice}"
                raise RankError(OPERATION, {self._rank: why})
            slot = self._buffers.slot(read)[:nbytes].data
            if not self._move(slot, self._link.recv_into):
                return
            self._buffers.publish(read, checksum)

    def send(self, reads: Sequence[PlannedRead]) -> None:
        """Send reads from slots, until this rank fails. Raises errors as `receive` does."""
        for read, nbytes, place in reads:
            if not self._wait(partial(self._is_filled, read)):
                return
            frame = _FRAME.pack(*place, self._buffers.checksum(read), NO_RANK)
            for data in (memoryview(frame), self._buffers.slot(read)[:nbytes].data):
                if not self._move(data, self._link.send):
                    return
            self._buffers.mark_sent(read)

    def _is_filled(self, read: int) -> bool:
        self._check_receiver()
        return self._buffers.is_filled(read)

    def _wait(self, is_ready: Callable[[], bool]) -> bool:
        """Wait until a slot is ready. Return whether it is; False if this rank has failed."""

        def poll() -> bool | None:
            return False if self._has_failed() else is_ready() or None

        late = (
            f"no rank of its node read or copied data for {self._node.timeout:.0f} s: see the "
            "first error of these ranks"
        )
        return self._node.wait(poll, lambda: {self._node.rank: late})

    def _move(self, data: memoryview, act: Callable[[memoryview], int]) -> bool:
        """Send or receive all of `data`. Return whether it was moved; False if this rank failed."""
        deadline = Deadline(self._node.timeout)
        while data:
            try:
                count = act(data)
            except TimeoutError as error:
                if self._has_failed():
                    return False
                self._node.check_alive()
                if act == self._link.send:
                    self._check_receiver()
                if deadline.has_passed():
                    late = f"it sent or took no data for {self._node.timeout:.0f} s"
                    raise LostRankError(OPERATION, {self._rank: late}) from error
                continue
            except OSError as error:
                self._check_receiver()
                raise self._lost(str(error)) from error
            if not count:
                raise self._lost("its process has ended, or its load has failed")
            data = data[count:]
            deadline = Deadline(self._node.timeout)
        return True

    def _check_receiver(self) -> None:
        """Raise an error if the rank that receives sent a failure, or closed the connection."""
        poller = select.poll()
        poller.register(self._link.fileno(), select.POLLIN)
        if poller.poll(0):
            with suppress(OSError):
                _check_frame(self._link.recv(_FRAME.size))
            raise self._lost("its process has ended, or its load has failed")

    def _has_failed(self) -> bool:
        return self._buffers.failed_rank is not None

    def _lost(self, reason: str) -> LostRankError:
        return LostRankError(OPERATION, {self._rank: f"its connection ended: {reason}"})


def _check_frame(frame: bytes | bytearray) -> None:
    """Raise an error if a frame says that a rank has failed."""
    if len(frame) == _FRAME.size and (failed := _FRAME.unpack(frame)[-1]) != NO_RANK:
        raise RankError(OPERATION, {failed: "it failed, or did not answer in time"})
