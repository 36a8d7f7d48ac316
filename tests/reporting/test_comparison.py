"""Why a save was slower than another one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools.telemetry_runs import (
    GIB,
    SECONDS,
    report_of,
    save_of,
    save_with_one_stage,
    without_ranks,
)

HOST_2 = dict.fromkeys(range(16, 24), 3.0)
Compare = Callable[[Any, Any], Any]


@pytest.fixture
def compare_operations(tmp_path: Path) -> Compare:
    """Compare the telemetry of two saves."""
    return lambda this, other: report_of(tmp_path, this, other).slowdown


@pytest.mark.parametrize(
    ("this", "other", "expected"),
    [
        ({}, {}, []),
        # Everything takes longer by the same.
        ({"seconds": SECONDS | {"write": 16.0}}, {}, [("write", "all ranks")]),
        ({}, {"seconds": SECONDS | {"write": 16.0}}, [("write", "all ranks")]),
        # 8 % of the stage, and 0.6 of 9 s: too little.
        ({"seconds": SECONDS | {"write": 8.6}}, {}, []),
        # One host, and then one rank.
        ({"slow": {"write": HOST_2}}, {}, [("write", "node-0002 (ranks 16…23)")]),
        ({"slow": {"plan": {7: 9.0}}}, {}, [("plan", "rank 7 on node-0000")]),
        # The same host was as slow before: it is a straggler, but no difference.
        ({"slow": {"write": HOST_2}}, {"slow": {"write": HOST_2}}, []),
        # Everything takes longer, and one rank still longer.
        (
            {"seconds": SECONDS | {"write": 12.0}, "slow": {"write": {5: 3.0}}},
            {},
            [("write", "rank 5 on node-0000"), ("write", "all ranks")],
        ),
        # Stages that only one of them has.
        ({"seconds": SECONDS | {"hooks": 2.0}}, {}, [("hooks", "all ranks")]),
        ({}, {"seconds": SECONDS | {"hooks": 2.0}}, [("hooks", "all ranks")]),
        # With another number of ranks, each is compared with the median.
        ({"ranks": 32, "slow": {"write": {7: 3.0}}}, {}, [("write", "rank 7 on node-0000")]),
        ({"ranks": 32}, {}, []),
        # With another number of hosts, too: rank 7 need not be the same GPU.
        (
            {"ranks_of_host": 4, "slow": {"write": {7: 3.0}}},
            {"slow": {"write": {7: 3.0}}},
            [("write", "rank 7 on node-0001")],
        ),
    ],
)
def test_what_differs(
    compare_operations: Compare,
    this: dict[str, Any],
    other: dict[str, Any],
    expected: list[tuple[str, str]],
) -> None:
    first, second = (
        save_of(**{"ranks": 64, "noise": 0, "seed": seed} | each)
        for seed, each in ((1, this), (2, other))
    )
    found = compare_operations(first, second)
    assert [(each.stage, each.who) for each in found.differences] == expected


@pytest.mark.parametrize(
    ("this", "reason"),
    [
        ({"nbytes": 8 * GIB}, "each rank moved 8.00 GiB instead of 4.00 GiB"),
        ({}, "each rank moved 205 MiB/s instead of 512 MiB/s"),
        ({"retries": {3: 14}}, "14 retries instead of 0; each rank moved 205 MiB/s instead"),
    ],
)
def test_the_reason(compare_operations: Compare, this: dict[str, Any], reason: str) -> None:
    slow = save_of(64, noise=0, seconds=SECONDS | {"write": 20.0}, **this)
    (found,) = compare_operations(slow, save_of(64, noise=0)).differences
    assert found.reason.startswith(reason)
    assert (round(found.before), round(found.after), round(found.change)) == (8, 20, 12)


def test_times_and_rates_are_of_the_same_rank(compare_operations: Compare) -> None:
    """Of two ranks, the faster one is the median: its time doubles, and its rate halves."""
    before = save_with_one_stage([4.0, 5.0], total=5.0)
    after = save_with_one_stage([8.0, 20.0], total=20.0)
    found = compare_operations(after, before).differences
    (both,) = [each for each in found if each.who == "all ranks"]
    assert (both.before, both.after) == (4.0, 8.0)
    assert both.reason == "each rank moved 512 MiB/s instead of 1.00 GiB/s"


def test_the_sentence_says_slower_or_faster(compare_operations: Compare) -> None:
    slow = save_of(8, noise=0, step=200, seconds={"write": 20.0})
    fast = save_of(8, noise=0, step=100, seconds={"write": 8.0})
    assert (
        compare_operations(slow, fast).sentence == "12.0 s slower than step 100, which took 8.02 s"
    )
    assert (
        compare_operations(fast, slow).sentence == "12.0 s faster than step 200, which took 20.0 s"
    )


def test_what_differs_besides_stages_is_noted(compare_operations: Compare) -> None:
    this, other = save_of(32), save_of(64, noise=0)
    this = replace(this, library="0.2.0", hosts=("new-1", *this.hosts[1:]))
    notes = compare_operations(without_ranks(this, [3]), other).notes
    assert notes == (
        "32 ranks instead of 64",
        "4 hosts instead of 8",
        "new hosts: new-1",
        "1 rank of this save sent no telemetry",
        "shardwise 0.2.0 instead of 0.1.0",
    )


def test_a_rank_is_compared_with_itself_if_records_are_missing(compare_operations: Compare) -> None:
    other = save_of(64, noise=0, slow={"write": {40: 3.0}})
    this = without_ranks(save_of(64, noise=0, slow={"write": {40: 3.0, 41: 3.0}}), [0, 39])
    (found,) = compare_operations(this, other).differences
    assert found.who == "rank 41 on node-0005"


def test_agents_move_the_bytes_of_their_hosts(tmp_path: Path) -> None:
    """All ranks of a host have its agent's numbers, which count once."""
    tables = []
    for seconds in (8.0, 20.0):
        table = save_of(16, noise=0, seconds={"persist": seconds})
        (stage,) = table.stages
        stage = replace(stage, bytes=np.full(16, 32 * GIB))
        tables.append(replace(table, stages=(stage,)))
    report = report_of(tmp_path, tables[1], tables[0])
    assert report.operation is not None
    assert report.operation.bytes == 2 * 32 * GIB
    assert report.slowdown is not None
    (found,) = report.slowdown.differences
    assert found.reason == "each host moved 1.60 GiB/s instead of 4.00 GiB/s"
