"""Draw the picture of the architecture page: `python docs/images/weight.py` writes weight.svg."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drawing import arrow, grid, picture, rectangle, sheet, text, write_picture

CELL = 26.0
MANIFEST = (
    '{"name":"weight","dtype":"float32","shape":[6,4],"pieces":[{"file":0,"start":0,',
    '"offset":[0,0],"shape":[2,4],"repeat":[{"count":3,"offset":[2,0],"file":1}]}]}',
)


def cells(corner: tuple[float, float], part: int) -> str:
    """Return two rows of the tensor, filled."""
    at = (corner[0] + 1, corner[1] + 2 * part * CELL + 1)
    return rectangle(f"file{part}", at, (4 * CELL - 2, 2 * CELL - 2), 2)


def tensor() -> Iterator[str]:
    """Yield the tensor, and the ranks of the mesh that hold its rows."""
    yield from sheet((24, 24), (262, 300), "Tensor", "weight: float32 [6, 4]")
    yield from grid((56, 96), 6, 4, CELL)
    for part in range(3):
        yield cells((56, 96), part)
        middle = 96 + (2 * part + 1) * CELL + 4
        yield text("label", (108, middle), f"tp={part}")
        yield text("code", (176, middle), f"ranks {part}, {part + 3}", "start")
    yield text("text", (155, 280), "mesh dp=2 × tp=3: rows split")
    yield text("text", (155, 302), "over tp, replicated over dp")


def rule() -> Iterator[str]:
    """Yield the rule that all ranks have, and the grid of boxes that it makes."""
    yield from sheet((330, 24), (262, 300), "Rule and grid", "the same for all six ranks")
    yield text("text", (461, 96), "rule: dimension 0 into 3 shards,")
    yield text("text", (461, 118), "the index is the coordinate of tp")
    for part in range(3):
        y = 136 + 42 * part
        yield rectangle(f"file{part}", (356, y), (210, 34))
        yield text("label", (461, y + 21), f"[{2 * part}:{2 * part + 2},0:4], rank {part} writes")
    yield text("text", (461, 288), "grid: 3 boxes of shape [2, 4],")
    yield text("text", (461, 310), "at distances of [2, 0]")


def files() -> Iterator[str]:
    """Yield the files of the ranks that write the weight."""
    yield from sheet((636, 24), (300, 300), "Pieces in files", "32 bytes each")
    for part in range(3):
        y = 88 + 66 * part
        yield text("code", (656, y + 6), f"r0000{part}-….safetensors", "start")
        for x, width, style, name in (
            (656, 96, "panel", "header"),
            (752, 100, f"file{part}", "piece"),
            (852, 64, "panel", "CRC-32s"),
        ):
            yield rectangle(style, (x, y + 12), (width, 30), 0)
            label = "label" if name == "piece" else "code"
            yield text(label, (x + width / 2, y + 31), name)
    yield text("code", (752, 280), "4096")
    yield text("code", (852, 280), "4128")
    yield text("text", (786, 308), "Ranks 3, 4 and 5 write the bias.")


def weight() -> Iterator[str]:
    """Yield the way of a weight from its tensor to the manifest."""
    yield from tensor()
    yield from arrow(288, 328, 174, "")
    yield from rule()
    yield from arrow(594, 634, 174, "")
    yield from files()
    yield rectangle("sheet", (24, 344), (912, 96), 8)
    yield text("title", (44, 374), "Manifest: one entry", "start")
    for number, line in enumerate(MANIFEST):
        yield text("code", (44, 400 + 22 * number), line.replace('"', "&quot;"), "start")


def pictures() -> dict[str, Iterator[str]]:
    """Return the lines of each file, by name."""
    return {"weight": picture("The way of a weight to the manifest.", (960, 464), weight())}


if __name__ == "__main__":
    for name, lines in pictures().items():
        write_picture(Path(__file__).with_name(f"{name}.svg"), lines)
