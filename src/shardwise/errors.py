"""Every error that shardwise raises.

    ShardwiseError
    ├── StateError            a value in the state cannot be saved or restored
    ├── LayoutError           shards do not cover a tensor exactly once
    ├── SpecError             a layout specification has an error; the message shows where
    ├── MismatchError         checkpoint and state do not fit, or replicas differ; lists all names
    ├── StoreError            the storage, or an agent, failed an operation
    ├── CheckpointNotFoundError   there is no committed checkpoint at this path
    ├── CheckpointExistsError     there is one at this path, and `overwrite` was not given
    ├── CorruptionError       bytes differ from those that were saved
    │   └── FormatError       a manifest or header is malformed, or of another version
    └── RankError             another rank failed, so all ranks stopped this operation
        └── LostRankError     another rank died, or did not answer in time

Each error says what is wrong, where, and what to do about it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class ShardwiseError(Exception):
    """The base of all errors of this library."""


class StateError(ShardwiseError, ValueError):
    """A value in the state cannot be saved or restored."""


class LayoutError(ShardwiseError, ValueError):
    """The shards that the ranks hold do not make up the tensor."""


class SpecError(ShardwiseError, ValueError):
    """A specification of a foreign checkpoint's layout has an error.

    `line` and `column` count from 1; the message shows the line, and a caret below the column.
    """

    def __init__(self, what: str, *, source: str, line: int, column: int, text: str) -> None:
        self.what, self.source, self.line, self.column, self.text = what, source, line, column, text
        caret = " " * (column - 1) + "^"
        super().__init__(f"{source}:{line}:{column}: {what}\n  {text}\n  {caret}")

    def __reduce__(self) -> tuple[object, ...]:
        return _spec_error, (self.what, self.source, self.line, self.column, self.text)


def _spec_error(what: str, source: str, line: int, column: int, text: str) -> SpecError:
    return SpecError(what, source=source, line=line, column=column, text=text)


class MismatchError(ShardwiseError, ValueError):
    """Checkpoint and state do not fit, or replicas differ.

    `problems` has one line for each affected name; the message shows the first 50.
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
    """The storage, or an agent, failed an operation."""


class CheckpointNotFoundError(ShardwiseError, FileNotFoundError):
    """There is no committed checkpoint at this path."""


class CheckpointExistsError(ShardwiseError, FileExistsError):
    """There is already a committed checkpoint at this path."""


class CorruptionError(ShardwiseError):
    """Bytes that were read differ from those that were saved."""


class FormatError(CorruptionError, ValueError):
    """A manifest or a header is malformed, unsafe, or of an unknown version."""


class RankError(ShardwiseError):
    """Another rank failed, so this rank stopped too.

    `failures` maps each failed rank to its error message.
    """

    def __init__(self, doing: str, failures: dict[int, str]) -> None:
        self.doing = doing
        self.failures = failures
        shown = [f"  rank {rank}: {text}" for rank, text in list(failures.items())[:16]]
        super().__init__(f"{doing} failed on {len(failures)} rank(s):\n" + "\n".join(shown))

    def __reduce__(self) -> tuple[type[RankError], tuple[str, dict[int, str]]]:
        return type(self), (self.doing, self.failures)


class LostRankError(RankError):
    """Another rank died, or did not answer in time. How far it got is not known."""


@contextmanager
def user_code(name: str, call: str) -> Iterator[None]:
    """Name the key of the state whose own code runs in the block, if it raises.

    The caller's exceptions keep their type and get a note: `loader: raised by its state_dict()`.
    A ShardwiseError becomes a StateError: if `load_state_dict` reads some other damaged file, this
    checkpoint must not count as damaged.

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


def add_note(error: Exception, note: str) -> None:
    """Have tracebacks show a line below the error; Python 3.10 cannot, so there it is logged."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", []), note]
        logging.getLogger("shardwise").error("%s", note)


def described(error: BaseException) -> str:
    """The type of an error, its message, and its notes: `KeyError: 'x' (loader: raised by …)`."""
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else "")
