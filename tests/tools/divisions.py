"""Hypothesis strategies that draw tensors, and divisions of tensors among ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from shardwise.kernel.boxes import Box, Split, boxes_of_range, shard_boxes
from shardwise.kernel.manifest.dtypes import DTYPES

BoxesByRank = tuple[tuple[Box, ...], ...]
"""For each rank, the boxes of a tensor that it holds."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """The name, dtype (as torch names it) and global shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


# An older torch lacks some of the dtypes.
DTYPES_HERE = sorted(name for name in DTYPES if hasattr(torch, name))
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, *, max_count: int = 4) -> list[Tensor]:
    """Draw up to `max_count` small tensors of any dtype, including 0-d and empty tensors."""
    pairs = draw(st.lists(st.tuples(st.sampled_from(DTYPES_HERE), shapes), max_size=max_count))
    return [Tensor(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(pairs)]


@st.composite
def meshes(draw: st.DrawFn, world: int) -> tuple[int, ...]:
    """Draw the shape of a device mesh for a world size."""
    dims = []
    rest = world
    while rest > 1 and draw(st.booleans()):
        size = draw(st.sampled_from([n for n in range(2, rest + 1) if rest % n == 0]))
        dims.append(size)
        rest //= size
    return (*dims, rest)


@st.composite
def boxes_of_ranks(draw: st.DrawFn, shape: tuple[int, ...], world: int) -> BoxesByRank:
    """Draw the boxes of each rank: on a mesh, as a flattened range, or all on one rank."""
    kind = draw(st.sampled_from(["mesh", "mesh", "flat", "one"]))
    if kind == "one":
        owner = draw(st.integers(0, world - 1))
        whole = (Box.whole(shape),) if math.prod(shape) else ()
        return tuple(whole if rank == owner else () for rank in range(world))
    if kind == "flat":
        size = math.prod(shape)
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=world - 1, max_size=world - 1)))
        edges = list(itertools.pairwise([0, *cuts, size]))
        return tuple(tuple(boxes_of_range(shape, a, b)) for a, b in edges)
    mesh = draw(meshes(world))
    # None, or the dimension that a mesh dimension shards, and the number of chunks of each rank
    placement = st.one_of(
        st.none(), st.tuples(st.integers(0, max(0, len(shape) - 1)), st.integers(1, 3))
    )
    placements = [draw(placement) if shape else None for _ in mesh]
    return tuple(_boxes_on_mesh(shape, mesh, placements, rank) for rank in range(world))


def _boxes_on_mesh(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    placements: list[tuple[int, int] | None],
    rank: int,
) -> tuple[Box, ...]:
    coordinate: list[int] = []
    for size in reversed(mesh):
        rank, index = divmod(rank, size)
        coordinate.insert(0, index)
    splits = [
        Split(placement[0], size, index, placement[1])
        for size, index, placement in zip(mesh, coordinate, placements, strict=True)
        if placement is not None
    ]
    return tuple(box for box, _ in shard_boxes(shape, tuple(splits)))
