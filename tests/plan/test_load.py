"""What a rank reads alone and together with the other ranks of its node: each block once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.boxes import Box, row_major_strides
from shardwise.kernel.manifest.layout import Layout, StoredFile
from shardwise.kernel.manifest.manifest import TensorEntry
from shardwise.kernel.manifest.pieces import Pieces, Runs
from shardwise.kernel.plan.load import Ranges, assign_transfers, plan_load
from shardwise.parts.sharing.reads import share_reads

BLOCK = 64
DIMS = 3
Int = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """Tensors cut into pieces that lie in files, and boxes of them that are wanted."""

    shapes: list[tuple[int, ...]]
    itemsizes: list[int]
    pieces: list[tuple[int, Box]]
    files: list[int]
    gaps: list[int]
    wanted: list[tuple[int, Box]]
    largest_read: int


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in edges), tuple(b - a for a, b in edges))


def halves(box: Box, dim: int) -> list[Box]:
    """A box cut across a dimension."""
    at = box.shape[dim] // 2
    first, second = list(box.shape), list(box.shape)
    offset = list(box.offset)
    first[dim], second[dim], offset[dim] = at, box.shape[dim] - at, box.offset[dim] + at
    return [Box(box.offset, tuple(first)), Box(tuple(offset), tuple(second))]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shapes = draw(st.lists(st.tuples(*[st.integers(1, 12)] * DIMS), min_size=1, max_size=3))
    pieces: list[tuple[int, Box]] = []
    for i, shape in enumerate(shapes):
        parts = [Box.whole(shape)]
        for dim in draw(st.lists(st.integers(0, DIMS - 1), max_size=3)):
            parts = [half for part in parts for half in halves(part, dim) if half.size]
        pieces += [(i, part) for part in parts]
    tensors = st.integers(0, len(shapes) - 1)
    owners = draw(st.lists(tensors, max_size=6))
    return Case(
        shapes,
        [draw(st.sampled_from([1, 2, 4, 8])) for _ in shapes],
        pieces,
        [draw(st.integers(0, 2)) for _ in pieces],
        [draw(st.integers(0, 40)) for _ in pieces],
        [(i, draw(boxes(shapes[i]))) for i in owners],
        draw(st.sampled_from([BLOCK, 3 * BLOCK, 100 * BLOCK])),
    )


def source_of(case: Case) -> tuple[Layout, list[int]]:
    """Pieces one after another in their files, with gaps; and the number of each file's bytes."""
    ends = [0, 0, 0]
    starts = []
    for (tensor, box), file, gap in zip(case.pieces, case.files, case.gaps, strict=True):
        starts.append(ends[file] + gap)
        ends[file] = starts[-1] + box.size * case.itemsizes[tensor]
    data_at = np.array([0, 24, 4096])
    files = np.array(case.files, np.int64)
    shape = np.array([box.shape for _, box in case.pieces], np.int64).reshape(-1, DIMS)
    pieces = Pieces(
        np.array([tensor for tensor, _ in case.pieces], np.int64),
        files,
        data_at[files] + np.array(starts, np.int64),
        np.array([box.offset for _, box in case.pieces], np.int64).reshape(-1, DIMS),
        shape,
        row_major_strides(shape),
    )
    covered = (data_at + ends + 8).tolist()
    return layout_of(case.shapes, case.itemsizes, pieces, covered), covered


def layout_of(
    shapes: list[tuple[int, ...]], itemsizes: list[int], pieces: Pieces, file_sizes: list[int]
) -> Layout:
    rows = enumerate(zip(shapes, itemsizes, strict=True))
    return Layout(
        format="made here",
        files=tuple(StoredFile(str(i), size) for i, size in enumerate(file_sizes)),
        tensors=tuple(TensorEntry(str(i), f"int{8 * size}", shape) for i, (shape, size) in rows),
        runs=Runs.of_pieces(pieces),
    )


def wanted_of(case: Case) -> tuple[Int, Int, Int]:
    return (
        np.array([tensor for tensor, _ in case.wanted], np.int64),
        np.array([box.offset for _, box in case.wanted], np.int64).reshape(-1, DIMS),
        np.array([box.shape for _, box in case.wanted], np.int64).reshape(-1, DIMS),
    )


def needed_blocks(case: Case, source: Layout) -> set[tuple[int, int]]:
    """The blocks in which the bytes of wanted elements lie: element by element."""
    blocks = set()
    for (tensor, box), file, start in zip(
        case.pieces, source.pieces.file.tolist(), source.pieces.start.tolist(), strict=True
    ):
        itemsize = case.itemsizes[tensor]
        place = start + itemsize * np.arange(box.size).reshape(box.shape)
        for other, wanted in case.wanted:
            common = box.intersect(wanted) if other == tensor else None
            if common is not None:
                bytes_at = place[common.relative_to(box.offset).slices()].reshape(-1)
                for low in bytes_at.tolist():
                    last = (low + itemsize - 1) // BLOCK
                    blocks |= {(file, low // BLOCK), (file, last)}
    return blocks


def read_blocks(spans: Ranges) -> list[tuple[int, int]]:
    return [
        (int(file), block)
        for file, low, high in zip(spans.file, spans.low, spans.high, strict=True)
        for block in range(int(low) // BLOCK, -(-int(high) // BLOCK))
    ]


@given(cases())
def test_blocks_are_read_once_and_whole(case: Case) -> None:
    source, covered = source_of(case)
    _, spans = plan_load(source, wanted_of(case), largest_read=case.largest_read, block=BLOCK)
    read = read_blocks(spans)
    assert len(read) == len(set(read))
    assert needed_blocks(case, source) <= set(read)
    for file, low, high in zip(spans.file, spans.low, spans.high, strict=True):
        assert low % BLOCK == 0
        assert high % BLOCK == 0 or high == covered[int(file)]
        assert 0 < high - low <= case.largest_read


@given(cases())
def test_no_whole_block_is_read_for_nothing(case: Case) -> None:
    source, _ = source_of(case)
    _, spans = plan_load(source, wanted_of(case), largest_read=case.largest_read, block=BLOCK)
    assert set(read_blocks(spans)) == needed_blocks(case, source)


@given(cases(), st.integers(1, 6))
def test_small_gaps_are_read_too(case: Case, gap: int) -> None:
    """All gaps of at most `gap` blocks between needed blocks of a file are read, and no others."""
    source, _ = source_of(case)
    wanted = wanted_of(case)
    _, spans = plan_load(
        source, wanted, largest_read=case.largest_read, largest_gap=gap * BLOCK, block=BLOCK
    )
    needed = sorted(needed_blocks(case, source))
    expected = set(needed)
    for (file, block), (next_file, next_block) in pairwise(needed):
        if file == next_file and next_block - block - 1 <= gap:
            expected |= {(file, each) for each in range(block, next_block)}
    read = read_blocks(spans)
    assert len(read) == len(set(read))
    assert set(read) == expected


@given(cases())
def test_every_wanted_element_is_transferred_once(case: Case) -> None:
    source, _ = source_of(case)
    moves, _ = plan_load(source, wanted_of(case), largest_read=case.largest_read, block=BLOCK)
    times = [np.zeros(shape, int) for shape in case.shapes]
    expected = [np.zeros(shape, int) for shape in case.shapes]
    for tensor, box in case.wanted:
        expected[tensor][box.slices()] += 1
    for i in range(len(moves)):
        piece, wanted = int(moves.run[i]), int(moves.fragment[i])
        tensor, saved = case.pieces[piece]
        box = Box(tuple(moves.offset[i].tolist()), tuple(moves.shape[i].tolist()))
        assert case.wanted[wanted][0] == tensor
        assert saved.contains(box)
        assert case.wanted[wanted][1].contains(box)
        times[tensor][box.slices()] += 1
    assert all((a == b).all() for a, b in zip(times, expected, strict=True))


@given(cases())
def test_a_span_serves_just_the_transfers_that_touch_it(case: Case) -> None:
    source, _ = source_of(case)
    moves, spans = plan_load(source, wanted_of(case), largest_read=case.largest_read, block=BLOCK)
    first, rows = assign_transfers(moves, spans)
    for i in range(len(spans.file)):
        served = set(rows[first[i] : first[i + 1]].tolist())
        touching = (moves.file == spans.file[i]) & (moves.low < spans.high[i])
        touching &= moves.high > spans.low[i]
        assert served == set(np.flatnonzero(touching).tolist())


def test_a_column_of_long_rows_costs_a_block_a_row() -> None:
    rows, columns = 32, 4096
    pieces = Pieces(
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        np.zeros(1, np.int64),
        np.zeros((1, 2), np.int64),
        np.array([[rows, columns]]),
        np.array([[columns, 1]]),
    )
    source = layout_of([(rows, columns)], [4], pieces, [rows * columns * 4])
    wanted = np.zeros(1, np.int64), np.array([[0, 7]]), np.array([[rows, 1]])
    _, spans = plan_load(source, wanted, largest_read=1 << 20, block=BLOCK)
    assert spans.nbytes == rows * BLOCK


def test_neighbouring_pieces_are_one_read() -> None:
    count, nbytes = 1000, 64
    pieces = Pieces(
        np.arange(count),
        np.zeros(count, np.int64),
        np.arange(count) * nbytes,
        np.zeros((count, 1), np.int64),
        np.full((count, 1), nbytes),
        np.ones((count, 1), np.int64),
    )
    source = layout_of([(nbytes,)] * count, [1] * count, pieces, [count * nbytes])
    wanted = np.arange(count), np.zeros((count, 1), np.int64), np.full((count, 1), nbytes)
    _, spans = plan_load(source, wanted, largest_read=1 << 20)
    assert len(spans.file) == 1
    assert spans.nbytes == math.prod((count, nbytes))


def test_each_file_may_have_its_own_limit_of_a_read() -> None:
    halves = [Box((at, 0, 0), (4, 64, 1)) for at in (0, 4)]
    whole = Box.whole((8, 64, 1))
    case = Case([whole.shape], [4], [(0, each) for each in halves], [0, 1], [0, 0], [(0, whole)], 0)
    source, _ = source_of(case)
    longest = np.array([2 * BLOCK, 5 * BLOCK, BLOCK])
    _, spans = plan_load(source, wanted_of(case), largest_read=longest, block=BLOCK)
    for file in (0, 1):
        assert (spans.high - spans.low)[spans.file == file].max() == longest[file]


def ranges_of(wanted: set[tuple[int, int]]) -> Ranges:
    """One range for each wanted (file, block)."""
    rows = sorted(wanted)
    file = np.array([f for f, _ in rows], np.int64)
    low = np.array([b * BLOCK for _, b in rows], np.int64)
    return Ranges(file, low, low + BLOCK)


blocks = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 20)), max_size=30)


@given(st.lists(blocks, min_size=1, max_size=5), st.integers(1, 8))
def test_every_wanted_block_is_read_once_by_a_rank_that_wants_it(
    wanted: list[set[tuple[int, int]]], largest: int
) -> None:
    shared = share_reads([ranges_of(each) for each in wanted], largest_read=largest * BLOCK)
    read: dict[tuple[int, int], int] = {}
    for i in range(len(shared)):
        assert 0 < shared.high[i] - shared.low[i] <= largest * BLOCK
        users = set(np.flatnonzero(shared.wanted[i]).tolist())
        assert int(shared.reader[i]) in users
        for block in range(int(shared.low[i]) // BLOCK, int(shared.high[i]) // BLOCK):
            key = int(shared.file[i]), block
            assert key not in read
            read[key] = int(shared.reader[i])
            assert users == {rank for rank, each in enumerate(wanted) if key in each}
    assert set(read) == set().union(*wanted)


def test_what_all_want_is_divided_evenly() -> None:
    everything = {(file, block) for file in range(2) for block in range(64)}
    ranges = [ranges_of(everything)] * 4
    shared = share_reads(ranges, largest_read=4 * BLOCK)
    loads = np.bincount(shared.reader, weights=shared.high - shared.low)
    assert loads.max() == loads.min()
    assert shared.nbytes * 4 == sum(each.nbytes for each in ranges)


def test_what_nobody_shares_saves_nothing() -> None:
    ranges = [ranges_of({(0, 1), (0, 2)}), ranges_of({(0, 3), (1, 1)})]
    assert share_reads(ranges, largest_read=BLOCK).nbytes == sum(each.nbytes for each in ranges)
