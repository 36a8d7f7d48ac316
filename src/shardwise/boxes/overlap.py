"""Find the common parts of two lists of boxes, for all tensors in one call."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.boxes.table import IntArray, Table, count_up

PAIRS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Overlaps(Table):
    """The common parts of boxes in a left and a right list.

    Attributes:
        left, right: indices in the two lists, `(n,)`.
        offset, shape: the common box, in elements of the global tensor, `(n, D)`.
    """

    left: IntArray
    right: IntArray
    offset: IntArray
    shape: IntArray


def find_overlaps(
    left: tuple[IntArray, IntArray, IntArray],
    right: tuple[IntArray, IntArray, IntArray],
    *,
    pairs_at_once: int = PAIRS_AT_ONCE,
) -> Overlaps:
    """Intersect each left box with all right boxes of the same tensor.

    Args:
        left, right: columns `(tensor, offset, shape)`, of shapes `(n,)`, `(n, D)` and `(n, D)`;
            boxes of fewer than D dimensions are padded with offset 0 and shape 1.
        pairs_at_once: the approximate number of pairs to compare at a time.

    Returns:
        All common parts with at least one element, ordered by the left index, then by the right.
    """
    order = np.argsort(right[0], kind="stable")
    tensors = right[0][order]
    low = np.searchsorted(tensors, left[0], side="left")
    counts = np.searchsorted(tensors, left[0], side="right") - low
    ends = np.cumsum(counts)
    found = []
    begin = 0
    while begin < len(counts):
        pairs_before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, pairs_before + pairs_at_once, side="right")))
        rows = np.arange(begin, end)
        found.append(_intersect(left, right, order, low, counts, rows))
        begin = end
    return Overlaps.join(found, left[1].shape[1])


def _intersect(
    left: tuple[IntArray, IntArray, IntArray],
    right: tuple[IntArray, IntArray, IntArray],
    order: IntArray,
    low: IntArray,
    counts: IntArray,
    rows: IntArray,
) -> Overlaps:
    count = counts[rows]
    left_rows = np.repeat(rows, count)
    place_in_tensor = count_up(count)
    right_rows = order[np.repeat(low[rows], count) + place_in_tensor]
    offset = np.maximum(left[1][left_rows], right[1][right_rows])
    shape = (
        np.minimum(
            left[1][left_rows] + left[2][left_rows], right[1][right_rows] + right[2][right_rows]
        )
        - offset
    )
    keep = (shape > 0).all(axis=1)
    return Overlaps(left_rows, right_rows, offset, shape).select(keep)
