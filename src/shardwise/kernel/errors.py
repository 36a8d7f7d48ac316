"""The errors that shardwise raises.

    ShardwiseError
    ├── StateError            a value cannot be saved or restored, or an option is invalid
    ├── LayoutError           shards do not cover a tensor exactly once
    ├── SpecError             a layout specification has an error; the message shows where
    ├── MismatchError         checkpoint and state do not match, or replicas differ
    ├── StoreError            an operation of the storage or of an agent failed
    │   └── StoreUnavailableError     the storage does not answer now; trying again may help
    ├── CheckpointNotFoundError   there is no committed checkpoint at the path
    ├── CheckpointExistsError     the path has a checkpoint, and `overwrite` is not set
    ├── CorruptionError       bytes differ from the saved bytes
    │   └── FormatError       a manifest or header is malformed, or of another version
    └── RankError             another rank failed, so all ranks stopped the operation
        └── LostRankError     another rank died, or did not answer in time

Each message says what failed, where, why, and what to do.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

MOST_RANKS_SHOWN = 8


class ShardwiseError(Exception):
    """The base class of all errors of this library."""


class StateError(ShardwiseError, ValueError):
    """A value in the state cannot be saved or restored, or an option is invalid."""


class LayoutError(ShardwiseError, ValueError):
    """The shards of the ranks do not cover a tensor exactly once."""


class SpecError(ShardwiseError, ValueError):
    """A layout specification has an error. The message shows the line, and a caret at the column.

    Attributes:
        problem: the problem, in words.
        source: the name of the specification, for example its file.
        line, column: the position of the problem, both counted from 1.
        text: the line.
    """

    def __init__(self, problem: str, *, source: str, line: int, column: int, text: str) -> None:
        self.problem, self.source, self.line, self.column, self.text = (
            problem,
            source,
            line,
            column,
            text,
        )
        caret = " " * (column - 1) + "^"
        super().__init__(f"{source}:{line}:{column}: {problem}\n  {text}\n  {caret}")

    def __reduce__(self) -> tuple[object, ...]:
        make = partial(
            type(self),
            source=self.source,
            line=self.line,
            column=self.column,
            text=self.text,
        )
        return make, (self.problem,)


class MismatchError(ShardwiseError, ValueError):
    """Checkpoint and state do not match, or replicas differ. The message shows up to 50 problems.

    Example:

        try:
            sw.load(path, state)
        except sw.MismatchError as error:
            print(len(error.problems), *error.problems, sep="\\n")

    Attributes:
        summary: the first line of the message.
        problems: all problems, one line for each affected name.
    """

    def __init__(self, summary: str, problems: Sequence[str]) -> None:
        self.summary = summary
        self.problems = list(problems)
        shown = self.problems[:50]
        more = len(self.problems) - len(shown)
        lines = [summary, *(f"  - {problem}" for problem in shown)]
        if more:
            lines.append(f"  … and {more} more (all in `.problems`)")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type[MismatchError], tuple[str, list[str]]]:
        return type(self), (self.summary, self.problems)


class StoreError(ShardwiseError, OSError):
    """An operation of the storage or of an agent failed."""


class StoreUnavailableError(StoreError):
    """The storage does not answer, or is overloaded. The operation may succeed later.

    An agent that persists a checkpoint tries again. Other operations raise this error.
    """


class CheckpointNotFoundError(ShardwiseError, FileNotFoundError):
    """There is no committed checkpoint at the path."""


class CheckpointExistsError(ShardwiseError, FileExistsError):
    """There is already a committed checkpoint at the path."""


class CorruptionError(ShardwiseError):
    """Bytes that were read differ from those that were saved."""


class FormatError(CorruptionError, ValueError):
    """A manifest or a header is malformed, unsafe, or of an unknown version."""


class RankError(ShardwiseError):
    """Another rank failed, so this rank stopped the operation too.

    Attributes:
        operation: the name of the operation.
        failures: the error messages of failed ranks. If very many ranks failed, of the first ones.
        count: the number of failed ranks.
    """

    def __init__(
        self, operation: str, failures: dict[int, str], *, count: int | None = None
    ) -> None:
        self.operation = operation
        self.failures = failures
        self.count = len(failures) if count is None else count
        shown = [f"  rank {rank}: {text}" for rank, text in list(failures.items())[:16]]
        if self.count > len(shown):
            shown.append(f"  … and {self.count - len(shown)} more ranks")
        ranks = "1 rank" if self.count == 1 else f"{self.count} ranks"
        super().__init__(f"{operation} failed on {ranks}:\n" + "\n".join(shown))

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), count=self.count), (self.operation, self.failures)


class LostRankError(RankError):
    """Another rank died, or did not answer in time. It is unknown how far that rank got."""


@contextmanager
def user_code(name: str, call: str) -> Iterator[None]:
    """Add the key of the state to errors that code of the user raises in the block.

    Exceptions keep their type and get a note, for example `loader: raised by its state_dict()`. A
    ShardwiseError becomes a StateError: if `load_state_dict` fails to read some other damaged file,
    this checkpoint must not count as damaged.

    Args:
        name: the key of the state.
        call: the method that is called, for the note.

    Raises:
        StateError: the code raised a ShardwiseError.
    """
    try:
        yield
    except StateError as error:
        raise StateError(f"{name}: {error}").with_traceback(error.__traceback__) from None
    except ShardwiseError as error:
        raise StateError(f"{name}: its {call} raised {error!r}") from error
    except Exception as error:
        add_note(error, f"{name}: raised by its {call}")
        raise


@contextmanager
def storage_errors(place: object) -> Iterator[None]:
    """Make errors of the system in the block, such as `PermissionError`, errors of the storage.

    Args:
        place: where the block reads or writes, for the message.

    Raises:
        StoreError: the block raised an `OSError`. `errno` is kept.
    """
    try:
        yield
    except ShardwiseError:
        raise
    except OSError as error:
        shown = f"{type(error).__name__}: {text_of(error)}"
        failure = StoreError(
            f"{place}: {shown}. Check that this user may write there, and that the file system is "
            "mounted and has space"
        )
        failure.errno = error.errno
        raise failure from error


def name_ranks(ranks: Iterable[int]) -> str:
    """Return the names of ranks, ascending: `rank 3`, or `ranks 1-4, 7 and more`."""
    ranges: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], rank
        else:
            ranges.append((rank, rank))
    shown: list[str] = []
    for low, high in ranges:
        shown += [f"{low}-{high}"] if high > low + 1 else map(str, range(low, high + 1))
    more = " and more" if len(shown) > MOST_RANKS_SHOWN else ""
    is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return f"rank{'' if is_one else 's'} {', '.join(shown[:MOST_RANKS_SHOWN])}{more}"


def add_note(error: Exception, note: str) -> None:
    """Add a note, which tracebacks show below the error. On Python 3.10, log the note too."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
        logging.getLogger("shardwise").error("%s", note)


def describe_error(error: BaseException) -> str:
    """Return the type, message and notes of an error: `KeyError: 'x' (loader: raised by …)`."""
    notes = "; ".join(map(text_of, getattr(error, "__notes__", [])))
    return f"{type(error).__name__}: {text_of(error)}" + (f" ({notes})" if notes else "")


def text_of(value: object) -> str:
    """Return `str(value)` as text that UTF-8 can encode, whatever the value is."""
    try:
        text = str(value)
    except Exception as failure:  # the class of a user
        return f"(without a text, because its __str__ raised {type(failure).__name__})"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
