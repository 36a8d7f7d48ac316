"""`sw.Shards` inside of a `state_dict()`: an object of the user that holds a part of a tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks

ROWS = 12


class Table:
    """Holds a rank's rows of a table."""

    def __init__(self, group: ThreadGroup, fill: int | None = None, rows: int = ROWS) -> None:
        self.start, stop = (rows * (group.rank + i) // group.size for i in range(2))
        whole = torch.arange(3 * rows).reshape(rows, 3)
        self.own = (
            whole[self.start : stop].clone() if fill is None else whole[self.start : stop] * 0
        )
        self.rows = rows
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        box = sw.Box((self.start, 0), tuple(self.own.shape))
        return {"rows": sw.Shards((self.rows, 3), self.own.dtype, [(box, self.own)]), "name": "t"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["rows"]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (4, 1), (1, 5)])
def test_each_rank_loads_its_part(tmp_path: Path, before: int, after: int) -> None:
    def load(group: ThreadGroup) -> None:
        table = Table(group, fill=0)
        sw.load(tmp_path, {"table": table}, group=group)
        (fragment,) = table.loaded.fragments
        assert fragment.data is table.own
        assert torch.equal(table.own, Table(group).own)

    run_ranks(before, lambda group: sw.save(tmp_path, {"table": Table(group)}, group=group))
    run_ranks(after, load)
    assert sw.open(tmp_path)["table.rows"].shape == (ROWS, 3)


def test_another_shape_loads_as_a_whole_tensor(tmp_path: Path) -> None:
    """Then the object decides."""
    (alone,) = ThreadGroup.of_size(1)
    sw.save(tmp_path, {"table": Table(alone)})
    other = Table(alone, fill=0, rows=5)
    sw.load(tmp_path, {"table": other})
    assert torch.equal(other.loaded, Table(alone).own)


def test_a_per_rank_value_cannot_contain_shards(tmp_path: Path) -> None:
    (alone,) = ThreadGroup.of_size(1)
    with pytest.raises(sw.StateError, match=r"table\.rows: a Shards cannot be part of this value"):
        sw.save(tmp_path, {"table": sw.PerRank(Table(alone))})
