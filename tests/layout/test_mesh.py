"""Regular shardings, against what torch itself cuts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.errors import LayoutError
from shardwise.layout import Split, shard_boxes

shapes = st.lists(st.integers(0, 13), min_size=1, max_size=3).map(tuple)


Case = tuple[tuple[int, ...], list[tuple[int, int, int]]]


@st.composite
def shardings(draw: st.DrawFn) -> Case:
    """A shape, and the dimension, parts and strides of one to three splits of it."""
    shape = draw(shapes)
    split = st.tuples(st.integers(0, len(shape) - 1), st.integers(1, 4), st.integers(1, 3))
    return shape, draw(st.lists(split, min_size=1, max_size=3))


def at_index(splits: list[tuple[int, int, int]], index: tuple[int, ...]) -> list[Split]:
    """The splits of one rank."""
    pairs = zip(splits, index, strict=True)
    return [Split(dim, parts, i, strides) for (dim, parts, strides), i in pairs]


def cut_by_torch(values: torch.Tensor, dim: int, parts: int, strides: int) -> list[torch.Tensor]:
    """As DTensor cuts for a placement."""
    if strides == 1:
        chunks = list(values.chunk(parts, dim))
        empty = values.narrow(dim, 0, 0)
        return chunks + [empty] * (parts - len(chunks))
    placement = _StridedShard(dim, split_factor=strides)
    return placement._split_tensor(values, parts, with_padding=False)[0]


@given(shardings())
def test_shards_are_those_that_torch_cuts(case: Case) -> None:
    shape, splits = case
    values = torch.arange(math.prod(shape)).reshape(shape)
    for index in itertools.product(*(range(parts) for _, parts, _ in splits)):
        local = values
        for (dim, parts, strides), i in zip(splits, index, strict=True):
            local = cut_by_torch(local, dim, parts, strides)[i]
        pairs = shard_boxes(shape, tuple(at_index(splits, index)))
        assert sum(there.size for there, _ in pairs) == local.numel()
        for there, here in pairs:
            assert there.size
            assert torch.equal(values[there.slices()], local[here.slices()])


@given(shardings())
def test_every_element_is_in_one_shard(case: Case) -> None:
    shape, splits = case
    times = torch.zeros(shape, dtype=torch.int64)
    for index in itertools.product(*(range(parts) for _, parts, _ in splits)):
        for there, _ in shard_boxes(shape, tuple(at_index(splits, index))):
            times[there.slices()] += 1
    assert torch.equal(times, torch.ones(shape, dtype=torch.int64))


@given(shapes, st.integers(1, 5))
def test_a_plain_split_is_one_box(shape: tuple[int, ...], parts: int) -> None:
    for index in range(parts):
        assert len(shard_boxes(shape, (Split(0, parts, index),))) <= 1


def test_without_splits_the_shard_is_the_tensor() -> None:
    assert [str(there) for there, _ in shard_boxes((2, 3), ())] == ["[0:2,0:3]"]
    assert [str(there) for there, _ in shard_boxes((), ())] == ["[]"]


def test_a_split_of_no_dimension_is_refused() -> None:
    with pytest.raises(LayoutError, match="dimension 1"):
        shard_boxes((4,), (Split(1, 2, 0),))
