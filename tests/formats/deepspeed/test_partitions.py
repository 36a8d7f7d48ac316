"""ZeRO's partitions, against padding and cutting flat arrays."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.errors import FormatError
from shardwise.formats.readers.deepspeed.without_zero import assign_by_shape
from shardwise.formats.readers.deepspeed.zero import (
    FlatRanges,
    ranges_of_partitions,
    ranges_of_slices,
)

Shapes = list[tuple[int, ...]]
SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)
RANKS = st.integers(1, 5)


def put_together(shapes: Shapes, ranges: FlatRanges, flat: list[np.ndarray]) -> list[np.ndarray]:
    """Parameters made of the ranges that ranks have."""
    made = [np.full(math.prod(shape), -1) for shape in shapes]
    for parameter, rank, start, stop, position in zip(*ranges, strict=True):
        assert start < stop
        made[parameter][start:stop] = flat[rank][position : position + stop - start]
    return [each.reshape(shape) for each, shape in zip(made, shapes, strict=True)]


def numbered(shapes: Shapes) -> list[np.ndarray]:
    """Parameters whose elements all differ."""
    sizes = [math.prod(shape) for shape in shapes]
    starts = np.cumsum([0, *sizes])
    return [
        np.arange(start, start + size).reshape(shape)
        for start, size, shape in zip(starts, sizes, shapes, strict=False)
    ]


def sizes_of(shapes: Shapes) -> list[int]:
    return [math.prod(shape) for shape in shapes]


@given(SHAPES, RANKS, st.data())
def test_partitions_of_a_group(shapes: Shapes, ranks: int, data: st.DataObject) -> None:
    gaps = [data.draw(st.integers(0, 3)) for _ in shapes]
    full = numbered(shapes)
    parts = [np.pad(each.reshape(-1), (0, gap)) for each, gap in zip(full, gaps, strict=True)]
    flat = np.concatenate(parts)
    flat = np.pad(flat, (0, -len(flat) % (2 * ranks)))
    ranges = ranges_of_partitions(sizes_of(shapes), gaps, ranks, len(flat) // ranks)
    made = put_together(shapes, ranges, np.split(flat, ranks))
    assert all(np.array_equal(one, two) for one, two in zip(made, full, strict=True))


@given(SHAPES, RANKS)
def test_slices_of_each_parameter(shapes: Shapes, ranks: int) -> None:
    full = numbered(shapes)
    held: list[list[np.ndarray]] = [[] for _ in range(ranks)]
    for each in full:
        flat = np.pad(each.reshape(-1), (0, -each.size % ranks))
        for rank, part in enumerate(np.split(flat, ranks)):
            held[rank].append(part)
    ranges = ranges_of_slices(sizes_of(shapes), ranks)
    made = put_together(shapes, ranges, [np.concatenate(parts) for parts in held])
    assert all(np.array_equal(one, two) for one, two in zip(made, full, strict=True))


def test_partitions_that_are_too_short_are_refused() -> None:
    with pytest.raises(FormatError, match="too short for parameters of 7"):
        ranges_of_partitions([3, 4], [0, 0], 2, 3)


def test_names_are_told_by_shapes_only_if_one_way_is_left() -> None:
    parameters = [("a", (2, 3)), ("frozen", (3,)), ("b", (4,)), ("c", (3,)), ("d", (2, 3))]
    assert assign_by_shape(parameters, [[(2, 3), (2, 3)], [(4,), (3,)]]) == [["a", "d"], ["b", "c"]]
    assert assign_by_shape(parameters, [[(2, 3), (2, 3)], [(3,), (4,)]]) == [
        ["a", "d"],
        ["frozen", "b"],
    ]
    assert assign_by_shape(parameters, [[(2, 3)], [(4,)]]) is None  # a or d
    assert assign_by_shape(parameters, [[(9,)]]) is None
    assert assign_by_shape(parameters, []) == []
    whole: list[tuple[int, ...] | None] = [(2, 3), None, (4,), None, (2, 3)]
    assert assign_by_shape(parameters, [whole]) == [["a", "frozen", "b", "c", "d"]]
    assert assign_by_shape(parameters, [[(2, 3), None, (3,), None]]) is None  # frozen or b
    assert assign_by_shape(parameters, [[None]]) is None


def test_an_optimizer_over_frozen_parameters_is_read_without_zero(tmp_path: Path) -> None:
    """Frozen parameters have no state. They are in the param group nevertheless."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 2))
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.rand(4, 3)).square().sum().backward()
    optimizer.step()
    state = {"module": model.state_dict(), "buffer_names": [], "global_steps": 1}
    state |= {"optimizer": optimizer.state_dict(), "dp_world_size": 1, "mp_world_size": 1}
    (tmp_path / "global_step1").mkdir()
    torch.save(state, tmp_path / "global_step1" / "mp_rank_00_model_states.pt")
    (tmp_path / "latest").write_text("global_step1")
    found = sw.open(tmp_path)
    assert not [line for line in found.left_out if line.startswith("optimizer")]
    fresh = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 2))
    fresh[1].requires_grad_(False)
    again = torch.optim.AdamW(fresh.parameters(), lr=1.0)
    sw.load(tmp_path, {"model": fresh, "optimizer": again}, only=["model.*", "optimizer.*"])
    assert again.param_groups[0]["lr"] == 0.25
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, other)
        for key, value in optimizer.state[one].items():
            assert torch.equal(again.state[other][key], value)
        assert one.requires_grad or not again.state.get(other)
