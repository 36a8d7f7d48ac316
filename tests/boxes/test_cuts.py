"""How tensors are cut into boxes: by ranges, meshes and indices, against numpy and torch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.kernel.boxes import (
    Box,
    Split,
    batch_boxes,
    boxes_of_covers,
    boxes_of_range,
    boxes_of_ranges,
    boxes_within,
    cover_positions,
    find_overlaps,
    row_major_strides,
    select_positions,
    shard_boxes,
    split_into_batches,
    split_into_boxes,
)
from shardwise.kernel.errors import LayoutError
from tests.breadth import OLD_TORCH

# Flattened ranges as boxes, against numpy's row-major order.

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


# Regular shardings, against what torch itself cuts.

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


def chunk(values: torch.Tensor, dim: int, parts: int) -> list[torch.Tensor]:
    """As `torch.chunk`, which returns fewer parts if the last ones are empty."""
    chunks = list(values.chunk(parts, dim))
    return chunks + [values.narrow(dim, 0, 0)] * (parts - len(chunks))


def cut_by_torch(values: torch.Tensor, dim: int, parts: int, strides: int) -> list[torch.Tensor]:
    """As DTensor cuts for a placement."""
    if strides == 1:
        return chunk(values, dim, parts)
    if OLD_TORCH:  # its placement cuts indivisible dimensions otherwise than FSDP2 with TP does
        cut = [chunk(each, dim, parts) for each in chunk(values, dim, strides)]
        return [torch.cat(each, dim) for each in zip(*cut, strict=True)]
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


# What an index selects, against numpy, and how much more than that the spans hold.


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


# Overlaps of all tensors at once, against boxes intersected one by one.

DIMS = 2
Row = tuple[int, Box]

rows = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.builds(
            Box,
            st.tuples(*[st.integers(0, 5)] * DIMS),
            st.tuples(*[st.integers(0, 4)] * DIMS),
        ),
    ),
    max_size=12,
)


def columns(
    listed: list[Row],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return (
        np.array([tensor for tensor, _ in listed], np.int64),
        np.array([box.offset for _, box in listed], np.int64).reshape(-1, DIMS),
        np.array([box.shape for _, box in listed], np.int64).reshape(-1, DIMS),
    )


@given(rows, rows, st.integers(1, 40))
def test_every_common_part_is_found_in_order(
    left: list[Row], right: list[Row], pairs_at_once: int
) -> None:
    lefts, rights, offsets, shapes = find_overlaps(
        columns(left), columns(right), pairs_at_once=pairs_at_once
    )
    expected = [
        (i, j, common.offset, common.shape)
        for i, (one, box) in enumerate(left)
        for j, (other, against) in enumerate(right)
        if one == other and (common := box.intersect(against)) is not None
    ]
    listed = zip(
        lefts.tolist(),
        rights.tolist(),
        map(tuple, offsets.tolist()),
        map(tuple, shapes.tolist()),
        strict=True,
    )
    assert list(listed) == expected


# Boxes and batches of a comparison are bounded, and cover everything once.


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
