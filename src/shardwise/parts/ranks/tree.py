"""`TreeGroup`: ranks that are connected as a tree, whatever the backend of their process group.

Rank 0 is the root. A rank has up to 32 ranks below it: rank 0 has 1 to 32, rank 1 has 33 to 64. So
131,072 ranks are four levels, and no rank has more than 33 connections. `reduce` combines messages
on their way up, and `broadcast` sends a message down.

A rank that waits watches all its connections. If one of them ends, it tells the others, which tell
theirs. So a rank that dies is soon known to all ranks that wait. Ranks that wait for a long time
tell each other for whom, so an error at the time-out names the ranks that are missing.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import msgspec
import torch.distributed as dist

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.decoding import DECODE_ERRORS
from shardwise.kernel.engine.group import TIMEOUT, Combine, Decode, UndecodableError
from shardwise.kernel.errors import LostRankError, RankError, StateError, name_ranks
from shardwise.parts.ranks.tree_links import MOST_BYTES, Failure, Kind, Link
from shardwise.parts.ranks.tree_rendezvous import OPERATION as CONNECTING
from shardwise.parts.ranks.tree_rendezvous import (
    SHARED_CHECK_SECONDS,
    Check,
    RankListener,
    connect_upwards,
    nothing,
)

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

FAN_OUT = 32
OPERATION = "exchanging messages"
REPORT_SECONDS = 1.0
"""How often a rank that waits tells others for whom. It also tells them when it no longer waits."""
LONGER_SECONDS = 3.0
"""How much longer to wait for the rank above, which knows better than this rank who is missing."""
MOST_MISSING = 64
"""How many missing ranks are named."""
TELL_SECONDS = 2.0
"""The longest time to tell other ranks of a failure."""
_ADVICE = "Look at its log and its stack (py-spy dump), or raise timeout="
_REMEDY = "create a new Checkpointer (or TreeGroup), or restart the job"


def parent_of(rank: int) -> int:
    """Return the rank to which a rank sends its messages."""
    return (rank - 1) // FAN_OUT


def children_of(rank: int, size: int) -> range:
    """Return the ranks that send their messages to a rank."""
    first = FAN_OUT * rank + 1
    return range(min(first, size), min(first + FAN_OUT, size))


def descendants_of(rank: int, size: int) -> Iterator[range]:
    """Yield the ranks whose messages go through a rank, level by level."""
    low, high = FAN_OUT * rank + 1, FAN_OUT * (rank + 1) + 1
    while low < size:
        yield range(low, min(high, size))
        low, high = FAN_OUT * low + 1, FAN_OUT * high + 1


def is_in_subtree(rank: int, top: int, fan_out: int) -> bool:
    """Return whether a rank is `top`, or sends its messages through it."""
    while rank > top:
        rank = (rank - 1) // fan_out
    return rank == top


_Missing = list[tuple[int, str]]
"""Ranks that others wait for, with their hosts where these are known."""


class TreeGroup:
    """Ranks that are connected as a tree. All ranks create it together; implements `Group`.

    Example, for processes without a process group:

        store = torch.distributed.TCPStore(host, port, is_master=rank == 0)
        with sw.TreeGroup(store, rank, size) as group:
            sw.save(path, state, group=group)

    Args:
        store: through which the ranks find each other. Use a `PrefixStore` for each group.
        rank, size: this rank, and the number of ranks.
        timeout: the longest time that ranks wait for each other.
        check: called again and again until the ranks are connected. It raises to give up, or moves
            the deadline.
        numbers: the number of each rank in errors; by default, the rank.

    Raises:
        StateError: `rank` is not one of `size` ranks.
        LostRankError: a rank did not connect in time. The error names it.
        RankError: a rank has other code of the library, or another number of ranks; or two
            processes are the same rank.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout: timedelta = TIMEOUT,
        check: Check = nothing,
        numbers: Sequence[int] | None = None,
    ) -> None:
        if not 0 <= rank < size:
            raise StateError(f"rank={rank}, size={size}: expected a rank from 0 to size - 1")
        self.rank, self.size, self.timeout = rank, size, timeout
        self._fan_out = FAN_OUT
        self._store, self._numbers = store, range(size) if numbers is None else numbers
        self.number = self._numbers[rank]
        self._above: Link | None = None
        self._below: dict[int, Link] = {}
        self._listener: RankListener | None = None
        self._check_whole: Check = nothing
        self._is_closed, self._operation = False, CONNECTING
        self._first_failure: Failure | None = None
        self._process = os.getpid()
        with self._closing_on_error():
            below = children_of(rank, size)
            if below:
                self._listener = RankListener(store, rank, size, below, self._numbers)
            if rank:
                above = parent_of(rank)
                self._above = connect_upwards(
                    store, rank, size, above, timeout, check, self._numbers
                )
            self._run(self._missing_below, check=check)
        self._operation = OPERATION

    @property
    def bytes_sent(self) -> int:
        """The bytes of the messages that this rank has sent, also those of other ranks."""
        return sum(link.bytes_sent for link in self._links)

    @property
    def bytes_received(self) -> int:
        """The bytes of the messages that this rank has received."""
        return sum(link.bytes_received for link in self._links)

    def __enter__(self) -> TreeGroup:
        return self

    def __exit__(
        self,
        error_class: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections; a second call has no effect.

        A forked child closes only its own copies, so that the connections end with this process.
        """
        self._close()

    def _close(self, failure: Failure | None = None) -> None:
        self._is_closed = True
        if self._process != os.getpid():  # a forked child: the connections are those of its parent
            for link in self._links:
                link.detach()
            return
        if self._listener is not None:
            self._listener.close(failure)
            self._listener = None
        for link in self._links:
            if failure is None:
                link.put(Kind.LEAVING, b"")
                link.send_and_receive(can_receive=False)
            link.close()

    def reduce(self, data: bytes, combine: Combine) -> bytes:
        """Combine the data of all ranks, on their way to rank 0."""
        self._check_open()
        with self._closing_on_error():
            self._check_size(data, "its message")
            below = self._below.values()
            self._run(self._missing_below)
            if below:
                parts = [data, *(link.inbox.popleft() for link in below)]
                senders = [self.rank, *(link.rank for link in below)]
                size, largest = max(zip(map(len, parts), senders, strict=True))
                try:
                    data = combine(parts)
                except UndecodableError as error:
                    self._refuse_message(senders[error.index], error)
                self._check_size(
                    data,
                    f"its message, combined with those of the {self._count_below()} ranks below "
                    f"it, of which rank {self._numbers[largest]} sent most ({size:,} bytes),",
                )
            above = self._above
            if above is None:
                return data
            above.put(Kind.REDUCE, data)
            # The message may be the last one. Those below may have closed their connections.
            self._run(lambda: above.missing() if above.is_sending else [], are_ending=True)
            return b""

    def broadcast(self, data: bytes, decode: Decode = bytes) -> bytes:
        """Send rank 0's data to all ranks, and return it."""
        self._check_open()
        with self._closing_on_error():
            self._check_size(data, "its message to all ranks")
            if (above := self._above) is not None:
                self._run(lambda: [] if above.inbox else above.missing(), longer=LONGER_SECONDS)
                data = above.inbox.popleft()
            try:
                decode(data)
            except DECODE_ERRORS as error:
                sender = self.rank if above is None else above.rank
                self._refuse_message(sender, UndecodableError(0, str(error)))
            below = self._below.values()
            for link in below:
                link.put(Kind.BROADCAST, data)
            # The message may be the last one. Those that have it may close their connections.
            self._run(
                lambda: [each for link in below if link.is_sending for each in link.missing()],
                are_ending=True,
            )
            return data

    def part(self, ranks: Sequence[int], cleanup: ExitStack) -> TreeGroup:
        """Connect some of the ranks among themselves."""
        store = dist.distributed_c10d.PrefixStore(f"part {ranks[0]}", self._store)
        own = ranks.index(self.rank)
        numbers = [self._numbers[rank] for rank in ranks]
        check = self._look_for_lost_ranks
        part = TreeGroup(store, own, len(ranks), timeout=self.timeout, check=check, numbers=numbers)
        part._check_whole = check
        return cleanup.enter_context(part)

    @property
    def _links(self) -> list[Link]:
        above = [] if self._above is None else [self._above]
        return [*above, *self._below.values()]

    def _count_below(self) -> int:
        return sum(map(len, descendants_of(self.rank, self.size)))

    def _check_open(self) -> None:
        """Raise the first failure again, so that it stays known; or say that the group is closed.

        The caller may have logged the first failure only, as telemetry does.
        """
        if (first := self._first_failure) is not None:
            operation = (
                f"{self._operation} (not possible, because {first.operation} failed earlier: "
                f"{_REMEDY})"
            )
            raise Failure(operation, first.reasons, first.is_lost).error()
        how = "were closed by close()" if self._is_closed else ""
        if self._process != os.getpid():
            how = "belong to the process that has forked this one"
        if how:
            reason = f"its connections {how}: {_REMEDY}"
            raise LostRankError(self._operation, {self.number: reason})

    def _check_size(self, data: bytes, what: str) -> None:
        """Fail on all ranks if a message is too large."""
        if len(data) > MOST_BYTES:
            reason = (
                f"{what} has {len(data):,} bytes, more than {MOST_BYTES:,}. Save fewer plain "
                "values, or values that are equal on all ranks; pass tensors as DTensors, which "
                "follow rules, and not as many boxes of sw.Shards"
            )
            self._fail(Failure(self._operation, {self.number: reason}, is_lost=False))

    def _refuse_message(self, sender: int, error: UndecodableError) -> NoReturn:
        """Fail on all ranks because of what a rank has sent."""
        reason = f"{error}. Use the same version of shardwise on all hosts"
        self._fail(Failure(self._operation, {self._numbers[sender]: reason}, is_lost=False))

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        """Close the connections, and keep the reason, if the block fails or is interrupted."""
        try:
            yield
        except RankError as error:
            self._first_failure = Failure.of(error)
            self._close(self._first_failure)
            raise
        except BaseException as error:
            reason = f"it raised {type(error).__name__} meanwhile"
            self._first_failure = Failure(self._operation, {self.number: reason}, is_lost=True)
            self._close()
            raise

    def _missing_below(self) -> _Missing:
        """Return the ranks below whose next message, or connection, is missing."""
        missing = [
            each for link in self._below.values() if not link.inbox for each in link.missing()
        ]
        if self._operation == CONNECTING:
            return [] if self._listener is None else self._listener.awaited()
        return missing

    def _run(
        self,
        find_missing: Callable[[], _Missing],
        *,
        longer: float = 0.0,
        are_ending: bool = False,
        check: Check = nothing,
    ) -> None:
        """Send and receive until no rank is missing.

        Args:
            find_missing: returns the ranks that this rank waits for.
            longer: how many seconds to wait beyond the time-out.
            are_ending: whether other ranks may close their connections meanwhile. A rank that has
                said that it leaves, and whose message was not taken yet, may always do so.
            check: called again and again.
        """
        deadline = Deadline(self.timeout.total_seconds() + longer)
        next_report = Deadline(REPORT_SECONDS)
        began = time.monotonic()
        self._send_and_receive(0.0)
        while missing := find_missing():
            self._check_other_ranks(deadline)
            lost = {self._numbers[link.rank]: link.ended for link in self._links if link.is_lost}
            if lost and not are_ending:
                self._fail(Failure(self._operation, lost, is_lost=True))
            if deadline.has_passed():
                self._fail(self._why_missing(missing, time.monotonic() - began))
            check(deadline)
            if next_report.has_passed():
                self._report(missing)
                next_report = Deadline(REPORT_SECONDS)
            pause = min(deadline.seconds_left(), next_report.seconds_left())
            pause = pause if self._listener is None else min(pause, SHARED_CHECK_SECONDS)
            self._send_and_receive(pause)
        self._retract()

    def _look_for_lost_ranks(self, deadline: Deadline) -> None:
        """Fail if a rank of this group is lost, while this rank waits for a part of the group.

        A rank that leaves is not lost: it may need neither this rank nor its own part any more.
        """
        if self._is_closed:
            return
        with self._closing_on_error():
            self._send_and_receive(0.0)
            links = [link for link in self._links if link.ended and not link.has_left]
            if lost := {self._numbers[link.rank]: link.ended for link in links}:
                self._fail(Failure(self._operation, lost, is_lost=True))

    def _check_other_ranks(self, deadline: Deadline) -> None:
        """In a part of a group, tell the part of a failure that the whole group knows."""
        try:
            self._check_whole(deadline)
        except RankError as error:
            self._fail(Failure.of(error))

    def _send_and_receive(self, seconds: float) -> None:
        """Send and receive what can be now, after a wait of at most some seconds."""
        poll = select.poll()
        links = {link.fileno(): link for link in self._links if not link.ended}
        for fd, link in links.items():
            receives = 0 if link.is_full else select.POLLIN
            poll.register(fd, receives | (select.POLLOUT if link.is_sending else 0))
        for connection in [] if self._listener is None else self._listener.sockets():
            poll.register(connection, select.POLLIN)
        for fd, events in poll.poll(1000 * seconds):
            if (ready := links.get(fd)) is not None:
                ready.send_and_receive(can_receive=bool(events & ~select.POLLOUT))
                self._take_news(ready)
        if self._listener is not None:
            self._accept(self._listener)

    def _accept(self, listener: RankListener) -> None:
        try:
            for link in listener.accept():
                self._below[link.rank] = link
            is_done = listener.is_done
            listener.check_is_alone(at_once=is_done)
        except RankError as error:
            self._fail(Failure.of(error))
        if is_done:
            self._listener = None
            listener.close()

    def _take_news(self, link: Link) -> None:
        """Act on what another rank says about failed and missing ranks."""
        while link.news:
            kind, data = link.news.popleft()
            is_old, link.old_news = link.old_news > 0, max(0, link.old_news - 1)
            try:
                if kind == Kind.FAILED:
                    failure = msgspec.msgpack.decode(data, type=Failure)
                    self._fail(failure.shortened(), heard_from=link)
                if kind == Kind.LEAVING:
                    link.has_left = True
                    continue
                missing = msgspec.msgpack.decode(data, type=_Missing)[:MOST_MISSING]
                known = [each for each in missing if self._can_know(link, each[0])]
                link.report([] if is_old else known)
            except DECODE_ERRORS:
                link.end("it sent an invalid message")
                link.inbox.clear()

    def _can_know(self, link: Link, rank: int) -> bool:
        """Return whether a rank of the tree can be missing for the other end of a connection.

        Each side knows best for which ranks of its own part of the tree it waits.
        """
        is_below = is_in_subtree(
            rank, self.rank if link is self._above else link.rank, self._fan_out
        )
        return 0 <= rank < self.size and is_below != (link is self._above)

    def _report(self, missing: _Missing) -> None:
        """Tell other ranks for whom this rank waits; again, because old news are not believed."""
        below = [each for each in missing if is_in_subtree(each[0], self.rank, self._fan_out)]
        for other in self._links:
            news = below if other is self._above else [*self._missing_above(), *missing]
            self._tell_missing(other, sorted(set(news))[:MOST_MISSING])

    def _tell_missing(self, other: Link, news: _Missing) -> None:
        if (news or other.told) and not other.ended and not other.is_sending:
            other.told = news
            other.put(Kind.MISSING, msgspec.msgpack.encode(news))

    def _retract(self) -> None:
        """Tell others that no rank is missing any more, before this rank does something else."""
        for other in self._links:
            if other.told:
                self._tell_missing(other, [])
                other.send_and_receive(can_receive=False)

    def _missing_above(self) -> _Missing:
        return [] if self._above is None else self._above.reported

    def _why_missing(self, missing: _Missing, seconds: float) -> Failure:
        """Describe ranks that did not answer in time."""
        reasons = {}
        for rank, host in missing:
            through = [
                self._numbers[each] for low in descendants_of(rank, self.size) for each in low
            ]
            reason = f"did not answer within {seconds:.0f} s"
            reason += f", on host {host}" if host else ""
            if through and rank:
                reason += f"; {name_ranks(through)} send their messages through it"
            reasons[self._numbers[rank]] = f"{reason}. {_ADVICE}"
        return Failure(self._operation, reasons, is_lost=True)

    def _fail(self, failure: Failure, heard_from: Link | None = None) -> NoReturn:
        """Tell the other ranks of a failure, and raise it."""
        message = msgspec.msgpack.encode(failure.shortened())
        told = [link for link in self._links if link is not heard_from and not link.ended]
        for link in told:
            link.put(Kind.FAILED, message)
        for _ in Deadline(TELL_SECONDS).attempts():
            for link in told:
                link.send_and_receive(can_receive=False)
            if not any(link.is_sending for link in told):
                break
        self._close(failure)
        raise failure.error()
