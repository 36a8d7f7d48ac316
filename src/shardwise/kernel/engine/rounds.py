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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import TracebackType
from typing import Any, TypeVar, overload

import msgspec

from shardwise.kernel import errors
from shardwise.kernel.decoding import DECODE_ERRORS, prepare_decoding
from shardwise.kernel.engine.group import Group, UndecodableError
from shardwise.kernel.errors import (
    MOST_RANKS_SHOWN,
    LostRankError,
    MismatchError,
    RankError,
    ShardwiseError,
    SpecError,
    describe_error,
    name_ranks,
    text_of,
)

T = TypeVar("T")
R = TypeVar("R")
K = TypeVar("K")
_NO_REASON = "RankError: "
"""A rank that failed only because another rank failed describes its error in this way. The text
explains nothing, so it is left out."""
MOST_FAILURES = 16
"""The most failed ranks whose errors each rank receives. It also receives the number of all."""
MOST_VALUES = 16
"""The most different values that an error lists, where ranks should have the same value."""
MOST_PROBLEMS = 1000
"""The most lines of an error that are sent."""
MOST_TEXT = 4000
"""The most characters of the text of an error that are sent."""
Values = dict[str, dict[str, list[int]]]
"""By name, the different values of ranks, each with its first ranks."""


@prepare_decoding
class _Error(msgspec.Struct, array_like=True):
    """An error that is the same on all ranks: the name of its class, and its text."""

    name: str
    text: str
    problems: list[str] = []


@prepare_decoding
class _Message(msgspec.Struct, array_like=True):
    """The combined messages of some ranks to rank 0, and the reply of rank 0 to all ranks.

    Attributes:
        operations: the names of the operations, with the first rank of each.
        data: the combined data of the ranks; empty if any of them failed.
        failures: the errors of the first failed ranks.
        failed: the number of failed ranks.
        error: an error that combining the data has raised.
    """

    operations: dict[str, int]
    data: bytes = b""
    failures: dict[int, str] = {}
    failed: int = 0
    error: _Error | None = None

    @property
    def has_data(self) -> bool:
        """Whether the data of all ranks could be combined."""
        return not self.failed and self.error is None and len(self.operations) == 1


class Round:
    """A step that all ranks take together, as a context manager.

    At most one of `all_gather`, `all_reduce` and `broadcast` is called, at the end of the block.
    Without such a call, the end of the block waits for the other ranks.

    Args:
        group: the ranks. All of them begin the same rounds in the same order.
        operation: what the ranks do, for error messages; the same on all ranks.
        rank0_only: only rank 0 does something in the block that can fail. The other ranks send
            nothing, and wait for rank 0. All ranks call `broadcast` at the end, or no rank does.

    Attributes:
        failed: the number of ranks whose block failed; 0 until this is known.

    Raises:
        Exception: the block failed on this rank.
        RankError: the block failed on other ranks. The error says why.
        ShardwiseError: rank 0 failed in a round with `rank0_only`, or a function passed to
            `all_reduce` failed: the same error on all ranks.
        MismatchError: ranks take different steps.
        LostRankError: a rank died or did not answer in time.
    """

    def __init__(self, group: Group, operation: str, *, rank0_only: bool = False) -> None:
        self._group = group
        self._operation = operation
        self._first_only = rank0_only
        self._is_over = False
        self.failed = 0

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
            reply = self._report(error)
        except LostRankError as lost:
            raise error from lost  # the error of this rank explains more
        reasons = {
            rank: text for rank, text in reply.failures.items() if not text.startswith(_NO_REASON)
        }
        if type(error) is RankError and reasons:  # it only says that another rank has failed
            raise RankError(self._operation, reasons) from error

    def all_gather(self, message: T, kind: Any) -> list[T]:
        """Send a message, and return the messages of all ranks.

        Every rank receives all messages. Use `all_reduce` where a result that does not grow with
        the number of ranks is enough.

        Args:
            message: a value that msgspec encodes.
            kind: the type of the messages.
        """
        if self._group.size == 1:
            self._is_over = True
            return [message]
        encoded = self.all_reduce(
            [(self._group.rank, self._group.number, msgspec.msgpack.encode(message))],
            list[tuple[int, int, bytes]],
            concatenate,
            lambda messages: [(number, data) for _, number, data in sorted(messages)],
            list[tuple[int, bytes]],
        )
        return [self._decode_of(number, data, kind) for number, data in encoded]

    @overload
    def all_reduce(self, message: T, kind: Any, combine: Callable[[Sequence[T]], T]) -> T: ...

    @overload
    def all_reduce(
        self,
        message: T,
        kind: Any,
        combine: Callable[[Sequence[T]], T],
        conclude: Callable[[T], R],
        result_kind: Any,
    ) -> R: ...

    def all_reduce(
        self,
        message: T,
        kind: Any,
        combine: Callable[[Sequence[T]], T],
        conclude: Callable[[T], R] | None = None,
        result_kind: Any = None,
    ) -> T | R:
        """Send a message, and return the combined messages of all ranks.

        Messages are combined on their way to rank 0, on several ranks. For example,
        `all_reduce(loss, float, max)` returns the greatest loss of all ranks.

        Args:
            message: a value that msgspec encodes.
            kind: the type of the messages.
            combine: combines messages into one. It must be associative and commutative, such as
                `max`, or the union of sets.
            conclude: makes the result from the combined message. It runs on rank 0 only. Without
                it, the combined message is the result.
            result_kind: the type of what `conclude` returns, a value that msgspec encodes.
        """
        if self._group.size == 1:
            self._is_over = True
            return message if conclude is None else conclude(message)

        def combine_data(parts: Sequence[bytes]) -> bytes:
            return msgspec.msgpack.encode(combine(_decode_each(parts, kind)))

        def conclude_data(data: bytes) -> bytes:
            if conclude is None:
                return data
            return msgspec.msgpack.encode(conclude(self._decode_of(0, data, kind)))

        data = self._exchange(msgspec.msgpack.encode(message), combine_data, conclude_data)
        result: T | R = self._decode_of(0, data, kind if conclude is None else result_kind)
        return result

    def require_equal(
        self,
        values: Mapping[str, str],
        summary: str,
        conclude: Callable[[], Any] = lambda: None,
        result_kind: Any = None,
    ) -> Any:
        """Require that all ranks have the same values, and return what rank 0 concludes then.

        Args:
            values: the values of this rank by name, formatted for an error message. If there is
                only one, its name may be "".
            summary: the first line of the error.
            conclude: makes the result. It runs on rank 0 only.
            result_kind: the type of the result, a value that msgspec encodes.

        Raises:
            MismatchError: values differ. The error lists the different values of each name with
                their first ranks.
        """

        def conclude_equal(values: Values) -> Any:
            refuse_unequal(summary, values)
            return conclude()

        own = values_of(self._group.number, values)
        return self.all_reduce(own, Values, combine_values, conclude_equal, result_kind)

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
        shared: T = self._decode_of(0, data, kind)
        return shared

    def _decode_of(self, number: int, data: bytes, kind: Any) -> Any:
        """Decode what a rank has sent to all ranks."""
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except DECODE_ERRORS as error:
            raise RankError(
                self._operation, {number: str(UndecodableError(0, str(error)))}
            ) from error

    def _exchange(
        self,
        data: bytes,
        combine: Callable[[Sequence[bytes]], bytes],
        conclude: Callable[[bytes], bytes] = bytes,
    ) -> bytes:
        """Send this rank's data, and return what rank 0 concludes from the data of all ranks."""
        self._is_over = True
        message, raised = self._message(data=data), list[Exception]()
        if not self._first_only:
            message = self._reduce(message, combine, raised)
        if self._group.rank == 0 and message.has_data:
            try:
                message.data = conclude(message.data)
            except Exception as error:  # raised below, after the other ranks know
                raised.append(error)
                message = self._message(error=_encode_error(error))
        reply = self._broadcast(message)
        self.failed = reply.failed
        if raised:
            raise raised[0]
        _refuse_different_operations(
            _first_ranks([reply.operations, {self._operation: self._group.number}])
        )
        _raise_failure(reply, self._operation)
        return reply.data

    def _report(self, error: Exception) -> _Message:
        """Tell the other ranks that this rank has failed, and return the reply to all ranks."""
        self._is_over = True
        if self._first_only:
            return self._broadcast(self._message(error=_encode_error(error)))
        text = describe_error(error)[:MOST_TEXT]
        message = self._message(failures={self._group.number: text}, failed=1)
        return self._broadcast(self._reduce(message, lambda _: b"", []))

    def _message(
        self,
        *,
        data: bytes = b"",
        failures: dict[int, str] | None = None,
        failed: int = 0,
        error: _Error | None = None,
    ) -> _Message:
        operations = {self._operation: self._group.number}
        return _Message(operations, data, failures or {}, failed, error)

    def _reduce(
        self,
        message: _Message,
        combine: Callable[[Sequence[bytes]], bytes],
        raised: list[Exception],
    ) -> _Message:
        """Return the combined messages of all ranks on rank 0, and `message` on other ranks.

        Args:
            message: the message of this rank.
            combine: combines the data of some ranks.
            raised: gets an exception that combining messages on this rank has raised.
        """

        def combine_encoded(encoded: Sequence[bytes]) -> bytes:
            messages = _decode_each(encoded, _Message)
            combined = _combine(messages)
            try:
                if combined.has_data:
                    combined.data = combine([each.data for each in messages])
            except UndecodableError as error:
                sender = min(messages[error.index].operations.values(), default=0)
                combined = self._message(failures={sender: str(error)}, failed=1)
            except Exception as error:  # the caller raises it, after the other ranks know
                raised.append(error)
                combined = self._message(error=_encode_error(error))
            return msgspec.msgpack.encode(combined)

        with self._naming_the_operation():
            data = self._group.reduce(msgspec.msgpack.encode(message), combine_encoded)
        return msgspec.msgpack.decode(data, type=_Message) if self._group.rank == 0 else message

    def _broadcast(self, reply: _Message) -> _Message:
        data = msgspec.msgpack.encode(reply) if self._group.rank == 0 else b""
        decoded: list[_Message] = []
        with self._naming_the_operation():
            self._group.broadcast(
                data, lambda each: decoded.append(msgspec.msgpack.decode(each, type=_Message))
            )
        return decoded[0]

    @contextmanager
    def _naming_the_operation(self) -> Iterator[None]:
        """Say in errors of the group what the ranks were doing."""
        try:
            yield
        except RankError as error:
            operation = f"{self._operation}: {error.operation}"
            named = type(error)(operation, error.failures, count=error.count)
            raise named.with_traceback(error.__traceback__) from error.__cause__


def _decode_each(messages: Sequence[bytes], kind: Any) -> list[Any]:
    """Decode messages of ranks.

    Raises:
        UndecodableError: says which message cannot be decoded.
    """
    decoder, decoded = msgspec.msgpack.Decoder(kind), list[Any]()
    try:
        for each in messages:
            decoded.append(decoder.decode(each))
    except DECODE_ERRORS as error:
        raise UndecodableError(len(decoded), str(error)) from error
    return decoded


def unite(messages: Sequence[dict[K, T]]) -> dict[K, T]:
    """Return all items of some dicts, for `Round.all_reduce`. Their keys must differ."""
    return {key: value for message in messages for key, value in message.items()}


def concatenate(messages: Sequence[list[T]]) -> list[T]:
    """Return all elements of some lists, for `Round.all_reduce`. Their order is not defined."""
    return list(chain.from_iterable(messages))


def values_of(rank: int, values: Mapping[str, str]) -> Values:
    """Return the values of one rank, for `combine_values`."""
    return {name: {value: [rank]} for name, value in values.items()}


def combine_values(messages: Sequence[Values]) -> Values:
    """Return the values of some ranks together: the first different values, and their ranks."""
    combined: Values = {}
    for message in messages:
        for name, values in message.items():
            own = combined.setdefault(name, {})
            for value, ranks in values.items():
                own[value] = sorted([*own.get(value, []), *ranks])[: MOST_RANKS_SHOWN + 1]
    return {
        name: dict(sorted(values.items(), key=lambda each: each[1])[:MOST_VALUES])
        for name, values in combined.items()
    }


def refuse_unequal(summary: str, values: Values) -> None:
    """Raise if ranks have different values.

    Args:
        summary: the first line of the error.
        values: the values of all ranks, from `combine_values`.

    Raises:
        MismatchError: values differ. The error lists the different values with their first ranks.
    """
    problems = []
    for name, own in values.items():
        if len(own) > 1 and name:
            having = (
                f"{name_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} {value}"
                for value, ranks in own.items()
            )
            problems.append(f"{name}: {', '.join(having)}")
        elif len(own) > 1:
            problems += [f"{name_ranks(ranks)}: {value}" for value, ranks in own.items()]
    if problems:
        raise MismatchError(summary, problems)


def _combine(messages: Sequence[_Message]) -> _Message:
    """Combine all but the data of the messages of some ranks."""
    failures = [each for message in messages for each in message.failures.items()]
    # A rank that failed because another one did says less than the other one.
    failures.sort(key=lambda each: (each[1].startswith(_NO_REASON), each[0]))
    return _Message(
        operations=_first_ranks([each.operations for each in messages]),
        failures=dict(sorted(failures[:MOST_FAILURES])),
        failed=sum(each.failed for each in messages),
        error=next((each.error for each in messages if each.error is not None), None),
    )


def _first_ranks(messages: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the first rank of each operation, for the operations with the lowest first ranks."""
    first: dict[str, int] = {}
    for operations in messages:
        for operation, rank in operations.items():
            first[operation] = min(rank, first.get(operation, rank))
    return dict(sorted(first.items(), key=lambda each: each[1])[:MOST_VALUES])


def _refuse_different_operations(first_ranks: Mapping[str, int]) -> None:
    """Refuse messages of different operations, which cannot be decoded together."""
    if len(first_ranks) > 1:
        raise MismatchError(
            "ranks called different operations: all must make the same calls, with the same steps "
            "and options, in the same order:",
            [f"rank {rank}: {operation}" for operation, rank in first_ranks.items()],
        )


def _encode_error(error: Exception) -> _Error:
    name = type(error).__name__
    if isinstance(error, MismatchError):
        problems = [text_of(each)[:MOST_TEXT] for each in error.problems[:MOST_PROBLEMS]]
        if len(error.problems) > MOST_PROBLEMS:
            problems.append(f"and {len(error.problems) - MOST_PROBLEMS} more")
        return _Error(name, text_of(error.summary)[:MOST_TEXT], problems)
    return _Error(name, text_of(error)[:MOST_TEXT])


def _raise_failure(reply: _Message, operation: str) -> None:
    if reply.failed:
        raise RankError(operation, reply.failures, count=reply.failed)
    error = reply.error
    if error is None:
        return
    error_class: Any = getattr(errors, error.name, None)
    if error_class is MismatchError:
        raise MismatchError(error.text, error.problems)
    # The others need more than a text.
    takes_text = isinstance(error_class, type) and issubclass(error_class, ShardwiseError)
    if takes_text and not issubclass(error_class, (RankError, SpecError)):
        raise error_class(error.text)
    raise RankError(operation, {0: f"{error.name}: {error.text}"})
