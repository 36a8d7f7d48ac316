"""Pieces by rule are checked, and found by a load, as if they were listed one by one."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.kernel.boxes import row_major_strides
from shardwise.kernel.boxes.box import IntArray
from shardwise.kernel.errors import FormatError
from shardwise.kernel.manifest.checksums import block_count
from shardwise.kernel.manifest.data_files import FileTable
from shardwise.kernel.manifest.layout import Layout
from shardwise.kernel.manifest.manifest import (
    Manifest,
    TensorEntry,
    decode_manifest,
    encode_manifest,
)
from shardwise.kernel.manifest.pieces import Pieces, Runs, encode_tensors, find_runs
from shardwise.kernel.manifest.validate import layout_of_manifest
from shardwise.kernel.plan.load import plan_load
from tests.breadth import examples

SAVE_ID = "0123456789abcdef"


@st.composite
def saves(draw: st.DrawFn) -> tuple[list[TensorEntry], Runs, IntArray]:
    """Tensors that ranks of two axes hold, their runs, and the data bytes of each rank's file."""
    outer, inner = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    data = np.zeros((outer, inner), np.int64)
    entries, rows = [], []
    for index in range(draw(st.integers(1, 4))):
        height, width = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        holders, dim = draw(st.integers(1, outer)), draw(st.sampled_from([0, 1]))
        if dim:  # each rank of the inner axis has some columns
            shape, moves = (holders * height, inner * width), [[height, 0], [0, width]]
        else:  # each rank of the inner axis has further rows
            shape, moves = (inner * holders * height, width), [[height, 0], [holders * height, 0]]
        entries.append(TensorEntry(f"t{index}", "int16", shape))
        split = draw(st.integers(1, holders)) if draw(st.booleans()) else holders
        for low, high in ((0, split), (split, holders)):
            if low == high:
                continue
            starts = data[low:high]
            if (starts == starts[0, 0]).all():
                first = [index, low * inner, int(starts[0, 0]), low * height, 0, height, width]
                steps = [high - low, inner, inner, 1, 0, 0, *moves[0], *moves[1]]
                rows.append([*first, *steps])
                continue
            for i in range(low, high):
                for j in range(inner):
                    at = (i * np.array(moves[0]) + j * np.array(moves[1])).tolist()
                    rows.append(
                        [index, i * inner + j, int(data[i, j]), *at, height, width, 1, 1, *[0] * 8]
                    )
        data[:holders] += 2 * height * width
    table = np.array(rows, np.int64)
    n = len(table)
    runs = Runs(
        *table[:, :3].T,
        table[:, 3:5],
        table[:, 5:7],
        table[:, 7:9],
        table[:, 9:11],
        table[:, 11:13],
        table[:, 13:].reshape(n, 2, 2),
        row_major_strides(table[:, 5:7]),
    )
    return entries, runs, data.reshape(-1)


def opened(entries: list[TensorEntry], runs: Runs, data: IntArray) -> Layout:
    """The layout of a manifest with these pieces."""
    objects_at = 4096 + data
    sizes = [objects_at + 4 * block_count(objects_at), np.full_like(data, 4096)]
    columns = [np.arange(len(data)), *sizes, objects_at, objects_at, np.zeros_like(data)]
    manifest = Manifest(
        save_id=SAVE_ID,
        step=None,
        created="",
        world_size=len(data),
        files=FileTable(SAVE_ID, np.column_stack(columns)),
        objects=(),
        tensors=encode_tensors(entries, runs),
    )
    return layout_of_manifest(decode_manifest(encode_manifest(manifest)))


def listed(runs: Runs) -> Runs:
    """The same pieces without axes."""
    pieces = runs.expand()
    return Runs.of_pieces(pieces)


def rows_of(pieces: Pieces) -> list[tuple[object, ...]]:
    """The pieces in any order that is the same for equal pieces."""
    columns = (pieces.tensor, pieces.file, pieces.start, pieces.offset, pieces.shape)
    return sorted(zip(*(map(str, column.tolist()) for column in columns), strict=True))


@given(saves())
def test_what_is_written_by_rule_is_read(case: tuple[list[TensorEntry], Runs, IntArray]) -> None:
    entries, runs, data = case
    layout = opened(entries, runs, data)
    assert rows_of(layout.pieces) == rows_of(runs.expand())
    assert layout.piece_counts.tolist() == np.bincount(layout.pieces.tensor).tolist()
    for file in range(len(data)):
        expected = layout.pieces.select(layout.pieces.file == file)
        assert rows_of(layout.pieces_in(file)) == rows_of(expected)
    for tensor in range(len(entries)):
        expected = layout.pieces.select(layout.pieces.tensor == tensor)
        assert rows_of(layout.pieces_of(tensor)) == rows_of(expected)


@given(saves())
def test_runs_are_found_again_in_what_was_listed(
    case: tuple[list[TensorEntry], Runs, IntArray],
) -> None:
    entries, runs, data = case
    pieces = runs.expand()
    order = np.lexsort([*reversed(pieces.offset.T), pieces.tensor])
    columns = pieces.tensor, pieces.file, pieces.start, pieces.offset, pieces.shape
    found = find_runs(Runs.of_rows(*(column[order] for column in columns)))
    assert rows_of(found.expand()) == rows_of(pieces)
    opened(entries, found, data)


@examples(300)
@given(saves(), st.data())
def test_a_rule_is_refused_just_if_its_pieces_are(
    case: tuple[list[TensorEntry], Runs, IntArray], data: st.DataObject
) -> None:
    """With a number changed somewhere, or without one run."""
    entries, runs, nbytes = case
    row = data.draw(st.integers(0, len(runs) - 1))
    if data.draw(st.integers(0, 4)):
        name = data.draw(st.sampled_from([*Runs.__dataclass_fields__][1:-1]))
        column = getattr(runs, name).copy()
        values = column[row : row + 1].reshape(-1)
        at = data.draw(st.integers(0, len(values) - 1))
        values[at] = max(0, values[at] + data.draw(st.sampled_from([-2, -1, 1, 2])))
        column[row] = values.reshape(column[row].shape)
        runs = replaced(runs, name, column)
    else:
        runs = runs.select(np.arange(len(runs)) != row)
    if (runs.count < 1).any():
        return

    def refusal(given: Runs) -> str | None:
        try:
            opened(entries, given, nbytes)
        except FormatError as error:
            return str(error)
        return None

    by_rule, one_by_one = refusal(runs), refusal(listed(runs))
    assert (by_rule is None) == (one_by_one is None) == is_exact(entries, runs, nbytes), by_rule


def is_exact(entries: list[TensorEntry], runs: Runs, nbytes: IntArray) -> bool:
    """Whether each element is in one piece, and each byte of each file too."""
    elements: Counter[tuple[int, ...]] = Counter()
    used: Counter[tuple[int, int]] = Counter()
    pieces = runs.expand()
    for tensor, file, start, offset, shape in zip(
        *(
            getattr(pieces, name).tolist()
            for name in ("tensor", "file", "start", "offset", "shape")
        ),
        strict=True,
    ):
        if min(shape) < 1:
            return False
        ranges = (range(a, a + n) for a, n in zip(offset, shape, strict=True))
        elements.update(itertools.product([tensor], *ranges))
        used.update((file, start + i) for i in range(2 * math.prod(shape)))
    wanted = Counter(
        point
        for i, entry in enumerate(entries)
        for point in itertools.product([i], *map(range, entry.shape))
    )
    return elements == wanted and used == Counter(
        (file, at) for file, size in enumerate(nbytes.tolist()) for at in range(size)
    )


def replaced(runs: Runs, name: str, column: IntArray) -> Runs:
    """The runs with another column."""
    columns = {each: getattr(runs, each) for each in Runs.__dataclass_fields__}
    return Runs(**(columns | {name: column}))


@given(saves(), st.data())
def test_a_load_by_rule_reads_what_a_load_of_listed_pieces_reads(
    case: tuple[list[TensorEntry], Runs, IntArray], data: st.DataObject
) -> None:
    entries, runs, nbytes = case
    tensor, offset, shape = [], [], []
    for index in data.draw(st.lists(st.integers(0, len(entries) - 1), max_size=4)):
        whole = entries[index].shape
        low = [data.draw(st.integers(0, n - 1)) for n in whole]
        tensor.append(index)
        offset.append(low)
        shape.append([data.draw(st.integers(1, n - a)) for a, n in zip(low, whole, strict=True)])
    wanted = (
        np.array(tensor, np.int64),
        np.array(offset, np.int64).reshape(-1, 2),
        np.array(shape, np.int64).reshape(-1, 2),
    )
    plans = []
    for layout in (opened(entries, runs, nbytes), opened(entries, listed(runs), nbytes)):
        transfers, spans = plan_load(layout, wanted, largest_read=1 << 20, block=8)
        columns = ("fragment", "offset", "shape", "file", "low", "high")
        rows = zip(*(map(str, getattr(transfers, name).tolist()) for name in columns), strict=True)
        plans.append((sorted(rows), spans.file.tolist(), spans.low.tolist(), spans.high.tolist()))
    assert plans[0] == plans[1]


def runs_of(rows: list[tuple[list[int], list[int], list[list[int]]]]) -> Runs:
    """Runs of one-dimensional pieces of one tensor.

    Args:
        rows: for each run: file, start, offset and shape; the counts; and for each axis the steps
            of file, start and offset.
    """
    first = np.array([row[0] for row in rows], np.int64)
    steps = np.array([row[2] for row in rows], np.int64)
    return Runs(
        np.zeros(len(rows), np.int64),
        first[:, 0],
        first[:, 1],
        first[:, 2:3],
        first[:, 3:4],
        np.array([row[1] for row in rows], np.int64),
        steps[:, :, 0],
        steps[:, :, 1],
        steps[:, :, 2:3],
        np.ones((len(rows), 1), np.int64),
    )


MANY = 2**24
HALVES = [([0, 2 * i, i, 1], [MANY], [[0, 4, 2]]) for i in (0, 1)]
REFUSED = {
    "every second element, twice": (HALVES, [4 * MANY], "33,554,432 pieces"),
    "all in the same bytes": ([([0, 0, 0, 2], [8], [[0, 0, 2]])], [32], "share bytes|lies outside"),
    "nothing wrong": ([([0, 0, 0, 2], [8], [[1, 0, 2]])], [4] * 8, None),
    "past the last file": ([([1, 0, 0, 2], [8], [[1, 0, 2]])], [4] * 8, "in none of the 8 files"),
    "before the first file": ([([1, 0, 0, 2], [8], [[-1, 0, 2]])], [4] * 8, "in none of the 8"),
    "before the data": ([([0, 4, 0, 2], [8], [[1, -1, 2]])], [4] * 8, "a piece lies outside"),
    "past the end of one file": (
        [([0, 0, 0, 2], [8], [[1, 0, 2]])],
        [4] * 6 + [2, 6],
        "outside of its file",
    ),
    "short of the end of a file": ([([0, 0, 0, 2], [8], [[1, 0, 2]])], [4] * 7 + [6], "left over"),
    "shared by two files' worth": (
        [([0, 0, 0, 2], [4], [[1, 0, 2]]), ([0, 0, 8, 2], [4], [[1, 0, 2]])],
        [8] * 4,
        "share bytes",
    ),
    "a step that is too long": ([([0, 0, 0, 1], [16], [[0, 2, 2]])], [32], "outside of its tensor"),
    "a step of nothing": ([([0, 0, 0, 1], [16], [[0, 2, 0]])], [32], "overlap or leave gaps"),
    "diagonal steps that cancel out": (
        [([0, 0, 8, 1], [16], [[0, 2, -1]])],
        [32],
        "outside of its tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_rule_that_cannot_be_right_is_refused(name: str) -> None:
    rows, data, message = REFUSED[name]
    elements = sum(first[3] * math.prod(counts) for first, counts, _ in rows)
    entries = [TensorEntry("w", "int16", (elements,))]
    tracemalloc.start()
    try:
        if message is None:  # the same, but right
            opened(entries, runs_of(rows), np.array(data))
        else:
            with pytest.raises(FormatError, match=message):
                opened(entries, runs_of(rows), np.array(data))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_the_whole_of_a_huge_grid_is_checked_in_little_memory() -> None:
    """2^44 pieces, in four ranks' files: nothing is listed."""
    side = 2**22
    rows = [
        ([0, 0, 0, 2], [4, side, side], [[1, 0, 2 * side**2], [0, 4 * side, 2 * side], [0, 4, 2]])
    ]
    entries = [TensorEntry("w", "int16", (8 * side**2,))]
    tracemalloc.start()
    try:
        layout = opened(entries, runs_of(rows), np.full(4, 4 * side**2))
        wanted = np.array([0]), np.array([[2 * side**2 - 1]]), np.array([[3]])
        transfers, _ = plan_load(layout, wanted, largest_read=1 << 20)
        assert transfers.file.tolist() == [0, 1]
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert layout.piece_counts.tolist() == [4 * side**2]
    with pytest.raises(FormatError, match="at most 16,777,216 are supported"):
        _ = layout.pieces


# Files by rule.


@st.composite
def file_tables(draw: st.DrawFn) -> FileTable:
    """Files of some ranks, of a few sizes; some with another id in their names."""
    ranks = sorted(draw(st.sets(st.integers(0, 60) | st.integers(99_998, 100_002))))
    kinds = [draw(st.integers(0, 2)) for _ in ranks]
    numbers = [
        [rank, 9000 + kind, 4096 + kind, 5000, 6000, draw(st.integers(0, 2**32 - 1))]
        for rank, kind in zip(ranks, kinds, strict=True)
    ]
    others = {rank: "f" * 16 for rank in ranks if not draw(st.integers(0, 9))}
    return FileTable(SAVE_ID, np.array(numbers, np.int64).reshape(-1, 6), others)


@given(file_tables())
def test_files_survive_the_manifest(table: FileTable) -> None:
    manifest = Manifest(
        save_id=SAVE_ID,
        step=None,
        created="",
        world_size=200_000,
        files=table,
        objects=(),
        tensors=msgspec.Raw(b"[]"),
    )
    decoded = decode_manifest(encode_manifest(manifest)).files
    assert decoded == table
    assert isinstance(decoded, FileTable)
    assert FileTable.of([*decoded], SAVE_ID) == table
    for index, entry in enumerate(table):
        assert decoded[index] == entry
        assert decoded.index_of(entry.name) == decoded.index_of_rank(entry.rank) == index
    assert decoded.nbytes == sum(entry.size for entry in table)


@pytest.mark.parametrize(
    "name", ["r00007-0123456789abcdef.safetensors", "r00001-" + "f" * 16 + ".safetensors", "r1", ""]
)
def test_other_names_have_no_index(name: str) -> None:
    table = FileTable(SAVE_ID, np.array([[1, 2, 3, 4, 5, 6]]))
    assert table.index_of("r00001-0123456789abcdef.safetensors") == 0
    assert table.index_of(name) is None


def test_a_hundred_thousand_files_of_three_sizes_are_three_entries() -> None:
    ranks = np.arange(131_072)
    numbers = np.zeros((len(ranks), 6), np.int64)
    numbers[:, 0], numbers[:, 1] = ranks, 9000 + ranks % 8 // 3
    manifest = Manifest(
        save_id=SAVE_ID,
        step=None,
        created="",
        world_size=len(ranks),
        files=FileTable(SAVE_ID, numbers),
        objects=(),
        tensors=msgspec.Raw(b"[]"),
    )
    encoded = encode_manifest(manifest)
    assert len(encoded) < 16 * len(ranks)
    assert decode_manifest(encoded).files == manifest.files
