"""The table of docs/benchmarks/gpu.md: one column for each result of `gpu_overhead.py`."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.summary import Result

LINK = "pinned copies, of the link"


def gpu_rows(results: dict[str, Result]) -> list[list[str]]:
    """Return the head and the rows of the table, from the results by name."""
    rows = [["", *results, "goal"]]

    def add(title: str, text: Callable[[Result], str], goal: str = "") -> None:
        rows.append([title, *map(text, results.values()), goal])

    add("bandwidth of the link, large pinned copy", lambda r: bandwidth(r, "link"))
    add("bandwidth of our copy of the state", lambda r: bandwidth(r, "snapshot"))
    add("our copy, of the link", lambda r: f"**{measured(r, LINK):.2f}**", wanted(results, LINK))
    for way in ("ahead", "waiting"):
        for with_ in ("without", "with"):
            add(
                f"{way}: step {with_} snapshots, mean (p99)",
                lambda r, key=f"{way}, {with_}": mean_and_p99(r, key),  # type: ignore[misc]
            )
        for key in ("mean", "p99"):
            goal = f"{way}: slower, {key}"
            add(goal, lambda r, goal=goal: percent(measured(r, goal)), in_percent(results, goal))  # type: ignore[misc]
    return rows


def measured(result: Result, text: str) -> float:
    """Return what was measured for a goal."""
    (found,) = (goal["measured"] for goal in result["goals"] if goal["goal"] == text)
    return found


def wanted(results: dict[str, Result], text: str) -> str:
    """Return a goal, and how many of the runs reach it."""
    found = [goal for r in results.values() for goal in r["goals"] if goal["goal"] == text]
    reached = sum(goal["reached"] for goal in found)
    return f"{found[0]['wanted']}, reached in {reached} of {len(found)} runs"


def in_percent(results: dict[str, Result], text: str) -> str:
    """Return such a goal, of a share, in percent."""
    sign, share, rest = wanted(results, text).replace(",", " %,", 1).split(" ", 2)
    return f"{sign} {100 * float(share):g} {rest}"


def bandwidth(result: Result, key: str) -> str:
    """Return GB/s."""
    return f"{result['bytes_a_second'][key] / 1e9:.1f} GB/s"


def mean_and_p99(result: Result, key: str) -> str:
    """Return the mean and the 99th percentile of a step."""
    step = result["seconds_of_a_step"][key]
    return f"{step['mean']:.4f} s ({step['p99']:.4f} s)"


def percent(value: float) -> str:
    """Return a percentage in bold."""
    return f"**{100 * value:.1f} %**".replace("-", "−")
