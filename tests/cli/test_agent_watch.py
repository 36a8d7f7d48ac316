"""`shardwise agent status --watch`."""

from __future__ import annotations

import io
from datetime import datetime
from pathlib import Path

import pytest
from rich.console import Console

import shardwise as sw
from shardwise.parts.cli.agent_watch import draw, watch
from shardwise.parts.memory.progress import RankProgress, RunProgress

SLOW = RankProgress(17, True, "save", 100, "write", False, 12.34)


def progress(**fields: object) -> RunProgress:
    long = "a-node-with-quite-a-long-name-0123456789"
    values: dict[str, object] = {
        "run": "0123456789abcdef",
        "ranks": 1024,
        "lost": [],
        "counts": [
            ("save", 100, "write", True, 1020),
            ("save", 100, "write", False, 3),
            ("", None, "", False, 1),
        ],
        "slowest": [(long, SLOW), ("node-2", RankProgress(3, True, seconds=40.0))],
        "nodes": 128,
        "unanswered": 0,
    }
    return RunProgress(**{**values, **fields})  # type: ignore[arg-type]


def drawn(*runs: sw.RunProgress) -> list[str]:
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(draw(runs))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def test_it_names_the_ranks_that_others_wait_for() -> None:
    lines = drawn(progress())
    assert lines[0] == "run 0123456789abcdef: 1,024 ranks on 128 nodes"
    assert lines[1] == "  1,020 ranks: save of step 100: waiting for others after write"
    assert lines[2] == "  3 ranks: save of step 100: write"
    assert lines[3] == "  1 rank: training"
    assert any(line.split()[:1] == ["17"] and line.split()[-2:] == ["12.3", "s"] for line in lines)
    assert any(
        line.split() == ["3", "node-2", "has", "not", "begun", "40.0", "s"] for line in lines
    )


def test_it_fits_into_80_columns_and_a_screen() -> None:
    many = progress(
        counts=[(f"{each}" * 32, 10**17, "s" * 32, False, 10**6) for each in range(50)],
        slowest=[("n" * 200, RankProgress(10**8, True, "o" * 32, 1, "s" * 32, False, 1e6))] * 10,
        lost=[*range(10)],
        unanswered=4000,
    )
    lines = drawn(many)
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40
    assert any("no answer yet from 4,000 nodes" in line for line in lines)
    assert any("lost: rank 0…9" in line or "lost: rank 0" in line for line in lines)


def test_it_prints_no_control_characters() -> None:
    text = "\n".join(
        drawn(progress(slowest=[("a\x1b[31m", RankProgress(1, True, "x\x1b", 1, "y\x1b"))]))
    )
    assert "\x1b" not in text


def test_without_a_training() -> None:
    assert drawn() == ["no training with snapshots runs on this node"]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_it_draws_until_it_is_interrupted(is_terminal: bool) -> None:
    """If the output is a pipe or a file, each drawing is below the last one."""
    pauses: list[float] = []
    console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal, color_system=None)

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    reads = iter([[progress()], [], [progress(ranks=7)]])
    watch(lambda: next(reads), console, sleep, lambda: datetime(2026, 11, 27, 8, 5, 9))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("\n\n2026-11-27 08:05:09\n") == 2 * (not is_terminal)
    assert pauses == [1.0] * 3
    assert "1,024 ranks" in text
    assert "no training" in text
    assert "7 ranks on" in text
    assert ("\x1b" in text) == is_terminal


def test_the_command_reads_this_node(tmp_path: Path) -> None:
    assert sw.NodeAgent(tmp_path).watch().read() == []
