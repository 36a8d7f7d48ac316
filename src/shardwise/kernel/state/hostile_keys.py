"""Protection from files with many keys of equal hash, which make dicts and sets quadratically slow.

Python hashes text with a secret of the process, but numbers without a secret. So a hostile file can
contain thousands of numbers with the same hash. Code that builds a dict or set from a file counts
the keys of each hash before it uses them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

MOST_PARTS_OF_KEY = 4096
MOST_COLLISIONS = 64
SAFE_KEY_TYPES = frozenset({str, bytes, bool, type(None)})
"""Types whose hashes a file cannot choose."""
_MODULUS = sys.hash_info.modulus


class UnsafeValueError(ValueError):
    """Building, reading or copying a value would take too much time or memory."""


class KeyCounter:
    """Counts the keys of each hash in one dict or set."""

    __slots__ = ("_counts_by_hash",)

    def __init__(self) -> None:
        self._counts_by_hash: dict[int, tuple[object, int]] = {}

    def add(self, keys: Iterable[object]) -> None:
        """Count keys. Call this method before the keys are added to the dict or set.

        Raises:
            TypeError: a key has no hash.
            UnsafeValueError: a key has too many parts, or too many keys have the same hash.
        """
        for key in keys:
            key_type = type(key)
            if key_type in SAFE_KEY_TYPES or (key_type is int and -_MODULUS < key < _MODULUS):  # type: ignore[operator]
                continue  # small integers have different hashes
            _check_parts(key)
            hash_value = hash(key)
            first_key, count = self._counts_by_hash.get(hash_value, (key, 0))
            if count and key == first_key:
                continue
            if count == MOST_COLLISIONS:
                raise UnsafeValueError(
                    f"more than {MOST_COLLISIONS} keys have the same hash, so each would be "
                    "compared with all others, which can take hours"
                )
            self._counts_by_hash[hash_value] = first_key, count + 1


def _check_parts(key: object) -> None:
    """Refuse a key with so many nested parts that its hash would overflow the stack."""
    parts = [key]
    count = 0
    while parts:
        part = parts.pop()
        count += 1
        if isinstance(part, tuple):
            parts += part
        if count + len(parts) > MOST_PARTS_OF_KEY:
            raise UnsafeValueError(f"a key has more than {MOST_PARTS_OF_KEY} nested parts")
