"""Draw the boxes of a tensor, with the ranks that wrote them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from shardwise.layout import Plane

WIDTH = 64
HEIGHT = 16
LEAST_WIDTH = 5
LEAST_HEIGHT = 2
COLOURS = (
    "bright_blue",
    "bright_yellow",
    "bright_green",
    "bright_magenta",
    "bright_cyan",
    "bright_red",
    "bright_white",
)
SHADES = "█▒░"

# Characters by the directions in which their lines lead: up 1, down 2, left 4, right 8.
LINES = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"
UP, DOWN, LEFT, RIGHT = 1, 2, 4, 8


def rank_style(rank: int) -> Style:
    """Return the colours of a rank's boxes. Seven ranks have different ones."""
    return Style(color="black", bgcolor=COLOURS[rank % len(COLOURS)])


def draw(view: Plane, ranks: Sequence[int]) -> list[Text]:
    """Return the lines of the picture: boxes with frames and ranks, or coloured blocks if many.

    Args:
        ranks: the rank of each box that the plane was made from.
    """
    # A character is half as wide as it is high.
    wanted = 0 if view.down is None else round(WIDTH / 2 * view.height / view.width)
    across = _placed({edge for box in view.boxes for edge in box[1::2]}, WIDTH, LEAST_WIDTH, WIDTH)
    down = _placed({edge for box in view.boxes for edge in box[::2]}, wanted, LEAST_HEIGHT, HEIGHT)
    if across is None or down is None:
        return _blocks(view, ranks)
    picture = _frames(view, ranks, down, across)
    margin = {} if view.down is None else {place: f"{edge} " for edge, place in down.items()}
    gutter = max(map(len, margin.values()), default=0)
    lines = [
        Text.assemble((margin.get(y, "").rjust(gutter), "dim"), line)
        for y, line in enumerate(picture)
    ]
    return [Text(" " * gutter + _ruler(across), "dim"), *lines]


def _placed(edges: set[int], room: int, least: int, most: int) -> dict[int, int] | None:
    """Map edges to positions in the picture, in proportion, but at least `least` apart.

    The last edge is at `room`, or further if needed. Returns None if that exceeds `most`.
    """
    ordered = sorted(edges)
    needed = least * (len(ordered) - 1)
    if needed > most:
        return None
    room = min(max(room, needed), most)
    places = [round(edge / ordered[-1] * room) for edge in ordered]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + least)
    places[-1] = room
    for i in range(len(places) - 2, -1, -1):
        places[i] = min(places[i], places[i + 1] - least)
    return dict(zip(ordered, places, strict=True))


def _ruler(across: dict[int, int]) -> str:
    """Return the line of edges above the picture; edges between the outer two only if they fit."""
    last, end = max(across.items())
    line = ""
    for edge, place in across.items():
        if edge == last or place + len(f"{edge} {last}") > end + 1:
            continue
        if place >= len(line) + bool(line):
            line = line.ljust(place) + str(edge)
    return line + str(last).rjust(end + 1 - len(line))


def _frames(
    view: Plane, ranks: Sequence[int], down: dict[int, int], across: dict[int, int]
) -> list[Text]:
    lines = max(down.values()) + 1
    columns = max(across.values()) + 1
    sides = [[0] * columns for _ in range(lines)]
    content = [[" "] * columns for _ in range(lines)]
    styles = [[Style.null()] * columns for _ in range(lines)]
    for (top, left, bottom, right), owner in zip(view.boxes, view.owners, strict=True):
        y0, y1, x0, x1 = down[top], down[bottom], across[left], across[right]
        _frame(sides, y0, y1, x0, x1)
        for y in range(y0 + 1, y1):
            styles[y][x0 + 1 : x1] = [rank_style(ranks[owner])] * (x1 - x0 - 1)
        label = str(ranks[owner])
        at = x0 + 1 + (x1 - x0 - 1 - len(label)) // 2
        if len(label) < x1 - x0:
            content[(y0 + y1) // 2][at : at + len(label)] = label
    picture = []
    for y in range(lines):
        line = Text()
        for x in range(columns):
            line.append(LINES[sides[y][x]] if sides[y][x] else content[y][x], styles[y][x])
        picture.append(line)
    return picture


def _frame(sides: list[list[int]], y0: int, y1: int, x0: int, x1: int) -> None:
    """Add the frame of a box to the frames that are already drawn."""
    for y in (y0, y1):
        for x in range(x0, x1):
            sides[y][x] |= RIGHT
            sides[y][x + 1] |= LEFT
    for x in (x0, x1):
        for y in range(y0, y1):
            sides[y][x] |= DOWN
            sides[y + 1][x] |= UP


def _blocks(view: Plane, ranks: Sequence[int]) -> list[Text]:
    """Return one block for each cell of the plane, in the shade and colour of its rank."""
    lines = 1 if view.down is None else min(HEIGHT, view.height)
    columns = min(WIDTH, view.width)
    owners = [[-1] * columns for _ in range(lines)]
    for (top, left, bottom, right), owner in zip(view.boxes, view.owners, strict=True):
        for y in _cells(top, bottom, view.height, lines):
            for x in _cells(left, right, view.width, columns):
                owners[y][x] = ranks[owner]
    picture = []
    for row in owners:
        line = Text()
        for rank in row:
            style = Style(color=COLOURS[rank % len(COLOURS)]) if rank >= 0 else Style.null()
            line.append(SHADES[rank % len(SHADES)] if rank >= 0 else " ", style)
        picture.append(line)
    return picture


def _cells(start: int, stop: int, extent: int, cells: int) -> range:
    """Return the cells whose first element is in `start:stop`."""
    return range(-(-start * cells // extent), -(-stop * cells // extent))
