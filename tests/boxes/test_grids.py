"""Grids are what they stand for: every result equals that of the boxes, listed one by one."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.boxes import coverage
from shardwise.kernel.boxes.box import IntArray, distinct_rows
from shardwise.kernel.boxes.coverage import find_unfilled_files
from shardwise.kernel.boxes.grids import (
    advance,
    count_boxes,
    expand_grids,
    find_in_grids,
    grid_bounds,
    merge_axes,
)
from shardwise.kernel.errors import FormatError

Grids = tuple[IntArray, IntArray, IntArray, IntArray]
Point = tuple[int, ...]


@st.composite
def grids(draw: st.DrawFn, dims: int = 2, most: int = 4) -> Grids:
    """Grids of up to three axes, many of which lie side by side."""
    n, axes = draw(st.integers(0, most)), draw(st.integers(0, 3))
    first = [[draw(st.integers(0, 9)) for _ in range(dims)] for _ in range(n)]
    extent = [[draw(st.integers(1, 3)) for _ in range(dims)] for _ in range(n)]
    count, step = [], []
    for row in range(n):
        sizes = list(extent[row])
        inner = []
        for _ in range(axes):
            times = draw(st.integers(1, 4))
            move = [0] * dims
            if draw(st.booleans()):
                dim = draw(st.integers(0, dims - 1))
                move[dim] = sizes[dim]
                sizes[dim] *= times
            else:
                move = [draw(st.integers(-4, 4)) for _ in range(dims)]
            inner.append((times, move))
        inner = draw(st.permutations(inner))
        count.append([times for times, _ in inner])
        step.append([move for _, move in inner])
    return (
        np.array(first, np.int64).reshape(n, dims),
        np.array(extent, np.int64).reshape(n, dims),
        np.array(count, np.int64).reshape(n, axes),
        np.array(step, np.int64).reshape(n, axes, dims),
    )


def boxes_of(table: Grids) -> Iterator[tuple[int, Point, Point, Point]]:
    """The grid, indices, offset and extent of every box, one by one."""
    first, extent, count, step = table
    for grid in range(len(first)):
        for k in itertools.product(*map(range, count[grid].tolist())):
            at = first[grid].copy()
            for index, move in zip(k, step[grid], strict=True):
                at += index * move
            yield grid, k, tuple(at.tolist()), tuple(extent[grid].tolist())


def elements_of(table: Grids) -> Counter[tuple[int, Point]]:
    """How often each grid has each element."""
    found: Counter[tuple[int, Point]] = Counter()
    for grid, _, at, extent in boxes_of(table):
        ranges = [range(a, a + n) for a, n in zip(at, extent, strict=True)]
        found.update((grid, point) for point in itertools.product(*ranges))
    return found


@given(grids())
def test_all_boxes_are_expanded_in_order(table: Grids) -> None:
    first, _, count, step = table
    grid, k = expand_grids(count)
    at = advance(first[grid], k, step[grid])
    found = zip(grid.tolist(), map(tuple, k.tolist()), map(tuple, at.tolist()), strict=True)
    assert list(found) == [each[:3] for each in boxes_of(table)]
    assert count_boxes(count).sum() == len(grid)


@given(grids())
def test_the_bounds_are_those_of_the_boxes(table: Grids) -> None:
    low, high = grid_bounds(*table)
    for grid in range(len(low)):
        own = [(at, extent) for each, _, at, extent in boxes_of(table) if each == grid]
        assert low[grid].tolist() == [min(at[d] for at, _ in own) for d in range(2)]
        assert high[grid].tolist() == [max(at[d] + n[d] for at, n in own) for d in range(2)]


@given(grids())
def test_merged_boxes_have_the_same_elements(table: Grids) -> None:
    first, extent, count, step = table
    merged = merge_axes(extent, count, step)
    assert elements_of((first, *merged, step)) == elements_of(table)


def test_boxes_side_by_side_become_one() -> None:
    count, step = np.array([[8, 2]]), np.array([[[4, 0], [0, 3]]])
    extent, left = merge_axes(np.array([[4, 3]]), count, step)
    assert (extent.tolist(), left.tolist()) == ([[32, 6]], [[1, 1]])


def test_a_comb_stays_a_comb() -> None:
    count, step = np.array([[8, 2]]), np.array([[[10, 0], [5, 0]]])
    extent, left = merge_axes(np.array([[4, 3]]), count, step)
    assert (extent.tolist(), left.tolist()) == ([[4, 3]], [[8, 2]])


@given(grids(), st.data())
def test_exactly_the_overlapping_boxes_are_found(table: Grids, data: st.DataObject) -> None:
    n = len(table[0])
    wanted = data.draw(st.lists(st.integers(0, n - 1), max_size=4)) if n else []
    numbers = st.tuples(st.integers(-9, 20), st.integers(-9, 20))
    low = [data.draw(numbers) for _ in wanted]
    high = [(a + data.draw(st.integers(1, 9)), b + data.draw(st.integers(1, 9))) for a, b in low]
    expected = {
        (i, k)
        for i, grid in enumerate(wanted)
        for each, k, at, extent in boxes_of(table)
        if each == grid
        and all(at[d] < high[i][d] and at[d] + extent[d] > low[i][d] for d in range(2))
    }
    corners = (np.array(each, np.int64).reshape(-1, 2) for each in (low, high))
    found, k = find_in_grids(np.array(wanted, np.int64), *corners, table)
    pairs = list(zip(found.tolist(), map(tuple, k.tolist()), strict=True))
    assert sorted(pairs) == sorted(expected)


def test_a_small_part_of_a_huge_grid_is_found_at_once() -> None:
    side = 2**24
    count, step = np.array([[side, side]]), np.array([[[3, 0], [0, 5]]])
    table = np.zeros((1, 2), np.int64), np.array([[3, 5]]), count, step
    low = np.array([[3 * 2**23, 5 * 2**20]])
    found, k = find_in_grids(np.zeros(1, np.int64), low, low + np.array([[4, 6]]), table)
    assert found.tolist() == [0] * 4
    assert (k - [2**23, 2**20]).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


@pytest.mark.long
def test_too_much_of_a_huge_grid_is_refused() -> None:
    side = 2**24
    count, step = np.array([[side, side]]), np.array([[[3, 0], [0, 5]]])
    table = np.zeros((1, 2), np.int64), np.array([[3, 5]]), count, step
    low = np.zeros((1, 2), np.int64)
    with pytest.raises(FormatError, match="at most"):
        find_in_grids(np.zeros(1, np.int64), low, low + 2**26, table)


@st.composite
def files(draw: st.DrawFn) -> tuple[list[int], Grids]:
    """Lengths of files, and ranges that often fill them: rules with a few changes."""
    tp, dp = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    length = np.zeros((dp, tp), np.int64)
    first, extent, count, step = [], [], [], []
    for _ in range(draw(st.integers(0, 4))):
        width, low = draw(st.integers(1, tp)), draw(st.integers(0, dp - 1))
        high = draw(st.integers(low + 1, dp))
        size, times = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        for start in sorted({*length[low:high, :width].ravel().tolist()}):
            for i, j in itertools.product(range(low, high), range(width)):
                if length[i, j] == start:
                    first.append([i * tp + j, start])
                    extent.append([1, size])
                    count.append([1, 1, times])
                    step.append([[tp, 0], [1, 0], [0, size]])
        if len({*length[low:high, :width].ravel().tolist()}) == 1:
            del first[-(high - low) * width :], extent[-(high - low) * width :]
            del count[-(high - low) * width :], step[-(high - low) * width :]
            first.append([low * tp, int(length[low, 0])])
            extent.append([1, size])
            count.append([high - low, width, times])
            step.append([[tp, 0], [1, 0], [0, size]])
        length[low:high, :width] += size * times
    lengths = length.ravel().tolist()
    table = (
        np.array(first, np.int64).reshape(-1, 2),
        np.array(extent, np.int64).reshape(-1, 2),
        np.array(count, np.int64).reshape(-1, 3),
        np.array(step, np.int64).reshape(-1, 3, 2),
    )
    for _ in range(draw(st.integers(0, 1))):
        if len(table[0]):
            row = draw(st.integers(0, len(table[0]) - 1))
            column = table[draw(st.sampled_from([0, 1, 3]))]
            column[row, ..., 1] += draw(st.sampled_from([-1, 1, 2]))
    return lengths, table


@given(files())
def test_files_are_filled_just_if_each_byte_is_in_one_range(
    case: tuple[list[int], Grids],
) -> None:
    lengths, table = case
    found: list[Counter[int]] = [Counter() for _ in lengths]
    for (_, (file, byte)), times in elements_of(table).items():
        if byte < 0:
            return  # refused before
        found[file][byte] += times
    expected = [i for i, n in enumerate(lengths) if found[i] != Counter(range(n))]
    assert find_unfilled_files(np.array(lengths, np.int64), *table).tolist() == expected


@given(files())
def test_files_are_filled_the_same_without_axes(case: tuple[list[int], Grids]) -> None:
    lengths, (first, extent, count, step) = case
    grid, k = expand_grids(count)
    at = advance(first[grid], k, step[grid])
    none, no_steps = np.zeros((len(grid), 0), np.int64), np.zeros((len(grid), 0, 2), np.int64)
    if (at < 0).any():
        return
    found = find_unfilled_files(np.array(lengths), first, extent, count, step)
    listed = find_unfilled_files(np.array(lengths), at, extent[grid], none, no_steps)
    assert found.tolist() == listed.tolist()


@pytest.mark.parametrize("seed", range(20))
def test_many_ranges_in_every_third_file_fill_as_if_they_were_listed(seed: int) -> None:
    """More ranges than files, so that they are added up along the distances between files."""
    random = np.random.default_rng(seed)
    dp, tp = 40, 3
    length = np.zeros((dp, tp), np.int64)
    first, extent, count, step = [], [], [], []
    for number in range(30):
        low, column = int(random.integers(0, 3)), number % tp
        if number % 4 == 3:  # from the last to the first
            first.append([(dp - 1) * tp + column, 0])
            step.append([[-tp, 0]])
            low = 0
        else:
            first.append([low * tp + column, 0])
            step.append([[tp, 0]])
        low = low if len({*length[low:, column].tolist()}) == 1 else dp
        if low == dp:
            first.pop(), step.pop()
            continue
        first[-1][1] = int(length[low, column])
        extent.append([1, int(random.integers(1, 9))])
        count.append([dp - low])
        length[low:, column] += extent[-1][1]
    lengths = length.ravel()
    table = tuple(np.array(each, np.int64) for each in (first, extent, count, step))
    found: list[Counter[int]] = [Counter() for _ in lengths]
    changed = random.integers(0, len(first))
    if seed % 2:
        table[seed // 2 % 2][changed, 1] += 1
    for (_, (file, byte)), times in elements_of(table).items():  # type: ignore[arg-type]
        found[file][byte] += times
    expected = [i for i, n in enumerate(lengths.tolist()) if found[i] != Counter(range(n))]
    assert bool(expected) == bool(seed % 2)
    assert find_unfilled_files(lengths, *table).tolist() == expected


def test_ranks_at_too_many_distances_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "MOST_STRIDED_FILES", 100)
    count = np.repeat([[30], [20]], 3, axis=0)
    step = np.array([[2, 0]] * 3 + [[3, 0]] * 3).reshape(6, 1, 2)
    first, extent = np.zeros((6, 2), np.int64), np.ones((6, 2), np.int64)
    with pytest.raises(FormatError, match="2 different distances"):
        find_unfilled_files(np.ones(59, np.int64), first, extent, count, step)


@given(
    st.integers(0, 4).flatmap(
        lambda columns: st.lists(
            st.tuples(*[st.sampled_from([0, 1, 2, -1, 2**40, 2**61])] * columns), max_size=30
        ).map(lambda rows: np.array(rows, np.int64).reshape(len(rows), columns))
    )
)
def test_distinct_rows_are_those_of_numpy(table: np.ndarray) -> None:
    first, kind = distinct_rows(table)
    if not table.shape[1]:  # all rows are equal
        assert first.tolist() == [0][: len(table)]
        assert kind.tolist() == [0] * len(table)
        return
    _, expected, inverse = np.unique(table, axis=0, return_index=True, return_inverse=True)
    assert first.tolist() == expected.tolist()
    assert kind.tolist() == inverse.reshape(-1).tolist()
