"""Keys that files give: counted by their hashes before they go into a dict or set.

Python hashes text with a secret of the process, and numbers without. So a file can have thousands
of numbers with one hash, and a dict compares each of them with all that it has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

LARGEST_KEY = 4096
MOST_ALIKE = 64
SAFE_KEYS = frozenset({str, bytes, bool, type(None)})
"""Types that a file cannot make hashes of."""
_MODULUS = sys.hash_info.modulus


class Keys:
    """The keys of one dict or set, as they are added."""

    __slots__ = ("_alike",)

    def __init__(self) -> None:
        self._alike: dict[int, tuple[object, int]] = {}

    def add(self, keys: Iterable[object]) -> None:
        """Count keys before the dict or set has them.

        Raises:
            TypeError: one has no hash.
            ValueError: one has too many parts, or too many have the same hash.
        """
        for key in keys:
            made = type(key)
            if made in SAFE_KEYS or (made is int and -_MODULUS < key < _MODULUS):  # type: ignore[operator]
                continue  # small integers have hashes of their own
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
    """Check the keys of a dict or set that is made at once.

    Raises:
        TypeError, ValueError: as `Keys.add` says.
    """
    Keys().add(keys)


def _check_parts(key: object) -> None:
    """Refuse a key whose hash would take all stack or time, as that of nested tuples does."""
    parts = [key]
    count = 0
    while parts:
        part = parts.pop()
        count += 1
        if isinstance(part, tuple):
            parts += part
        if count + len(parts) > LARGEST_KEY:
            raise ValueError(f"a key has more than {LARGEST_KEY} parts")
