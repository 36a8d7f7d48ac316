"""How numbers, times, names and values are spelled for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
LONGEST_STRING = 40
MOST_ITEMS = 4
DEEPEST = 4


def size(nbytes: int) -> str:
    """Bytes in the largest fitting binary unit: `0 B`, `1.50 KiB`, `250 MiB`."""
    value = float(nbytes)
    for unit in UNITS:
        if value < 1000 or unit == UNITS[-1]:
            break
        value /= 1024
    if unit == "B":
        return f"{nbytes} B"
    decimals = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{decimals}f} {unit}"


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


def metrics(values: dict[str, float]) -> str:
    """Names and values: `loss 0.0123  lr 1e-05`."""
    return "  ".join(f"{printable(name)} {value:.4g}" for name, value in values.items())


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
    if step > 1 and all(b - a == step for a, b in zip(rest, rest[1:], strict=False)):
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


def value(encoded: object, depth: int = 0) -> str:
    """A plain value as it stands in a manifest, in a few words, much as Python would write it."""
    if isinstance(encoded, str):
        return printable(repr(clipped(encoded, LONGEST_STRING)))
    if not isinstance(encoded, (list, dict)):
        return repr(encoded)
    if encoded and depth == DEEPEST:
        return "[…]" if isinstance(encoded, list) else "{…}"
    if isinstance(encoded, list):
        return f"[{_items([value(item, depth + 1) for item in encoded[:MOST_ITEMS]], encoded)}]"
    if "$" in encoded:
        return _tagged(encoded, depth)
    fields = list(encoded.items())[:MOST_ITEMS]
    spelled = [f"{printable(str(key))}: {value(item, depth + 1)}" for key, item in fields]
    return "{" + _items(spelled, encoded) + "}"


def _items(shown: list[str], whole: Sequence[object] | dict[str, object]) -> str:
    more = len(whole) - len(shown)
    return ", ".join([*shown, f"… {more:,} more"] if more else shown)


def _tagged(encoded: dict[str, object], depth: int) -> str:
    """A value that JSON has no form for, such as `{"$": "tuple", "v": […]}`."""
    kind = printable(clipped(str(encoded["$"]), LONGEST_STRING))
    fields = {key: item for key, item in encoded.items() if key not in ("$", "data")}
    if list(fields) == ["v"]:
        return f"{kind}({value(fields['v'], depth + 1)})"
    return f"{kind}({', '.join(value(item, depth + 1) for item in fields.values())})"
