"""The elements that an index selects, and the spans of each dimension to read for them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from shardwise.layout.box import Box

Ints: TypeAlias = npt.NDArray[np.int64]
Span = tuple[int, int]
"""`start` and `stop`."""


@dataclass(frozen=True, slots=True)
class Selected:
    """What an index selects along one dimension.

    Attributes:
        positions: selected positions, ascending and unique.
        then: index that turns the elements at these positions into the result.
    """

    positions: range | Ints
    then: int | slice | Ints


@dataclass(frozen=True, slots=True)
class Cover:
    """Spans of a dimension that contain positions, and these positions within the spans."""

    spans: tuple[Span, ...]
    within: slice | Ints

    @property
    def length(self) -> int:
        """The length of all spans."""
        return sum(stop - start for start, stop in self.spans)


def selected(index: Any, shape: Sequence[int]) -> tuple[Selected, ...]:
    """Return what an index selects, by dimension.

    Args:
        index: integers, slices with positive steps, `...`, and at most one array, list or mask of
            one dimension; or a tuple of these.

    Raises:
        IndexError: the index is of another kind, or out of bounds.
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1 or len(parts) - len(dots) > len(shape):
        raise IndexError(f"{len(parts)} indices for a tensor of shape {list(shape)}")
    at = dots[0] if dots else len(parts)
    rest = len(shape) - (len(parts) - len(dots))
    parts[at : at + len(dots)] = [slice(None)] * rest
    found = tuple(_along(parts[dim], dim, shape) for dim in range(len(shape)))
    if sum(isinstance(each.then, np.ndarray) for each in found) > 1:
        raise IndexError("two index arrays: use one, and index the result with the other")
    return found


def cover(positions: range | Ints, gap: int) -> Cover:
    """Return spans that contain all positions, and no more than `gap` unselected ones in a row."""
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
    of = np.searchsorted(starts, positions, side="right") - 1
    within = positions - starts[of] + before[of]
    return Cover(tuple(zip(starts.tolist(), stops.tolist(), strict=True)), within)


def batches(positions: range | Ints, gap: int, most: int) -> Iterator[slice]:
    """Yield slices of positions whose covers are about `most` long, or have one position."""
    if isinstance(positions, range):
        each = positions.step if positions.step - 1 <= gap else 1
        several = max(1, most // each)
        yield from (slice(at, at + several) for at in range(0, len(positions), several))
        return
    apart = np.diff(positions, prepend=positions[:1] - 1)
    turn = (np.cumsum(np.where(apart - 1 <= gap, apart, 1)) - 1) // most
    edges = [0, *(np.flatnonzero(np.diff(turn)) + 1).tolist(), len(positions)]
    yield from (slice(a, b) for a, b in pairwise(edges))


def boxes_of_covers(covers: Sequence[Cover]) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes that spans of all dimensions form: in the tensor, and in the result."""
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
        there, here, extent = zip(*combined, strict=True) if combined else ((), (), ())
        yield Box(there, extent), Box(here, extent)


def _along(part: Any, dim: int, shape: Sequence[int]) -> Selected:
    n = shape[dim]
    if isinstance(part, slice):
        start, stop, step = part.indices(n)
        if step < 1:
            raise IndexError(f"step {step} in dimension {dim}: steps must be positive")
        return Selected(range(start, max(start, stop), step), slice(None))
    if not isinstance(part, bool) and hasattr(part, "__index__") and not getattr(part, "shape", ()):
        at = operator.index(part)
        if not -n <= at < n:
            raise IndexError(f"index {at} in dimension {dim} of shape {list(shape)}")
        return Selected(range(at % n, at % n + 1), 0)
    return _by_array(part, dim, shape)


def _by_array(part: Any, dim: int, shape: Sequence[int]) -> Selected:
    n = shape[dim]
    if str(getattr(part, "dtype", "")) == "torch.uint8":
        raise IndexError(
            "an index of dtype torch.uint8, which torch reads as a mask and NumPy as numbers: "
            "pass part.bool() or part.long()"
        )
    array = np.asarray(part)
    if array.dtype == bool and array.shape == (n,):
        array = np.flatnonzero(array)
    elif array.dtype == bool:
        raise IndexError(f"a mask of shape {array.shape} for dimension {dim} of {list(shape)}")
    if not array.size:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu" or part is None or array.ndim == 0:
        raise IndexError(
            f"{part!r:.60}: a tensor is indexed with integers, slices, arrays of integers, masks "
            "and ..."
        )
    wrong = array[(array < -n) | (array >= n)]
    if wrong.size:
        raise IndexError(f"index {wrong[0]} in dimension {dim} of shape {list(shape)}")
    positions, then = np.unique(array.astype(np.int64) % max(n, 1), return_inverse=True)
    return Selected(positions, then.reshape(array.shape).astype(np.int64))
