"""How numbers, times and names are spelled for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from itertools import pairwise

from shardwise.events import size as size


def count(number: int, noun: str, plural: str | None = None) -> str:
    """A number and what it counts: `1 file`, `2,000 files`, `2 boxes`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def moment(created: str) -> str:
    """An ISO 8601 time in UTC, to the second; as it is if it is none."""
    try:
        when = datetime.fromisoformat(created)
    except ValueError:
        return printable(created)
    return when.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def metrics(values: dict[str, float | None]) -> str:
    """Names and values: `loss=0.0123 lr=1e-05`."""
    shown = {name: "?" if value is None else f"{value:.4g}" for name, value in values.items()}
    return " ".join(f"{printable(name)}={value}" for name, value in shown.items())


def shape(dims: Sequence[int]) -> str:
    """A shape: `[4096, 4096]`, and `[]` of a scalar."""
    return "[" + ", ".join(map(str, dims)) + "]"


def listed(names: Sequence[str], most: int = 3) -> str:
    """Some of the names, and how many more there are."""
    shown = ", ".join(printable(name) for name in names[:most])
    more = len(names) - most
    return f"{shown} and {more:,} more" if more > 0 else shown


def indices(numbers: Iterable[int]) -> str:
    """Ascending integers, short: `0…31`, `0, 2…30` by their step, `0…3, 7`."""
    rest = list(numbers)
    step = rest[1] - rest[0] if len(rest) > 2 else 1
    if step > 1 and all(b - a == step for a, b in pairwise(rest)):
        return f"{rest[0]}, {rest[1]}…{rest[-1]}"
    runs: list[list[int]] = []
    for number in rest:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}…{run[-1]}" for run in runs)


def printable(text: str) -> str:
    """Text without control characters: they are escaped, so that none reaches the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def clipped(text: str, limit: int) -> str:
    """At most `limit` characters of a text."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
