"""TCP connections between ranks: addresses, and how each side proves that it belongs to the job."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from shardwise.kernel.deadline import Deadline

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Address = tuple[str, int]
"""A host and a port."""
LOOPBACK = "127.0.0.1"
TOKEN_SIZE = 16
"""The size of the token with which a connection begins, in bytes."""
HELLO_TIMEOUT = 5.0
"""The seconds in which a process that has connected has to say who it is."""
BACKLOG = 4096
"""Connections that may wait until this rank accepts them; the kernel may allow fewer."""

LOST_SECONDS = 10
"""How long a host may leave packets unanswered before it counts as lost. Virtual machines and
networks stop for seconds, while they are moved or changed, and then go on."""
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 2,
    socket.TCP_KEEPINTVL: 2,
    socket.TCP_USER_TIMEOUT: 1000 * LOST_SECONDS,
}
_ANY_NETWORK = "192.0.2.1", 9
"""An address of no host; the way to it is the way to other networks."""


def watch_host(connection: socket.socket) -> None:
    """Have the kernel end a connection if the other host is lost, after about `LOST_SECONDS`.

    A suspended process is not lost: its kernel answers.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def own_address(store: Store | None = None) -> str | None:
    """Return this host's address in the network that connects the ranks; None if unknown.

    Args:
        store: the store of the ranks; by default, that of the default process group.
    """
    if store is None and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    if store is None or (address := address_of(store)) is None:
        return None
    host, port = address
    own = _address_towards(host, port)
    if own is not None and _is_loopback(own) and host != "localhost" and not _is_loopback(host):
        # Some systems map a host's own name to loopback, where other hosts cannot reach it.
        return _address_towards(*_ANY_NETWORK) or own
    return own


def address_of(store: Store) -> Address | None:
    """Return the host and port of a store; None if it has none, such as a `FileStore`."""
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return None if host is None or port is None else (host, port)


def _address_towards(host: str, port: int) -> str | None:
    """Return this host's address on the way to another one."""
    with suppress(OSError):
        for family, kind, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # chooses the interface, but sends nothing
                return str(probe.getsockname()[0])
    return None


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def listen(host: str, cleanup: ExitStack) -> socket.socket:
    """Listen on a free port of this host.

    Raises:
        OSError: the address does not belong to this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    cleanup.callback(listener.close)
    return listener


class _Closable(Protocol):
    def close(self) -> None: ...


def close_in_forked_children(resource: _Closable) -> None:
    """Close a resource in children that are forked later, where it would outlive this process."""
    reference = weakref.ref(resource)

    def close() -> None:
        closable = reference()
        if closable is not None:
            closable.close()

    os.register_at_fork(after_in_child=close)


def listen_for_ranks(
    cleanup: ExitStack, store: Store | None = None
) -> tuple[Address, socket.socket]:
    """Listen on the address that other hosts can reach; on loopback if none is known.

    The first of these addresses that belongs to this host: the one on the way to the store of the
    ranks; that of the host's name, unless it is a loopback address, as on some systems; the one on
    the way to other networks.
    """
    for host in _own_addresses(store):
        with suppress(OSError):
            listener = listen(host, cleanup)
            return (host, listener.getsockname()[1]), listener
    listener = listen(LOOPBACK, cleanup)
    return (LOOPBACK, listener.getsockname()[1]), listener


def _own_addresses(store: Store | None) -> Iterator[str]:
    """Yield the addresses of this host, the best one first."""
    if (address := own_address(store)) is not None:
        yield address
    with suppress(OSError):
        if not _is_loopback(address := socket.gethostbyname(socket.gethostname())):
            yield address
    if (address := _address_towards(*_ANY_NETWORK)) is not None:
        yield address


def is_token(given: bytes, token: bytes) -> bool:
    """Return whether a process has given the right token."""
    return hmac.compare_digest(given, token)


def proof_of(token: bytes) -> bytes:
    """Return what proves to a process that has given the token that this one also knows it."""
    return hashlib.blake2b(token, digest_size=TOKEN_SIZE, person=b"accepted").digest()


def receive_before(deadline: Deadline, connection: socket.socket, count: int) -> bytes:
    """Return the next bytes of a connection, which have to arrive before the deadline together.

    Raises:
        OSError: they do not arrive in time, or the connection was closed.
    """
    data = b""
    while len(data) < count:
        connection.settimeout(remaining(deadline))
        received = connection.recv(count - len(data))
        if not received or deadline.has_passed():
            raise ConnectionError("the connection was closed, or is too slow")
        data += received
    return data


def remaining(deadline: Deadline) -> float:
    """Return the seconds until a deadline, for a time-out of a socket, which must not be 0."""
    return max(deadline.seconds_left(), 0.001)
