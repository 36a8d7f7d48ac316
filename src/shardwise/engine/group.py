"""How ranks talk while they plan: few, small messages that no accelerator sees."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.errors import LostRankError


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
    """A process group of `torch.distributed` whose backend moves CPU tensors."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.bytes_sent = 0

    def gather(self, data: bytes) -> list[bytes]:
        """Lengths by a collective, then each rank's bytes by themselves: no padding."""
        sizes = self._gather_sizes(len(data))
        if self.rank != 0:
            self._send(data, 0)
            return []
        return [data, *(self._receive(sizes[rank], rank) for rank in range(1, self.size))]

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Lengths by a collective, then each rank's bytes by themselves."""
        if self.rank != 0:
            return self._receive(self._scatter_size([]), 0)
        self._scatter_size([len(part) for part in parts])
        for rank in range(1, self.size):
            self._send(parts[rank], rank)
        return parts[0]

    def broadcast(self, data: bytes) -> bytes:
        """The length first, then the bytes."""
        length = torch.tensor([len(data)], dtype=torch.int64)
        self._run(lambda: dist.broadcast(length, group=self._group, group_src=0))
        content = _tensor(data) if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        if len(content):
            self._run(lambda: dist.broadcast(content, group=self._group, group_src=0))
        self.bytes_sent += len(data) if self.rank == 0 else 0
        return data if self.rank == 0 else _bytes(content)

    def _gather_sizes(self, size: int) -> list[int]:
        mine = torch.tensor([size], dtype=torch.int64)
        everyone = [torch.empty_like(mine) for _ in range(self.size)] if self.rank == 0 else None
        self._run(lambda: dist.gather(mine, everyone, group=self._group, group_dst=0))
        return [int(size) for size in everyone or []]

    def _scatter_size(self, sizes: Sequence[int]) -> int:
        mine = torch.empty(1, dtype=torch.int64)
        parts = [torch.tensor([size], dtype=torch.int64) for size in sizes] or None
        self._run(lambda: dist.scatter(mine, parts, group=self._group, group_src=0))
        return int(mine)

    def _send(self, data: bytes, rank: int) -> None:
        if data:
            self._run(lambda: dist.send(_tensor(data), group=self._group, group_dst=rank))
            self.bytes_sent += len(data)

    def _receive(self, size: int, rank: int) -> bytes:
        content = torch.empty(size, dtype=torch.uint8)
        if size:
            self._run(lambda: dist.recv(content, group=self._group, group_src=rank))
        return _bytes(content)

    def _run(self, operation: object) -> None:
        try:
            operation()  # type: ignore[operator]
        except RuntimeError as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise LostRankError(
                "talking to the other ranks (one of them died, or did not answer in time)",
                {self.rank: said},
            ) from error


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(content: torch.Tensor) -> bytes:
    return content.numpy().tobytes()


def own_process_group(timeout: timedelta) -> dist.ProcessGroup | None:
    """A new gloo group of all ranks, for one owner to talk over; None without distribution."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def moves_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """Whether a process group has a backend for CPU tensors."""
    return torch.device("cpu") in group._device_types
