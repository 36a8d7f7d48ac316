"""What an index selects, against numpy, and how much more than that the spans hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout import (
    boxes_of_covers,
    cover_positions,
    select_positions,
    split_into_batches,
)


@st.composite
def indices(draw: st.DrawFn) -> tuple[tuple[int, ...], Any]:
    """A shape, and an index that fits it."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    arrays = 0
    parts: list[Any] = []
    for n in shape[: draw(st.integers(0, len(shape)))]:
        kind = draw(st.sampled_from(["int", "slice", "array", "mask"]))
        if kind == "int":
            parts.append(draw(st.integers(-n, n - 1)))
        elif kind == "slice" or arrays:
            ends = st.one_of(st.none(), st.integers(-n - 2, n + 2))
            parts.append(slice(draw(ends), draw(ends), draw(st.integers(1, 4))))
        elif kind == "array":
            arrays += 1
            parts.append(draw(st.lists(st.integers(-n, n - 1), max_size=12)))
        else:
            arrays += 1
            parts.append(np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n))))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(parts)))
        here, there = parts[:at], parts[at:]
        if len(parts) == len(shape) or not there:
            parts = [*here, ..., *there]
    return shape, tuple(parts)


@given(indices(), st.integers(0, 3), st.integers(1, 20))
def test_spans_hold_what_is_selected(
    shaped: tuple[tuple[int, ...], Any], gap: int, most: int
) -> None:
    shape, index = shaped
    whole = np.arange(math.prod(shape)).reshape(shape)
    along = select_positions(index, shape)
    out = np.full([len(each.positions) for each in along], -1)
    for batch in split_into_batches(along[0].positions, gap, most) if out.size else ():
        firsts = along[0].positions[batch]
        covers = [
            cover_positions(firsts, gap),
            *(cover_positions(each.positions, gap) for each in along[1:]),
        ]
        assert covers[0].length <= most + gap
        assert covers[0].length <= len(firsts) * (gap + 1)
        data = np.full([each.length for each in covers], -1)
        for there, here in boxes_of_covers(covers):
            data[here.slices()] = whole[there.slices()]
        for dim, each in enumerate(covers):
            data = data[(slice(None),) * dim + (each.packed_index,)]
        out[batch] = data
    for dim in reversed(range(len(shape))):  # one dimension after the other, as torch does
        out = out[(slice(None),) * dim + (along[dim].reindex,)]
    wanted = whole
    full = index
    if any(part is Ellipsis for part in index):
        at = next(i for i, part in enumerate(index) if part is Ellipsis)
        rest = (slice(None),) * (len(shape) - len(index) + 1)
        full = (*index[:at], *rest, *index[at + 1 :])
    for dim in reversed(range(len(full))):
        part = np.array(full[dim], int) if isinstance(full[dim], list) else full[dim]
        wanted = wanted[(slice(None),) * dim + (part,)]
    assert np.array_equal(out, wanted)


def test_bytes_are_neither_a_mask_nor_numbers() -> None:
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8)
    with pytest.raises(IndexError, match=r"torch\.uint8"):
        select_positions(mask, (3,))
    assert select_positions(mask.bool(), (3,))[0].positions.tolist() == [0, 2]
