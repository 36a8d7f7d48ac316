"""Boxes, drawn."""

from __future__ import annotations

import math
from itertools import pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from shardwise.cli.box_picture import HEIGHT, SHADES, WIDTH, draw_boxes
from shardwise.layout import Box, choose_plane

CUTS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


def grid(*lengths: list[int]) -> tuple[tuple[int, ...], list[Box]]:
    """The boxes that cuts of these lengths make of a tensor, in order."""
    shape = tuple(map(sum, lengths))
    edges = [[sum(each[:i]) for i in range(len(each) + 1)] for each in lengths]
    boxes = [
        Box(tuple(low for low, _ in part), tuple(high - low for low, high in part))
        for part in product(*(pairwise(each) for each in edges))
    ]
    return shape, boxes


def drawn(lengths: list[list[int]]) -> list[str]:
    shape, boxes = grid(*lengths)
    return [line.plain for line in draw_boxes(choose_plane(shape, boxes), list(range(len(boxes))))]


@given(st.lists(CUTS, min_size=1, max_size=3))
def test_the_picture_is_bounded_and_rectangular(lengths: list[list[int]]) -> None:
    lines = drawn(lengths)
    assert len(lines) <= HEIGHT + 2
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= WIDTH + 1 + 6


@given(st.lists(st.integers(1, 40), min_size=2, max_size=12))
def test_a_line_has_every_rank_in_its_place(lengths: list[int]) -> None:
    ruler, top, middle, bottom = drawn([lengths])
    assert [int(part) for part in middle.strip("│").split("│")] == list(range(len(lengths)))
    assert top.count("┬") == bottom.count("┴") == len(lengths) - 1
    assert (ruler.split()[0], ruler.split()[-1]) == ("0", str(sum(lengths)))


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
)
def test_a_grid_has_every_rank_in_its_row(rows: list[int], columns: list[int]) -> None:
    _, *lines = drawn([rows, columns])
    ranks = [
        [int(part) for part in line.split("│")[1:-1] if part.strip()]
        for line in lines
        if "│" in line and any(c.isdigit() for c in line.split("│")[1])
    ]
    wide = len(columns)
    assert ranks == [list(range(wide * i, wide * (i + 1))) for i in range(len(rows))]


@given(st.integers(200, 400))
def test_many_boxes_become_blocks_in_the_shades_of_their_ranks(n: int) -> None:
    (line,) = drawn([[1] * n])
    cells = [math.ceil(i * n / WIDTH) for i in range(WIDTH)]
    owners = [i * n // WIDTH for i in range(WIDTH)]
    assert len(line) == len(cells) == WIDTH
    assert line == "".join(SHADES[owner % len(SHADES)] for owner in owners)


def test_of_more_than_two_dimensions_the_split_ones_are_drawn() -> None:
    shape, boxes = grid([5], [2, 2], [6], [3, 3])
    view = choose_plane(shape, boxes)
    assert (view.vertical_dim, view.horizontal_dim, view.hidden) == (1, 3, ())
    assert len(view.boxes) == 4
    shape, boxes = grid([1, 1], [2, 2], [3, 3])
    view = choose_plane(shape, boxes)
    assert (view.vertical_dim, view.horizontal_dim, view.hidden) == (0, 1, (2,))
    assert view.owners == (0, 2, 4, 6)


def test_a_scalar_is_one_box() -> None:
    lines = draw_boxes(choose_plane((), [Box((), ())]), [5])
    assert "5" in lines[2].plain
