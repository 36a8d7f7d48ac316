"""Goals that follow from the seconds and tables of a result, so that earlier results can be judged.

Other goals are stated by the benchmarks themselves (`Bench.goal`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.summary import Result

COPY = "copy into memory that was touched before"
FROM_MEMORY = "direct write from /dev/shm"
OURS, OURS_DURABLE = "sw: save", "sw: save, until it is durable"
RECOVERED, FROM_DISK = "sw: restore from memory", "sw: load from disk, cold"
FIRST = ": the first"
DIVIDED = "What each rank copies of a state that all have"
COPIED_LATER = frozenset(
    {"torch_checkpointing", "dcp.async_save, thread, reused buffers, async staging"}
)
"""Peers that return before the copy is made; the training must wait before it changes tensors."""

VERIFIED, NOT_VERIFIED = "warm: verified", "warm: not verified"


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal of a benchmark.

    Attributes:
        text: what is measured.
        needs: the rows and tables of the result from which it is computed.
        measure: computes it from a result that has them.
        least: the least value that reaches the goal.
        most: the largest value that reaches the goal.
        reason: one sentence that says why this is the goal, or "".
    """

    text: str
    needs: tuple[str, ...]
    measure: Callable[[Result], float]
    least: float = -math.inf
    most: float = math.inf
    reason: str = ""

    def judge(self, result: Result) -> dict[str, object]:
        """Return the entry of a result's list of goals; None stands for "not measured"."""
        found = all(each in result["seconds"] or each in result["tables"] for each in self.needs)
        value = self.measure(result) if found else None
        return {
            "goal": self.text,
            "wanted": f"≥ {self.least:g}" if self.least > -math.inf else f"≤ {self.most:g}",
            "measured": None if value is None else float(f"{value:.4g}"),
            "reached": None if value is None else self.least <= value <= self.most,
        }


def ratio(result: Result, name: str, base: str) -> float:
    """Return the median over the rounds of the ratio of two rows."""
    pairs = zip(result["seconds"][name], result["seconds"][base], strict=True)
    return statistics.median(a / b for a, b in pairs)


def difference(result: Result, name: str, base: str) -> float:
    """Return the median over the rounds of the difference of two rows, in seconds."""
    pairs = zip(result["seconds"][name], result["seconds"][base], strict=True)
    return statistics.median(a - b for a, b in pairs)


def of_best_by_dcp(result: Result) -> float:
    """Return the time that our save blocks, relative to DCP's best way by a thread."""
    medians = {name: statistics.median(each) for name, each in result["seconds"].items()}
    best = min(
        seconds
        for name, seconds in medians.items()
        if "thread" in name and name not in COPIED_LATER and not name.endswith(FIRST)
    )
    return medians[OURS] / best


def most_copied(result: Result) -> float:
    """Return the most bytes that a rank copies of a replicated state, relative to its n-th part."""
    rows = result["tables"][DIVIDED]
    return max(row["copies, bytes"] / row["has, bytes"] for row in rows) * len(rows)


def seconds_a_gb(result: Result) -> float:
    """Return the seconds for which a core verifies a GB in a warm load, one core for each rank."""
    gigabytes = result["tensors"] * result["tensor_bytes"] / 1e9
    return difference(result, VERIFIED, NOT_VERIFIED) * result["processes"] / gigabytes


SNAPSHOTS = (
    Goal(
        text="save blocks, of a copy",
        needs=(OURS, COPY),
        measure=lambda result: ratio(result, OURS, COPY),
        most=1.15,
    ),
    Goal(
        text="save blocks, of dcp.async_save by a thread, its best",
        needs=(OURS, "dcp.async_save, thread"),
        measure=of_best_by_dcp,
        most=1,
    ),
    Goal(
        text="the first save, of a later one",
        needs=(OURS + FIRST, OURS),
        measure=lambda result: ratio(result, OURS + FIRST, OURS),
        most=2,
    ),
    Goal(
        text="until it is durable, of the bandwidth of direct writes from /dev/shm",
        needs=(FROM_MEMORY, OURS_DURABLE),
        measure=lambda result: ratio(result, FROM_MEMORY, OURS_DURABLE),
        least=0.9,
        reason="A snapshot lies in `/dev/shm` and must be read from there, so the limit is a "
        "direct write from the same memory, not one that writes 8 MiB from the processor's cache "
        "again and again.",
    ),
    Goal(
        text="restore from memory: seconds beyond a copy",
        needs=(RECOVERED, COPY),
        measure=lambda result: difference(result, RECOVERED, COPY),
        most=0.02,
        reason="What a restore does besides the copy takes a fixed time for any size, so a ratio "
        "to the copy says more about the size of the state than about the restore.",
    ),
    Goal(
        text="restore, times faster than from disk",
        needs=(FROM_DISK, RECOVERED),
        measure=lambda result: ratio(result, FROM_DISK, RECOVERED),
        least=3,
    ),
    Goal(
        text="replicated state: most bytes that a rank copies, of its n-th part",
        needs=(DIVIDED,),
        measure=most_copied,
        most=1.01,
    ),
)

GOALS = {
    "snapshots": SNAPSHOTS,
    "snapshots_large": SNAPSHOTS,
    "checksums": (
        Goal(
            text="checksums of a load: seconds a GB and core",
            needs=(VERIFIED, NOT_VERIFIED),
            measure=seconds_a_gb,
            most=0.025,
            reason="Even a pass at the speed of the memory is more than a tenth of a warm load, so "
            "the goal is the cost of the pass itself; it is that of a warm load, because the speed "
            "of the disk hides it in a cold one.",
        ),
    ),
}
"""The goals of benchmarks whose goals all follow from the result, by question."""


def judge(result: Result) -> list[dict[str, Any]]:
    """Return the goals of a result: computed from it, or those that the benchmark stated."""
    if result["question"] in GOALS:
        return [goal.judge(result) for goal in GOALS[result["question"]]]
    return result["goals"]
