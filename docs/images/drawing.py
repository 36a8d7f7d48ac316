"""Shapes and colours of all pictures. Each picture has a light and a dark variant in one SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

Point = tuple[float, float]
STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
.panel { fill: #ffffff; stroke: #d0d7de; }
.sheet { fill: #f6f8fa; stroke: #d0d7de; }
.title { fill: #1f2328; font-size: 18px; font-weight: 600; }
.text { fill: #59636e; font-size: 15px; }
.code { fill: #59636e; font-size: 13px; font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
.label { fill: #ffffff; font-size: 13px; font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
.line { stroke: #59636e; stroke-width: 1.5; fill: none; }
.head { fill: #59636e; }
.file0 { fill: #0b7285; }
.file1 { fill: #5f3dc4; }
.file2 { fill: #c2255c; }
.file3 { fill: #b35c00; }
"""
DARK = """
.panel { fill: #0d1117; stroke: #3d444d; }
.sheet { fill: #151b23; stroke: #3d444d; }
.title { fill: #f0f6fc; }
.text, .code { fill: #9198a1; }
.line { stroke: #9198a1; }
.head { fill: #9198a1; }
"""


def rectangle(style: str, corner: Point, size: Point, radius: float = 3) -> str:
    """Return a rectangle, given its upper left corner and its size."""
    (x, y), (width, height) = corner, size
    return (
        f'<rect class="{style}" x="{x:g}" y="{y:g}" '
        f'width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
    )


def text(style: str, at: Point, content: str, anchor: str = "middle") -> str:
    """Return a line of text, given the middle (or the start) of its baseline."""
    x, y = at
    return f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{content}</text>'


def arrow(start: float, end: float, y: float, content: str) -> Iterator[str]:
    """Yield an arrow to the right with a text above it."""
    yield f'<path class="line" d="M {start:g} {y:g} H {end - 8:g}"/>'
    yield f'<path class="head" d="M {end:g} {y:g} l -10 -5 v 10 z"/>'
    yield text("text", ((start + end) / 2, y - 10), content)


def arrow_down(start: Point, end: float, content: str) -> Iterator[str]:
    """Yield an arrow down to a height, with a text to its right."""
    x, y = start
    yield f'<path class="line" d="M {x:g} {y:g} V {end - 8:g}"/>'
    yield f'<path class="head" d="M {x:g} {end:g} l -5 -10 h 10 z"/>'
    yield text("text", (x + 14, (y + end) / 2 + 4), content, "start")


def moved(by: Point, content: Iterable[str]) -> Iterator[str]:
    """Yield a part of the picture at another place."""
    yield f'<g transform="translate({by[0]:g} {by[1]:g})">'
    yield from content
    yield "</g>"


def labelled(style: str, corner: Point, size: Point, content: str) -> Iterator[str]:
    """Yield a coloured rectangle with a label in its middle."""
    yield rectangle(style, corner, size)
    yield text("label", (corner[0] + size[0] / 2, corner[1] + size[1] / 2 + 4), content)


def sheet(corner: Point, size: Point, title: str, subtitle: str = "") -> Iterator[str]:
    """Yield a framed part of the picture, with a title and a subtitle at its top."""
    middle = corner[0] + size[0] / 2
    yield rectangle("sheet", corner, size, 8)
    yield text("title", (middle, corner[1] + 26), title)
    if subtitle:
        yield text("text", (middle, corner[1] + 46), subtitle)


def grid(corner: Point, rows: int, columns: int, cell: float) -> Iterator[str]:
    """Yield the cells of a tensor, empty."""
    for row in range(rows):
        for column in range(columns):
            at = (corner[0] + column * cell, corner[1] + row * cell)
            yield rectangle("panel", at, (cell, cell), 0)


def picture(title: str, size: tuple[int, int], content: Iterable[str]) -> Iterator[str]:
    """Yield the lines of an SVG file: a frame, and the content."""
    width, height = size
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img">'
    )
    yield f"<title>{title}</title>"
    yield f"<style>{STYLE}@media (prefers-color-scheme: dark) {{{DARK}}}\n</style>"
    yield rectangle("panel", (0.5, 0.5), (width - 1, height - 1), 10)
    yield from content
    yield "</svg>"


def write_picture(path: Path, lines: Iterable[str]) -> None:
    """Write an SVG file."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
