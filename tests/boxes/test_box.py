"""Boxes, against numpy's own indexing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwise as sw


@st.composite
def boxes_of_one_tensor(draw: st.DrawFn) -> tuple[tuple[int, ...], sw.Box, sw.Box]:
    """A shape, and two boxes within it, which may be empty."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    return shape, draw(box_within(shape)), draw(box_within(shape))


@st.composite
def box_within(draw: st.DrawFn, shape: tuple[int, ...]) -> sw.Box:
    edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return sw.Box(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))


def marked(shape: tuple[int, ...], box: sw.Box) -> np.ndarray:
    """A mask of a tensor that is set inside a box."""
    mask = np.zeros(shape, bool)
    mask[box.slices()] = True
    return mask


@given(boxes_of_one_tensor())
def test_intersect_and_contains_are_those_of_sets(
    case: tuple[tuple[int, ...], sw.Box, sw.Box],
) -> None:
    shape, one, other = case
    both = marked(shape, one) & marked(shape, other)
    common = one.intersect(other)
    assert common == other.intersect(one)
    if common is None:
        assert not both.any()
    else:
        assert (marked(shape, common) == both).all()
        assert common.size == both.sum() > 0
        assert one.contains(common)
        assert other.contains(common)
    assert one.size == marked(shape, one).sum()
    if other.size:
        assert one.contains(other) == bool((marked(shape, one) >= marked(shape, other)).all())


@given(boxes_of_one_tensor())
def test_a_common_box_is_found_in_the_local_array(
    case: tuple[tuple[int, ...], sw.Box, sw.Box],
) -> None:
    shape, one, other = case
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    common = one.intersect(other)
    if common is not None:
        local = values[one.slices()][common.relative_to(one.offset).slices()]
        assert (local == values[common.slices()]).all()


def test_a_box_is_written_as_an_index() -> None:
    assert str(sw.Box((0, 3), (2, 4))) == "[0:2,3:7]"
    assert str(sw.Box((), ())) == "[]"
    assert sw.Box.whole((2, 3)).stop == (2, 3)


@pytest.mark.parametrize(
    ("offset", "shape"), [((0,), ()), ((0,), (1, 2)), ((-1,), (2,)), ((0, 0), (1, -1))]
)
def test_a_box_validates_itself(offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
    with pytest.raises(sw.LayoutError):
        sw.Box(offset, shape)
