"""A group whose ranks are threads of one process, for tests without a process group."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import TypeVar

from shardwise.kernel.engine.group import Combine, Decode
from shardwise.kernel.errors import LostRankError, RankError

T = TypeVar("T")
TIMEOUT = 60.0  # seconds


class _SharedTable:
    """Memory that the ranks of a group share to exchange data, and a barrier.

    Attributes:
        parts: the data of each rank in the current operation, by rank.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.parts = [b""] * size
        self._changed = threading.Condition()
        self._arrived, self._ended = set[int](), set[int]()
        self._round = 0
        self._parts: dict[tuple[int, ...], _SharedTable] = {}

    def wait_for_all(self, rank: int) -> dict[int, str]:
        """Wait for all ranks. For each rank that ended or is late, return the reason."""
        with self._changed:
            round_number = self._round
            self._arrived.add(rank)
            if len(self._arrived) == self.size:
                self._arrived.clear()
                self._round += 1
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._round != round_number or bool(self._ended), self.timeout
            )
            if self._round != round_number:
                return {}
            late = f"did not take part within {self.timeout} s"
            return dict.fromkeys(sorted(self._ended), "has ended") or dict.fromkeys(
                sorted({*range(self.size)} - self._arrived), late
            )

    def part(self, ranks: Sequence[int]) -> _SharedTable:
        """Return the table of some of the ranks."""
        with self._changed:
            return self._parts.setdefault(tuple(ranks), _SharedTable(len(ranks), self.timeout))

    def end(self, rank: int) -> None:
        """Record that a rank has ended, so that no other rank waits for it."""
        with self._changed:
            self._ended.add(rank)
            self._changed.notify_all()
            for ranks, table in self._parts.items():
                if rank in ranks:
                    table.end(ranks.index(rank))


class ThreadGroup:
    """One rank of a group of threads; implements `shardwise.kernel.engine.group.Group`.

    Every operation raises `LostRankError` if another rank has ended or does not call it within the
    timeout. `reduce` combines few messages at a time, in an order that changes from call to call,
    so that tests find functions whose result depends on the order.
    """

    def __init__(self, rank: int, table: _SharedTable) -> None:
        self.rank = self.number = rank
        self.size = table.size
        self.bytes_sent = self.bytes_received = 0
        self.timeout = timedelta(seconds=table.timeout)
        self._table = table
        self._calls = 0

    @classmethod
    def of_size(cls, size: int, *, timeout: float = TIMEOUT) -> list[ThreadGroup]:
        """Return the ranks of a new group, one for each thread. `timeout` is in seconds."""
        table = _SharedTable(size, timeout)
        return [cls(rank, table) for rank in range(size)]

    def reduce(self, data: bytes, combine: Combine) -> bytes:
        """Return the combined data of all ranks on rank 0, and `b""` on the others."""
        self._table.parts[self.rank] = data
        self._wait_for_all()
        combined = b""
        if self.rank == 0:
            self._calls += 1
            combined = _combine_in_steps(self._table.parts, combine, random.Random(self._calls))
            self.bytes_received += sum(map(len, self._table.parts[1:]))
        else:
            self.bytes_sent += len(data)
        self._wait_for_all()
        return combined

    def broadcast(self, data: bytes, decode: Decode = bytes) -> bytes:
        """Return rank 0's data on all ranks."""
        if self.rank == 0:
            self._table.parts[0] = data
            self.bytes_sent += len(data)
        self._wait_for_all()
        received = self._table.parts[0]
        self.bytes_received += len(received) if self.rank else 0
        self._wait_for_all()
        decode(received)
        return received

    def part(self, ranks: Sequence[int], cleanup: ExitStack) -> ThreadGroup:
        """Return a group of some of the ranks."""
        part = ThreadGroup(ranks.index(self.rank), self._table.part(ranks))
        part.number = self.number
        return part

    def end(self) -> None:
        """Record that this rank has ended, so that the others stop waiting for it."""
        self._table.end(self.rank)

    def _wait_for_all(self) -> None:
        failures = self._table.wait_for_all(self.rank)
        if failures:
            raise LostRankError("communicating with the other ranks", failures)


def _combine_in_steps(parts: Sequence[bytes], combine: Combine, choice: random.Random) -> bytes:
    """Combine messages as a tree of ranks does, at most three at a time, in a random order."""
    waiting = list(parts)
    while len(waiting) > 1:
        choice.shuffle(waiting)
        count = choice.randint(2, 3)
        waiting[:count] = [combine(waiting[:count])]
    return waiting[0]


def run_ranks_and_catch(
    world: int, function: Callable[[ThreadGroup], T], *, timeout: float = TIMEOUT
) -> list[T | Exception]:
    """Call `function` on `world` threads, and return the result or exception of each rank.

    Args:
        timeout: limit for each communication, in seconds.
    """

    def run_rank(group: ThreadGroup) -> T | Exception:
        try:
            return function(group)
        except Exception as error:
            return error
        finally:
            group.end()

    with ThreadPoolExecutor(world, "rank") as pool:
        return list(pool.map(run_rank, ThreadGroup.of_size(world, timeout=timeout)))


def run_ranks(
    world: int, function: Callable[[ThreadGroup], T], *, timeout: float = TIMEOUT
) -> list[T]:
    """Call `function` on `world` threads and return the results by rank.

    Raises:
        Exception: the exception of a rank. Exceptions other than `RankError` come first, because a
            `RankError` only reports that another rank failed.
    """
    outcomes = run_ranks_and_catch(world, function, timeout=timeout)
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    for failure in sorted(failures, key=lambda error: isinstance(error, RankError)):
        raise failure
    return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]
