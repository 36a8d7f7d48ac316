"""Draw how the cost of a save grows with the ranks: this writes scale.svg."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from drawing import picture, rectangle, text, write_picture

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "scale-1-float32.json"
TABLE = "Rank 0, by the number of ranks"
WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 556, 72, 356
SECONDS = (0.001, 0.01, 0.1, 1.0)
"""The marks of the vertical axis. The horizontal axis begins at 64 ranks."""
LINES = (
    ("file0", "first plan", "first plan, seconds", 1.0),
    ("file1", "publish, first save", "publish, seconds", 1.0),
    ("file2", "publish, later saves", "again, seconds", 1.0),
    ("file3", "cached plan", "cached plan, ms", 0.001),
)
"""The style and the label of each line, its column in the table, and the column's unit."""
Row = dict[str, float]


def x_of(ranks: float, largest: float) -> float:
    """Return where a number of ranks is on the logarithmic axis."""
    return LEFT + math.log(ranks / 64) / math.log(largest / 64) * (RIGHT - LEFT)


def y_of(seconds: float) -> float:
    """Return where a number of seconds is on the logarithmic axis."""
    part = math.log(seconds / SECONDS[0]) / math.log(SECONDS[-1] / SECONDS[0])
    return BOTTOM - part * (BOTTOM - TOP)


def axes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield both axes with their marks."""
    largest = rows[-1]["ranks"]
    for seconds in SECONDS:
        y = y_of(seconds)
        yield f'<path class="line" d="M {LEFT} {y:g} H {RIGHT}" opacity="0.3"/>'
        label = f"{seconds:g} s" if seconds >= 1 else f"{1000 * seconds:g} ms"
        yield f'<text class="text" x="{LEFT - 10}" y="{y + 5:g}" text-anchor="end">{label}</text>'
    for ranks in (64, 1024, 16384, largest):
        x = x_of(ranks, largest)
        yield f'<path class="line" d="M {x:g} {BOTTOM} v 6"/>'
        yield text("text", (x, BOTTOM + 26), f"{ranks:,}")
    yield text("text", ((LEFT + RIGHT) / 2, BOTTOM + 50), "ranks")


def content(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the title, the axes and the lines."""
    yield text("title", (24, 36), "Processor time of rank 0 (both axes are logarithmic)", "start")
    yield from axes(rows)
    largest = rows[-1]["ranks"]
    last_y = math.inf
    for style, label, column, unit in sorted(LINES, key=lambda line: rows[-1][line[2]] * line[3]):
        points = [(x_of(row["ranks"], largest), y_of(row[column] * unit)) for row in rows]
        for (x0, y0), (x1, y1) in pairwise(points):
            yield f'<path class="line" d="M {x0:g} {y0:g} L {x1:g} {y1:g}"/>'
        for x, y in points:
            yield rectangle(style, (x - 4, y - 4), (8, 8))
        last_y = min(points[-1][1], last_y - 20)  # labels do not cover each other
        yield rectangle(style, (RIGHT + 16, last_y - 5), (10, 10))
        yield text("text", (RIGHT + 34, last_y + 5), label, "start")


def pictures() -> dict[str, Iterator[str]]:
    """Return the lines of each file, by name; nothing if there is no result."""
    if not RESULT.exists():
        return {}
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["tables"][TABLE]
    parts = ", ".join(label for _, label, _, _ in LINES)
    title = f"Processor time of rank 0 by the number of ranks: {parts}"
    return {"scale": picture(title, (WIDTH, HEIGHT), content(rows))}


if __name__ == "__main__":
    for name, lines in pictures().items():
        write_picture(Path(__file__).with_name(f"{name}.svg"), lines)
