"""Comparisons of replicas of random layouts: a flipped bit is found, and nothing else is."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.divergence import replica_sets
from shardwise.divergence.comparison import ReplicaComparison
from shardwise.divergence.differences import Divergence, DivergencePolicy
from shardwise.divergence.replica_sets import saves_per_round
from shardwise.events import Recorder
from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES
from shardwise.plan.save import plan_save
from shardwise.state.leaves import Fragment
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.breadth import examples
from tests.plan.test_save import described, world_of, worlds
from tests.tools.divisions import BoxesByRank, Tensor

World = tuple[list[Tensor], list[BoxesByRank], int]
Flip = tuple[int, int, int, int]
"""A rank, and which of its fragments, elements and bits to flip; modulo their numbers."""


def fragments_of(case: World, rank: int) -> list[tuple[Tensor, Fragment]]:
    """The fragments of a rank. Every tensor holds random bytes: also NaNs, and odd booleans."""
    listed, held, _ = case
    found = []
    for i, (tensor, boxes) in enumerate(zip(listed, held, strict=True)):
        itemsize = DTYPES[tensor.dtype].itemsize
        random = np.random.default_rng(i).integers(0, 256, (*tensor.shape, itemsize), np.uint8)
        for box in boxes[rank]:
            part = np.ascontiguousarray(random[box.slices()])
            data = torch.from_numpy(part).view(getattr(torch, tensor.dtype)).reshape(box.shape)
            found.append((tensor, Fragment(box, data)))
    return found


def compare_for_a_round(case: World, flip: Flip | None) -> list[tuple[tuple[Divergence, ...], int]]:
    """Compare until a difference is found, or for a round; what each rank found, and when."""
    listed, held, world = case
    descriptions = [
        described([(t, list(boxes[rank])) for t, boxes in zip(listed, held, strict=True)])
        for rank in range(world)
    ]
    world_of_ranks = world_of(descriptions)

    def run(group: ThreadGroup) -> tuple[tuple[Divergence, ...], int]:
        description = descriptions[group.rank]
        fragments = [each for _, each in fragments_of(case, group.rank)]
        if flip is not None and flip[0] == group.rank:
            data = fragments[flip[1]].data.view(-1).view(torch.uint8)
            data[flip[2]] ^= 1 << flip[3]
        plan = plan_save(world_of_ranks, group.rank, description)
        comparison = ReplicaComparison(DivergencePolicy((("*", "warn"),)))
        for step in range(saves_per_round(world)):
            save_id = f"{0xFFFFFFFE:x}{step:08x}"
            sample = comparison.begin(save_id, step, plan, fragments)
            if sample is not None:
                sample.take_from_state()
            comparison.compare_last(group, Recorder())
            if comparison.found:
                return comparison.found, step
        return (), -1

    with mock.patch.object(replica_sets, "SHARE", 2):
        return run_ranks(world, run)


@examples(25)
@given(worlds())
def test_equal_replicas_are_never_reported(case: World) -> None:
    assert compare_for_a_round(case, None) == [((), -1)] * case[2]


@examples(40)
@given(worlds(), st.data())
def test_a_flipped_bit_is_found_within_a_round_and_named(case: World, data: st.DataObject) -> None:
    listed, held, world = case
    rank = data.draw(st.integers(0, world - 1))
    fragments = fragments_of(case, rank)
    if not fragments:
        return
    index = data.draw(st.integers(0, len(fragments) - 1))
    tensor, fragment = fragments[index]
    itemsize = DTYPES[tensor.dtype].itemsize
    byte = data.draw(st.integers(0, fragment.box.size * itemsize - 1))
    flip = rank, index, byte, data.draw(st.integers(0, 7))
    boxes = next(own for t, own in zip(listed, held, strict=True) if t == tensor)
    holders = [r for r in range(world) if fragment.box in boxes[r]]
    found = compare_for_a_round(case, flip)
    assert found == [found[0]] * world
    if len(holders) == 1:
        assert found[0] == ((), -1), "nobody else holds it"
        return
    ((divergence,), step) = found[0]
    with mock.patch.object(replica_sets, "SHARE", 2):
        assert step < saves_per_round(len(holders))
    assert divergence.tensor == tensor.name
    assert sorted(r for group in divergence.groups for r in group) == holders
    assert divergence.minority == ((rank,) if len(holders) > 2 else ())
    element = np.unravel_index(byte // itemsize, fragment.box.shape)
    position = tuple(o + int(i) for o, i in zip(fragment.box.offset, element, strict=True))
    (box,) = divergence.boxes
    assert box.contains(Box(position, (1,) * len(position)))
    assert box.size * itemsize <= max(64, math.prod(fragment.box.shape) * itemsize)
