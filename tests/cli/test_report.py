"""`shardwise report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shardwise as sw
from tests.cli.conftest import Run
from tests.tools.telemetry_runs import (
    report_of,
    save_of,
    save_with_one_stage,
    telemetry_of,
    write_run,
)

TEXT = """\
Step 200 was saved in 24.8 s
64 ranks on 8 hosts, 256 GiB at 10.3 GiB/s
ROOT

stage   stragglers                slowest   median of all
write   node-0002 (ranks 16…23)    24.0 s          8.00 s

16.0 s slower than step 100, which took 8.84 s
stage   who                         then      now
write   node-0002 (ranks 16…23)   8.00 s   24.0 s
write of node-0002 (ranks 16…23): each rank moved 171 MiB/s instead of 512 MiB/s

wrote PAGE
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of two saves, of which the second one is slow on one host."""
    root = tmp_path / "run"
    slow = {"write": dict.fromkeys(range(16, 24), 3.0)}
    write_run(root, [save_of(64, step=100, noise=0, started="2026-11-26")])
    write_run(root, [save_of(64, step=200, noise=0, slow=slow)])
    return root


def test_the_text_and_the_page(run: Run, root: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    ran = run("report", root, "-o", page)
    assert ran.out == TEXT.replace("ROOT", str(root)).replace("PAGE", str(page))
    assert (ran.err, ran.status) == ("", 0)
    assert "Step 200 was saved in 24.8 s" in page.read_text(encoding="utf-8")


def test_retries_of_a_straggler_are_told(run: Run, tmp_path: Path) -> None:
    save = save_of(8, noise=0, slow={"write": {3: 3.0}}, retries={1: 5, 3: 14})
    write_run(tmp_path / "run", [save])
    ran = run("report", tmp_path / "run", "-o", tmp_path / "report.html")
    assert "write of rank 3 on node-0000: 14 retries of requests to the storage\n" in ran.out
    assert "5 retries" not in ran.out


def test_a_save_without_an_earlier_one_on_as_many_ranks(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "run"
    write_run(root, [save_of(8, step=100, started="2026-11-26"), save_of(64, step=200)])
    line = "no earlier save on 64 ranks to compare with\n"
    page = tmp_path / "report.html"
    assert line in run("report", root, "-o", page).out
    assert "no earlier save" not in run("report", root, root / "step-00000100", "-o", page).out


def test_short_durations_are_not_zero(run: Run, tmp_path: Path) -> None:
    report_of(tmp_path, save_with_one_stage([0.0, 85e-6, 123e-6, 0.0781], total=0.1))
    ran = run("report", tmp_path / "save", "-o", tmp_path / "report.html")
    assert "write   rank 3 on node-0003     78 ms           85 µs" in ran.out


def test_the_page_is_written_to_the_working_directory(
    run: Run, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "wrote report.html" in run("report", root).out
    assert (tmp_path / "report.html").exists()
    ran = run("report", root, "--trace", "trace.json")
    assert ran.out.endswith("replaced report.html\nwrote trace.json\n")


def test_that_there_is_no_telemetry_is_said_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sw.save("alone", {"t": 1})
    assert run("report", "alone").out.splitlines() == [
        "No telemetry can be read of this checkpoint",
        "alone",
        "alone was saved without telemetry, or the file of its telemetry was removed or is damaged",
        "wrote report.html",
    ]


def test_two_checkpoints_are_compared(run: Run, root: Path, tmp_path: Path) -> None:
    first, second = root / "step-00000100", root / "step-00000200"
    page = tmp_path / "report.html"
    assert "16.0 s slower than step 100" in run("report", second, first, "-o", page).out
    assert "16.0 s faster than step 200" in run("report", first, second, "-o", page).out


def test_the_trace(run: Run, root: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    assert f"wrote {trace}" in run("report", root, "-o", page, "--trace", trace).out
    assert json.loads(trace.read_bytes())["traceEvents"]


def test_damaged_telemetry_is_told_and_the_rest_is_shown(
    run: Run, root: Path, tmp_path: Path
) -> None:
    damaged = telemetry_of(root / "step-00000200")
    damaged.write_bytes(b"damaged")
    page = tmp_path / "report.html"
    ran = run("report", root / "step-00000200", "-o", page)
    assert ran.out.startswith("No telemetry can be read of this checkpoint\n")
    assert f"{damaged}: the telemetry is damaged" in ran.out
    assert ran.status == 0
    text = page.read_text(encoding="utf-8")
    assert f"{damaged}: the telemetry is damaged" in text
    assert "seconds of each save" in text


def test_the_headline_says_that_a_newer_checkpoint_has_no_telemetry(
    run: Run, root: Path, tmp_path: Path
) -> None:
    telemetry_of(root / "step-00000200").write_bytes(b"damaged")
    ran = run("report", root, "-o", tmp_path / "report.html")
    headline = "Step 100 was saved in 8.84 s; step 200 is newer, without readable telemetry\n"
    assert ran.out.startswith(headline)


def test_a_place_without_a_run(run: Run, tmp_path: Path) -> None:
    ran = run("report", tmp_path / "nothing", "-o", tmp_path / "report.html")
    assert ran.status == 2
    assert ran.err.startswith("shardwise: ")
    assert not (tmp_path / "report.html").exists()


def test_a_page_that_cannot_be_written(run: Run, root: Path, tmp_path: Path) -> None:
    ran = run("report", root, "-o", tmp_path / "missing" / "report.html")
    assert ran.status == 2
    assert "missing" in ran.err


def test_control_characters_do_not_reach_the_terminal(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "run"
    stages = {"write\x1b[31m": 2.0}
    slow = {"write\x1b[31m": {3: 4.0}}
    write_run(root, [save_of(8, step=100, noise=0, seconds=stages, slow=slow)])
    ran = run("report", root, "-o", tmp_path / "report.html")
    assert "write\\x1b[31m" in ran.out
    assert "\x1b" not in ran.out
