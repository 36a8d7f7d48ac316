"""How soak tests tell ranks that hang from ranks that are slow."""

from __future__ import annotations

import pytest

from tests.soak.faults import FAULTS
from tests.soak.judging import LONGEST_CYCLE, LONGEST_SILENCE, judged, longest_silence
from tests.soak.trainer import Line
from tests.tools.gang import Outcome

BEGAN = 1_000_000.0
KILLED = FAULTS["trainer killed while saving"]


def lines_every(seconds: float, until: float) -> list[Line]:
    """Return the lines of two ranks that begin a save every so many seconds."""
    times = [step * seconds for step in range(int(until / seconds) + 1)]
    return [
        Line(rank, "saving", BEGAN + at + 0.01 * rank, step)
        for step, at in enumerate(times)
        for rank in range(2)
    ]


def killed_at(seconds: float, lines: list[Line]) -> list[str]:
    outcomes = [Outcome(rank=rank, kind="hung") for rank in range(2)]
    return judged(outcomes, lines, KILLED, BEGAN + seconds)


def test_ranks_that_stop_writing_hang() -> None:
    lines = lines_every(2.0, until=10.0)
    assert killed_at(10.0 + LONGEST_SILENCE + 1, lines) == [
        f"rank {rank} hung: no rank went on for {LONGEST_SILENCE:.0f} s; its last line, "
        f"{LONGEST_SILENCE + 1:.0f} s before its end: saving 5"
        for rank in range(2)
    ]


def test_ranks_that_never_write_hang() -> None:
    struck = [Line(-1, "struck", BEGAN + 50.0)]
    for lines in ([], struck):
        for rank, said in enumerate(killed_at(LONGEST_SILENCE, lines)):
            assert said.startswith(f"rank {rank} hung")
            assert said.endswith("it has written nothing")


def test_ranks_that_go_on_are_too_slow() -> None:
    lines = lines_every(LONGEST_SILENCE / 2, until=LONGEST_CYCLE)
    for rank, said in enumerate(killed_at(LONGEST_CYCLE + 1, lines)):
        assert said.startswith(f"rank {rank} was too slow: the cycle took over")


@pytest.mark.parametrize(
    ("fault", "text", "is_wrong"),
    [
        ("trainer killed", "shardwise.kernel.errors.LostRankError: rank 1 is lost", False),
        ("trainer killed", "KeyError: 'step'", True),
        ("agent killed", "shardwise.kernel.errors.LostRankError: rank 1 is lost", True),
        ("agent killed", "StoreError: rank 1: its node vm-1 is lost", False),
    ],
)
def test_errors_that_a_fault_explains(fault: str, text: str, is_wrong: bool) -> None:
    lines = [Line(0, "raised", BEGAN, text=text), Line(1, "ended", BEGAN)]
    outcomes = [Outcome(rank=0, kind="error"), Outcome(rank=1, kind="value")]
    assert bool(judged(outcomes, lines, FAULTS[fault], BEGAN)) is is_wrong


def test_the_longest_silence_is_that_of_all_ranks() -> None:
    assert longest_silence([], BEGAN) == 0.0
    lines = [Line(0, "here", BEGAN), Line(1, "here", BEGAN + 3.0), Line(-1, "struck", BEGAN + 5.0)]
    assert longest_silence(lines, BEGAN + 10.0) == 7.0
    assert longest_silence([*lines, Line(0, "ended", BEGAN + 9.0)], BEGAN + 10.0) == 6.0
