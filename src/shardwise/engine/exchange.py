"""Exchanges: every rank sends a message to rank 0, which replies. A failure is raised on all ranks.

An exchange returns on all ranks or raises on all ranks, so that no rank waits for a failed rank.
Code that may fail on a single rank therefore runs inside an exchange. The functions differ in
their results:

- `exchange`: rank 0's reply.
- `exchange_keeping`: rank 0's reply, and a value that this rank made together with its message.
- `collect`: on rank 0, a value made from all messages.
- `run_on_all`: the result of a function that runs on every rank; no data is sent.
- `run_on_first`: the bytes that a function returned on rank 0, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from shardwise import errors
from shardwise.engine.group import Group
from shardwise.errors import LostRankError, MismatchError, RankError, ShardwiseError, described

Kept = TypeVar("Kept")
United = TypeVar("United")
Reply = bytes | Sequence[bytes]
"""One reply for all ranks, or a sequence with one for each rank."""


class _Message(msgspec.Struct, array_like=True):
    """A rank's message: the name of the exchange, and its data or its error."""

    doing: str
    data: bytes = b""
    failure: str | None = None


class _Reply(msgspec.Struct, array_like=True):
    """Rank 0's reply: data, an error raised on rank 0 (`kind`), or the errors of other ranks."""

    data: bytes = b""
    kind: str | None = None
    message: str = ""
    problems: list[str] = []
    failures: dict[int, str] = {}


def exchange(
    group: Group,
    doing: str,
    speak: Callable[[], bytes],
    answer: Callable[[list[bytes]], Reply],
) -> bytes:
    """Gather a message from every rank, and return rank 0's reply to this rank.

    Args:
        group: the ranks; all of them call this function with the same `doing`.
        doing: the name of the operation, for error messages.
        speak: makes this rank's message; runs on every rank.
        answer: makes the reply from the messages of all ranks; runs on rank 0.

    Raises:
        ShardwiseError: `answer` failed; the same error on all ranks.
        MismatchError: ranks called different operations.
        RankError: `speak` failed on another rank.
        LostRankError: a rank died or did not answer in time.
        Exception: `speak` failed on this rank.
    """
    return _exchange(group, doing, lambda: (None, speak()), lambda _, said: (None, answer(said)))[2]


def exchange_keeping(
    group: Group,
    doing: str,
    speak: Callable[[], tuple[Kept, bytes]],
    answer: Callable[[Kept, list[bytes]], Reply],
) -> tuple[Kept, bytes]:
    """Return the value that `speak` made on this rank together with its message, and the reply.

    Args:
        group, doing: as for `exchange`.
        speak: returns a value to keep and this rank's message.
        answer: takes the value that rank 0 kept, and the messages of all ranks.

    Raises:
        ShardwiseError: as for `exchange`.
    """
    kept, _, reply = _exchange(group, doing, speak, lambda own, said: (None, answer(own, said)))
    return kept, reply


def collect(
    group: Group,
    doing: str,
    speak: Callable[[], bytes],
    unite: Callable[[list[bytes]], United],
) -> United | None:
    """Return on rank 0 the result of `unite` for the messages of all ranks; None on other ranks.

    Raises:
        ShardwiseError: as for `exchange`; also if `unite` failed.
    """
    made = _exchange(group, doing, lambda: (None, speak()), lambda _, said: (unite(said), b""))
    return made[1]


def run_on_all(group: Group, doing: str, work: Callable[[], Kept]) -> Kept:
    """Run `work` on every rank, and return its result once it has succeeded on all of them.

    Raises:
        ShardwiseError: as for `exchange`.
    """
    return _exchange(group, doing, lambda: (work(), b""), lambda _, __: (None, b""))[0]


def run_on_first(group: Group, doing: str, work: Callable[[], bytes]) -> bytes:
    """Run `work` on rank 0, and return its result on all ranks.

    Raises:
        ShardwiseError: as for `exchange`.
    """
    return exchange(group, doing, lambda: b"", lambda _: work())


def require_equal(said: Sequence[str], message: str) -> None:
    """Refuse to continue if the messages of the ranks are not all equal.

    Args:
        said: the message of each rank, as an error shows it.
        message: the first line of the error.

    Raises:
        MismatchError: they differ; lists the message of each rank.
    """
    if len(set(said)) > 1:
        raise MismatchError(message, [f"rank {rank}: {each}" for rank, each in enumerate(said)])


def _exchange(
    group: Group,
    doing: str,
    speak: Callable[[], tuple[Kept, bytes]],
    answer: Callable[[Kept, list[bytes]], tuple[United, Reply]],
) -> tuple[Kept, United | None, bytes]:
    """Return the value of `speak`, on rank 0 that of `answer`, and the reply to this rank."""
    kept: Kept
    error: Exception | None = None
    message = _Message(doing)
    try:
        kept, message.data = speak()
    except Exception as failure:  # raised again below, after the other ranks know
        error, message.failure = failure, described(failure)
    united: United | None = None
    replies: list[_Reply] = []
    error_here: Exception | None = None
    try:
        messages = [
            msgspec.msgpack.decode(data, type=_Message)
            for data in group.gather(msgspec.msgpack.encode(message))
        ]
        if group.rank == 0:
            united, replies, error_here = _answer(
                messages, lambda said: answer(kept, said), group.size
            )
        reply = _send_replies(group, replies)
    except LostRankError as lost:
        if error is None:
            raise
        raise error from lost  # the error of this rank is more precise
    if error is not None:
        raise error
    if error_here is not None:
        raise error_here
    _raise_failure(reply, doing)
    return kept, united, reply.data


def _answer(
    messages: list[_Message], answer: Callable[[list[bytes]], tuple[United, Reply]], size: int
) -> tuple[United | None, list[_Reply], Exception | None]:
    """Return the value of `answer`, the replies (one, or one for each rank), and its error."""
    failures = {rank: m.failure for rank, m in enumerate(messages) if m.failure is not None}
    if failures:
        return None, [_Reply(kind="RankError", failures=failures)], None
    try:
        _refuse_different_exchanges([each.doing for each in messages])
        united, reply = answer([each.data for each in messages])
    except Exception as error:  # the caller raises it, after the other ranks know
        problems = error.problems if isinstance(error, MismatchError) else []
        text = error.summary if isinstance(error, MismatchError) else str(error)
        return None, [_Reply(kind=type(error).__name__, message=text, problems=problems)], error
    if isinstance(reply, bytes):
        return united, [_Reply(reply)], None
    if len(reply) == 1 == size:
        return united, [_Reply(reply[0])], None
    return united, [_Reply(each) for each in reply], None


def _send_replies(group: Group, replies: list[_Reply]) -> _Reply:
    """Send rank 0's replies, and return the one to this rank."""
    encoded = [msgspec.msgpack.encode(each) for each in replies]
    reply = group.broadcast(encoded[0] if len(encoded) == 1 else b"")
    if not reply:  # no encoded reply is empty, so each rank has its own
        reply = group.scatter(encoded)
    return msgspec.msgpack.decode(reply, type=_Reply)


def _refuse_different_exchanges(doing: Sequence[str]) -> None:
    """Refuse messages of different exchanges, because one could be decoded as another."""
    if len(set(doing)) > 1:
        firsts = sorted(doing.index(each) for each in set(doing))
        raise MismatchError(
            "ranks called different operations: all must make the same calls, with the same steps "
            "and options, in the same order:",
            [f"rank {rank}: {doing[rank]}" for rank in firsts],
        )


def _raise_failure(reply: _Reply, doing: str) -> None:
    if reply.kind is None:
        return
    if reply.failures:
        raise RankError(doing, reply.failures)
    kind = getattr(errors, reply.kind, None)
    if reply.kind == "MismatchError":
        raise MismatchError(reply.message, reply.problems)
    if isinstance(kind, type) and issubclass(kind, ShardwiseError) and kind is not RankError:
        raise kind(reply.message)
    raise RankError(doing, {0: f"{reply.kind}: {reply.message}"})
