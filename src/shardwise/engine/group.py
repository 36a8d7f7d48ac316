"""How ranks talk while they plan: few, small messages that no accelerator sees."""

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
"""Bytes of a message that a collective carries, and of its length therein: most fit into one."""
FIRST = HEAD - LENGTH


class Group(Protocol):
    """The ranks of one save or load. Every verb is called by all of them, in the same order."""

    @property
    def rank(self) -> int:
        """This rank, counted within the group."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent so far."""
        ...

    @property
    def timeout(self) -> timedelta:
        """How long ranks wait for each other."""
        ...

    def gather(self, data: bytes) -> list[bytes]:
        """All ranks' data at rank 0; an empty list elsewhere."""
        ...

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Rank 0's parts, each to its rank."""
        ...

    def broadcast(self, data: bytes) -> bytes:
        """Rank 0's data to all."""
        ...


class SoloGroup:
    """One process, which has nobody to talk to."""

    rank = 0
    size = 1
    bytes_sent = 0
    timeout = TIMEOUT

    def gather(self, data: bytes) -> list[bytes]:
        """The data of the only rank."""
        return [data]

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """The only part."""
        return parts[0]

    def broadcast(self, data: bytes) -> bytes:
        """The data."""
        return data


class TorchGroup:
    """A process group of `torch.distributed` whose backend moves CPU tensors.

    Args:
        group: the ranks.
        own: nobody else talks over it. So it can be closed, and is once a rank is lost: those that
            wait for this one learn of it at once, and not when their time is up.
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
        """Let go of a group of its own; nothing if that was done before."""
        if self._own:
            # Connections are closed when nothing refers to the group any more.
            group, self._group = self._group, None
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def gather(self, data: bytes) -> list[bytes]:
        """Heads by a collective, then what is left of each rank's bytes by themselves."""
        mine = _head(data)
        heads = list(_empty(self.size, HEAD)) if self.rank == 0 else None
        self._run(lambda group: dist.gather(mine, heads, group=group, group_dst=0))
        if heads is None:
            self._send(data[FIRST:], 0)
            self.bytes_sent += min(len(data), FIRST)
            return []
        return [data, *(self._rest(heads[rank], rank) for rank in range(1, self.size))]

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Heads by a collective, then what is left of each rank's bytes by themselves."""
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
        """The head first, then what is left."""
        head = _head(data) if self.rank == 0 else _empty(HEAD)
        self._run(lambda group: dist.broadcast(head, group=group, group_src=0))
        size, first = _opened(head)
        if size > FIRST:
            rest = _tensor(data[FIRST:] if self.rank == 0 else bytes(size - FIRST))
            self._run(lambda group: dist.broadcast(rest, group=group, group_src=0))
            first += _bytes(rest)
        self.bytes_sent += size if self.rank == 0 else 0
        return first

    def _rest(self, head: torch.Tensor, rank: int) -> bytes:
        """All of what a rank sends that begins so."""
        size, first = _opened(head)
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
            # The frames that it went through refer to the group, and would keep it open.
            raise _lost("talking to", error, self.rank) from error.with_traceback(None)

    def _open(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("it gave up before, or closed; make another")
        return self._group


def _lost(doing: str, error: Exception, rank: int) -> LostRankError:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return LostRankError(
        f"{doing} the other ranks (one of them died, gave up, or did not answer in time)",
        {rank: said},
    )


def _head(data: bytes) -> torch.Tensor:
    """The length of a message, and its first bytes."""
    return _tensor((len(data).to_bytes(LENGTH, "little") + data[:FIRST]).ljust(HEAD, b"\0"))


def _opened(head: torch.Tensor) -> tuple[int, bytes]:
    """The inverse: the length of a message, and its first bytes, which may be all."""
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
    """A new gloo group of all ranks, for one owner to talk over; None if there is only one.

    Raises:
        LostRankError: a rank died, or did not come in time.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    default = dist.distributed_c10d._get_default_group()
    patience = timeout
    try:
        if moves_cpu_tensors(default):
            # A rank that died before it came is noticed here at once: its connections are closed.
            _meet(default, timeout)
            patience = min(timeout, CONNECTING)
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=patience)
        group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
    except RuntimeError as error:
        raise _lost("meeting", error, dist.get_rank()) from error.with_traceback(None)
    return TorchGroup(group, own=True)


def own_address() -> str | None:
    """The address of this host on the network over which the ranks have met; None if not known."""
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


def _meet(group: dist.ProcessGroup, timeout: timedelta) -> None:
    options = dist.BarrierOptions()
    options.timeout = timeout
    options.device = torch.device("cpu")
    group.barrier(options).wait()


def moves_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Whether a process group has a backend for CPU tensors."""
    return torch.device("cpu") in group._device_types
