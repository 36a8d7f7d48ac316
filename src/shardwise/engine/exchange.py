"""Exchanges: every rank sends a message to rank 0, which replies. A failure is raised on all ranks.

An exchange either returns on all ranks or raises on all ranks, so that no rank waits for a failed
rank. So code that may fail on a single rank runs inside an exchange. The functions differ in their
results:

- `exchange`: rank 0's reply.
- `exchange_with_local_value`: rank 0's reply, and a value that this rank made with its message.
- `run_on_all`: the result of a function that runs on every rank; no data is sent.
- `run_on_first`: the bytes that a function returned on rank 0, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from shardwise import errors
from shardwise.decoding import prepare_decoding
from shardwise.engine.group import Group
from shardwise.errors import LostRankError, MismatchError, RankError, ShardwiseError, describe_error

LocalValue = TypeVar("LocalValue")
Reply = bytes | Sequence[bytes]
"""One reply for all ranks, or a sequence with one for each rank."""


@prepare_decoding
class _ExchangeMessage(msgspec.Struct, array_like=True):
    """A rank's message: the name of the operation, and the rank's data or error."""

    operation: str
    data: bytes = b""
    failure: str | None = None


@prepare_decoding
class _Reply(msgspec.Struct, array_like=True):
    """Rank 0's reply.

    Attributes:
        data: the result, if all ranks succeeded.
        error_class: the name of the class of an error; None if all ranks succeeded.
        message, problems: the text of an error that rank 0 raised.
        failures: for each failed rank, its error.
    """

    data: bytes = b""
    error_class: str | None = None
    message: str = ""
    problems: list[str] = []
    failures: dict[int, str] = {}


def exchange(
    group: Group,
    operation: str,
    make_message: Callable[[], bytes],
    make_reply: Callable[[list[bytes]], Reply],
) -> bytes:
    """Gather a message from every rank, and return rank 0's reply to this rank.

    Args:
        group: the ranks; all of them call this function with the same `operation`.
        operation: the name of the operation, for error messages.
        make_message: runs on every rank, and returns its message.
        make_reply: runs on rank 0 with the messages of all ranks. Returns one reply for all ranks,
            or a sequence with a reply for each rank.

    Raises:
        ShardwiseError: `make_reply` failed; the same error on all ranks.
        MismatchError: ranks called different operations.
        RankError: `make_message` failed on another rank.
        LostRankError: a rank died or did not answer in time.
        Exception: `make_message` failed on this rank.
    """

    def keep_nothing() -> tuple[None, bytes]:
        return None, make_message()

    def reply_to(_: None, messages: list[bytes]) -> Reply:
        return make_reply(messages)

    return exchange_with_local_value(group, operation, keep_nothing, reply_to)[1]


def exchange_with_local_value(
    group: Group,
    operation: str,
    make_message: Callable[[], tuple[LocalValue, bytes]],
    make_reply: Callable[[LocalValue, list[bytes]], Reply],
) -> tuple[LocalValue, bytes]:
    """Exchange messages like `exchange`, and keep a value that this rank made with its message.

    Args:
        group, operation: as for `exchange`.
        make_message: runs on every rank, and returns a value to keep and the rank's message.
        make_reply: runs on rank 0 with the value that rank 0 kept and the messages of all ranks.
            Returns replies as for `exchange`.

    Returns:
        The kept value of this rank, and the reply to this rank.

    Raises:
        ShardwiseError: as for `exchange`.
    """
    kept: LocalValue
    error: Exception | None = None
    message = _ExchangeMessage(operation)
    try:
        kept, message.data = make_message()
    except Exception as failure:  # raised again below, after the other ranks know
        error, message.failure = failure, describe_error(failure)
    replies: list[_Reply] = []
    reply_error: Exception | None = None
    try:
        messages = [
            msgspec.msgpack.decode(data, type=_ExchangeMessage)
            for data in group.gather(msgspec.msgpack.encode(message))
        ]
        if group.rank == 0:
            replies, reply_error = _reply_to_all(
                messages, lambda data: make_reply(kept, data), group.size
            )
        reply = _send_replies(group, replies)
    except LostRankError as lost:
        if error is None:
            raise
        raise error from lost  # the error of this rank explains more
    if error is not None:
        raise error
    if reply_error is not None:
        raise reply_error
    _raise_failure(reply, operation)
    return kept, reply.data


def run_on_all(group: Group, operation: str, work: Callable[[], LocalValue]) -> LocalValue:
    """Run `work` on every rank. Return this rank's result when all ranks have succeeded.

    Raises:
        ShardwiseError: as for `exchange`.
    """
    return exchange_with_local_value(group, operation, lambda: (work(), b""), lambda _, __: b"")[0]


def run_on_first(group: Group, operation: str, work: Callable[[], bytes]) -> bytes:
    """Run `work` on rank 0 only, and return its result on all ranks.

    Raises:
        ShardwiseError: as for `exchange`.
    """
    return exchange(group, operation, lambda: b"", lambda _: work())


def require_equal(values: Sequence[str], summary: str) -> None:
    """Require that all ranks have the same value.

    Args:
        values: the value of each rank, formatted for an error message.
        summary: the first line of the error.

    Raises:
        MismatchError: the values differ. The error lists the value of each rank.
    """
    if len(set(values)) > 1:
        raise MismatchError(summary, [f"rank {rank}: {each}" for rank, each in enumerate(values)])


def _reply_to_all(
    messages: list[_ExchangeMessage],
    make_reply: Callable[[list[bytes]], Reply],
    size: int,
) -> tuple[list[_Reply], Exception | None]:
    """Run `make_reply` on rank 0.

    Returns:
        One reply for all ranks or one for each rank, and the error of `make_reply`.
    """
    failures = {rank: m.failure for rank, m in enumerate(messages) if m.failure is not None}
    if failures:
        return [_Reply(error_class="RankError", failures=failures)], None
    try:
        _refuse_different_operations([each.operation for each in messages])
        replies = make_reply([each.data for each in messages])
    except Exception as error:  # the caller raises it, after the other ranks know
        problems = error.problems if isinstance(error, MismatchError) else []
        text = error.summary if isinstance(error, MismatchError) else str(error)
        reply = _Reply(error_class=type(error).__name__, message=text, problems=problems)
        return [reply], error
    if isinstance(replies, bytes):
        return [_Reply(replies)], None
    if len(replies) == 1 == size:
        return [_Reply(replies[0])], None
    return [_Reply(each) for each in replies], None


def _send_replies(group: Group, replies: list[_Reply]) -> _Reply:
    """Send rank 0's replies, and return the reply to this rank."""
    encoded = [msgspec.msgpack.encode(each) for each in replies]
    reply = group.broadcast(encoded[0] if len(encoded) == 1 else b"")
    if not reply:  # an encoded reply is never empty, so this means that each rank gets its own
        reply = group.scatter(encoded)
    return msgspec.msgpack.decode(reply, type=_Reply)


def _refuse_different_operations(operations: Sequence[str]) -> None:
    """Refuse messages of different operations, which cannot be decoded together."""
    if len(set(operations)) > 1:
        first_ranks = sorted(operations.index(each) for each in set(operations))
        raise MismatchError(
            "ranks called different operations: all must make the same calls, with the same steps "
            "and options, in the same order:",
            [f"rank {rank}: {operations[rank]}" for rank in first_ranks],
        )


def _raise_failure(reply: _Reply, operation: str) -> None:
    if reply.error_class is None:
        return
    if reply.failures:
        raise RankError(operation, reply.failures)
    error_class = getattr(errors, reply.error_class, None)
    if reply.error_class == "MismatchError":
        raise MismatchError(reply.message, reply.problems)
    if (
        isinstance(error_class, type)
        and issubclass(error_class, ShardwiseError)
        and error_class is not RankError
    ):
        raise error_class(reply.message)
    raise RankError(operation, {0: f"{reply.error_class}: {reply.message}"})
