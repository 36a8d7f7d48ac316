"""A random order of any number of items, computed for each position alone, without a list.

Checkpoints store positions, not items, so the order of a key must never change.
"""

from __future__ import annotations

import hashlib
from math import isqrt
from typing import TypeAlias

import numpy as np

Positions: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_Words: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.uint64]]

ORDER_VERSION = 1
"""The version of this algorithm, which states contain."""
MOST_ITEMS = 2**62
_ROUNDS = 8
_MOST_HASHED = 256


def permute(positions: Positions, length: int, key: str) -> Positions:
    """Return which items are at these positions of a random order of `length` items.

    The order of up to 256 items is that of their hashes. A longer order is a Feistel network on the
    square with at least `length` fields. A result outside of the order is permuted again until it
    lies within (*cycle walking*), which keeps the items distinct. On small squares, this would
    prefer some orders.

    Args:
        positions: numbers from 0 to `length - 1`, one-dimensional.
        length: the number of items, from 1 to 2⁶².
        key: the order depends on this text and on `length` only.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
    round_keys = np.frombuffer(digest, "<u8")
    if length <= _MOST_HASHED:
        hashes = _mix(np.arange(length, dtype=np.uint64) ^ round_keys[0])
        return np.argsort(hashes, kind="stable")[positions]
    side = isqrt(length - 1) + 1
    items = _permute_square(positions, side, round_keys)
    outside = np.flatnonzero(items >= length)
    while len(outside):
        items[outside] = _permute_square(items[outside], side, round_keys)
        outside = outside[items[outside] >= length]
    return items


def _permute_square(fields: Positions, side: int, round_keys: _Words) -> Positions:
    row, column = np.divmod(fields.astype(np.uint64), np.uint64(side))
    for key in round_keys:
        row, column = column, (row + _mix(column ^ key) % np.uint64(side)) % np.uint64(side)
    return (row * np.uint64(side) + column).astype(np.int64)


def _mix(words: _Words) -> _Words:
    """Return a hash of each word: the last step of SplitMix64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
