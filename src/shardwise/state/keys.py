"""Protection from keys with equal hashes, which make dicts and sets quadratically slow.

Python hashes text with a secret of the process, but numbers without one. So a hostile file can have
thousands of numbers with the same hash. Keys from files are counted by hash before they are used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

LARGEST_KEY = 4096
MOST_ALIKE = 64
SAFE_KEYS = frozenset({str, bytes, bool, type(None)})
"""Types whose hashes a file cannot choose."""
_MODULUS = sys.hash_info.modulus


class Keys:
    """Counts the keys of one dict or set as they are added."""

    __slots__ = ("_alike",)

    def __init__(self) -> None:
        self._alike: dict[int, tuple[object, int]] = {}

    def add(self, keys: Iterable[object]) -> None:
        """Count keys before they are added to the dict or set.

        Raises:
            TypeError: a key has no hash.
            ValueError: a key has too many parts, or too many keys have the same hash.
        """
        for key in keys:
            made = type(key)
            if made in SAFE_KEYS or (made is int and -_MODULUS < key < _MODULUS):  # type: ignore[operator]
                continue  # small integers have different hashes
            _check_parts(key)
            code = hash(key)
            first, count = self._alike.get(code, (key, 0))
            if count and key == first:
                continue
            if count == MOST_ALIKE:
                raise ValueError(
                    f"more than {MOST_ALIKE} keys have the same hash, so that each is compared "
                    "with all others"
                )
            self._alike[code] = first, count + 1


def check_keys(keys: Iterable[object]) -> None:
    """Check the keys of a new dict or set.

    Raises:
        TypeError, ValueError: see `Keys.add`.
    """
    Keys().add(keys)


def _check_parts(key: object) -> None:
    """Refuse a key with so many nested parts that its hash would overflow the stack."""
    parts = [key]
    count = 0
    while parts:
        part = parts.pop()
        count += 1
        if isinstance(part, tuple):
            parts += part
        if count + len(parts) > LARGEST_KEY:
            raise ValueError(f"a key has more than {LARGEST_KEY} parts")
