"""Draw the boxes of a tensor in the terminal, coloured by the ranks that wrote them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from shardwise.layout import Plane

WIDTH = 64  # characters
HEIGHT = 16  # lines
MIN_BOX_WIDTH = 5
MIN_BOX_HEIGHT = 2
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

# Line characters. The index is the sum of the directions in which the character has a line.
LINE_CHARACTERS = " ╵╷│╴┘┐┤╶└┌├─┴┬┼"
UP, DOWN, LEFT, RIGHT = 1, 2, 4, 8


def rank_style(rank: int) -> Style:
    """Return the colours of a rank's boxes. Every seventh rank has the same colours."""
    return Style(color="black", bgcolor=COLOURS[rank % len(COLOURS)])


def draw_boxes(plane: Plane, ranks: Sequence[int]) -> list[Text]:
    """Return the lines of the picture.

    Boxes have frames, with the rank inside. If the frames do not fit, coloured blocks show the
    ranks.

    Args:
        plane: the two dimensions of the tensor to draw, and the boxes in them.
        ranks: the ranks that wrote the boxes. `plane.owners` contains indices into this list.
    """
    # A character is half as wide as it is high.
    proportional_height = (
        0 if plane.vertical_dim is None else round(WIDTH / 2 * plane.height / plane.width)
    )
    columns_of_edges = _positions_of_edges(
        {edge for box in plane.boxes for edge in box[1::2]}, WIDTH, MIN_BOX_WIDTH, WIDTH
    )
    rows_of_edges = _positions_of_edges(
        {edge for box in plane.boxes for edge in box[::2]},
        proportional_height,
        MIN_BOX_HEIGHT,
        HEIGHT,
    )
    if columns_of_edges is None or rows_of_edges is None:
        return _draw_blocks(plane, ranks)
    picture = _draw_frames(plane, ranks, rows_of_edges, columns_of_edges)
    margin = (
        {}
        if plane.vertical_dim is None
        else {position: f"{edge} " for edge, position in rows_of_edges.items()}
    )
    margin_width = max(map(len, margin.values()), default=0)
    with_margin = [
        Text.assemble((margin.get(y, "").rjust(margin_width), "dim"), line)
        for y, line in enumerate(picture)
    ]
    return [Text(" " * margin_width + _ruler_line(columns_of_edges), "dim"), *with_margin]


def _positions_of_edges(
    edges: set[int], extent: int, min_distance: int, max_extent: int
) -> dict[int, int] | None:
    """Map edges to positions in the picture, in proportion, but at least `min_distance` apart.

    The last edge is at `extent`, or further if the distances require this. Return None if the edges
    do not fit into `max_extent`.
    """
    ordered = sorted(edges)
    needed_extent = min_distance * (len(ordered) - 1)
    if needed_extent > max_extent:
        return None
    extent = min(max(extent, needed_extent), max_extent)
    positions = [round(edge / ordered[-1] * extent) for edge in ordered]
    for i in range(1, len(positions)):
        positions[i] = max(positions[i], positions[i - 1] + min_distance)
    positions[-1] = extent
    for i in range(len(positions) - 2, -1, -1):
        positions[i] = min(positions[i], positions[i + 1] - min_distance)
    return dict(zip(ordered, positions, strict=True))


def _ruler_line(columns_of_edges: dict[int, int]) -> str:
    """Return the line of edges above the picture. Inner edges are left out if they do not fit."""
    last_edge, last_position = max(columns_of_edges.items())
    line = ""
    for edge, position in columns_of_edges.items():
        if edge == last_edge or position + len(f"{edge} {last_edge}") > last_position + 1:
            continue
        if position >= len(line) + bool(line):
            line = line.ljust(position) + str(edge)
    return line + str(last_edge).rjust(last_position + 1 - len(line))


def _draw_frames(
    plane: Plane,
    ranks: Sequence[int],
    rows_of_edges: dict[int, int],
    columns_of_edges: dict[int, int],
) -> list[Text]:
    height = max(rows_of_edges.values()) + 1
    width = max(columns_of_edges.values()) + 1
    line_directions = [[0] * width for _ in range(height)]
    characters = [[" "] * width for _ in range(height)]
    styles = [[Style.null()] * width for _ in range(height)]
    for (top, left, bottom, right), owner in zip(plane.boxes, plane.owners, strict=True):
        y0, y1, x0, x1 = (
            rows_of_edges[top],
            rows_of_edges[bottom],
            columns_of_edges[left],
            columns_of_edges[right],
        )
        _add_frame(line_directions, y0, y1, x0, x1)
        for y in range(y0 + 1, y1):
            styles[y][x0 + 1 : x1] = [rank_style(ranks[owner])] * (x1 - x0 - 1)
        label = str(ranks[owner])
        label_start = x0 + 1 + (x1 - x0 - 1 - len(label)) // 2
        if len(label) < x1 - x0:
            characters[(y0 + y1) // 2][label_start : label_start + len(label)] = label
    lines = []
    for y in range(height):
        line = Text()
        for x in range(width):
            line.append(
                LINE_CHARACTERS[line_directions[y][x]]
                if line_directions[y][x]
                else characters[y][x],
                styles[y][x],
            )
        lines.append(line)
    return lines


def _add_frame(line_directions: list[list[int]], y0: int, y1: int, x0: int, x1: int) -> None:
    """Add the frame of a box to the frames that are already drawn."""
    for y in (y0, y1):
        for x in range(x0, x1):
            line_directions[y][x] |= RIGHT
            line_directions[y][x + 1] |= LEFT
    for x in (x0, x1):
        for y in range(y0, y1):
            line_directions[y][x] |= DOWN
            line_directions[y + 1][x] |= UP


def _draw_blocks(plane: Plane, ranks: Sequence[int]) -> list[Text]:
    """Return lines with one block for each cell, in the shade and colour of the cell's rank."""
    height = 1 if plane.vertical_dim is None else min(HEIGHT, plane.height)
    width = min(WIDTH, plane.width)
    ranks_of_cells = [[-1] * width for _ in range(height)]
    for (top, left, bottom, right), owner in zip(plane.boxes, plane.owners, strict=True):
        for y in _cells_of(top, bottom, plane.height, height):
            for x in _cells_of(left, right, plane.width, width):
                ranks_of_cells[y][x] = ranks[owner]
    lines = []
    for row in ranks_of_cells:
        line = Text()
        for rank in row:
            style = Style(color=COLOURS[rank % len(COLOURS)]) if rank >= 0 else Style.null()
            line.append(SHADES[rank % len(SHADES)] if rank >= 0 else " ", style)
        lines.append(line)
    return lines


def _cells_of(start: int, stop: int, extent: int, cell_count: int) -> range:
    """Divide `extent` elements into cells. Return the cells that begin in `start:stop`."""
    return range(-(-start * cell_count // extent), -(-stop * cell_count // extent))
