"""Indexing: the positions that an index selects, and the spans to read for them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise.kernel.boxes.box import Box

Ints: TypeAlias = npt.NDArray[np.int64]
Span = tuple[int, int]
"""`start` and `stop`."""


@dataclass(frozen=True, slots=True)
class SelectedPositions:
    """The positions that an index selects along one dimension.

    Attributes:
        positions: the selected positions, ascending and unique.
        reindex: the index that turns the elements at `positions` into the result. For example,
            `t[[5, 2, 5]]` has the positions `[2, 5]`, which `[1, 0, 1]` puts into the requested
            order. For `t[3]`, it is 0, which removes the dimension.
    """

    positions: range | Ints
    reindex: int | slice | Ints


@dataclass(frozen=True, slots=True)
class Cover:
    """Spans of a dimension that contain some positions.

    Attributes:
        spans: disjoint spans, in ascending order.
        packed_index: the index of the positions in the spans, when the spans are laid end to end.
    """

    spans: tuple[Span, ...]
    packed_index: slice | Ints

    @property
    def length(self) -> int:
        """The length of all spans together."""
        return sum(stop - start for start, stop in self.spans)


def select_positions(index: Any, shape: Sequence[int]) -> tuple[SelectedPositions, ...]:
    """Return the positions that an index selects along each dimension.

    Args:
        index: integers, slices with positive steps, `...`, and at most one array, list or mask of
            one dimension; or a tuple of these.
        shape: the shape of the indexed tensor.

    Raises:
        IndexError: the index has an unsupported part, or is out of bounds.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    ellipses = [i for i, part in enumerate(parts) if part is Ellipsis]
    index_count = len(parts) - len(ellipses)
    if len(ellipses) > 1:
        raise IndexError("an index can contain only one ellipsis (...)")
    if index_count > len(shape):
        raise IndexError(
            f"{index_count} indices for a tensor of shape {list(shape)}: pass at most {len(shape)}"
        )
    first_implied = ellipses[0] if ellipses else len(parts)
    implied = [slice(None)] * (len(shape) - index_count)
    parts[first_implied : first_implied + len(ellipses)] = implied
    selections = tuple(_select_in_dimension(parts[dim], dim, shape) for dim in range(len(shape)))
    if sum(isinstance(each.reindex, np.ndarray) for each in selections) > 1:
        raise IndexError("two index arrays: use one, and index the result with the other")
    return selections


def cover_positions(positions: range | Ints, gap: int) -> Cover:
    """Return spans that contain all positions.

    Positions with at most `gap` other positions between them share a span: with a gap of 2,
    `[0, 1, 5]` has the spans 0:2 and 5:6.

    Args:
        positions: ascending and unique positions.
    """
    if not len(positions):
        return Cover((), slice(0, 0))
    if isinstance(positions, range):
        first, step, last = positions[0], positions.step, positions[-1]
        if step - 1 <= gap or len(positions) == 1:
            return Cover(((first, last + 1),), slice(None, None, step))
        return Cover(tuple((each, each + 1) for each in positions), slice(None))
    cuts = np.flatnonzero(np.diff(positions) - 1 > gap)
    starts = positions[np.concatenate(([0], cuts + 1))]
    stops = positions[np.concatenate((cuts, [len(positions) - 1]))] + 1
    before = np.concatenate(([0], np.cumsum(stops - starts)[:-1]))
    span = np.searchsorted(starts, positions, side="right") - 1
    within = positions - starts[span] + before[span]
    return Cover(tuple(zip(starts.tolist(), stops.tolist(), strict=True)), within)


def split_into_batches(positions: range | Ints, gap: int, longest_cover: int) -> Iterator[slice]:
    """Yield slices that divide positions into batches, each with a cover of bounded length.

    For example, the positions `[0, 1, 2, 9]` with gap 0 and a bound of 2 are divided into `0:2`,
    whose cover is the span 0:2, and `2:4`, whose cover has the spans 2:3 and 9:10.

    Args:
        positions: ascending and unique positions.
        gap: as for `cover_positions`.
        longest_cover: the approximate bound on the length of a batch's cover. A batch has at least
            one position.
    """
    if isinstance(positions, range):
        length_each = positions.step if positions.step - 1 <= gap else 1
        count = max(1, longest_cover // length_each)
        yield from (slice(start, start + count) for start in range(0, len(positions), count))
        return
    distance = np.diff(positions, prepend=positions[:1] - 1)
    length = np.cumsum(np.where(distance - 1 <= gap, distance, 1))
    batch = (length - 1) // longest_cover
    edges = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(positions)]
    yield from (slice(a, b) for a, b in pairwise(edges))


def boxes_of_covers(covers: Sequence[Cover]) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes that combine one span of each dimension, in all possible ways.

    Args:
        covers: the cover of each dimension.

    Yields:
        The box in the tensor, and the same box in an array of the covers' lengths.
    """
    sides = []
    for each in covers:
        ends = accumulate(stop - start for start, stop in each.spans)
        sides.append(
            [
                (start, end - (stop - start), stop - start)
                for (start, stop), end in zip(each.spans, ends, strict=True)
            ]
        )
    for combined in product(*sides):
        offset, packed_offset, shape = zip(*combined, strict=True) if combined else ((), (), ())
        yield Box(offset, shape), Box(packed_offset, shape)


def _select_in_dimension(part: Any, dim: int, shape: Sequence[int]) -> SelectedPositions:
    n = shape[dim]
    if isinstance(part, slice):
        start, stop, step = part.indices(n)
        if step < 1:
            raise IndexError(
                f"a slice with step {step} in dimension {dim}: steps must be positive; flip the "
                "result instead"
            )
        return SelectedPositions(range(start, max(start, stop), step), slice(None))
    if not isinstance(part, bool) and hasattr(part, "__index__") and not getattr(part, "shape", ()):
        position = operator.index(part)
        if not -n <= position < n:
            raise _out_of_bounds(position, dim, shape)
        return SelectedPositions(range(position % n, position % n + 1), 0)
    return _select_by_array(part, dim, shape)


def _select_by_array(part: Any, dim: int, shape: Sequence[int]) -> SelectedPositions:
    n = shape[dim]
    if str(getattr(part, "dtype", "")) == "torch.uint8":
        raise IndexError(
            f"the index of dimension {dim} has dtype torch.uint8, which torch reads as a mask and "
            "NumPy as numbers: pass index.bool() or index.long()"
        )
    array = np.asarray(part)
    if array.dtype == bool and array.shape == (n,):
        array = np.flatnonzero(array)
    elif array.dtype == bool:
        raise IndexError(
            f"a mask of shape {list(array.shape)} for dimension {dim} of a tensor of shape "
            f"{list(shape)}: a mask must have one dimension, of length {n}"
        )
    if not array.size:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or part is None or array.ndim == 0:
        raise IndexError(
            f"{part!r:.60} is not an index: pass integers, slices, arrays of integers, masks or ..."
        )
    wrong = array[(array < -n) | (array >= n)]
    if wrong.size:
        raise _out_of_bounds(int(wrong[0]), dim, shape)
    positions, inverse = np.unique(array.astype(np.int64) % max(n, 1), return_inverse=True)
    return SelectedPositions(positions, inverse.reshape(array.shape).astype(np.int64))


def _out_of_bounds(position: int, dim: int, shape: Sequence[int]) -> IndexError:
    return IndexError(
        f"index {position} is out of bounds for dimension {dim} of a tensor of shape {list(shape)}"
    )
