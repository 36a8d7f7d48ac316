"""Conformance tests for read strategies: subclass `ReadStrategySuite` and define `strategy`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

import shardwise as sw
from shardwise.kernel.errors import ShardwiseError
from shardwise.ports.read_strategy import Group, ReadStrategy
from shardwise.testing.thread_group import ThreadGroup, run_ranks, run_ranks_and_catch

RANKS = 3
ROWS, COLUMNS = 12, 20_000
TENSORS = 6
SECONDS_TO_FAIL = 30.0


class ReadStrategySuite:
    """The conformance tests of a read strategy. They run its ranks as threads of this process.

    Derive a class whose name begins with `Test`, and write the method `strategy`:

        class TestMine(ReadStrategySuite):
            def strategy(self, group: Group) -> ReadStrategy:
                return Mine()
    """

    def strategy(self, group: Group) -> ReadStrategy:
        """Return the strategy to test, for one rank of a load."""
        raise NotImplementedError

    def load(
        self, place: Path, part: Callable[[int], sw.Box | None]
    ) -> list[sw.LoadReport | Exception]:
        """Load a part of each tensor on each rank with the strategy.

        Args:
            place: the checkpoint.
            part: returns the box that a rank loads of each tensor; None for none.

        Returns:
            The report of each rank, or its error.
        """

        def load_rank(group: ThreadGroup) -> sw.LoadReport:
            box = part(group.rank)
            parts = [[] if box is None else [(box, torch.zeros(box.shape))] for _ in range(TENSORS)]
            state = {
                f"t{i}": sw.Shards((ROWS, COLUMNS), torch.float32, each)
                for i, each in enumerate(parts)
            }
            report = sw.load(place, state, group=group)
            for i, shards in enumerate(state.values()):
                for fragment in shards.fragments:
                    assert torch.equal(fragment.data, content(i)[fragment.box.slices()])
            return report

        entry = SimpleNamespace(load=lambda: lambda group, read_once: self.strategy(group))
        with patch("shardwise.kernel.loading.find_plugins", lambda _: [entry]):
            return run_ranks_and_catch(RANKS, load_rank)

    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        """A checkpoint whose tensors are divided by rows, in a file of each rank."""

        def save(group: ThreadGroup) -> None:
            box = rows_of(group.rank)
            data = [content(i)[box.slices()].contiguous() for i in range(TENSORS)]
            state = {
                f"t{i}": sw.Shards((ROWS, COLUMNS), torch.float32, [(box, each)])
                for i, each in enumerate(data)
            }
            sw.save(tmp_path / "checkpoint", state, group=group)

        run_ranks(RANKS, save)
        return tmp_path / "checkpoint"

    @pytest.mark.parametrize("part", ["rows", "columns", "whole", "of two ranks", "nothing"])
    def test_each_rank_gets_its_bytes(self, place: Path, part: str) -> None:
        """Requests of ranks may be equal, disjoint or empty."""
        parts: dict[str, Callable[[int], sw.Box | None]] = {
            "rows": rows_of,
            "columns": columns_of,
            "whole": lambda _: sw.Box((0, 0), (ROWS, COLUMNS)),
            "of two ranks": lambda rank: columns_of(rank) if rank else None,
            "nothing": lambda _: None,
        }
        chosen = parts[part]
        reports = self.load(place, chosen)
        read = received = 0
        for rank, report in enumerate(reports):
            assert isinstance(report, sw.LoadReport), report
            box = chosen(rank)
            assert report.bytes_needed == (0 if box is None else box.size * 4 * TENSORS)
            read, received = read + report.bytes_read, received + report.bytes_received
        wanted = {box for box in map(chosen, range(RANKS)) if box is not None}
        assert read + received >= sum(box.size for box in wanted) * 4 * TENSORS

    def test_a_strategy_serves_load_after_load(self, place: Path) -> None:
        """Nothing is left behind that the next load could stumble over."""
        for part in (columns_of, rows_of, columns_of):
            assert all(isinstance(each, sw.LoadReport) for each in self.load(place, part))

    @pytest.mark.parametrize("fault", ["flipped bit", "missing file", "truncated file"])
    def test_a_damaged_file_fails_on_all_ranks(self, place: Path, fault: str) -> None:
        """All ranks raise, and none hangs, although only one file is damaged."""
        file = sorted(place.glob("r*.safetensors"))[1]
        if fault == "flipped bit":
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        elif fault == "missing file":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes()[:-5000])
        start = time.monotonic()
        errors = self.load(place, columns_of)
        assert time.monotonic() - start < SECONDS_TO_FAIL
        assert all(isinstance(error, ShardwiseError) for error in errors)
        assert any(isinstance(error, sw.CorruptionError) for error in errors)


def content(i: int) -> torch.Tensor:
    """The values of a tensor: each element tells its place."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + i


def rows_of(rank: int) -> sw.Box:
    """The rows of a rank."""
    return sw.Box((ROWS // RANKS * rank, 0), (ROWS // RANKS, COLUMNS))


def columns_of(rank: int) -> sw.Box:
    """The columns of a rank; the last rank has a few more."""
    width = COLUMNS // RANKS
    return sw.Box((0, width * rank), (ROWS, COLUMNS - 2 * width if rank == 2 else width))
