"""Ranks that come late, agents that wait, and numbers at the limits of the format."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.kernel.events import Event, OperationRecord
from shardwise.parts.telemetry.records import Telemetry
from shardwise.parts.telemetry.rows import Operation, align, combine, row_of
from tests.memory.test_snapshots import shm
from tests.tools.gang import Gang
from tests.tools.telemetry_runs import report_of, save_of, write_telemetry

__all__ = ["shm"]
LARGEST = 2**53 - 1
SAVE = Operation(name="save", id="ab" * 8, step=3, path="runs/a/step-00000003")


def late(table: Telemetry, seconds: dict[int, float]) -> Telemetry:
    """The telemetry if some ranks had entered so many seconds after the others."""
    began = np.zeros_like(table.began)
    for rank, each in seconds.items():
        began[rank] = int(each * 1e6)
    return replace(table, began=began, seconds=table.seconds + max(seconds.values()))


def test_a_rank_that_comes_late_is_a_straggler(tmp_path: Path) -> None:
    found = report_of(tmp_path, late(save_of(8), {2: 4.0}))
    (straggler,) = found.stragglers
    assert (straggler.stage, straggler.group.ranks) == ("arrival", (2,))
    assert (straggler.seconds, straggler.median) == (4.0, 0.0)
    assert not report_of(tmp_path, late(save_of(8), {2: 0.3})).stragglers  # less than 5 %
    assert not report_of(tmp_path, late(save_of(8), dict.fromkeys(range(1, 8), 4.0))).stragglers


def test_a_host_that_comes_late_is_named_and_compared(tmp_path: Path) -> None:
    table = late(save_of(32), dict.fromkeys(range(8, 16), 3.0))
    found = report_of(tmp_path, table, baseline=save_of(32))
    (straggler,) = found.stragglers
    assert straggler.who == "node-0001 (ranks 8…15)"
    assert found.slowdown is not None
    (difference,) = found.slowdown.differences
    assert (difference.stage, difference.who) == ("arrival", "node-0001 (ranks 8…15)")
    assert difference.before < 0.02
    assert difference.after == 3.0


def test_arrival_is_on_the_page_and_in_the_trace(tmp_path: Path) -> None:
    found = report_of(tmp_path, late(save_of(8), {2: 4.0}))
    found.write_page(tmp_path / "page.html")
    found.write_trace(tmp_path / "trace.json")
    assert "arrival" in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert '"name":"arrival"' in (tmp_path / "trace.json").read_text(encoding="utf-8")


def save_late(root: Path, memory: sw.Memory | None, options: dict[str, Any]) -> None:
    with sw.Checkpointer(root, memory=memory, **options) as cp:
        cp.save(1, {"w": torch.ones(9)})
        dist.barrier()
        if dist.get_rank() == 2:
            time.sleep(1.5)
        handle = cp.save(2, {"w": torch.ones(9)})
        assert handle is not None
        handle.result()


@pytest.mark.parametrize("case", ["direct", "background", "signals", "warn"])
def test_a_save_to_which_a_rank_came_late(gang: Gang, tmp_path: Path, shm: Path, case: str) -> None:
    """Also if the ranks met before the save itself, to ask each other for signals."""
    memory = sw.Memory(dir=str(shm), snapshot_every=0, slots=1) if case == "background" else None
    options: dict[str, Any] = {}
    if case == "signals":
        options = {"save_on_signals": [signal.SIGUSR2], "after_signal": "return"}
    elif case == "warn":
        options = {"on_failure": "warn"}
    gang.run(save_late, tmp_path / "run", memory, options, world=3)
    found = sw.report(tmp_path / "run" / "step-00000002").stragglers
    (straggler,) = [each for each in found if each.stage == "arrival"]
    assert straggler.group.ranks == (2,)
    assert straggler.seconds > 1.0
    assert found[0].stage == "arrival"


def of_agents(copies: list[float], commits: list[tuple[float, float]]) -> Telemetry:
    """A save through memory: until when each rank copies, and when its agent commits. Two ranks
    share a host."""
    rows = []
    for rank, (copied, (start, end)) in enumerate(zip(copies, commits, strict=True)):
        events = (Event("copy", 0.0, copied), Event("commit", start, end - start))
        record = OperationRecord(began=0.0, ended=copied, agreed=0.0, clock=1e9, events=events)
        rows.append(row_of(SAVE, record, rank, len(copies), f"host-{rank // 2}"))
    return align(combine(rows))


def commit_of(table: Telemetry, rank: int) -> list[float]:
    """Start, end and self time of the commit, in seconds."""
    stage = table.stage("commit")
    assert stage is not None
    end = stage.start + stage.duration
    return [float(stage.start[rank] / 1e6), float(end[rank] / 1e6), float(stage.self_seconds[rank])]


def test_a_commit_that_waits_for_a_copy_does_not_work() -> None:
    """Rank 3 copies for long, and the agent of its host has begun to commit."""
    table = of_agents([1.0, 1.0, 1.0, 4.0], [(1.1, 1.3), (1.1, 1.3), (1.1, 4.25), (1.1, 4.25)])
    for rank in (0, 1):
        assert commit_of(table, rank) == pytest.approx([1.0, 1.3, 0.2])
    for rank in (2, 3):
        assert commit_of(table, rank) == pytest.approx([1.1, 4.25, 0.25])


def test_the_time_before_an_agent_acts_is_a_part_of_its_stage() -> None:
    """All agents wait until the first one begins, because rank 0 leads. One of them is late."""
    commits = [(2.0, 2.2), (2.0, 2.2), (9.0, 9.2), (9.0, 9.2)]
    table = of_agents([2.0, 1.0, 1.0, 1.0], commits)
    for rank in (0, 1):
        assert commit_of(table, rank) == pytest.approx([2.0, 2.2, 0.2])
    for rank in (2, 3):
        assert commit_of(table, rank) == pytest.approx([1.0, 9.2, 7.2])


def test_a_host_that_explains_more_is_not_hidden_by_a_larger_group(tmp_path: Path) -> None:
    """Ranks 0 to 3 share a slow host; by chance, most ranks with tp=0 are a little slow, too."""
    slow = dict.fromkeys(range(4), 5.0) | dict.fromkeys((4, 6, 8, 10), 2.0)
    table = save_of(16, ranks_of_host=4, axes={"dp": 8, "tp": 2}, slow={"write": slow}, noise=0.0)
    found = report_of(tmp_path, table).stragglers
    assert found[0].who == "node-0000 (ranks 0…3)"
    assert found[1].who == "tp=0 (ranks 4, 6, 8, 10)"


def test_what_is_left_of_a_group_keeps_its_name(tmp_path: Path) -> None:
    slow = dict.fromkeys([*range(0, 32, 4), 1, 2, 3], 3.0)
    table = save_of(32, ranks_of_host=4, axes={"dp": 8, "tp": 4}, slow={"write": slow}, noise=0.0)
    who = [each.who for each in report_of(tmp_path, table).stragglers]
    assert sorted(each.partition(" ")[0] for each in who) == ["node-0000", "tp=0"]
    assert "node-0000 (ranks 1…3)" in who


@pytest.mark.parametrize(
    "started",
    [
        "0001-01-01T00:00:00+23:59",
        "0001-01-01T00:00:00+00:00",
        "9999-12-31T23:59:59-23:59",
        "9999-12-31T23:59:59.999999+00:00",
        "1969-12-31T23:59:59",
        "2026-11-27",
        "yesterday",
        "",
        "2026-11-27T03:12:44+99:00",
        "\x00",
    ],
)
def test_any_start_is_reported(tmp_path: Path, started: str) -> None:
    table = save_of(4, started=started)
    found = report_of(tmp_path, table, baseline=save_of(4))
    found.write_page(tmp_path / "page.html")
    found.write_trace(tmp_path / "trace.json")
    assert found.operation is not None
    assert found.operation.started == started


@pytest.mark.parametrize("number", [0, 1, LARGEST, -1])
@pytest.mark.parametrize(
    "column", ["began", "clock", "start", "duration", "bytes", "retries", "waited", "seconds"]
)
def test_any_number_is_reported_or_refused(tmp_path: Path, column: str, number: int) -> None:
    """On one rank, and on all of them."""
    sw.save(tmp_path / "save", {"w": np.zeros(2)}, step=1)
    for rows in (slice(0, 1), slice(None)):
        table = save_of(4)
        if column == "seconds":
            table = replace(table, seconds=min(float(number), 1e9))
        elif column in ("began", "clock"):
            values = getattr(table, column).copy()
            values[rows] = number
            table = replace(table, **{column: values})
        else:
            stages = []
            for stage in table.stages:
                values = getattr(stage, column).copy()
                values[rows] = number
                stages.append(replace(stage, **{column: values}))
            table = replace(table, stages=tuple(stages))
        for old in (tmp_path / "save").glob("telemetry-*"):
            old.unlink()
        write_telemetry(str(tmp_path / "save"), table)
        found = sw.report(tmp_path / "save")
        found.write_page(tmp_path / "page.html")
        found.write_trace(tmp_path / "trace.json")
        assert found.operation is not None or "is damaged" in str(found.problems)
