"""Draw the picture of the README: `python docs/images/idea.py` writes idea.svg."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drawing import arrow, picture, rectangle, text, write_picture

WIDTH, HEIGHT = 960, 372
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


def content() -> Iterator[str]:
    """Yield the three parts of the picture, from left to right."""
    yield from saved()
    yield from arrow(216, 298, 186, "write once")
    yield from stored()
    yield from arrow(626, 728, 186, "read boxes")
    yield from loaded()


def pictures() -> dict[str, Iterator[str]]:
    """Return the lines of each file, by name."""
    title = "Four ranks save a tensor as pieces; other shardings load from these."
    return {"idea": picture(title, (WIDTH, HEIGHT), content())}


if __name__ == "__main__":
    for name, lines in pictures().items():
        write_picture(Path(__file__).with_name(f"{name}.svg"), lines)
