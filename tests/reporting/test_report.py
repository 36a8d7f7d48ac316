"""`sw.report`: which operations it finds, and what it says of damaged and missing telemetry."""

from __future__ import annotations

import gzip
import json
import shutil
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

import shardwise as sw
from tests.tools.telemetry_runs import (
    RESTORE,
    report_of,
    save_of,
    telemetry_of,
    without_ranks,
    write_run,
)

START = datetime(2026, 11, 27, 3, tzinfo=timezone.utc)


def at(minutes: int) -> str:
    return (START + timedelta(minutes=minutes)).isoformat()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of four saves, of which the last one is slow on one host, and two restores."""
    saves = [save_of(16, step=100 * k, started=at(k), seed=k) for k in (1, 2, 3)]
    slow = {"write": dict.fromkeys(range(8, 16), 3.0)}
    saves.append(save_of(16, step=400, started=at(4), slow=slow))
    restores = [
        save_of(16, step=100, started=at(0), seconds=RESTORE, operation="restore"),
        save_of(16, step=300, started=at(5), seconds=RESTORE, operation="restore"),
    ]
    write_run(tmp_path / "run", saves, restores)
    return tmp_path / "run"


def test_the_newest_save_of_a_run_is_reported(root: Path) -> None:
    report = sw.report(root)
    assert report.operation is not None
    assert (report.operation.operation, report.operation.step) == ("save", 400)
    assert [each.step for each in report.operations] == [100, 100, 200, 300, 400, 300]
    assert [each.who for each in report.stragglers] == ["node-0001 (ranks 8…15)"]
    assert report.problems == ()
    assert all(Path(each.file).is_file() for each in report.operations)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (85e-6, "85 µs"),
        (0.0009996, "1 ms"),
        (0.0123, "12 ms"),
        (0.0996, "0.10 s"),
        (9.996, "10.0 s"),
        (119.4, "119 s"),
        (192.0, "3 min 12 s"),
        (7.3e6, "2,027 h 46 min"),
    ],
)
def test_durations_have_units(tmp_path: Path, seconds: float, text: str) -> None:
    save = replace(save_of(2), seconds=seconds)
    assert report_of(tmp_path, save).headline == f"Step 100 was saved in {text}"


def test_it_is_compared_with_the_save_of_median_duration(root: Path) -> None:
    seconds = {each.step: each.seconds for each in sw.report(root).operations if each.is_save}
    median = sorted((100, 200, 300), key=seconds.__getitem__)[1]
    slowdown = sw.report(root).slowdown
    assert slowdown is not None
    assert (slowdown.step, slowdown.other_step) == (400, median)
    assert [(each.stage, each.who) for each in slowdown.differences] == [
        ("write", "node-0001 (ranks 8…15)")
    ]


def test_a_checkpoint_is_reported_with_its_run(root: Path) -> None:
    report = sw.report(root / "step-00000200")
    assert report.operation is not None
    assert report.operation.step == 200
    assert len(report.operations) == 6
    assert report.slowdown is not None
    assert report.slowdown.other_step == 100


def test_a_checkpoint_outside_of_a_run(root: Path, tmp_path: Path) -> None:
    alone = tmp_path / "published"
    shutil.copytree(root / "step-00000400", alone)
    report = sw.report(alone)
    assert [each.step for each in report.operations] == [400]
    assert report.slowdown is None


def test_any_two_saves_are_compared(root: Path, tmp_path: Path) -> None:
    alone = tmp_path / "published"
    shutil.copytree(root / "step-00000100", alone)
    slowdown = sw.report(root, baseline=alone).slowdown
    assert slowdown is not None
    assert (slowdown.step, slowdown.other_step) == (400, 100)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the end of the file is missing"),
        (b"{}", "incorrect header check"),
        (gzip.compress(b"[1]", mtime=0), "the telemetry is damaged"),
        (gzip.compress(b'{"format": "shardwise-telemetry", "version": 2}', mtime=0), "version 2"),
    ],
)
def test_damaged_telemetry_is_named_and_the_rest_is_used(
    root: Path, content: bytes, problem: str
) -> None:
    damaged = telemetry_of(root / "step-00000400")
    damaged.write_bytes(content)
    report = sw.report(root)
    assert report.operation is not None
    assert report.operation.step == 300
    assert any(str(damaged) in each and problem in each for each in report.problems)
    assert report.headline.startswith("Step 300 was saved in ")
    assert report.headline.endswith("; step 400 is newer, without readable telemetry")
    assert "newer" not in sw.report(root / "step-00000300").headline
    alone = sw.report(root / "step-00000400")
    assert (alone.operation, alone.stragglers, alone.slowdown) == (None, (), None)
    assert len(alone.operations) == 5
    assert any("step-00000400 was saved without telemetry" in each for each in alone.problems)


def test_a_run_with_very_many_records_is_read_in_part(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.parts.reporting.collect.MOST_RECORDS", 20)
    report = sw.report(root)
    assert [each.step for each in report.operations] == [300, 400]
    assert report.problems == (
        "4 older telemetry files not read: together they have too many ranks",
    )


def test_a_truncated_file_is_damage(root: Path) -> None:
    damaged = telemetry_of(root / "step-00000400")
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert any(str(damaged) in each for each in sw.report(root).problems)


def test_missing_telemetry_is_named(root: Path) -> None:
    telemetry_of(root / "step-00000200").unlink()
    report = sw.report(root)
    assert report.problems == ("no readable telemetry for 1 of 4 checkpoints: step 200",)
    for step in (100, 300, 400):
        telemetry_of(root / f"step-00000{step}").unlink()
    shutil.rmtree(root / "telemetry")
    report = sw.report(root)
    assert (report.operation, report.operations) == (None, ())
    assert report.problems == (
        "no readable telemetry for 4 of 4 checkpoints: steps 100, 200, 300 and 400",
    )
    assert report.write_page(root / "report.html") > 1000


def test_ranks_without_a_record_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [without_ranks(save_of(16), [3, 4, 5])])
    report = sw.report(tmp_path / "run")
    assert report.operation is not None
    assert (report.operation.ranks, report.operation.missing) == (16, 3)
    report.write_page(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "3 ranks sent no telemetry: ranks 3…5" in page


def test_a_baseline_without_telemetry_is_a_problem(root: Path) -> None:
    telemetry_of(root / "step-00000100").unlink()
    report = sw.report(root, baseline=root / "step-00000100")
    assert report.slowdown is None
    assert any(each.startswith("to compare with: step-00000100") for each in report.problems)


def test_a_clock_that_is_off_is_named(tmp_path: Path) -> None:
    table = save_of(16)
    clock = table.clock.copy()
    clock[8:] = -90_000_000
    write_run(tmp_path / "run", [replace(table, clock=clock)])
    (problem,) = sw.report(tmp_path / "run").problems
    assert problem.startswith("the clock of node-0001 (ranks 8…15) was off by 90.0 s from that of")


def test_unreadable_manifests_leave_the_rest(root: Path) -> None:
    (root / "step-00000400" / "manifest.json").write_bytes(b"{")
    report = sw.report(root / "step-00000400")
    assert [each.who for each in report.stragglers] == ["node-0001 (ranks 8…15)"]
    assert any("the shards of tensors cannot be shown" in each for each in report.problems)


def test_an_unknown_tensor_is_a_problem(root: Path) -> None:
    report = sw.report(root, tensors=["model.w", "model.v"])
    assert report.problems == ("there is no tensor 'model.v'",)


@pytest.mark.parametrize("name", ["nothing", "empty"])
def test_a_place_without_checkpoints_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(sw.CheckpointNotFoundError):
        sw.report(tmp_path / name)


def test_many_problems_are_not_all_listed(root: Path) -> None:
    for k in range(60):
        name = f"restore-20261127T0300{k:02d}Z-{k:016x}.json.gz"
        (root / "telemetry" / name).write_bytes(b"damaged")
    problems = sw.report(root).problems
    assert len(problems) == 21
    assert problems[-1] == "there are more problems like these"


def test_the_trace_has_the_hosts_as_processes_and_the_ranks_as_threads(root: Path) -> None:
    size = sw.report(root / "step-00000400").write_trace(root / "trace.json")
    assert size == (root / "trace.json").stat().st_size
    trace = json.loads((root / "trace.json").read_bytes())
    events = trace["traceEvents"]
    assert trace["displayTimeUnit"] == "ms"
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
        else:
            assert event["ph"] == "X"
            assert isinstance(event["name"], str)
            assert isinstance(event["cat"], str)
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "node-0000", 2: "node-0001"}
    threads = {
        e["tid"]: (e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"
    }
    assert threads == {rank: (1 + rank // 8, f"rank {rank}") for rank in range(16)}
    slow = [e for e in events if e["name"] == "write" and e["args"]["step"] == 400]
    assert {e["tid"] for e in slow if e["dur"] == 24_000_000} == set(range(8, 16))
    assert all(e["args"]["bytes"] == 4 * 2**30 for e in slow)
    starts = {
        e["args"]["step"]: e["ts"] for e in events if e["name"] == "describe" and e["tid"] == 0
    }
    assert starts[400] - starts[300] == pytest.approx(60e6, abs=1e5)


@pytest.mark.long
def test_a_trace_of_many_ranks_is_bounded_and_has_the_stragglers(tmp_path: Path) -> None:
    ranks = 52_000
    table = save_of(ranks, slow={"write": {ranks - 3: 3.0}}, axes={"dp": ranks})
    write_run(tmp_path / "run", [table])
    report = sw.report(tmp_path / "run")
    report.write_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_bytes())
    events = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    assert 100_000 < len(events) < 200_100
    assert ranks - 3 in {each["tid"] for each in events}
    assert trace["otherData"]["ranks"] == "stragglers, and one of 2 others"
