"""Write the results into pages of the documentation as tables, between their markers."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.summary import Result, compare

MARKED = re.compile(r"(?<=<!-- measured: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


PAUSE = re.compile(r"`save` pauses training for \S+ s, and `dcp\.async_save` pauses it for \S+ s")


def rewrite_pages(pages: Iterable[Path], results: Path) -> None:
    """Replace the text between the markers of pages by tables of the results."""
    found = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))
    ]
    of_all = {"machine": machine, "summary": summary, "count": count_goals, "goals": goals}

    def content(match: re.Match[str]) -> str:
        name = match[1]
        if name in of_all:
            text = of_all[name](found)
        else:
            text = result_tables([result for result in found if result["question"] == name])
        return f"{name}{match[2]}\n{text}\n\n"

    for page in pages:
        text = MARKED.sub(content, page.read_text(encoding="utf-8"))
        page.write_text(PAUSE.sub(lambda _: pause(found), text), encoding="utf-8")


def pause(results: list[Result]) -> str:
    """Return the sentence of the README on pauses: the first row of the summary."""
    first = next(compare(results))
    return (
        f"`save` pauses training for {first.our_seconds:.2g} s, and `{first.peer}` pauses it for "
        f"{first.peer_seconds:.2g} s"
    )


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
    found = [goal["reached"] for result in results for goal in result["goals"]]
    return f"{sum(found)} of {len(found)} [goals](benchmarks/goals.md) are reached."


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
        [r["question"], setting(r), g["goal"], g["wanted"], f"{g['measured']:.3g}", reached(g)]
        for r in results
        for g in r["goals"]
    ]
    return table(["question", "setting", "", "goal", "measured", "reached"], rows)


def format_cell(value: object) -> str:
    """Format a cell; numbers get thousands separators."""
    return f"{value:,}" if isinstance(value, (int, float)) else str(value)


def result_tables(results: list[Result]) -> str:
    """Return the tables of one benchmark: the seconds under all settings, then the others."""
    if not results:
        return "Not measured yet."
    names = list(dict.fromkeys(name for result in results for name in result["seconds"]))
    rows = [[name, *(cell(result, name) for result in results)] for name in names]
    parts = [table(["seconds (× the base)", *map(setting, results)], rows)] if rows else []
    for result in results:
        for title, found in result["tables"].items():
            lines = [[format_cell(value) for value in row.values()] for row in found]
            parts.append(f"{title} ({setting(result)}):\n\n{table(list(found[0]), lines)}")
    return "\n\n".join(parts)


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


def reached(goal: dict[str, Any]) -> str:
    """Return whether a goal is reached, as text."""
    return "yes" if goal["reached"] else "**no**"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
