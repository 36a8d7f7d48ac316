"""Reads that the ranks of a node share: every wanted byte read once, by one who wants it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.load import Spans
from shardwise.plan.share import bytes_saved, share_reads

BLOCK = 16


def spans_of(wanted: set[tuple[int, int]]) -> Spans:
    """One span for each wanted (file, block)."""
    rows = sorted(wanted)
    file = np.array([f for f, _ in rows], np.int64)
    low = np.array([b * BLOCK for _, b in rows], np.int64)
    none = np.zeros(0, np.int64)
    return Spans(file, low, low + BLOCK, none, none)


blocks = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 20)), max_size=30)


@given(st.lists(blocks, min_size=1, max_size=5), st.integers(1, 8))
def test_every_wanted_block_is_read_once_by_a_rank_that_wants_it(
    wanted: list[set[tuple[int, int]]], largest: int
) -> None:
    shared = share_reads([spans_of(each) for each in wanted], largest_read=largest * BLOCK)
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
    spans = [spans_of(everything)] * 4
    shared = share_reads(spans, largest_read=4 * BLOCK)
    loads = np.bincount(shared.reader, weights=shared.high - shared.low)
    assert loads.max() == loads.min()
    assert bytes_saved(spans, shared) == 0.75


def test_what_nobody_shares_saves_nothing() -> None:
    spans = [spans_of({(0, 1), (0, 2)}), spans_of({(0, 3), (1, 1)})]
    assert bytes_saved(spans, share_reads(spans, largest_read=BLOCK)) == 0.0
