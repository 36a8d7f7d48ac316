"""Write the results into pages of the documentation: tables and figures, between their markers."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.figures import rewrite_figures
from benchmarks.goals import GOALS, judge
from benchmarks.gpu_table import gpu_rows
from benchmarks.summary import Result, compare

MARKED = re.compile(r"(?<=<!-- measured: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)

NOT_MEASURED = "not measured yet"


def rewrite_pages(pages: Iterable[Path], results: Path) -> None:
    """Replace the text between the markers of pages by tables and figures of the results."""
    found = read_results(results)
    of_gpus = {
        path.stem: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((results / "gpu").glob("*.json"))
    }
    of_all = {
        "machine": machine,
        "summary": summary,
        "count": count_goals,
        "goals": goals,
        "reasons": lambda _: reasons(),
        "gpu": lambda _: gpu(of_gpus),
    }

    def content(match: re.Match[str]) -> str:
        name = match[1]
        if name in of_all:
            text = of_all[name](found)
        else:
            text = result_tables([result for result in found if result["question"] == name])
        return f"{name}{match[2]}\n{text}\n\n"

    for page in pages:
        text = MARKED.sub(content, page.read_text(encoding="utf-8"))
        page.write_text(rewrite_figures(text, found, of_gpus), encoding="utf-8")


def read_results(results: Path) -> list[Result]:
    """Return the results in a directory, in the order of their names."""
    paths = sorted(results.glob("*.json"))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def summary(results: list[Result]) -> str:
    """Return a table of the main comparisons with others."""
    rows = [
        [
            each.text,
            f"{each.our_seconds:.2g} s",
            f"{each.peer}: {each.peer_seconds:.2g} s",
            f"**{each.ratio:.2g} ×**",
        ]
        for each in compare(results)
    ]
    return table(["what", "shardwise", "other", "times as fast"], rows)


def count_goals(results: list[Result]) -> str:
    """Return how many goals are reached, as a sentence."""
    found = [goal["reached"] for result in results for goal in judge(result)]
    later = found.count(None)
    rest = f" {later} are {NOT_MEASURED}." if later else ""
    return f"{found.count(True)} of {len(found)} [goals](benchmarks/goals.md) are reached.{rest}"


def machine(results: list[Result]) -> str:
    """Return the machines of the results, one per line."""
    machines = dict.fromkeys(
        ", ".join(f"{k} {v}" if k in ("python", "torch") else v for k, v in r["machine"].items())
        for r in results
    )
    return "\n\n".join(f"{each}." for each in machines)


def goals(results: list[Result]) -> str:
    """Return a table of all goals."""
    rows = [
        [r["question"], setting(r), g["goal"], g["wanted"], *measured(g)]
        for r in results
        for g in judge(r)
    ]
    return table(["question", "setting", "", "goal", "measured", "reached"], rows)


def reasons() -> str:
    """Return a list of the goals that have a reason."""
    found = {goal.text: goal.reason for goals in GOALS.values() for goal in goals if goal.reason}
    return "\n".join(f"- **{text}**: {reason}" for text, reason in found.items())


def gpu(results: dict[str, Result]) -> str:
    """Return the table of the results on accelerators."""
    head, *rows = gpu_rows(results)
    return table(head, rows)


def format_cell(value: object) -> str:
    """Format a cell; numbers get thousands separators."""
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def result_tables(results: list[Result]) -> str:
    """Return the tables of one benchmark: the seconds under all settings, then the others."""
    if not results:
        return f"{NOT_MEASURED.capitalize()}."
    names = list(dict.fromkeys(name for result in results for name in result["seconds"]))
    rows = [[name, *(cell(result, name) for result in results)] for name in names]
    parts = [table(["seconds (× the base)", *map(setting, results)], rows)] if rows else []
    for result in results:
        if absent := missing(result):
            parts.append(f"{NOT_MEASURED.capitalize()} ({setting(result)}): {', '.join(absent)}.")
        for title, found in result["tables"].items():
            lines = [[format_cell(value) for value in row.values()] for row in found]
            parts.append(f"{title} ({setting(result)}):\n\n{table(list(found[0]), lines)}")
    return "\n\n".join(parts)


def missing(result: Result) -> list[str]:
    """Return the rows and tables that a result lacks, because it is older than a goal."""
    needs = [each for goal in GOALS.get(result["question"], ()) for each in goal.needs]
    return [
        each for each in dict.fromkeys(needs) if each not in result["seconds"] | result["tables"]
    ]


def cell(result: Result, name: str) -> str:
    """Return the median seconds, and the median ratio if there is one."""
    if name not in result["seconds"]:
        return ""
    seconds = f"{statistics.median(result['seconds'][name]):.3g}"
    ratio = result["ratios"].get(name)
    return f"{seconds} (× {ratio['median']:.3g})" if ratio else seconds


def setting(result: Result) -> str:
    """Return the number of processes and the dtype."""
    return f"{result['processes']} × {result['dtype']}"


def measured(goal: dict[str, Any]) -> tuple[str, str]:
    """Return what was measured, and whether the goal is reached, as text."""
    if goal["measured"] is None:
        return NOT_MEASURED, ""
    return f"{goal['measured']:.3g}", "yes" if goal["reached"] else "**no**"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
