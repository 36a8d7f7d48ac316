"""Draw the main results of the benchmarks: `python docs/images/results.py` writes results.svg."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

from drawing import picture, rectangle, text, write_picture

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.summary import Comparison, compare  # noqa: E402

WIDTH, ROW, TOP, LEFT = 640, 52, 74, 24
FROM, TO = 0.5, 32.0  # times as fast: the ends of the scale


def position(ratio: float) -> float:
    """Return where a ratio is on the logarithmic scale."""
    part = math.log(min(max(ratio, FROM), TO) / FROM) / math.log(TO / FROM)
    return LEFT + part * (WIDTH - 2 * LEFT - 70)


def bar(row: int, comparison: Comparison) -> Iterator[str]:
    """Yield one comparison: a line of text, and below it a bar that begins at 1 ×."""
    y = TOP + row * ROW
    ends = sorted((position(1), position(comparison.ratio)))
    style = "file0" if comparison.ratio >= 1 else "file3"
    yield text("text", (LEFT, y), f"{comparison.text}, against {comparison.peer}", "start")
    yield rectangle(style, (ends[0], y + 8), (max(2, ends[1] - ends[0]), 18))
    yield f'<path class="line" d="M {position(1):g} {y + 4} v 26"/>'
    yield text("title", (ends[1] + 8, y + 23), f"{comparison.ratio:.2g} ×", "start")


def content(comparisons: list[Comparison]) -> Iterator[str]:
    """Yield the title and the bars."""
    yield text("title", (LEFT, 36), "Times as fast as others (logarithmic scale)", "start")
    for row, comparison in enumerate(comparisons):
        yield from bar(row, comparison)


def pictures() -> dict[str, Iterator[str]]:
    """Return the lines of each file, by name."""
    results = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    comparisons = list(compare(json.loads(path.read_text(encoding="utf-8")) for path in results))
    title = "; ".join(f"{each.text}: {each.ratio:.2g} times as fast" for each in comparisons)
    size = WIDTH, TOP + len(comparisons) * ROW
    return {"results": picture(title, size, content(comparisons))}


if __name__ == "__main__":
    for name, lines in pictures().items():
        write_picture(Path(__file__).with_name(f"{name}.svg"), lines)
