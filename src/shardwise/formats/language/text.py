"""Text that is read from left to right, and knows where it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from shardwise.errors import SpecError

SPACE = re.compile(r"(?:\s|#(?<!\S#)[^\n]*)*")  # a # within a word is a letter of it
NAME = re.compile(r"[A-Za-z_]\w*")
NUMBER = re.compile(r"\d+")
LARGEST_NUMBER = 2**62


@dataclass(frozen=True, slots=True)
class Text:
    """A specification's text, and what to call it in messages."""

    text: str
    source: str

    def error(self, at: int, what: str) -> SpecError:
        """An error that shows the place: a character's index from the start of the text."""
        line = self.text.count("\n", 0, at)
        begin = self.text.rfind("\n", 0, at) + 1
        shown = self.text.splitlines()[line] if line < len(self.text.splitlines()) else ""
        return SpecError(what, source=self.source, line=line + 1, column=at - begin + 1, text=shown)

    def line(self, at: int) -> int:
        """The number of the line of a character, from 1."""
        return self.text.count("\n", 0, at) + 1

    def statements(self) -> Iterator[tuple[int, int]]:
        """Where each statement begins and ends: at a line that is not indented."""
        lines = self.text.splitlines(keepends=True)
        starts, at = [], 0
        margin = min(
            (len(line) - len(line.lstrip()) for line in lines if _says_something(line)), default=0
        )
        for line in lines:
            if _says_something(line) and len(line) - len(line.lstrip()) == margin:
                starts.append(at + margin)
            at += len(line)
        yield from zip(starts, [*starts[1:], len(self.text)], strict=False)


def _says_something(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


class Cursor:
    """A place in a statement; every reading moves it past what was read, and the space after."""

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
        """Raise an error that points here, or at another place.

        Raises:
            SpecError: always.
        """
        raise self.text.error(self.at if at is None else at, what)

    def sees(self, symbol: str) -> bool:
        """Whether the text goes on with a symbol, or with a word that ends there."""
        if not self.text.text.startswith(symbol, self.at, self.stop):
            return False
        after = self.text.text[self.at + len(symbol) : self.stop][:1]
        return not (symbol[-1].isalpha() and (after.isalnum() or after == "_"))

    def take(self, symbol: str) -> bool:
        """Read a symbol or word if it is there."""
        if not self.sees(symbol):
            return False
        self.at += len(symbol)
        self.skip_space()
        return True

    def expect(self, symbol: str, why: str) -> None:
        """Read a symbol that must be there.

        Raises:
            SpecError: it is not.
        """
        if not self.take(symbol):
            self.fail(f"expected `{symbol}` {why}")

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Read what a regular expression matches here, if it does."""
        found = pattern.match(self.text.text, self.at, self.stop)
        if found is None or not found.group():
            return None
        self.at = found.end()
        self.skip_space()
        return found.group()

    def name(self, what: str) -> str:
        """Read a name.

        Raises:
            SpecError: there is none; `what` says what it would be of.
        """
        found = self.match(NAME)
        return found if found is not None else self.fail(f"expected {what}")

    def number(self) -> int | None:
        """Read a number, if one is there.

        Raises:
            SpecError: it is absurd.
        """
        at = self.at
        digits = self.match(NUMBER)
        if digits is None:
            return None
        if len(digits) > 19 or int(digits) > LARGEST_NUMBER:
            self.fail("this number is absurdly large", at)
        return int(digits)
