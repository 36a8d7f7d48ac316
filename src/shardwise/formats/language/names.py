"""Patterns that names match, and templates that make names of what was captured."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from shardwise.errors import LayoutError
from shardwise.formats.language.numbers import Expression, Name, names_in, render

Matcher = Callable[[str], dict[str, str] | None]


@dataclass(frozen=True, slots=True)
class Capture:
    """`{name}`: a word without dots, or a number where it is counted with; `*` takes any text."""

    name: str
    star: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """Literal text and captures, in order."""

    parts: tuple[str | Capture, ...]

    def captures(self) -> tuple[str, ...]:
        """Names of the captures; a star without a name is `*0`, `*1`, … by its position."""
        found = (part.name for part in self.parts if isinstance(part, Capture))
        return tuple(dict.fromkeys(found))

    def matcher(self, numbers: Collection[str]) -> Matcher:
        """A function from a name to what it captures, or None.

        Args:
            numbers: captures that take only digits.
        """
        names = list(self.captures())
        seen: set[str] = set()
        pieces = []
        for part in self.parts:
            if isinstance(part, str):
                pieces.append(re.escape(part))
            elif part.name in seen:
                pieces.append(f"(?:\\{names.index(part.name) + 1})")
            else:
                seen.add(part.name)
                kind = r"\d{1,9}" if part.name in numbers else ".+" if part.star else r"[^.]+"
                pieces.append(f"({kind})")
        compiled = re.compile("".join(pieces), re.DOTALL | re.ASCII)

        def match(name: str) -> dict[str, str] | None:
            found = compiled.fullmatch(name)
            return dict(zip(names, found.groups(), strict=True)) if found else None

        return match

    def __str__(self) -> str:
        return "".join(
            part if isinstance(part, str) else "*" if part.name[0] == "*" else _braced(part)
            for part in self.parts
        )


def _braced(capture: Capture) -> str:
    return "{" + capture.name + ("*" if capture.star else "") + "}"


@dataclass(frozen=True, slots=True)
class Template:
    """Literal text and expressions; one that is only the name of a capture may stand for text."""

    parts: tuple[str | Expression, ...]

    def fill(self, texts: Mapping[str, str]) -> str:
        """The name, where all of its captures stand for text.

        Raises:
            LayoutError: something is no capture.
        """
        words = []
        for part in self.parts:
            if not isinstance(part, str | Name):
                raise LayoutError("a name that is made of others cannot count")
            words.append(part if isinstance(part, str) else texts[part.name])
        return "".join(words)

    def __str__(self) -> str:
        return "".join(p if isinstance(p, str) else f"{{{render(p)}}}" for p in self.parts)

    def names(self) -> tuple[str, ...]:
        """All captures, coordinates, axes and constants that it takes."""
        holes = (part for part in self.parts if not isinstance(part, str))
        return tuple(dict.fromkeys(name for hole in holes for name in names_in(hole)))


def substitute(
    parts: tuple[str | Capture, ...], by: Mapping[str, tuple[str | Capture, ...]]
) -> tuple[str | Capture, ...]:
    """A pattern's parts with captures replaced by parts of another."""
    found: list[str | Capture] = []
    for part in parts:
        own = by.get(part.name) if isinstance(part, Capture) else None
        found.extend((part,) if own is None else own)
    return tuple(found)
