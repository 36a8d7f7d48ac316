"""Communication between ranks: small messages on the CPU. Tensors are never sent."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.errors import LostRankError

TIMEOUT = timedelta(minutes=10)
CONNECTING = timedelta(minutes=1)
HEAD, LENGTH = 1024, 8
"""The size of a message's head, which one collective sends, and of the length field in the head.

Most messages fit into the head.
"""
FIRST = HEAD - LENGTH


class Group(Protocol):
    """The ranks of one save or load. All ranks call every method, in the same order."""

    @property
    def rank(self) -> int:
        """This rank, counted within the group."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def bytes_sent(self) -> int:
        """The bytes that this rank has sent so far."""
        ...

    @property
    def timeout(self) -> timedelta:
        """How long ranks wait for each other."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks at rank 0, and an empty list on other ranks."""
        ...

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Send each of rank 0's parts to its rank, and return this rank's part."""
        ...

    def broadcast(self, data: bytes) -> bytes:
        """Send rank 0's data to all ranks, and return it."""
        ...


class SoloGroup:
    """A group of one process."""

    rank = 0
    size = 1
    bytes_sent = 0
    timeout = TIMEOUT

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of the only rank."""
        return [data]

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Return the only part."""
        return parts[0]

    def broadcast(self, data: bytes) -> bytes:
        """Return the data."""
        return data


class TorchGroup:
    """A process group of `torch.distributed` whose backend moves CPU tensors.

    Args:
        group: the ranks.
        own: this object owns the group, and closes it when a rank is lost. Ranks that wait for
            this rank then fail at once instead of after the timeout.
    """

    def __init__(self, group: dist.ProcessGroup, *, own: bool = False) -> None:
        self._group: dist.ProcessGroup | None = group
        self._own = own
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.bytes_sent = 0
        options = getattr(group._get_backend(torch.device("cpu")), "options", None)
        self.timeout: timedelta = getattr(options, "_timeout", TIMEOUT)

    def close(self) -> None:
        """Close the group if this object owns it; a second call has no effect."""
        if self._own:
            # torch closes the connections when the last reference to the group is dropped.
            group, self._group = self._group, None
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def gather(self, data: bytes) -> list[bytes]:
        """Send heads by a collective, then the rest of longer messages one by one."""
        mine = _head(data)
        heads = list(_empty(self.size, HEAD)) if self.rank == 0 else None
        self._run(lambda group: dist.gather(mine, heads, group=group, group_dst=0))
        if heads is None:
            self._send(data[FIRST:], 0)
            self.bytes_sent += min(len(data), FIRST)
            return []
        return [data, *(self._rest(heads[rank], rank) for rank in range(1, self.size))]

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Send heads by a collective, then the rest of longer messages one by one."""
        mine = _empty(HEAD)
        heads = [_head(part) for part in parts] if self.rank == 0 else None
        self._run(lambda group: dist.scatter(mine, heads, group=group, group_src=0))
        if self.rank != 0:
            return self._rest(mine, 0)
        for rank in range(1, self.size):
            self._send(parts[rank][FIRST:], rank)
            self.bytes_sent += min(len(parts[rank]), FIRST)
        return parts[0]

    def broadcast(self, data: bytes) -> bytes:
        """Send the head, then the rest of a longer message."""
        head = _head(data) if self.rank == 0 else _empty(HEAD)
        self._run(lambda group: dist.broadcast(head, group=group, group_src=0))
        size, first = _parse_head(head)
        if size > FIRST:
            rest = _tensor(data[FIRST:] if self.rank == 0 else bytes(size - FIRST))
            self._run(lambda group: dist.broadcast(rest, group=group, group_src=0))
            first += _bytes(rest)
        self.bytes_sent += size if self.rank == 0 else 0
        return first

    def _rest(self, head: torch.Tensor, rank: int) -> bytes:
        """Return the whole message that begins with this head."""
        size, first = _parse_head(head)
        return first + self._receive(size - len(first), rank)

    def _send(self, data: bytes, rank: int) -> None:
        if data:
            self._run(lambda group: dist.send(_tensor(data), group=group, group_dst=rank))
            self.bytes_sent += len(data)

    def _receive(self, size: int, rank: int) -> bytes:
        content = _empty(size)
        if size:
            self._run(lambda group: dist.recv(content, group=group, group_src=rank))
        return _bytes(content)

    def _run(self, operation: Callable[[dist.ProcessGroup], object]) -> None:
        try:
            operation(self._open())
        except RuntimeError as error:
            self.close()
            # Drop the traceback: its frames refer to the group, and would keep connections open.
            raise _lost("exchanging messages with", error, self.rank) from error.with_traceback(
                None
            )

    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError(
                "the process group was closed, by close() or after a failure: create a new one"
            )
        return self._group


def _lost(doing: str, error: Exception, rank: int) -> LostRankError:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return LostRankError(
        f"{doing} the other ranks (one of them died, failed, or did not answer in time)",
        {rank: said},
    )


def _head(data: bytes) -> torch.Tensor:
    """Return the head of a message: its length and its first bytes."""
    return _tensor((len(data).to_bytes(LENGTH, "little") + data[:FIRST]).ljust(HEAD, b"\0"))


def _parse_head(head: torch.Tensor) -> tuple[int, bytes]:
    """Return the length of a message, and its first bytes, from its head."""
    data = _bytes(head)
    size = int.from_bytes(data[:LENGTH], "little")
    return size, data[LENGTH : LENGTH + size]


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="cpu")


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(content: torch.Tensor) -> bytes:
    return content.numpy().tobytes()


def own_group(timeout: timedelta) -> TorchGroup | None:
    """Return a new gloo group of all ranks, which its user owns; None if there is one rank.

    Raises:
        LostRankError: a rank died or did not arrive in time.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    default = dist.distributed_c10d._get_default_group()
    connect_timeout = timeout
    try:
        if moves_cpu_tensors(default):
            # The barrier fails at once if a rank died before, because its connections are closed.
            _barrier(default, timeout)
            connect_timeout = min(timeout, CONNECTING)
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=connect_timeout)
        group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
    except RuntimeError as error:
        raise _lost("connecting to", error, dist.get_rank()) from error.with_traceback(None)
    return TorchGroup(group, own=True)


def own_address() -> str | None:
    """Return this host's address on the network that connects the ranks; None if unknown."""
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if host is None:
        return None
    with suppress(OSError):
        for family, kind, *_, there in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as towards:
                towards.connect(there)  # nothing is sent
                return str(towards.getsockname()[0])
    return None


def _barrier(group: dist.ProcessGroup, timeout: timedelta) -> None:
    options = dist.BarrierOptions()
    options.timeout = timeout
    options.device = torch.device("cpu")
    group.barrier(options).wait()


def moves_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Return whether a process group has a backend for CPU tensors."""
    return torch.device("cpu") in group._device_types
