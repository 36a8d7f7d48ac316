"""Axes that ranks divide unevenly: where the share of each begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.manifest.table import Int


@dataclass(frozen=True, slots=True)
class Shares:
    """Columns of n rows: where each row's share begins, and the sum of all of its group.

    `unequal` and `missing` list groups whose rows disagree about a share, or lack one.
    """

    start: Int
    total: Int
    unequal: Int
    missing: Int


def shares(group: Int, position: Int, size: Int, positions: int, *, grows: bool = False) -> Shares:
    """Lay the shares of each group one after another, in the order of their positions.

    Args:
        group, position, size: columns: rows of one group and position have the same share.
        positions: how many there are.
        grows: the share is the largest size that any of its rows has.
    """
    groups, row = np.unique(group, return_inverse=True)
    table = np.full((len(groups), positions), -1, np.int64)
    np.maximum.at(table, (row, position), size)
    unequal = np.zeros(len(groups), bool)
    if not grows:
        np.logical_or.at(unequal, row, table[row, position] != size)
    missing = (table < 0).any(axis=1)
    ends = np.cumsum(np.maximum(table, 0), axis=1)
    start = (ends - np.maximum(table, 0))[row, position]
    return Shares(start, ends[row, -1], groups[unequal], groups[missing])
