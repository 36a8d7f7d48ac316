"""Connections between ranks of different nodes, for the data that a load passes on.

Each rank listens on a port of its own. Rank 0 sends the addresses, and a secret token with which
each connection begins, over the process group. The data is neither encrypted nor compressed, as in
the process group itself.
"""

from __future__ import annotations

import hmac
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress

from shardwise.engine.group import Address
from shardwise.errors import LostRankError

OPERATION = "passing on data between nodes"
TOKEN_SIZE = 16
"""The size of the token with which a connection begins, in bytes."""
MEASURED_BYTES = 8 << 20
"""The bytes that each rank sends to measure the network."""
DISCARDED_AT_ONCE = 256 << 10
HELLO_TIMEOUT = 5.0
"""The seconds in which a rank that has connected has to send its number."""
_SIZE = 8
_HELLO = struct.Struct(f"<{TOKEN_SIZE}sq")

Connections = dict[int, socket.socket]


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
    deadline = time.monotonic() + timeout
    outgoing: Connections = {}
    for target, address in targets.items():
        with _rank_in_errors(target, address):
            made = socket.create_connection(address, _remaining(deadline))
            outgoing[target] = cleanup.enter_context(made)
            made.sendall(_HELLO.pack(token, rank))
    missing = set(sources)
    incoming: Connections = {}
    while missing:
        try:
            listener.settimeout(_remaining(deadline))
            accepted = cleanup.enter_context(listener.accept()[0])
        except OSError as error:
            late = dict.fromkeys(sorted(missing), f"did not connect within {timeout:.0f} s")
            raise LostRankError(OPERATION, late) from error
        with suppress(OSError):
            hello_deadline = min(deadline, time.monotonic() + HELLO_TIMEOUT)
            sent, source = _HELLO.unpack(_receive_before(hello_deadline, accepted, _HELLO.size))
            if hmac.compare_digest(sent, token) and source in missing:
                missing.remove(source)
                incoming[source] = accepted
    for connection in (*outgoing.values(), *incoming.values()):
        connection.settimeout(timeout)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return outgoing, incoming


@contextmanager
def _rank_in_errors(rank: int, address: Address) -> Iterator[None]:
    """Add the rank to the message of an error of a connection."""
    try:
        yield
    except OSError as error:
        reason = f"it cannot be reached at {address[0]}:{address[1]}: {error}"
        raise LostRankError(OPERATION, {rank: reason}) from error


def _remaining(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _receive_before(deadline: float, connection: socket.socket, count: int) -> bytes:
    """Return the next bytes of a connection, which have to arrive before the deadline together."""
    data = b""
    while len(data) < count:
        connection.settimeout(_remaining(deadline))
        received = connection.recv(count - len(data))
        if not received or time.monotonic() > deadline:
            raise ConnectionError("the connection was closed, or is too slow")
        data += received
    return data


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    """Return the next bytes of a connection.

    Raises:
        OSError: the connection ended, or timed out.
    """
    data = bytearray(count)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise ConnectionError("the connection was closed")
        view = view[received:]
    return bytes(data)


def _discard(connection: socket.socket, count: int) -> None:
    """Receive bytes, and discard them."""
    buffer = memoryview(bytearray(DISCARDED_AT_ONCE))
    while count:
        received = connection.recv_into(buffer[:count])
        if not received:
            raise ConnectionError("the connection was closed")
        count -= received


def measure_network(outgoing: Iterable[socket.socket], incoming: Iterable[socket.socket]) -> float:
    """Send some bytes over each connection, and measure how fast this rank receives.

    Returns:
        The bytes per second of all incoming connections together; 0 if there are none.

    Raises:
        OSError: a connection ended, or timed out.
    """
    targets = list(outgoing)

    def send() -> None:
        data = bytes(MEASURED_BYTES // len(targets))
        for target in targets:
            target.sendall(len(data).to_bytes(_SIZE, "little") + data)

    received, seconds = 0, 0.0
    with ThreadPoolExecutor(1, "shardwise-measure") as pool:
        sent = pool.submit(send) if targets else None
        for source in incoming:
            size = int.from_bytes(receive_exactly(source, _SIZE), "little")
            if size > MEASURED_BYTES:
                raise ConnectionError(f"the other end wants to send {size} bytes")
            start = time.perf_counter()
            _discard(source, size)
            seconds += time.perf_counter() - start
            received += size
        if sent is not None:
            sent.result()
    return received / max(seconds, 1e-6)
