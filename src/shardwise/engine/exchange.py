"""The one way in which ranks agree: all speak, rank 0 answers, and a failure is everyone's.

An exchange returns on all ranks or raises on all, so that no rank waits for one that gave up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from shardwise import errors
from shardwise.engine.group import Group
from shardwise.errors import LostRankError, MismatchError, RankError, ShardwiseError, described


class _Said(msgspec.Struct, array_like=True):
    """What a rank says: what it is doing, and its bytes, or the error it met instead."""

    doing: str
    data: bytes = b""
    failure: str | None = None


class _Answer(msgspec.Struct, array_like=True):
    """What rank 0 answers: bytes, or an error of its own (`kind`), or those of other ranks."""

    data: bytes = b""
    kind: str | None = None
    message: str = ""
    problems: list[str] = []
    failures: dict[int, str] = {}


def exchange(
    group: Group,
    doing: str,
    speak: Callable[[], bytes],
    answer: Callable[[list[bytes]], bytes | Sequence[bytes]],
) -> bytes:
    """Gather what every rank has to say, and give each what rank 0 makes of it.

    Args:
        group: the ranks; all call this with the same `doing`.
        doing: what is being done, for the errors; it has no answer unless all ranks do it.
        speak: runs on every rank.
        answer: runs on rank 0, on what all said; one answer for all, or a sequence of one each.

    Raises:
        ShardwiseError: whatever `answer` raised, on all ranks.
        MismatchError: the ranks are not doing the same.
        RankError: `speak` failed on another rank.
        LostRankError: a rank is gone, or does not answer in time.
        Exception: whatever `speak` raised, on the rank that it failed on.
    """
    mine, error = _attempt(doing, speak)
    try:
        heard, central = _meet(group, mine, answer)
    except LostRankError as lost:
        if error is None:
            raise
        raise error from lost  # what this rank has met says more
    if error is not None:
        raise error
    if central is not None:
        raise central
    _raise_failure(heard, doing)
    return heard.data


def _meet(
    group: Group, mine: _Said, answer: Callable[[list[bytes]], bytes | Sequence[bytes]]
) -> tuple[_Answer, Exception | None]:
    """What this rank is answered; and on rank 0, what `answer` raised."""
    said = [
        msgspec.msgpack.decode(data, type=_Said)
        for data in group.gather(msgspec.msgpack.encode(mine))
    ]
    answers: list[_Answer] = []
    central: Exception | None = None
    if group.rank == 0:
        answers, central = _answers(said, answer, group.size)
    encoded = [msgspec.msgpack.encode(each) for each in answers]
    reply = group.broadcast(encoded[0] if len(encoded) == 1 else b"")
    if not reply:  # no answer is empty: each rank has one of its own
        reply = group.scatter(encoded)
    return msgspec.msgpack.decode(reply, type=_Answer), central


def _attempt(doing: str, speak: Callable[[], bytes]) -> tuple[_Said, Exception | None]:
    try:
        return _Said(doing, speak()), None
    except Exception as error:  # it is raised again once the other ranks know
        return _Said(doing, failure=described(error)), error


def _answers(
    said: list[_Said], answer: Callable[[list[bytes]], bytes | Sequence[bytes]], size: int
) -> tuple[list[_Answer], Exception | None]:
    failures = {rank: each.failure for rank, each in enumerate(said) if each.failure is not None}
    if failures:
        return [_Answer(kind="RankError", failures=failures)], None
    try:
        _refuse_apart([each.doing for each in said])
        reply = answer([each.data for each in said])
    except Exception as error:  # it is raised again once the other ranks know
        problems = error.problems if isinstance(error, MismatchError) else []
        message = error.summary if isinstance(error, MismatchError) else str(error)
        return [_Answer(kind=type(error).__name__, message=message, problems=problems)], error
    if isinstance(reply, bytes):
        return [_Answer(reply)], None
    if len(reply) == 1 == size:
        return [_Answer(reply[0])], None
    return [_Answer(each) for each in reply], None


def _refuse_apart(doing: Sequence[str]) -> None:
    """Refuse to mix messages of different kinds, which could be read as each other."""
    if len(set(doing)) > 1:
        firsts = sorted(doing.index(each) for each in set(doing))
        raise MismatchError(
            "ranks are not doing the same: all must make the same calls, with the same steps and "
            "options, in the same order:",
            [f"rank {rank}: {doing[rank]}" for rank in firsts],
        )


def _raise_failure(heard: _Answer, doing: str) -> None:
    if heard.kind is None:
        return
    if heard.failures:
        raise RankError(doing, heard.failures)
    kind = getattr(errors, heard.kind, None)
    if heard.kind == "MismatchError":
        raise MismatchError(heard.message, heard.problems)
    if isinstance(kind, type) and issubclass(kind, ShardwiseError) and kind is not RankError:
        raise kind(heard.message)
    raise RankError(doing, {0: f"{heard.kind}: {heard.message}"})
