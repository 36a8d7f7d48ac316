"""Piece tables: pieces in columns, and runs of pieces, which keep regular shardings short."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwise.errors import FormatError

Int = npt.NDArray[np.int64]
SHORTEST_RUN = 3
MOST_NUMBERS = 2**25
"""Numbers in a column of offsets or shapes: rows times dimensions."""


def check_width(rows: int, dims: int) -> None:
    """Refuse a table that would take gigabytes. Call it before allocating the table.

    All rows are as wide as the tensor with most dimensions.

    Raises:
        FormatError: rows times dimensions exceed `MOST_NUMBERS`.
    """
    if rows * dims > MOST_NUMBERS:
        raise FormatError(
            f"{rows} pieces or tensors of up to {dims} dimensions exceed the limit: rows times "
            f"dimensions may be at most {MOST_NUMBERS}"
        )


def padded_rows(rows: Iterable[tuple[int, ...]], dims: int, fill: int) -> Int:
    """Return rows as an array of `dims` columns, padded on the right with `fill`."""
    padded = [(*row, *(fill,) * (dims - len(row))) for row in rows]
    return np.array(padded, np.int64).reshape(len(padded), dims)


@dataclass(frozen=True, slots=True)
class Pieces:
    """All pieces of a checkpoint, in columns of n rows.

    `tensor` and `file` are indices into the manifest's lists; `start` counts bytes from the start
    of the file's data section; `offset` and `shape` (`(n, D)`) are the box, padded on the right
    with offset 0 and shape 1 to the most dimensions of any tensor.
    """

    tensor: Int
    file: Int
    start: Int
    offset: Int
    shape: Int

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of pieces in arithmetic progression: row i is `count[i]` pieces.

    The k-th piece of a run is `first + k * step` in every column, except `tensor` and `shape`,
    which are the same for the whole run.
    """

    first: Pieces
    count: Int
    file_step: Int
    start_step: Int
    offset_step: Int


def find_runs(pieces: Pieces) -> Runs:
    """Return pieces, ordered by tensor, as runs. `expand_runs` is the inverse."""
    n = len(pieces)
    steps = np.column_stack([pieces.file, pieces.start, pieces.offset])
    delta = np.diff(steps, axis=0)
    joins = (np.diff(pieces.tensor) == 0) & (np.diff(pieces.shape, axis=0) == 0).all(axis=1)
    same = np.zeros(n, bool)
    if n > 2:
        same[2:] = joins[1:] & joins[:-1] & (delta[1:] == delta[:-1]).all(axis=1)
    heads, counts = _split_runs(same)
    step = np.zeros((len(heads), steps.shape[1]), np.int64)
    step[counts > 1] = delta[heads[counts > 1]]
    first = Pieces(*(column[heads] for column in _columns(pieces)))
    dims = pieces.offset.shape[1]
    return Runs(first, counts, step[:, 0], step[:, 1], step[:, 2 : 2 + dims])


def _split_runs(same: npt.NDArray[np.bool_]) -> tuple[Int, Int]:
    """Cut rows into runs. `same[i]`: row i continues with the step of the two rows before it."""
    heads: list[int] = []
    counts: list[int] = []
    n = len(same)
    continued = np.flatnonzero(same)
    starts = continued[np.flatnonzero(np.diff(continued, prepend=-2) != 1)]
    stops = continued[np.flatnonzero(np.diff(continued, append=n + 2) != 1)] + 1
    at = 0
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        head = max(start - 2, at)
        if stop - head < SHORTEST_RUN:
            continue
        heads.extend(range(at, head + 1))
        counts.extend([1] * (head - at))
        counts.append(stop - head)
        at = stop
    heads.extend(range(at, n))
    counts.extend([1] * (n - at))
    return np.array(heads, np.int64), np.array(counts, np.int64)


def expand_runs(runs: Runs) -> Pieces:
    """Return every piece of every run."""
    rows = np.repeat(np.arange(len(runs.count)), runs.count)
    k = np.arange(len(rows)) - np.repeat(np.cumsum(runs.count) - runs.count, runs.count)
    first = runs.first
    return Pieces(
        first.tensor[rows],
        first.file[rows] + k * runs.file_step[rows],
        first.start[rows] + k * runs.start_step[rows],
        first.offset[rows] + k[:, None] * runs.offset_step[rows],
        first.shape[rows],
    )


def _columns(pieces: Pieces) -> tuple[Int, ...]:
    return pieces.tensor, pieces.file, pieces.start, pieces.offset, pieces.shape
