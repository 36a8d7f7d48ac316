"""`Round`: a step that all ranks take together. If it fails on one rank, it fails on all ranks.

Example: each rank writes a file, and all ranks learn of all files.

    with Round(group, "writing a save") as all_ranks:
        entry = write_own_file()                     # may fail on some ranks
        entries = all_ranks.all_gather(entry, FileEntry)  # the entries of all ranks, on each

If `write_own_file` fails on rank 3, rank 3 raises that error, and all other ranks raise a
`RankError` which names rank 3. So no rank waits for a failed rank. Code that may fail on a single
rank therefore runs in the block of a round. Code that computes the same from the same input on all
ranks needs no round, because it fails on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from shardwise import errors
from shardwise.decoding import prepare_decoding
from shardwise.engine.group import Group
from shardwise.errors import (
    LostRankError,
    MismatchError,
    RankError,
    ShardwiseError,
    SpecError,
    describe_error,
    text_of,
)

T = TypeVar("T")
R = TypeVar("R")
_NO_REASON = "RankError: "
"""A rank that failed only because another rank failed describes its error in this way. The text
explains nothing, so it is left out."""


@prepare_decoding
class _Message(msgspec.Struct, array_like=True):
    """What a rank sends to rank 0: the name of the operation, and the rank's data or error."""

    operation: str
    data: bytes = b""
    failure: str | None = None


@prepare_decoding
class _Reply(msgspec.Struct, array_like=True):
    """What rank 0 sends to all ranks.

    Attributes:
        operation: the name of the operation on rank 0.
        data: the result, if all ranks succeeded.
        error_class: the name of the class of an error; None if all ranks succeeded.
        message, problems: the text of an error that rank 0 raised.
        failures: for each failed rank, its error.
    """

    operation: str = ""
    data: bytes = b""
    error_class: str | None = None
    message: str = ""
    problems: list[str] = []
    failures: dict[int, str] = {}


class Round:
    """A step that all ranks take together, as a context manager.

    At most one of `all_gather`, `all_reduce` and `broadcast` is called, at the end of the block.
    Without such a call, the end of the block waits for the other ranks.

    Args:
        group: the ranks. All of them begin the same rounds in the same order.
        operation: what the ranks do, for error messages; the same on all ranks.
        rank0_only: only rank 0 does something in the block that can fail. The other ranks send
            nothing, and wait for rank 0. All ranks call `broadcast` at the end, or no rank does.

    Raises:
        Exception: the block failed on this rank.
        RankError: the block failed on other ranks. The error says why.
        ShardwiseError: rank 0 failed in a round with `rank0_only`, or in the function passed to
            `all_reduce`: the same error on all ranks.
        MismatchError: ranks take different steps.
        LostRankError: a rank died or did not answer in time.
    """

    def __init__(self, group: Group, operation: str, *, rank0_only: bool = False) -> None:
        self._group = group
        self._operation = operation
        self._first_only = rank0_only
        self._is_over = False

    def __enter__(self) -> Round:
        return self

    def __exit__(
        self,
        error_class: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_over or self._group.size == 1:
            return
        if not (error is None or isinstance(error, Exception)):
            return  # interrupted: the other ranks notice that this process ends
        if error is None:
            self._exchange(b"", lambda _: b"")
            return
        try:
            failures = self._report(error)
        except LostRankError as lost:
            raise error from lost  # the error of this rank explains more
        reasons = {rank: text for rank, text in failures.items() if not text.startswith(_NO_REASON)}
        if type(error) is RankError and reasons:  # it only says that another rank has failed
            raise RankError(self._operation, reasons) from error

    def all_gather(self, message: T, kind: Any) -> list[T]:
        """Send a message, and return the messages of all ranks.

        Args:
            message: a value that msgspec encodes.
            kind: the type of the messages.
        """
        if self._group.size == 1:
            self._is_over = True
            return [message]
        encoded = self._exchange(msgspec.msgpack.encode(message), msgspec.msgpack.encode)
        messages = msgspec.msgpack.decode(encoded, type=list[bytes])
        return [msgspec.msgpack.decode(each, type=kind) for each in messages]

    def all_reduce(
        self, message: T, kind: Any, combine: Callable[[list[T]], R], result_kind: Any
    ) -> R:
        """Send a message, and return what `combine` makes of the messages of all ranks.

        Use it instead of `all_gather` if the result is much smaller than all messages.

        Args:
            message: a value that msgspec encodes.
            kind: the type of the messages.
            combine: a pure function of the messages, which runs on rank 0.
            result_kind: the type of its result, which msgspec encodes.
        """

        def reply(messages: list[bytes]) -> bytes:
            decoded = [msgspec.msgpack.decode(each, type=kind) for each in messages]
            return msgspec.msgpack.encode(combine(decoded))

        if self._group.size == 1:
            self._is_over = True
            return combine([message])
        data = self._exchange(msgspec.msgpack.encode(message), reply)
        result: R = msgspec.msgpack.decode(data, type=result_kind)
        return result

    def broadcast(self, value: T, kind: Any) -> T:
        """Return the value of rank 0 on all ranks. Only for rounds with `rank0_only`.

        Args:
            value: a value that msgspec encodes; ignored on other ranks.
            kind: the type of the value.
        """
        if self._group.size == 1:
            self._is_over = True
            return value
        encoded = msgspec.msgpack.encode(value) if self._group.rank == 0 else b""
        data = self._exchange(encoded, lambda _: encoded)
        shared: T = msgspec.msgpack.decode(data, type=kind)
        return shared

    def _exchange(self, data: bytes, reply: Callable[[list[bytes]], bytes]) -> bytes:
        """Send this rank's data to rank 0, and return its reply."""
        self._is_over = True
        answer, error = _Reply(self._operation), None
        if self._first_only:
            if self._group.rank == 0:
                answer.data = reply([data])
        else:
            answer, error = self._gather(_Message(self._operation, data), reply)
        answer = self._broadcast(answer)
        if error is not None:
            raise error
        if self._first_only:  # otherwise, rank 0 has compared the operations
            _refuse_different_operations([answer.operation, self._operation])
        _raise_failure(answer, self._operation)
        return answer.data

    def _report(self, error: Exception) -> dict[int, str]:
        """Tell the other ranks that this rank has failed, and return the errors of all ranks."""
        self._is_over = True
        if self._first_only:
            return self._broadcast(self._reply_of(error)).failures
        failed = _Message(self._operation, failure=describe_error(error))
        return self._broadcast(self._gather(failed, lambda _: b"")[0]).failures

    def _gather(
        self, message: _Message, reply: Callable[[list[bytes]], bytes]
    ) -> tuple[_Reply, Exception | None]:
        """Gather the messages of all ranks.

        Returns:
            On rank 0, the reply to all ranks, and the error of `reply` if it failed.
        """
        encoded = self._group.gather(msgspec.msgpack.encode(message))
        messages = [msgspec.msgpack.decode(each, type=_Message) for each in encoded]
        failures = {rank: m.failure for rank, m in enumerate(messages) if m.failure is not None}
        if failures:
            return _Reply(self._operation, error_class="RankError", failures=failures), None
        if not messages:
            return _Reply(self._operation), None
        try:
            _refuse_different_operations([each.operation for each in messages])
            return _Reply(self._operation, reply([each.data for each in messages])), None
        except Exception as error:  # the caller raises it, after the other ranks know
            return self._reply_of(error), error

    def _broadcast(self, reply: _Reply) -> _Reply:
        data = msgspec.msgpack.encode(reply) if self._group.rank == 0 else b""
        return msgspec.msgpack.decode(self._group.broadcast(data), type=_Reply)

    def _reply_of(self, error: Exception) -> _Reply:
        name = type(error).__name__
        if isinstance(error, MismatchError):
            problems = [text_of(each) for each in error.problems]
            return _Reply(self._operation, b"", name, text_of(error.summary), problems)
        return _Reply(self._operation, b"", name, text_of(error))


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
    error_class: Any = getattr(errors, reply.error_class, None)
    if error_class is MismatchError:
        raise MismatchError(reply.message, reply.problems)
    # The others need more than a text.
    takes_text = isinstance(error_class, type) and issubclass(error_class, ShardwiseError)
    if takes_text and not issubclass(error_class, (RankError, SpecError)):
        raise error_class(reply.message)
    raise RankError(operation, {0: f"{reply.error_class}: {reply.message}"})
