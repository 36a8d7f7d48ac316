"""Elements of strided arrays, found by ranges of bytes: each of them, once."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout import boxes_within, row_major


@st.composite
def arrays(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """A nested strided array: shape, strides in bytes, itemsize."""
    shape = draw(st.lists(st.integers(1, 4), max_size=4).map(tuple))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    strides = [0] * len(shape)
    reach = itemsize
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = 0 if shape[dim] == 1 else reach + draw(st.integers(0, 5))
        reach += (shape[dim] - 1) * strides[dim]
    return shape, tuple(strides), itemsize


@given(arrays(), st.integers(-3, 200), st.integers(0, 200))
def test_elements_in_a_range_are_found_once(
    array: tuple[tuple[int, ...], tuple[int, ...], int], low: int, count: int
) -> None:
    shape, strides, itemsize = array
    high = low + count
    hits = np.zeros(shape, int)
    boxes = boxes_within(shape, strides, itemsize, low, high)
    for box in boxes:
        hits[box.slices()] += 1
    at = np.zeros(shape, int)
    for dim, index in enumerate(np.indices(shape)):
        at += index * strides[dim]
    assert (hits == ((low <= at) & (at + itemsize <= high))).all()
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_strides_are_those_of_numpy(shape: list[int]) -> None:
    strides = row_major(np.array([shape], np.int64))[0]
    assert tuple(strides) == tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
