"""ZeRO's partitions, against padding and cutting flat arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.kernel.errors import FormatError
from shardwise.parts.formats.readers.deepspeed.without_zero import Group, Slot, assign_members
from shardwise.parts.formats.readers.deepspeed.zero import (
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
    assert assign_members(parameters, [[(2, 3), (2, 3)], [(4,), (3,)]]) == [["a", "d"], ["b", "c"]]
    assert assign_members(parameters, [[(2, 3), (2, 3)], [(3,), (4,)]]) == [
        ["a", "d"],
        ["frozen", "b"],
    ]
    assert assign_members(parameters, [[(2, 3)], [(4,)]]) is None  # a or d
    assert assign_members(parameters, [[(9,)]]) is None
    assert assign_members(parameters, []) == []
    whole: list[tuple[int, ...] | None] = [(2, 3), None, (4,), None, (2, 3)]
    assert assign_members(parameters, [whole]) == [["a", "frozen", "b", "c", "d"]]
    # A member without state may be frozen or b. Nothing belongs to it.
    assert assign_members(parameters, [[(2, 3), None, (3,), None]]) == [["a", None, "c", "d"]]
    assert assign_members(parameters, [[None]]) == [[None]]
    assert assign_members(parameters, [[None, (3,), None]]) is None  # frozen or c


def assignments(shapes: list[tuple[int, ...]], groups: list[Group]) -> Iterator[dict[Slot, int]]:
    """Every way to fill the slots of all groups, each in the order of the parameters."""
    for choice in product(range(-1, len(groups)), repeat=len(shapes)):
        taken, at = dict[Slot, int](), [0] * len(groups)
        for index, group in enumerate(choice):
            if group >= 0:
                taken[group, at[group]] = index
                is_flat = isinstance(groups[group], int)
                at[group] += math.prod(shapes[index]) if is_flat else 1
        ends = [group if isinstance(group, int) else len(group) for group in groups]
        alike = (
            isinstance(groups[g], int) or groups[g][at] in (shapes[index], None)
            for (g, at), index in taken.items()
        )
        if at == ends and all(alike):
            yield taken


@given(
    st.lists(st.sampled_from([(2,), (3,), (2, 2), (1, 3)]), min_size=1, max_size=6),
    st.lists(st.integers(-1, 1), min_size=6, max_size=6),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.booleans(),
)
def test_members_are_told_just_if_all_assignments_agree(
    shapes: list[tuple[int, ...]], group_of: list[int], has_state: list[bool], is_flat: bool
) -> None:
    parameters = [(str(index), shape) for index, shape in enumerate(shapes)]
    own = [[i for i in range(len(shapes)) if group_of[i] == group] for group in (0, 1)]
    groups: list[Group] = [
        sum(math.prod(shapes[i]) for i in members)
        if is_flat
        else [shapes[i] if has_state[i] else None for i in members]
        for members in own
    ]
    ways = [*assignments(shapes, groups)]
    slots = {
        slot
        for way in ways
        for slot in way
        if is_flat or groups[slot[0]][slot[1]] is not None  # type: ignore[index]
    }
    is_unique = all(len({way.get(slot) for way in ways}) == 1 for slot in slots)
    found = assign_members(parameters, groups)
    assert (found is not None) is is_unique
    if found is not None:
        for members, names in zip(own, found, strict=True):
            for i, name in zip(members, names, strict=True):
                assert name == str(i) or (name is None and not is_flat and not has_state[i])
    # Values that are only in the right slots tell all members.
    right = {
        (group, sum(math.prod(shapes[i]) for i in members[:at]) if is_flat else at): str(i)
        for group, members in enumerate(own)
        for at, i in enumerate(members)
    }
    for unlike_later in ((), [name for name, _ in parameters]):
        found = assign_members(
            parameters,
            groups,
            lambda name, slots: {s for s in slots if right.get(s) == name},
            unlike_later,
        )
        assert found == [[str(i) for i in members] for members in own]


def test_values_tell_the_members_of_many_parameters() -> None:
    """Every third is frozen. Each frozen one could be skipped, or a trained one in its place."""
    parameters = [(str(index), (2, 2)) for index in range(600)]
    trained = [[name for name, _ in parameters[group::3]] for group in (0, 1)]
    right = {(g, 4 * at): name for g, names in enumerate(trained) for at, name in enumerate(names)}
    found = assign_members(
        parameters,
        [4 * len(names) for names in trained],
        lambda name, slots: {slot for slot in slots if right.get(slot) == name},
        {name for name, _ in parameters},
    )
    assert found == trained
    assert assign_members(parameters, [4 * len(names) for names in trained]) is None


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
