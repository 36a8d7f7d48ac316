"""Pieces folded into runs, and back."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout.columns import Int
from shardwise.manifest.layout import Pieces
from shardwise.manifest.manifest import (
    TensorEntry,
)
from shardwise.manifest.pieces import (
    SHORTEST_RUN,
    count_tensors,
    decode_tensors,
    encode_tensors,
    expand_runs,
    find_runs,
)

SHAPE = (64, 64)
DATA_AT = np.zeros(1 << 15, np.int64)
Row = tuple[int, int, int, tuple[int, int], tuple[int, int]]


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Progressions, one after another, and single pieces between them."""
    listed: list[Row] = []
    small = st.integers(0, 3)
    for tensor in range(draw(st.integers(0, 3))):
        for _ in range(draw(st.integers(0, 3))):
            file, start, offset = draw(
                st.tuples(small, st.integers(0, 99), st.tuples(small, small))
            )
            shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
            step = draw(st.tuples(st.integers(0, 2), small, small, small))
            for k in range(draw(st.integers(1, 6))):
                box = (offset[0] + k * step[2], offset[1] + k * step[3]), shape
                listed.append((tensor, file + k * step[0], start + k * step[1], *box))
    return listed


def columns_of(listed: list[Row]) -> tuple[Int, Int, Int, Int, Int]:
    """Rows as columns."""
    plain = np.array([row[:3] for row in listed], np.int64).reshape(-1, 3)
    boxes = np.array([row[3:] for row in listed], np.int64).reshape(-1, 2, 2)
    return plain[:, 0], plain[:, 1], plain[:, 2], boxes[:, 0], boxes[:, 1]


def rows_of(pieces: Pieces) -> list[Row]:
    """Columns as rows."""
    columns = (
        pieces.tensor.tolist(),
        pieces.file.tolist(),
        pieces.start.tolist(),
        map(tuple, pieces.offset.tolist()),
        map(tuple, pieces.shape.tolist()),
    )
    return list(zip(*columns, strict=True))  # type: ignore[arg-type]


@given(rows())
def test_expanding_undoes_folding(listed: list[Row]) -> None:
    runs = find_runs(*columns_of(listed))
    assert rows_of(expand_runs(runs, DATA_AT)) == listed
    assert all(count == 1 or count >= SHORTEST_RUN for count in runs.count.tolist())


@given(rows())
def test_runs_survive_the_manifest(listed: list[Row]) -> None:
    entries = [TensorEntry(f"t{i}", "uint8", SHAPE) for i in range(3)]
    encoded = encode_tensors(entries, *columns_of(listed))
    tensors, runs = decode_tensors(encoded)
    assert tensors == tuple(entries)
    assert count_tensors(encoded) == len(entries)
    assert rows_of(expand_runs(runs, DATA_AT)) == listed


def test_a_regular_sharding_is_one_rule_however_many_ranks() -> None:
    ranks = 16_384
    listed: list[Row] = [(0, rank, 4096, (8 * rank, 0), (8, 64)) for rank in range(ranks)]
    runs = find_runs(*columns_of(listed))
    assert len(runs.count) == 1
    assert rows_of(expand_runs(runs, DATA_AT)) == listed
