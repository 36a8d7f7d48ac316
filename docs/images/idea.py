"""Draw the picture of the README: `python docs/images/idea.py` writes idea.svg."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

WIDTH, HEIGHT = 960, 372
RANKS = 4
GAP = 6.0

STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
.panel { fill: #ffffff; stroke: #d0d7de; }
.sheet { fill: #f6f8fa; stroke: #d0d7de; }
.title { fill: #1f2328; font-size: 16px; font-weight: 600; }
.text { fill: #59636e; font-size: 13px; }
.code { fill: #59636e; font-size: 12px; font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
.label { fill: #ffffff; font-size: 12px; font-family: ui-monospace, "DejaVu Sans Mono", monospace; }
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


def rectangle(
    style: str, corner: tuple[float, float], size: tuple[float, float], radius: float = 3
) -> str:
    """Return a rectangle, given its upper left corner and its size."""
    (x, y), (width, height) = corner, size
    return (
        f'<rect class="{style}" x="{x:g}" y="{y:g}" '
        f'width="{width:g}" height="{height:g}" rx="{radius:g}"/>'
    )


def text(style: str, at: tuple[float, float], content: str, anchor: str = "middle") -> str:
    """Return a line of text, given the middle (or the start) of its baseline."""
    x, y = at
    return f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{content}</text>'


def arrow(start: float, end: float, y: float, content: str) -> Iterator[str]:
    """Yield an arrow to the right with a text above it."""
    yield f'<path class="line" d="M {start:g} {y:g} H {end - 8:g}"/>'
    yield f'<path class="head" d="M {end:g} {y:g} l -10 -5 v 10 z"/>'
    yield text("text", ((start + end) / 2, y - 10), content)


def sharded(
    corner: tuple[float, float], size: float, rows: int, columns: int
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield a tensor in `rows` by `columns` shards, each in the colours of the files that hold it.

    Yields each rectangle, and the middle of its shard.
    """
    height = (size - (rows - 1) * GAP) / rows
    width = (size - (columns - 1) * GAP) / columns
    extent = rows * height
    for row in range(rows):
        for column in range(columns):
            x = corner[0] + column * (width + GAP)
            y = corner[1] + row * (height + GAP)
            middle = x + width / 2, y + height / 2
            for file in range(RANKS):
                low = max(file * extent / RANKS, row * height)
                high = min((file + 1) * extent / RANKS, (row + 1) * height)
                if high - low > 1:
                    top = y + low - row * height
                    yield rectangle(f"file{file}", (x, top), (width, high - low), 0), middle


def saved() -> Iterator[str]:
    """Yield the saved tensor, which four ranks shard by rows."""
    yield text("title", (130, 58), "Saved")
    yield text("text", (130, 78), "FSDP, 4 ranks")
    for rank, (shape, (x, y)) in enumerate(sharded((56, 104), 148, RANKS, 1)):
        yield shape
        yield text("label", (x, y + 4), f"rank {rank}")


def stored() -> Iterator[str]:
    """Yield the checkpoint: files, and the manifest of pieces."""
    yield rectangle("sheet", (310, 30), (300, 312), 8)
    yield text("title", (460, 58), "Checkpoint")
    yield text("text", (460, 78), "a manifest of pieces")
    for file in range(RANKS):
        y = 98 + 32 * file
        yield rectangle(f"file{file}", (332, y), (256, 26))
        yield text("label", (460, y + 17), f"r0000{file}-….safetensors")
    yield rectangle("panel", (332, 232), (256, 94))
    yield text("code", (344, 252), "manifest.json", "start")
    for file in range(3):
        line = f"w[{3 * file}:{3 * file + 3},0:8] → bytes of r0000{file}"
        yield text("code", (356, 272 + 16 * file), line, "start")
    yield text("code", (356, 318), "…", "start")


def loaded() -> Iterator[str]:
    """Yield the same tensor under three other shardings."""
    yield text("title", (820, 58), "Loaded")
    targets = (
        (1, 2, "tensor parallel", "2 ranks"),
        (2, 2, "FSDP × TP", "4 ranks"),
        (3, 1, "FSDP", "3 ranks"),
    )
    for number, (rows, columns, name, ranks) in enumerate(targets):
        y = 82 + 90 * number
        for shape, _ in sharded((744, y), 72, rows, columns):
            yield shape
        yield text("text", (832, y + 32), name, "start")
        yield text("text", (832, y + 50), ranks, "start")


def drawing() -> Iterable[str]:
    """Return the lines of the picture."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img">'
    )
    yield "<title>Four ranks save a tensor as pieces; other shardings load from these.</title>"
    yield f"<style>{STYLE}@media (prefers-color-scheme: dark) {{{DARK}}}\n</style>"
    yield rectangle("panel", (0.5, 0.5), (WIDTH - 1, HEIGHT - 1), 10)
    yield from saved()
    yield from arrow(216, 298, 186, "write once")
    yield from stored()
    yield from arrow(626, 728, 186, "read boxes")
    yield from loaded()
    yield "</svg>"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text("\n".join(drawing()) + "\n", encoding="utf-8")
