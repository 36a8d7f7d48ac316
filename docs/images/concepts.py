"""Draw the pictures of the concepts page: `python docs/images/concepts.py` writes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from drawing import Point, arrow, grid, labelled, picture, rectangle, sheet, text, write_picture

CELL = 28.0
ROWS, COLUMNS = 4, 8


def cells(corner: Point, style: str, box: tuple[int, int, int, int], cell: float = CELL) -> str:
    """Return a filled box of a grid: first row and column, and number of rows and columns."""
    row, column, rows, columns = box
    at = (corner[0] + column * cell + 1, corner[1] + row * cell + 1)
    return rectangle(style, at, (columns * cell - 2, rows * cell - 2), 2)


def box() -> Iterator[str]:
    """Yield a box, the boxes of two ranks, and the boxes of a flat range."""
    yield from sheet((24, 24), (288, 262), "A box", "a rectangular part of a tensor")
    yield from grid((56, 92), ROWS, COLUMNS, CELL)
    yield cells((56, 92), "file0", (1, 2, 2, 4))
    yield text("label", (168, 92 + 2 * CELL + 4), "2 × 4")
    yield text("code", (168, 236), "Box((1, 2), (2, 4))")
    yield text("text", (168, 262), "offset: row 1, column 2")

    yield from sheet((336, 24), (288, 262), "Shards of FSDP2", "one box for each rank")
    yield from grid((368, 92), ROWS, COLUMNS, CELL)
    for rank in range(2):
        yield cells((368, 92), f"file{rank}", (2 * rank, 0, 2, 8))
        yield text("label", (480, 92 + (2 * rank + 1) * CELL + 4), f"rank {rank}")
    yield text("code", (480, 236), "Box((0, 0), (2, 8))")
    yield text("code", (480, 262), "Box((2, 0), (2, 8))")

    yield from sheet((648, 24), (288, 262), "A flat range", "as in ZeRO and in FSDP1")
    yield from grid((680, 92), ROWS, COLUMNS, CELL)
    for part in ((1, 5, 1, 3), (2, 0, 1, 8), (3, 0, 1, 3)):
        yield cells((680, 92), "file2", part)
    yield text("text", (792, 236), "elements 13 to 26")
    yield text("text", (792, 262), "become three boxes")


def piece() -> Iterator[str]:
    """Yield a tensor in two boxes, and the files that hold their bytes."""
    yield text("title", (136, 58), "model.weight")
    yield text("text", (136, 78), "two boxes")
    yield from grid((24, 104), ROWS, COLUMNS, CELL)
    for rank in range(2):
        yield cells((24, 104), f"file{rank}", (2 * rank, 0, 2, 8))
        yield text(
            "label", (136, 104 + (2 * rank + 1) * CELL + 4), f"[{2 * rank}:{2 * rank + 2},0:8]"
        )
    for rank in range(2):
        y = 62.0 + 118 * rank
        yield text("code", (336, y - 10), f"r0000{rank}-….safetensors", "start")
        for x, width, name in ((336, 90, "header"), (636, 130, ""), (766, 90, "values")):
            yield rectangle("sheet", (x, y), (width, 44), 0)
            yield text("code", (x + width / 2, y + 27), name)
        yield rectangle("sheet", (856, y), (80, 44), 0)
        yield text("code", (896, y + 27), "CRC-32s")
        yield from labelled(f"file{rank}", (426, y), (210, 44), "piece: model.weight")
        yield text("code", (701, y + 27), "other pieces")
        start, end = (258, 330), (104 + (2 * rank + 1) * CELL, y + 22)
        yield f'<path class="line" d="M {start[0]} {end[0]:g} L {start[1]} {end[1]:g}"/>'
        for x, name in ((426, "data_at"), (766, "objects_at"), (884, "checksums_at")):
            yield text("code", (x, y + 62), name)
    yield text(
        "text",
        (636, 284),
        "Blocks of 64 KiB have checksums, from the start of the file to checksums_at.",
    )


def plan() -> Iterator[str]:
    """Yield the plan of a save with replicas, and the plan of a load."""
    yield from sheet(
        (24, 24), (440, 312), "The plan of a save", "four ranks, each shard on two of them"
    )
    for rank in range(4):
        x, y = 56 + 208 * (rank % 2), 92 + 112 * (rank // 2)
        first = 2 * (rank % 2)
        yield from grid((x, y), ROWS, COLUMNS, 18)
        yield cells((x, y), f"file{rank}", (first + rank // 2, 0, 1, 8), 18)
        yield f'<rect class="line" x="{x}" y="{y + 18 * first}" width="144" height="36"/>'
        yield text("text", (x + 72, y + 92), f"rank {rank} holds two rows")
    yield text("text", (244, 326), "Each rank writes one row, so each byte is written once.")

    yield from sheet((496, 24), (440, 312), "The plan of a load", "a rank needs columns 0 to 3")
    yield text("text", (592, 92), "checkpoint")
    yield from grid((520, 104), ROWS, COLUMNS, 18)
    for row in range(4):
        yield cells((520, 104), f"file{(0, 2, 1, 3)[row]}", (row, 0, 1, 8), 18)
    yield '<rect class="line" x="520" y="104" width="72" height="72"/>'
    yield from arrow(690, 790, 144, "intersections")
    yield text("text", (856, 92), "tensor of the rank")
    for row in range(4):
        yield cells((820, 104), f"file{(0, 2, 1, 3)[row]}", (row, 0, 1, 4), 18)
    lines = (
        "Box of the rank ∩ box of each piece = four boxes.",
        "The rank reads the blocks that contain them.",
        "Nearby blocks become one read, which is a span.",
        "Ranks of a node share blocks that several need.",
    )
    for number, line in enumerate(lines):
        yield text("text", (716, 216 + 28 * number), line)


def snapshot() -> Iterator[str]:
    """Yield the stages of a snapshot over time."""
    lanes = ("training", "agent", "other nodes", "storage")
    for number, name in enumerate(lanes):
        y = 64 + 66 * number
        yield text("title", (24, y + 25), name, "start")
        yield f'<path class="line" d="M 140 {y + 54} H 936" opacity="0.35"/>'
    for number, x in enumerate((140, 320, 500, 680)):
        yield from labelled("file0", (x, 64), (126, 38), f"step {number + 100}")
        yield from labelled("file3", (x + 130, 64), (44, 38), "copy")
    yield from labelled("file1", (320, 130), (84, 38), "checksums")
    yield from labelled("file1", (410, 130), (68, 38), "commit")
    yield from labelled("file2", (484, 196), (150, 38), "copies or parity")
    yield from labelled("file1", (640, 262), (260, 38), "data files, then manifest")
    for x, name in ((316, "staged"), (480, "committed"), (636, "protected"), (904, "persisted")):
        yield f'<path class="line" d="M {x} 46 V 316" stroke-dasharray="4 4"/>'
        yield text("code", (x, 338), name)
    yield text(
        "text", (480, 366), "Training waits for the copy only. The other stages run in the agents."
    )
    yield text("text", (24, 34), "The snapshot of step 100", "start")


def tiers() -> Iterator[str]:
    """Yield the places of a checkpoint, from near to far."""
    places = (
        ("file3", "memory", "of this node", "survives the end", "of the training"),
        ("file2", "memory", "of other nodes", "survives the loss", "of some nodes"),
        ("file0", "root", "a disk or a bucket", "survives the loss", "of all nodes"),
        ("file1", "mirror", "another disk or bucket", "survives the loss", "of the root"),
    )
    for number, (style, name, where, *survives) in enumerate(places):
        x = 24 + 236 * number
        yield rectangle("sheet", (x, 70), (204, 170), 8)
        yield from labelled(style, (x + 20, 90), (164, 44), name)
        yield text("text", (x + 102, 160), where)
        for line, content in enumerate(survives):
            yield text("text", (x + 102, 196 + 20 * line), content)
        if number:
            yield from arrow(x - 32, x, 155, "")
    yield text("text", (24, 44), "save: from left to right, in the background", "start")
    yield text(
        "text",
        (24, 276),
        "restore: loads the newest step of all, and replaces damaged blocks with their copies",
        "start",
    )


def pictures() -> dict[str, Iterator[str]]:
    """Return the lines of each file, by name."""
    return {
        "box": picture("A box, the boxes of two ranks, and a flat range.", (960, 310), box()),
        "piece": picture("Pieces say which bytes of a file hold a box.", (960, 310), piece()),
        "plan": picture("The plans of a save and of a load.", (960, 360), plan()),
        "snapshot": picture("The stages of a snapshot.", (960, 390), snapshot()),
        "tiers": picture("Memory, root and mirror.", (960, 300), tiers()),
    }


if __name__ == "__main__":
    for name, lines in pictures().items():
        write_picture(Path(__file__).with_name(f"{name}.svg"), lines)
