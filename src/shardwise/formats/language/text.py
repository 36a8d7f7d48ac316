"""The text of a specification, read from left to right; errors show the line and a caret."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from shardwise.errors import SpecError

SPACE = re.compile(r"(?:\s|#(?<!\S#)[^\n]*)*")  # `#` starts a comment only at the start of a word
NAME = re.compile(r"[A-Za-z_]\w*")
NUMBER = re.compile(r"\d+")
LARGEST_NUMBER = 2**62


@dataclass(frozen=True, slots=True)
class Text:
    """The text of a specification, and its name in messages."""

    text: str
    source: str

    def error(self, at: int, what: str) -> SpecError:
        """Return an error that shows the line and column of the character at index `at`."""
        begin = self.text.rfind("\n", 0, at) + 1
        line, lines = self.line(at), self.text.splitlines()
        shown = lines[line - 1] if line <= len(lines) else ""
        return SpecError(what, source=self.source, line=line, column=at - begin + 1, text=shown)

    def line(self, at: int) -> int:
        """Return the number of the line, from 1, of the character at index `at`."""
        return self.text.count("\n", 0, at) + 1

    def statements(self) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each statement. A statement starts at the left margin."""
        lines = self.text.splitlines(keepends=True)
        starts, at = [], 0
        indents = [
            None if not line.strip() or line.lstrip().startswith("#") else _indent(line)
            for line in lines
        ]
        margin = min((indent for indent in indents if indent is not None), default=0)
        for line, indent in zip(lines, indents, strict=True):
            if indent == margin:
                starts.append(at + margin)
            at += len(line)
        yield from zip(starts, [*starts[1:], len(self.text)], strict=False)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


class Cursor:
    """A position in a statement. Reading moves it past the token and the space that follows."""

    def __init__(self, text: Text, start: int, stop: int) -> None:
        self.text, self.at, self.stop = text, start, stop
        self.skip_space()

    def skip_space(self) -> None:
        """Move past spaces and comments."""
        found = SPACE.match(self.text.text, self.at, self.stop)
        self.at = found.end() if found else self.at

    @property
    def done(self) -> bool:
        """Whether the statement ends here."""
        return self.at >= self.stop

    def fail(self, what: str, at: int | None = None) -> NoReturn:
        """Raise an error that points at the cursor, or at the index `at`.

        Raises:
            SpecError: always.
        """
        raise self.text.error(self.at if at is None else at, what)

    def sees(self, symbol: str) -> bool:
        """Whether a symbol or a complete word comes next."""
        if not self.text.text.startswith(symbol, self.at, self.stop):
            return False
        after = self.text.text[self.at + len(symbol) : self.stop][:1]
        return not (symbol[-1].isalpha() and (after.isalnum() or after == "_"))

    def take(self, symbol: str) -> bool:
        """Read a symbol or word if it comes next; return whether it did."""
        if not self.sees(symbol):
            return False
        self.at += len(symbol)
        self.skip_space()
        return True

    def expect(self, symbol: str, why: str) -> None:
        """Read a required symbol.

        Raises:
            SpecError: something else comes next.
        """
        if not self.take(symbol):
            self.fail(f"expected `{symbol}` {why}")

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Read and return a non-empty match of a regular expression, if there is one here."""
        found = pattern.match(self.text.text, self.at, self.stop)
        if found is None or not found.group():
            return None
        self.at = found.end()
        self.skip_space()
        return found.group()

    def name(self, what: str) -> str:
        """Read a name. `what` describes it in the error.

        Raises:
            SpecError: no name comes next.
        """
        found = self.match(NAME)
        return found if found is not None else self.fail(f"expected {what}")

    def number(self) -> int | None:
        """Read a number, if one comes next.

        Raises:
            SpecError: the number is too large.
        """
        at = self.at
        digits = self.match(NUMBER)
        if digits is None:
            return None
        if len(digits) > 19 or int(digits) > LARGEST_NUMBER:
            self.fail(f"the number is absurdly large; the largest is {LARGEST_NUMBER}", at)
        return int(digits)
