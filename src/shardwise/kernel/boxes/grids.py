"""Grids: boxes at constant distances along several axes, without a list of the boxes.

For example, three ranks hold a matrix of 6 rows and 4 columns, 2 rows each. This is one grid: the
first box is `[0:2,0:4]`, and along its one axis, 3 boxes are 2 rows apart. The box of index 1 is
`[2:4,0:4]`.

With two axes, 8 ranks hold the rows of a matrix of 16 rows and 6 columns, each 4 rows and 3
columns: the first box is `[0:4,0:3]`. Along the outer axis, 4 boxes are 4 rows apart; along the
inner axis, 2 boxes are 3 columns apart.

A table of n grids has the columns `first` and `extent`, `(n, D)`, for the first box; and for A
axes, from the outermost to the innermost, `count`, `(n, A)`, and `step`, `(n, A, D)`. An axis of
count 1 has no effect. The box `k = (k_1, …, k_A)` of a grid begins at `first + Σ k_a · step_a`.
Boxes may have any dimensions: those of a tensor, or the files and the bytes of files.
"""

from __future__ import annotations

import numpy as np

from shardwise.kernel.boxes.box import BoolArray, IntArray, check_table_size, count_up


def grid_bounds(
    first: IntArray, extent: IntArray, count: IntArray, step: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the low and the high corner of the box around each grid, `(n, D)`."""
    moves = (count - 1)[:, :, None] * step
    low = first + np.minimum(moves, 0).sum(axis=1)
    return low, first + extent + np.maximum(moves, 0).sum(axis=1)


def count_boxes(count: IntArray) -> IntArray:
    """Return the number of boxes of each grid, `(n,)`."""
    found: IntArray = count.prod(axis=1)
    return found


def expand_grids(count: IntArray) -> tuple[IntArray, IntArray]:
    """Return the grid and the indices k of each box, `(m,)` and `(m, A)`, the last axis fastest.

    >>> expand_grids(np.array([[2, 2]]))[1].tolist()
    [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    total = count_boxes(count)
    grid = np.repeat(np.arange(len(count)), total)
    index = count_up(total)
    k = np.empty((len(grid), count.shape[1]), np.int64)
    for axis in reversed(range(count.shape[1])):
        index, k[:, axis] = np.divmod(index, count[grid, axis])
    return grid, k


def advance(start: IntArray, k: IntArray, step: IntArray) -> IntArray:
    """Return `start + Σ k_a · step_a`, for `start` `(m, …)`, `k` `(m, A)`, `step` `(m, A, …)`."""
    moved = start
    for axis in range(k.shape[1]):
        moved = moved + k[:, axis].reshape(-1, *[1] * (start.ndim - 1)) * step[:, axis]
    return moved


def merge_axes(extent: IntArray, count: IntArray, step: IntArray) -> tuple[IntArray, IntArray]:
    """Merge boxes that lie side by side into larger boxes.

    For example, boxes of 4 rows at distances of 4 rows are one box. The first box of each grid
    grows, and the axis has count 1.

    Returns:
        The extents and the counts after this.
    """
    extent, count = extent.copy(), count.copy()
    moves = (step != 0).sum(axis=2) == 1
    for _ in range(count.shape[1]):
        merged = False
        for axis in range(count.shape[1]):
            dim = np.argmax(step[:, axis] != 0, axis=1) if step.shape[2] else count[:, axis] * 0
            rows = np.flatnonzero((count[:, axis] > 1) & moves[:, axis])
            dim = dim[rows]
            beside = step[rows, axis, dim] == extent[rows, dim]
            rows, dim = rows[beside], dim[beside]
            if len(rows):
                extent[rows, dim] *= count[rows, axis]
                count[rows, axis] = 1
                merged = True
        if not merged:
            break
    return extent, count


def find_in_grids(
    grid: IntArray,
    low: IntArray,
    high: IntArray,
    table: tuple[IntArray, IntArray, IntArray, IntArray],
) -> tuple[IntArray, IntArray]:
    """Find the boxes of grids that overlap wanted boxes, axis by axis.

    Only what overlaps is expanded: first the range of the outermost index, then, for each of these,
    the range of the next index.

    Args:
        grid: for each of m wanted boxes, the grid to search, `(m,)`.
        low, high: the corners of the wanted boxes, `(m, D)`.
        table: the columns `(first, extent, count, step)` of the grids.

    Returns:
        For each overlap, the index of the wanted box, and the indices k, `(A,)`.

    Raises:
        FormatError: there are too many; see `check_table_size`.
    """
    first, extent, count, step = table
    at = first[grid]
    wanted, k = np.arange(len(grid)), np.zeros((len(grid), count.shape[1]), np.int64)
    for axis in range(count.shape[1]):
        steps, counts = step[grid, axis], count[grid, axis]
        inner = slice(axis + 1, None)
        below, above = grid_bounds(at, extent[grid], count[grid, inner], step[grid, inner])
        begin, end = _overlapping_range(below, above, low[wanted], high[wanted], steps, counts)
        lengths = np.maximum(end - begin, 0)
        check_table_size(int(lengths.sum(dtype=np.float64)), max(1, at.shape[1]))
        rows = np.repeat(np.arange(len(grid)), lengths)
        index = begin[rows] + count_up(lengths)
        at = at[rows] + index[:, None] * steps[rows]
        grid, wanted, k = grid[rows], wanted[rows], k[rows]
        k[:, axis] = index
    overlap = ((at < high[wanted]) & (at + extent[grid] > low[wanted])).all(axis=1)
    return wanted[overlap], k[overlap]


def _overlapping_range(
    below: IntArray, above: IntArray, low: IntArray, high: IntArray, step: IntArray, count: IntArray
) -> tuple[IntArray, IntArray]:
    """Return the range of the indices k at which boxes that move by `step` overlap wanted boxes.

    Args:
        below, above: the corners of the box at k = 0, `(m, D)`.
        low, high: the corners of the wanted box, `(m, D)`.
        step, count: the step for each k, `(m, D)`, and the number of indices, `(m,)`.
    """
    # Dimensions with a negative step are mirrored, so that all steps are positive.
    mirrored = step < 0
    below, above = np.where(mirrored, -above, below), np.where(mirrored, -below, above)
    low, high = np.where(mirrored, -high, low), np.where(mirrored, -low, high)
    size = np.maximum(np.abs(step), 1)
    first, last = -((above - low - 1) // size), (high - below - 1) // size
    moves = step != 0
    overlaps = (below < high) & (above > low)
    begin = np.where(moves, first, 0).max(axis=1, initial=0)
    all_but_last = np.where(moves, last + 1, np.where(overlaps, count[:, None], 0))
    return begin, np.minimum(all_but_last.min(axis=1, initial=2**62), count)


def split_runs(continues: BoolArray, shortest: int) -> tuple[IntArray, IntArray]:
    """Cut rows into runs of equal steps. Return the first row and the number of rows of each run.

    Args:
        continues: whether a row continues with the same step as the two rows before it, `(n,)`.
        shortest: shorter runs become single rows.
    """
    first_rows: list[int] = []
    counts: list[int] = []
    n = len(continues)
    continued = np.flatnonzero(continues)
    starts = continued[np.flatnonzero(np.diff(continued, prepend=-2) != 1)]
    stops = continued[np.flatnonzero(np.diff(continued, append=n + 2) != 1)] + 1
    row = 0  # the first row that is in no run yet
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        head = max(start - 2, row)
        if stop - head < shortest:
            continue
        first_rows.extend(range(row, head + 1))
        counts.extend([1] * (head - row))
        counts.append(stop - head)
        row = stop
    first_rows.extend(range(row, n))
    counts.extend([1] * (n - row))
    return np.array(first_rows, np.int64), np.array(counts, np.int64)
