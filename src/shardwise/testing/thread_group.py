"""A group whose ranks are threads of one process, for tests without process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

from shardwise.errors import LostRankError, RankError

T = TypeVar("T")
TIMEOUT = 60.0


@dataclass(slots=True)
class _Table:
    """The memory through which ranks exchange data, with a barrier."""

    size: int
    timeout: float
    parts: list[bytes] = field(init=False)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _arrived: int = 0
    _turn: int = 0
    _ended: bool = False

    def __post_init__(self) -> None:
        self.parts = [b""] * self.size

    def meet(self) -> bool:
        """Wait for all ranks; return False if a rank has ended or the timeout has passed."""
        with self._changed:
            turn = self._turn
            self._arrived += 1
            if self._arrived == self.size:
                self._arrived = 0
                self._turn += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._turn != turn or self._ended, self.timeout)
            return self._turn != turn

    def end(self) -> None:
        """Mark a rank as ended: it will not reach the barrier again."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class ThreadGroup:
    """One rank of a group of threads; implements `shardwise.engine.group.Group`.

    Every operation raises `LostRankError` if another rank has ended or does not call it within the
    timeout.
    """

    def __init__(self, rank: int, table: _Table) -> None:
        self.rank = rank
        self.size = table.size
        self.bytes_sent = 0
        self.timeout = timedelta(seconds=table.timeout)
        self._table = table

    @classmethod
    def of_size(cls, size: int, *, timeout: float = TIMEOUT) -> list[ThreadGroup]:
        """Return the ranks of a new group, one for each thread; `timeout` is in seconds."""
        table = _Table(size, timeout)
        return [cls(rank, table) for rank in range(size)]

    def gather(self, data: bytes) -> list[bytes]:
        """Return the data of all ranks on rank 0, and an empty list on the others."""
        self._table.parts[self.rank] = data
        self._meet()
        gathered = list(self._table.parts) if self.rank == 0 else []
        self._meet()
        self.bytes_sent += len(data) if self.rank else 0
        return gathered

    def scatter(self, parts: Sequence[bytes]) -> bytes:
        """Return this rank's part of the list that rank 0 passes."""
        if self.rank == 0:
            self._table.parts[:] = parts
            self.bytes_sent += sum(map(len, parts[1:]))
        self._meet()
        part = self._table.parts[self.rank]
        self._meet()
        return part

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's data on all ranks."""
        if self.rank == 0:
            self._table.parts[0] = data
            self.bytes_sent += len(data)
        self._meet()
        heard = self._table.parts[0]
        self._meet()
        return heard

    def end(self) -> None:
        """Mark this rank as ended, so that the others stop waiting for it."""
        self._table.end()

    def _meet(self) -> None:
        if not self._table.meet():
            lost = "a rank has ended or did not answer in time"
            raise LostRankError("communicating with the other ranks", {self.rank: lost})


def outcomes_of_ranks(
    world: int, function: Callable[[ThreadGroup], T], *, timeout: float = TIMEOUT
) -> list[T | Exception]:
    """Call `function` on `world` threads and return, by rank, each result or exception.

    Args:
        timeout: limit for each communication, in seconds.
    """

    def attempt(group: ThreadGroup) -> T | Exception:
        try:
            return function(group)
        except Exception as error:
            return error
        finally:
            group.end()

    with ThreadPoolExecutor(world, "rank") as pool:
        return list(pool.map(attempt, ThreadGroup.of_size(world, timeout=timeout)))


def run_ranks(
    world: int, function: Callable[[ThreadGroup], T], *, timeout: float = TIMEOUT
) -> list[T]:
    """Call `function` on `world` threads and return the results by rank.

    Raises:
        Exception: the exception of a rank, preferably of one that did not fail only because
            another did.
    """
    outcomes = outcomes_of_ranks(world, function, timeout=timeout)
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    for failure in sorted(failures, key=lambda error: isinstance(error, RankError)):
        raise failure
    return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
