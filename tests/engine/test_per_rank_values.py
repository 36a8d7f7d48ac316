"""Per-rank values under another world size: only those that are asked for are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks

SAVED = 6


class Asks:
    """A per-rank value that asks for the values of some ranks."""

    def __init__(self, value: object, ranks: slice | None = None) -> None:
        self.value = value
        self.ranks = ranks

    def capture(self) -> Any:
        return self.value

    def restore(self, value: Any) -> None:
        self.value = value

    def for_rank(self, values: Sequence[Any], rank: int, world: int) -> Any:
        assert len(values) == SAVED
        return values[self.ranks] if self.ranks is not None else values[rank]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A checkpoint of six ranks."""
    run_ranks(SAVED, lambda g: sw.save(tmp_path / "it", {"v": Asks(("of", g.rank))}, group=g))
    return tmp_path / "it"


def data_file(place: Path, rank: int) -> Path:
    (path,) = place.glob(f"r{rank:05d}-*")
    return path


def test_a_value_that_nobody_asks_for_is_not_read(place: Path) -> None:
    for rank in (0, 2, 3, 4, 5):
        data_file(place, rank).unlink()

    def load(group: ThreadGroup) -> None:
        state = {"v": Asks(None, slice(1, 2))}
        sw.load(place, state, group=group)
        assert state["v"].value == [("of", 1)]

    run_ranks(2, load)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [(slice(None), range(6)), (slice(-2, None), (4, 5)), (slice(5, 0, -2), (5, 3, 1))],
)
def test_values_are_those_of_the_ranks_asked_for(
    place: Path, ranks: slice, expected: Sequence[int]
) -> None:
    state = {"v": Asks(None, ranks)}
    sw.load(place, state)
    assert state["v"].value == [("of", rank) for rank in expected]


def test_a_damaged_value_is_the_fault_of_the_checkpoint(place: Path) -> None:
    """Not of `for_rank`, in which it is read."""
    path = data_file(place, 0)
    data = bytearray(path.read_bytes())
    data[5000 - 4096 : 5000 - 4090] = b"xxxxxx"
    path.write_bytes(data)
    with pytest.raises(sw.CorruptionError, match="differ from those that were saved"):
        sw.load(place, {"v": Asks(None)})
    path.unlink()
    with pytest.raises(sw.CorruptionError, match="missing"):
        sw.load(place, {"v": Asks(None)})


def test_all_values_are_listed_on_request(place: Path) -> None:
    values = sw.open(place).as_json("v")
    assert [each["v"][1] for each in values] == list(range(SAVED))
