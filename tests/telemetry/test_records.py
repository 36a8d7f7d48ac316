"""Tables of several ranks become one, however the tree of ranks is shaped."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shardwise.parts.telemetry.records import NOT_RUN, Telemetry, combine
from tests.telemetry.tables import same, table_of


def combine_as_tree(tables: list[Telemetry], fan_out: int, order: random.Random) -> Telemetry:
    while len(tables) > 1:
        order.shuffle(tables)
        groups = [tables[at : at + fan_out] for at in range(0, len(tables), fan_out)]
        tables = [combine(group) for group in groups]
    return tables[0]


@pytest.mark.parametrize("fan_out", [2, 3, 32])
def test_any_tree_makes_the_same_table(fan_out: int) -> None:
    tables = [table_of(range(rank, rank + 1), 40) for rank in range(40)]
    found = combine_as_tree(tables, fan_out, random.Random(fan_out))
    assert same(found, table_of(range(40), 40))


def test_ranks_may_be_missing() -> None:
    tables = [table_of(range(rank, rank + 1), 8) for rank in (6, 2, 5)]
    found = combine(tables)
    assert found.ranks.tolist() == [2, 5, 6]
    write = found.stage("write")
    assert write is not None
    assert write.start.tolist() == [1002, NOT_RUN, 1006]
    assert write.has_run.tolist() == [True, False, True]


def test_a_stage_of_one_rank_only() -> None:
    first, second = table_of(range(1), 2), table_of(range(1, 2), 2)
    publish = table_of(range(1), 2).stages[0]
    first = table_of(range(1), 2, stages=(*first.stages, type(publish)(
        "publish", *(getattr(publish, name) + 5000 for name in
        ("start", "duration", "bytes", "retries", "waited")), np.array([b"manifest.json"]),
    )))  # fmt: skip
    found = combine([second, first])
    assert [each.name for each in found.stages] == ["plan", "write", "publish"]
    stage = found.stage("publish")
    assert stage is not None
    assert (stage.start.tolist(), stage.file.tolist()) == ([5100, NOT_RUN], [b"manifest.json", b""])
    assert found.stage("read") is None


def test_pipeline_stages_with_other_meshes() -> None:
    first = table_of(range(1), 2, axes=("dp",), coordinates=np.array([[0]]))
    second = table_of(range(1, 2), 2, axes=("ep", "dp"), coordinates=np.array([[3], [1]]))
    found = combine([second, first])
    assert found.axes == ("dp", "ep")  # rank 0 has "dp"
    assert found.coordinates.tolist() == [[0, 1], [NOT_RUN, 3]]


def test_hosts_are_listed_once() -> None:
    tables = [table_of(range(low, low + 4), 32) for low in range(0, 32, 4)]
    found = combine(tables)
    assert found.hosts == ("host-0", "host-1", "host-2", "host-3")
    assert found.host.tolist() == [rank // 8 for rank in range(32)]
