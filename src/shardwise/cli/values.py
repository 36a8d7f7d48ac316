"""Plain values as they stand in a manifest, spelled in a few words, much as Python would."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeGuard

from shardwise.cli import wording

LONGEST_STRING = 40
LONGEST = 160
MOST_ITEMS = 4
DEEPEST = 4

_BARE = ("int", "float", "complex", "dtype", "device")
_MAPPINGS = ("dict", "ordered", "counter")
_ENCODED = ("bytes", "bytearray", "pickle", "numpy")


def spelled(encoded: object) -> str:
    """A value in at most 160 characters: what is long or deep is left out, and marked by `…`."""
    return wording.clipped(_spelled(encoded, 0), LONGEST)


def _spelled(encoded: object, depth: int) -> str:
    if isinstance(encoded, str):
        return wording.printable(repr(wording.clipped(encoded, LONGEST_STRING)))
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
    """A value that JSON has no form for, such as `{"$": "tuple", "v": […]}`."""
    value = encoded.get("v")
    if kind in _BARE and isinstance(value, str):
        return wording.printable(wording.clipped(value, LONGEST_STRING))
    if kind == "tuple" and isinstance(value, list):
        return f"({_items(value, depth)}{',' if len(value) == 1 else ''})"
    if kind in _MAPPINGS and _are_pairs(value):
        return f"{{{_pairs(value, value, depth)}}}"
    if kind in ("tensor", "array"):
        what = [kind, str(encoded["dtype"])] if "dtype" in encoded else [kind]
        return wording.printable(" ".join([*what, str(encoded.get("shape", ""))])).rstrip()
    if kind == "enum":
        return wording.printable(f"{encoded.get('class')}.{value}")
    if kind in _ENCODED and isinstance(value, str):
        nbytes = len(value) * 3 // 4 - value[-2:].count("=")
        return f"{kind} of {wording.size(nbytes)}"
    name = wording.printable(wording.clipped(kind, LONGEST_STRING))
    return f"{name}({_spelled(value, depth + 1)})"


def _are_pairs(value: object) -> TypeGuard[list[list[object]]]:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 for pair in value
    )


def _items(items: list[object], depth: int) -> str:
    return _cut([_spelled(item, depth + 1) for item in items[:MOST_ITEMS]], items)


def _pairs(pairs: Iterable[Sequence[object]], whole: Collection[object], depth: int) -> str:
    shown = [
        f"{_spelled(key, depth + 1)}: {_spelled(item, depth + 1)}"
        for (key, item), _ in zip(pairs, range(MOST_ITEMS), strict=False)
    ]
    return _cut(shown, whole)


def _cut(shown: list[str], whole: Collection[object]) -> str:
    more = len(whole) - len(shown)
    return ", ".join([*shown, f"… {more:,} more"] if more else shown)
