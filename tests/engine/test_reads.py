"""What a load reads of the files: each block at most once, and no more than it reports."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import shardwise as sw
from shardwise.ports.store import Buffer, ReadableFile
from shardwise.store import LocalStore
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.breadth import examples
from tests.tools.divisions import BoxesByRank, boxes_of_ranks

BLOCK = 64 * 1024

SHAPE = (40, 30, 64)
WORLDS = st.integers(1, 6)


class CountingStore(LocalStore):
    """Counts how often each block of each file is read, but for the tables of checksums."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.blocks: Counter[tuple[str, int]] = Counter()

    def open(self, path: str, size: int | None = None) -> ReadableFile:  # type: ignore[override]
        file = super().open(path)
        return file if path == "manifest.json" else _CountingFile(file, path, self.blocks)


class _CountingFile:
    def __init__(self, file: ReadableFile, key: str, blocks: Counter[tuple[str, int]]) -> None:
        self._file = file
        self._key = key
        self._blocks = blocks
        self._table_read = False
        self.size = file.size

    def read_at(self, offset: int, out: Buffer) -> int:
        if self._table_read:
            stop = -(-(offset + len(out)) // BLOCK)
            self._blocks.update((self._key, block) for block in range(offset // BLOCK, stop))
        self._table_read = True  # it comes first, as nothing can be verified without it
        return self._file.read_at(offset, out)

    def close(self) -> None:
        self._file.close()


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
