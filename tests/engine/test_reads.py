"""What a load reads of the files: each block at most once, and no more than it reports."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.breadth import examples
from tests.tools.divisions import BoxesByRank, boxes_of_ranks
from tests.tools.watched_stores import BLOCK, CountingStore

SHAPE = (40, 30, 64)
WORLDS = st.integers(1, 6)


@st.composite
def cases(draw: st.DrawFn) -> tuple[BoxesByRank, BoxesByRank, int]:
    held = draw(WORLDS.flatmap(lambda world: boxes_of_ranks(SHAPE, world)))
    wanted = draw(WORLDS.flatmap(lambda world: boxes_of_ranks(SHAPE, world)))
    return held, wanted, draw(st.integers(0, len(wanted) - 1))


def shards(values: torch.Tensor, boxes: tuple[sw.Box, ...]) -> sw.Shards:
    return sw.Shards(SHAPE, values.dtype, [(box, values[box.slices()].clone()) for box in boxes])


@examples(40, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_no_rank_reads_a_block_twice(case: tuple[BoxesByRank, BoxesByRank, int]) -> None:
    held, wanted, rank = case
    values = torch.arange(40 * 30 * 64, dtype=torch.float32).reshape(SHAPE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "it"

        def save(group: ThreadGroup) -> None:
            sw.save(path, {"t": shards(values, held[group.rank])}, group=group)

        run_ranks(len(held), save)
        store = CountingStore(path)
        target = shards(torch.zeros_like(values), wanted[rank])
        report = sw.load(store, {"t": target}, group=sw.SoloGroup())
    for fragment in target.fragments:
        assert torch.equal(fragment.data, values[fragment.box.slices()])
    assert max(store.blocks.values(), default=1) == 1
    needed = sum(box.size for box in wanted[rank]) * 4
    assert report.bytes_needed == needed
    assert report.bytes_read <= BLOCK * len(store.blocks)
    assert bool(store.blocks) == bool(needed)
