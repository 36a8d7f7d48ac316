"""Format names, shapes and plain values as text. Imported as `fmt`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeGuard

from shardwise.kernel.events import format_bytes
from shardwise.parts.words import format_seconds

MAX_STRING = 40
MAX_VALUE = 160
MAX_ITEMS = 4
MAX_DEPTH = 4

# Tags of encoded values, by the type of the encoded content.
_STRING_TAGS = ("int", "float", "complex", "dtype", "device")
_MAPPING_TAGS = ("dict", "ordered", "counter")
_BASE64_TAGS = ("bytes", "bytearray", "pickle", "numpy")


def duration(seconds: float | None) -> str:
    """Return a duration, and a dash for None."""
    return "–" if seconds is None else format_seconds(seconds)


def metrics(values: Mapping[str, float | None]) -> str:
    """Return metrics by name: `loss=0.0123 lr=1e-05`."""
    shown = {name: "?" if value is None else f"{value:.4g}" for name, value in values.items()}
    return " ".join(f"{printable(name)}={value}" for name, value in shown.items())


def shape(dims: Sequence[int]) -> str:
    """Return a shape: `[4096, 4096]`, and `[]` for a scalar."""
    return "[" + ", ".join(map(str, dims)) + "]"


def names(all_names: Sequence[str], max_names: int = 3) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(printable(name) for name in all_names[:max_names])
    more = len(all_names) - max_names
    return f"{shown} and {more:,} more" if more > 0 else shown


def indices(numbers: Iterable[int]) -> str:
    """Return ascending integers in short form: `0…31`, `0, 2…30` (even numbers), `0…3, 7`."""
    ascending = list(numbers)
    step = ascending[1] - ascending[0] if len(ascending) > 2 else 1
    if step > 1 and all(b - a == step for a, b in pairwise(ascending)):
        return f"{ascending[0]}, {ascending[1]}…{ascending[-1]}"
    ranges: list[list[int]] = []
    for number in ascending:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(str(each[0]) if len(each) == 1 else f"{each[0]}…{each[-1]}" for each in ranges)


def printable(text: str) -> str:
    """Return a text with control characters escaped, so that it is safe for a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def clip_text(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def value(encoded: object) -> str:
    """Return an encoded plain value as Python would print it, in at most 160 characters.

    `…` replaces parts that are too long or nested too deeply.
    """
    return clip_text(_format_value(encoded, 0), MAX_VALUE)


def _format_value(encoded: object, depth: int) -> str:
    if isinstance(encoded, str):
        return printable(repr(clip_text(encoded, MAX_STRING)))
    if not isinstance(encoded, (list, dict)):
        return repr(encoded)
    if encoded and depth == MAX_DEPTH:
        return "…"
    if isinstance(encoded, list):
        return f"[{_format_items(encoded, depth)}]"
    if "$" in encoded:
        return _format_tagged(str(encoded["$"]), encoded, depth)
    return f"{{{_format_pairs(encoded.items(), encoded, depth)}}}"


def _format_tagged(tag: str, encoded: dict[str, object], depth: int) -> str:
    """Format a value of a type that JSON lacks, which is encoded as `{"$": "tuple", "v": […]}`."""
    content = encoded.get("v")
    if tag in _STRING_TAGS and isinstance(content, str):
        return printable(clip_text(content, MAX_STRING))
    if tag == "tuple" and isinstance(content, list):
        return f"({_format_items(content, depth)}{',' if len(content) == 1 else ''})"
    if tag in _MAPPING_TAGS and _are_pairs(content):
        return f"{{{_format_pairs(content, content, depth)}}}"
    if tag in ("tensor", "array"):
        words = [tag, str(encoded["dtype"])] if "dtype" in encoded else [tag]
        return printable(" ".join([*words, str(encoded.get("shape", ""))])).rstrip()
    if tag == "enum":
        return printable(f"{encoded.get('class')}.{content}")
    if tag in _BASE64_TAGS and isinstance(content, str):
        nbytes = len(content) * 3 // 4 - content[-2:].count("=")
        return f"{tag} of {format_bytes(nbytes)}"
    return f"{printable(clip_text(tag, MAX_STRING))}({_format_value(content, depth + 1)})"


def _are_pairs(content: object) -> TypeGuard[list[list[object]]]:
    return isinstance(content, list) and all(
        isinstance(pair, list) and len(pair) == 2 for pair in content
    )


def _format_items(items: list[object], depth: int) -> str:
    return _join_with_rest([_format_value(item, depth + 1) for item in items[:MAX_ITEMS]], items)


def _format_pairs(
    pairs: Iterable[Sequence[object]], container: Collection[object], depth: int
) -> str:
    shown = [
        f"{_format_value(key, depth + 1)}: {_format_value(item, depth + 1)}"
        for (key, item), _ in zip(pairs, range(MAX_ITEMS), strict=False)
    ]
    return _join_with_rest(shown, container)


def _join_with_rest(shown: list[str], container: Collection[object]) -> str:
    more = len(container) - len(shown)
    return ", ".join([*shown, f"… {more:,} more"] if more else shown)
