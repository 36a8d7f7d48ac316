"""Which ranks count as stragglers, and how they are named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tools.telemetry_runs import (
    report_of,
    save_of,
    save_with_one_stage,
    without_ranks,
    without_stage,
)

Find = Callable[[Any], Sequence[Any]]


@pytest.fixture
def find_stragglers(tmp_path: Path) -> Find:
    """Find the stragglers in the telemetry of a save."""
    return lambda table: report_of(tmp_path, table).stragglers


def ranks_of(found: Iterable[Any]) -> list[int]:
    return sorted(rank for each in found for rank in each.group.ranks)


@pytest.mark.parametrize(
    ("own", "total", "slow"),
    [
        ([12.0] * 8, 20.0, []),
        ([12.0] * 7 + [31.0], 38.0, [7]),
        ([10.0] * 7 + [15.0], 20.0, []),  # 1.5 times the median is not more than that
        ([10.0] * 7 + [15.1], 20.0, [7]),
        ([10.0] * 7 + [16.0], 130.0, []),  # 6 of 130 s are less than 5 %
        ([0.01] * 7 + [0.055], 0.1, []),  # less than 50 ms
        ([0.01] * 7 + [0.065], 0.1, [7]),
        ([1.0, 3.0], 4.0, [1]),  # of an even number, the smaller median
        ([3.0, 3.0, 1.0], 4.0, []),
        ([31.0], 31.0, []),
        ([0.0] * 8, 1.0, []),
        ([12.0, 30.0, 31.0, 12.0, 12.0], 40.0, [1, 2]),
    ],
)
def test_the_rule(find_stragglers: Find, own: list[float], total: float, slow: list[int]) -> None:
    assert ranks_of(find_stragglers(save_with_one_stage(own, total=total))) == slow


def test_who_waits_for_others_is_no_straggler(find_stragglers: Find) -> None:
    table = save_with_one_stage([12.0] * 7 + [31.0], total=38.0, waited=[19.0] * 7 + [0.0])
    (found,) = find_stragglers(table)
    assert (found.stage, found.group.ranks) == ("write", (7,))
    assert (found.seconds, found.median, found.excess) == (31.0, 12.0, 19.0)
    table = save_with_one_stage([12.0] * 8, total=38.0, waited=[0.0] * 7 + [19.0])
    assert not find_stragglers(table)


def test_ranks_that_have_not_run_a_stage_do_not_count(find_stragglers: Find) -> None:
    table = save_with_one_stage([12.0] * 4 + [1.0] * 4, total=12.0)
    assert ranks_of(find_stragglers(table)) == [0, 1, 2, 3]
    assert ranks_of(find_stragglers(without_stage(table, "write", range(4, 8)))) == []
    assert ranks_of(find_stragglers(without_stage(table, "write", range(8)))) == []


def test_a_slow_host_is_named(find_stragglers: Find) -> None:
    table = save_of(64, slow={"write": dict.fromkeys(range(16, 24), 3.0)})
    (found,) = find_stragglers(table)
    assert found.who == "node-0002 (ranks 16…23)"
    assert found.group.hosts == ("node-0002",)


def test_six_of_eight_ranks_are_a_host_and_five_are_not(find_stragglers: Find) -> None:
    names = {}
    for count in (5, 6):
        table = save_of(64, slow={"write": dict.fromkeys(range(16, 16 + count), 3.0)})
        names[count] = {each.group.name for each in find_stragglers(table)}
    assert names == {5: {""}, 6: {"node-0002"}}


def test_a_slow_pipeline_stage_is_named_instead_of_its_hosts(find_stragglers: Find) -> None:
    """All ranks with pp=2, on four hosts."""
    axes = {"pp": 4, "dp": 8, "tp": 4}
    table = save_of(128, axes=axes, slow={"plan": dict.fromkeys(range(64, 96), 20.0)})
    (found,) = find_stragglers(table)
    assert found.who == "pp=2 (ranks 64…95)"
    assert len(found.group.hosts) == 4


def test_a_host_and_a_rank_elsewhere_are_two_groups(find_stragglers: Find) -> None:
    slow = dict.fromkeys(range(8, 16), 3.0) | {40: 4.0}
    table = save_of(64, axes={"dp": 8, "tp": 8}, slow={"write": slow})
    assert [each.who for each in find_stragglers(table)] == [
        "rank 40 on node-0005",
        "node-0001 (ranks 8…15)",
    ]


def test_an_axis_of_one_coordinate_explains_nothing(find_stragglers: Find) -> None:
    table = save_of(4, ranks_of_host=1, axes={"pp": 1, "dp": 4}, slow={"write": {1: 3.0}})
    assert [each.group.name for each in find_stragglers(table)] == [""]


def test_ranks_are_named_by_their_numbers_if_others_are_missing(find_stragglers: Find) -> None:
    table = save_of(64, slow={"write": {40: 3.0}})
    (found,) = find_stragglers(without_ranks(table, [0, 7, 39, 63]))
    assert found.who == "rank 40 on node-0005"


def test_the_largest_loss_comes_first_and_the_list_ends(find_stragglers: Find) -> None:
    every_third = {rank: 2.0 + rank / 1000 for rank in range(0, 600, 3)}
    found = find_stragglers(save_of(600, ranks_of_host=600, slow={"write": every_third}))
    assert len(found) == 100
    assert [each.excess for each in found] == sorted((e.excess for e in found), reverse=True)
