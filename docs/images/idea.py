"""Draw the picture of the README: `python docs/images/idea.py` writes idea.svg.

idea.narrow.svg has the same parts one below the other. The site shows it on phones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from drawing import Point, arrow, arrow_down, moved, picture, rectangle, text, write_picture

WIDE, NARROW = (960, 372), (400, 800)
RANKS = 4
GAP = 6.0


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


def loaded(title: Point, shardings: Sequence[tuple[Point, Point]]) -> Iterator[str]:
    """Yield the same tensor under three other shardings.

    Args:
        title: where the title is.
        shardings: for each sharding, the corner of its tensor and the start of its label.
    """
    yield text("title", title, "Loaded")
    targets = (
        (1, 2, "tensor parallel", "2 ranks"),
        (2, 2, "FSDP × TP", "4 ranks"),
        (3, 1, "FSDP", "3 ranks"),
    )
    for (rows, columns, name, ranks), (corner, (x, y)) in zip(targets, shardings, strict=True):
        for shape, _ in sharded(corner, 72, rows, columns):
            yield shape
        yield text("text", (x, y), name, "start")
        yield text("text", (x, y + 18), ranks, "start")


def wide() -> Iterator[str]:
    """Yield the three parts of the picture, from left to right."""
    yield from saved()
    yield from arrow(216, 298, 186, "write once")
    yield from stored()
    yield from arrow(626, 728, 186, "read boxes")
    yield from loaded((820, 58), [((744, y), (832, y + 32)) for y in (82, 172, 262)])


def narrow() -> Iterator[str]:
    """Yield the three parts of the picture, from top to bottom."""
    yield from moved((70, -24), saved())
    yield from arrow_down((200, 236), 284, "write once")
    yield from moved((-260, 260), stored())
    yield from arrow_down((200, 610), 656, "read boxes")
    yield from loaded((74, 650), [((x, 672), (x, 764)) for x in (22, 152, 272)])


def pictures() -> dict[str, Iterator[str]]:
    """Return the lines of each file, by name."""
    title = "Four ranks save a tensor as pieces; other shardings load from these."
    return {
        "idea": picture(title, WIDE, wide()),
        "idea.narrow": picture(title, NARROW, narrow()),
    }


if __name__ == "__main__":
    for name, lines in pictures().items():
        write_picture(Path(__file__).with_name(f"{name}.svg"), lines)
