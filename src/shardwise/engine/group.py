"""Groups of ranks that send each other small messages on the CPU. Tensor data is never sent."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.errors import LostRankError
from shardwise.events import Recorder

TIMEOUT = timedelta(minutes=10)
CONNECT_TIMEOUT = timedelta(minutes=1)
HEAD_SIZE = 1024
"""The size of the head of a message. One collective sends the heads of all ranks.

Most messages fit into their heads."""
LENGTH_SIZE = 8
"""The size of the length field at the start of the head."""
FIRST_SIZE = HEAD_SIZE - LENGTH_SIZE
"""The number of bytes of a message that fit into its head."""
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

Address = tuple[str, int]
"""A host and a port."""
Combine = Callable[[list[bytes]], bytes]


class Group(Protocol):
    """The ranks of one save or load. All ranks call every method, in the same order."""

    @property
    def rank(self) -> int:
        """The index of this rank in the group."""
        ...

    @property
    def size(self) -> int:
        """The number of ranks."""
        ...

    @property
    def bytes_sent(self) -> int:
        """The bytes of the messages that this rank has sent so far."""
        ...

    @property
    def bytes_received(self) -> int:
        """The bytes of the messages that this rank has received so far."""
        ...

    @property
    def timeout(self) -> timedelta:
        """The longest time that ranks wait for each other."""
        ...

    def reduce(self, data: bytes, combine: Combine) -> bytes:
        """Combine the data of all ranks.

        Args:
            data: what this rank adds.
            combine: makes one message of several. It must be associative, and must not depend on
                the order of the messages.

        Returns:
            The combined data on rank 0, and `b""` on other ranks.
        """
        ...

    def broadcast(self, data: bytes) -> bytes:
        """Send rank 0's data to all ranks, and return it."""
        ...


class TimedGroup:
    """A group that counts the time of its methods as waits for other ranks.

    Args:
        group: the ranks.
        recorder: gets the waits, and the time of the first agreement.
    """

    def __init__(self, group: Group, recorder: Recorder) -> None:
        self._group, self._recorder = group, recorder
        self.rank, self.size, self.timeout = group.rank, group.size, group.timeout

    @property
    def bytes_sent(self) -> int:
        """See `Group.bytes_sent`."""
        return self._group.bytes_sent

    @property
    def bytes_received(self) -> int:
        """See `Group.bytes_received`."""
        return self._group.bytes_received

    def reduce(self, data: bytes, combine: Combine) -> bytes:
        """See `Group.reduce`."""
        with self._recorder.waiting():
            return self._group.reduce(data, combine)

    def broadcast(self, data: bytes) -> bytes:
        """See `Group.broadcast`."""
        with self._recorder.waiting():
            received = self._group.broadcast(data)
        self._recorder.note_agreement()
        return received


class SoloGroup:
    """A group of only this process, as `group=` of `save` and `load` in a job of several processes.

    Example:

        if rank == 0:
            sw.save(path, state, group=sw.SoloGroup())
    """

    rank = 0
    size = 1
    bytes_sent = bytes_received = 0
    timeout = TIMEOUT

    def reduce(self, data: bytes, combine: Combine) -> bytes:
        """Return the data of the only rank."""
        return data

    def broadcast(self, data: bytes) -> bytes:
        """Return the data."""
        return data


class TorchGroup:
    """A process group of `torch.distributed` whose backend moves CPU tensors.

    Args:
        group: the ranks.
        own: whether this object owns the group. An owner closes the group when a rank is lost, so
            that ranks which wait for this rank fail at once instead of after the timeout.
    """

    def __init__(self, group: dist.ProcessGroup, *, own: bool = False) -> None:
        self._group: dist.ProcessGroup | None = group
        self._own = own
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.bytes_sent = self.bytes_received = 0
        options = getattr(group._get_backend(torch.device("cpu")), "options", None)
        self.timeout: timedelta = getattr(options, "_timeout", TIMEOUT)

    def close(self) -> None:
        """Close the group if this object owns it; a second call has no effect."""
        if self._own:
            # torch closes the connections when the last reference to the group is dropped.
            group, self._group = self._group, None
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)

    def reduce(self, data: bytes, combine: Combine) -> bytes:
        """Combine the data of all ranks on rank 0."""
        gathered = self._gather(data)
        self.bytes_received += sum(map(len, gathered))
        return combine(gathered) if gathered else b""

    def _gather(self, data: bytes) -> list[bytes]:
        """Gather the heads by a collective, then receive the rest of longer messages."""
        own_head = _head(data)
        heads = list(_empty(self.size, HEAD_SIZE)) if self.rank == 0 else None
        self._run(lambda group: dist.gather(own_head, heads, group=group, group_dst=0))
        if heads is None:
            if len(data) > FIRST_SIZE:
                rest = _tensor(data[FIRST_SIZE:])
                self._run(lambda group: dist.send(rest, group=group, group_dst=0))
            self.bytes_sent += len(data)
            return []
        return [data, *(self._receive_rest(heads[rank], rank) for rank in range(1, self.size))]

    def broadcast(self, data: bytes) -> bytes:
        """Send the head, then the rest of a longer message."""
        head = _head(data) if self.rank == 0 else _empty(HEAD_SIZE)
        self._run(lambda group: dist.broadcast(head, group=group, group_src=0))
        size, first = _parse_head(head)
        if size > FIRST_SIZE:
            rest = _tensor(data[FIRST_SIZE:] if self.rank == 0 else bytes(size - FIRST_SIZE))
            self._run(lambda group: dist.broadcast(rest, group=group, group_src=0))
            first += _bytes(rest)
        if self.rank == 0:
            self.bytes_sent += size
        else:
            self.bytes_received += size
        return first

    def _receive_rest(self, head: torch.Tensor, rank: int) -> bytes:
        """Receive the rest of a message, and return the whole message."""
        size, first = _parse_head(head)
        rest = _empty(size - len(first))
        if len(rest):
            self._run(lambda group: dist.recv(rest, group=group, group_src=rank))
        return first + _bytes(rest)

    def _run(self, operation: Callable[[dist.ProcessGroup], object]) -> None:
        try:
            operation(self._open_group())
        except RuntimeError as error:
            self.close()
            # Drop the traceback: its frames refer to the group, and would keep connections open.
            raise _lost_rank_error("exchanging messages with", error, self.rank) from (
                error.with_traceback(None)
            )

    def _open_group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError(
                "the process group was closed, by close() or after a failure: create a new "
                "Checkpointer, or restart the job"
            )
        return self._group


def _lost_rank_error(action: str, error: Exception, rank: int) -> LostRankError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return LostRankError(
        f"{action} the other ranks (a rank died, failed, did not make this call, or did not answer "
        "in time: look for the first error in the logs of all ranks; the ranks listed here only "
        "noticed it)",
        {rank: reason},
    )


def _head(data: bytes) -> torch.Tensor:
    """Return the head of a message: its length and its first bytes."""
    return _tensor(
        (len(data).to_bytes(LENGTH_SIZE, "little") + data[:FIRST_SIZE]).ljust(HEAD_SIZE, b"\0")
    )


def _parse_head(head: torch.Tensor) -> tuple[int, bytes]:
    """Return the length of a message, and its first bytes, from its head."""
    data = _bytes(head)
    size = int.from_bytes(data[:LENGTH_SIZE], "little")
    return size, data[LENGTH_SIZE : LENGTH_SIZE + size]


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="cpu")


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(content: torch.Tensor) -> bytes:
    return content.numpy().tobytes()


def own_group(timeout: timedelta) -> TorchGroup | None:
    """Return a new gloo group of all ranks, which the caller owns; None if there is only one rank.

    Raises:
        LostRankError: a rank died or did not arrive in time.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    default = dist.distributed_c10d._get_default_group()
    connect_timeout = timeout
    try:
        if has_cpu_backend(default):
            # The barrier fails at once if a rank died before, because its connections are closed.
            _barrier(default, timeout)
            connect_timeout = min(timeout, CONNECT_TIMEOUT)
        with _watched_connections():
            group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=connect_timeout)
        group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)
    except RuntimeError as error:
        raise _lost_rank_error("connecting to", error, dist.get_rank()) from error.with_traceback(
            None
        )
    return TorchGroup(group, own=True)


@contextmanager
def _watched_connections() -> Iterator[None]:
    """Have the kernel watch the TCP connections that this process opens in the block.

    If the other host is lost, because its power or network fails, an operation that waits for it
    fails after about `LOST_SECONDS`. Gloo alone would wait until its timeout. A suspended process
    is not lost: its kernel answers.
    """
    before = _own_sockets()
    yield
    for fd in _own_sockets() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(fd[0])) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _own_sockets() -> set[tuple[int, str]]:
    """Return the file descriptors of this process's sockets, each with its inode."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:"):
                found.add((int(name), target))
    return found


def own_address() -> str | None:
    """Return this host's address in the network that connects the ranks; None if unknown."""
    store = dist.distributed_c10d._get_default_store() if dist.is_initialized() else None
    while isinstance(store, dist.distributed_c10d.PrefixStore):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if host is None:
        return None
    with suppress(OSError):
        for family, kind, *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # chooses the interface, but sends nothing
                return str(probe.getsockname()[0])
    return None


def listen(host: str, cleanup: ExitStack) -> socket.socket:
    """Listen on a free port of this host.

    Raises:
        OSError: the address does not belong to this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    cleanup.callback(listener.close)
    return listener


def node_name() -> str:
    """Return a name that is equal on ranks whose processes see each other in `/proc`."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
    return f"{boot_id.strip()} {os.readlink('/proc/self/ns/pid')}"


def _barrier(group: dist.ProcessGroup, timeout: timedelta) -> None:
    options = dist.BarrierOptions()
    options.timeout = timeout
    options.device = torch.device("cpu")
    group.barrier(options).wait()


def has_cpu_backend(group: dist.ProcessGroup) -> bool:
    """Return whether a process group has a backend for CPU tensors."""
    return torch.device("cpu") in group._device_types
