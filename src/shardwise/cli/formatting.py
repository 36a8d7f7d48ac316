"""Numbers, times, names and plain values as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from typing import TypeGuard

from shardwise.events import size as size

LONGEST_STRING = 40
LONGEST_VALUE = 160
MOST_ITEMS = 4
DEEPEST = 4

_BARE = ("int", "float", "complex", "dtype", "device")
_MAPPINGS = ("dict", "ordered", "counter")
_ENCODED = ("bytes", "bytearray", "pickle", "numpy")


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number and its noun: `1 file`, `2,000 files`, `2 boxes`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def time(created: str) -> str:
    """Return an ISO 8601 time in UTC, to the second; any other text is returned as it is."""
    try:
        when = datetime.fromisoformat(created)
    except ValueError:
        return printable(created)
    return when.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float | None) -> str:
    """Return seconds in a fitting unit: `0.12 s`, `42 s`, `3 min`, `5 h`, `2 d`."""
    if seconds is None:
        return "–"
    for most, unit, length in ((100, "s", 1), (6000, "min", 60), (172_800, "h", 3600)):
        if seconds < most:
            decimals = 2 if unit == "s" and seconds < 10 else 0
            return f"{seconds / length:.{decimals}f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def metrics(values: dict[str, float | None]) -> str:
    """Return metrics by name: `loss=0.0123 lr=1e-05`."""
    shown = {name: "?" if value is None else f"{value:.4g}" for name, value in values.items()}
    return " ".join(f"{printable(name)}={value}" for name, value in shown.items())


def shape(dims: Sequence[int]) -> str:
    """Return a shape: `[4096, 4096]`, and `[]` for a scalar."""
    return "[" + ", ".join(map(str, dims)) + "]"


def names(every: Sequence[str], most: int = 3) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(printable(name) for name in every[:most])
    more = len(every) - most
    return f"{shown} and {more:,} more" if more > 0 else shown


def indices(numbers: Iterable[int]) -> str:
    """Return ascending integers in short form: `0…31`, `0, 2…30` (even numbers), `0…3, 7`."""
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
    """Return a text with control characters escaped, so that it is safe for a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def clipped(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def value(encoded: object) -> str:
    """Return an encoded plain value much as Python prints it, in at most 160 characters.

    `…` stands for what is too long or nested too deep.
    """
    return clipped(_value(encoded, 0), LONGEST_VALUE)


def _value(encoded: object, depth: int) -> str:
    if isinstance(encoded, str):
        return printable(repr(clipped(encoded, LONGEST_STRING)))
    if not isinstance(encoded, (list, dict)):
        return repr(encoded)
    if encoded and depth == DEEPEST:
        return "…"
    if isinstance(encoded, list):
        return f"[{_items(encoded, depth)}]"
    if "$" in encoded:
        return _tagged(str(encoded["$"]), encoded, depth)
    return f"{{{_pairs(encoded.items(), encoded, depth)}}}"


def _tagged(kind: str, encoded: dict[str, object], depth: int) -> str:
    """Return a value that JSON has no type for: `{"$": "tuple", "v": […]}`."""
    held = encoded.get("v")
    if kind in _BARE and isinstance(held, str):
        return printable(clipped(held, LONGEST_STRING))
    if kind == "tuple" and isinstance(held, list):
        return f"({_items(held, depth)}{',' if len(held) == 1 else ''})"
    if kind in _MAPPINGS and _are_pairs(held):
        return f"{{{_pairs(held, held, depth)}}}"
    if kind in ("tensor", "array"):
        what = [kind, str(encoded["dtype"])] if "dtype" in encoded else [kind]
        return printable(" ".join([*what, str(encoded.get("shape", ""))])).rstrip()
    if kind == "enum":
        return printable(f"{encoded.get('class')}.{held}")
    if kind in _ENCODED and isinstance(held, str):
        nbytes = len(held) * 3 // 4 - held[-2:].count("=")
        return f"{kind} of {size(nbytes)}"
    return f"{printable(clipped(kind, LONGEST_STRING))}({_value(held, depth + 1)})"


def _are_pairs(held: object) -> TypeGuard[list[list[object]]]:
    return isinstance(held, list) and all(
        isinstance(pair, list) and len(pair) == 2 for pair in held
    )


def _items(items: list[object], depth: int) -> str:
    return _with_rest([_value(item, depth + 1) for item in items[:MOST_ITEMS]], items)


def _pairs(pairs: Iterable[Sequence[object]], whole: Collection[object], depth: int) -> str:
    shown = [
        f"{_value(key, depth + 1)}: {_value(item, depth + 1)}"
        for (key, item), _ in zip(pairs, range(MOST_ITEMS), strict=False)
    ]
    return _with_rest(shown, whole)


def _with_rest(shown: list[str], whole: Collection[object]) -> str:
    more = len(whole) - len(shown)
    return ", ".join([*shown, f"… {more:,} more"] if more else shown)
