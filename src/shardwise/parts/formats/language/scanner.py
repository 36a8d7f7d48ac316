"""The scanner of specifications: reads symbols, names and numbers from the text.

Errors show the line of the text, and a caret below the wrong character.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from shardwise.kernel.errors import SpecError

SPACE = re.compile(r"(?:\s|#(?<!\S#)[^\n]*)*")  # `#` starts a comment only at the start of a word
NAME = re.compile(r"[A-Za-z_]\w*")
NUMBER = re.compile(r"\d+")
LITERAL = re.compile(r'[^\s,\[\]{}*"]+')
QUOTED = re.compile(r'"[^"\n]*"')
LARGEST_NUMBER = 2**62


@dataclass(frozen=True, slots=True)
class SourceText:
    """The text of a specification.

    Attributes:
        text: the text.
        source: the name of the text in messages, for example the path of its file.
    """

    text: str
    source: str

    def error(self, position: int, message: str) -> SpecError:
        """Return an error that points at a character, given by its index in the text."""
        line_start = self.text.rfind("\n", 0, position) + 1
        line, lines = self.line_number(position), self.text.splitlines()
        shown = lines[line - 1] if line <= len(lines) else ""
        column = position - line_start + 1
        return SpecError(message, source=self.source, line=line, column=column, text=shown)

    def line_number(self, position: int) -> int:
        """Return the line of a character, counted from 1."""
        return self.text.count("\n", 0, position) + 1

    def place_of(self, position: int) -> str:
        """Return the source and the line of a character: `my.spec:3`."""
        return f"{self.source}:{self.line_number(position)}"

    def statement_ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each statement. A statement starts at the left margin."""
        lines = self.text.splitlines(keepends=True)
        indents = [
            None if not line.strip() or line.lstrip().startswith("#") else _indent(line)
            for line in lines
        ]
        margin = min((indent for indent in indents if indent is not None), default=0)
        starts, position = [], 0
        for line, indent in zip(lines, indents, strict=True):
            if indent == margin:
                starts.append(position + margin)
            position += len(line)
        yield from zip(starts, [*starts[1:], len(self.text)], strict=False)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


class Scanner:
    """Reads one statement. Each read also skips the space and comments that follow.

    Args:
        source: the whole text.
        start, end: the range of the statement in the text.
    """

    def __init__(self, source: SourceText, start: int, end: int) -> None:
        self.source, self.position, self.end = source, start, end
        self.skip_space()

    def skip_space(self) -> None:
        """Skip spaces and comments."""
        found = SPACE.match(self.source.text, self.position, self.end)
        self.position = found.end() if found else self.position

    @property
    def at_end(self) -> bool:
        """Whether the whole statement has been read."""
        return self.position >= self.end

    def fail(self, message: str, position: int | None = None) -> NoReturn:
        """Raise an error that points at `position`, by default at the next character.

        Raises:
            SpecError: always.
        """
        raise self.source.error(self.position if position is None else position, message)

    def next_is(self, symbol: str) -> bool:
        """Return whether a symbol or a complete word comes next."""
        if not self.source.text.startswith(symbol, self.position, self.end):
            return False
        after = self.source.text[self.position + len(symbol) : self.end][:1]
        return not (symbol[-1].isalpha() and (after.isalnum() or after == "_"))

    def accept(self, symbol: str) -> bool:
        """Read a symbol or word if it comes next; return whether it did."""
        if not self.next_is(symbol):
            return False
        self.position += len(symbol)
        self.skip_space()
        return True

    def expect(self, symbol: str, context: str) -> None:
        """Read a required symbol. `context` continues the message of the error.

        Raises:
            SpecError: something else comes next.
        """
        if not self.accept(symbol):
            self.fail(f"expected `{symbol}` {context}")

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Read and return text that matches a regular expression; None if none comes next."""
        found = pattern.match(self.source.text, self.position, self.end)
        if found is None or not found.group():
            return None
        self.position = found.end()
        self.skip_space()
        return found.group()

    def read_name(self, expected: str) -> str:
        """Read a name. `expected` describes the name in the message of the error.

        Raises:
            SpecError: no name comes next.
        """
        found = self.match(NAME)
        return found if found is not None else self.fail(f"expected {expected}")

    def read_number(self) -> int | None:
        """Read a number; return None if none comes next.

        Raises:
            SpecError: the number is too large.
        """
        position = self.position
        digits = self.match(NUMBER)
        if digits is None:
            return None
        if len(digits) > 19 or int(digits) > LARGEST_NUMBER:
            self.fail(f"the number is too large; the largest is {LARGEST_NUMBER}", position)
        return int(digits)

    def read_name_parts(self, expected: str) -> Iterator[str]:
        """Read a name up to the next space or comma, and yield its parts.

        A part is `*`, `{`, or literal text with a `"` in front of it. After `{`, the caller reads
        up to and including `}` before it takes the next part.

        Args:
            expected: a description of the name, for the message of the error.

        Raises:
            SpecError: no name comes next.
        """
        start, text = self.position, self.source.text
        while True:
            if self.position < self.end and text[self.position] in "*{":
                self.position += 1
                yield text[self.position - 1]
                continue
            quoted = QUOTED.match(text, self.position, self.end)
            found = quoted or LITERAL.match(text, self.position, self.end)
            if found is None:
                break
            self.position = found.end()
            yield '"' + (found.group()[1:-1] if quoted else found.group())
        if self.position == start:
            self.fail(f"expected {expected}")
        self.skip_space()

    def read_closing_brace(self) -> None:
        """Read `}`. Unlike `expect`, do not skip the space after it, because a space ends the name.

        Raises:
            SpecError: something else comes next.
        """
        if self.source.text[self.position : min(self.position + 1, self.end)] != "}":
            self.fail("expected `}`")
        self.position += 1
