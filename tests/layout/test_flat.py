"""Flattened ranges as boxes, against numpy's row-major order."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import LayoutError
from shardwise.layout import boxes_of_range, boxes_of_ranges, boxes_within, row_major_strides

Range = tuple[tuple[int, ...], int, int]


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    """A shape, and a range of its elements."""
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    size = math.prod(shape)
    start, stop = sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size))))
    return shape, start, stop


@given(ranges())
def test_boxes_laid_end_to_end_are_the_range(case: Range) -> None:
    shape, start, stop = case
    flat = np.arange(math.prod(shape))
    boxes = boxes_of_range(shape, start, stop)
    parts = [flat.reshape(shape)[box.slices()].reshape(-1) for box in boxes]
    found = np.concatenate([flat[:0], *parts])
    assert found.tolist() == flat[start:stop].tolist()
    assert all(box.size for box in boxes)


@given(ranges())
def test_boxes_are_few_and_each_is_contiguous(case: Range) -> None:
    shape, start, stop = case
    boxes = boxes_of_range(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    flat = np.arange(math.prod(shape)).reshape(shape)
    for box in boxes:
        elements = flat[box.slices()].reshape(-1)
        assert elements[-1] - elements[0] == len(elements) - 1


def test_as_many_boxes_as_the_bound_allows_are_met() -> None:
    assert len(boxes_of_range((3, 3, 3), 1, 26)) == 5
    assert len(boxes_of_range((3, 3), 1, 8)) == 3


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_is_refused(start: int, stop: int) -> None:
    with pytest.raises(LayoutError, match="not inside"):
        boxes_of_range((2, 3), start, stop)


@given(st.lists(ranges(), max_size=6))
def test_many_ranges_at_once_give_the_boxes_of_each(cases: list[Range]) -> None:
    dims = max((len(shape) for shape, _, _ in cases), default=0)
    padded = [(*shape, *(1,) * (dims - len(shape))) for shape, _, _ in cases]
    found = boxes_of_ranges(
        np.array(padded, np.int64).reshape(len(cases), dims),
        np.array([start for _, start, _ in cases], np.int64),
        np.array([stop for _, _, stop in cases], np.int64),
    )
    rows = []
    for i, (shape, start, stop) in enumerate(cases):
        first = start
        for box in boxes_of_range(shape, start, stop):
            more = dims - len(shape)
            rows.append((i, first, (*box.offset, *(0,) * more), (*box.shape, *(1,) * more)))
            first += box.size
    columns = zip(found.range_index, found.first, found.offset, found.shape, strict=True)
    assert [(i, at, tuple(o), tuple(n)) for i, at, o, n in columns] == rows


def test_many_ranges_are_refused_if_one_is_outside() -> None:
    shapes = np.array([[2, 3], [2, 3]])
    with pytest.raises(LayoutError, match="not inside"):
        boxes_of_ranges(shapes, np.array([0, 1]), np.array([6, 7]))


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
    strides = row_major_strides(np.array([shape], np.int64))[0]
    assert tuple(strides) == tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
