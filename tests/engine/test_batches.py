"""Boxes and batches of a comparison are bounded, and cover everything once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.engine.load import batch_boxes
from shardwise.layout import Box, split_into_boxes


@given(st.lists(st.integers(0, 9), max_size=4), st.integers(1, 50))
def test_boxes_are_small_and_cover_once(shape: list[int], most: int) -> None:
    seen = torch.zeros(shape, dtype=torch.int32)
    for box in split_into_boxes(tuple(shape), most):
        assert 0 < box.size <= most
        seen[box.slices()] += 1
    assert bool((seen == 1).all())


@given(st.lists(st.integers(0, 40 << 20), max_size=8))
def test_batches_are_bounded_and_hold_everything(lengths: list[int]) -> None:
    found = list(batch_boxes(((i, Box((3,), (n,)), 2) for i, n in enumerate(lengths)), 16 << 20))
    assert all(0 < sum(2 * box.size for _, box in batch) <= 16 << 20 for batch in found)
    ends = [3] * len(lengths)
    for batch in found:
        for index, box in batch:
            assert box.offset == (ends[index],)
            ends[index] += box.size
    assert ends == [3 + n for n in lengths]
