"""Regular shardings: a tensor split over the dimensions of a device mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import LayoutError
from shardwise.layout.box import Box

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Split:
    """One mesh dimension's split of a tensor dimension.

    Dimension `dim` is cut into `parts`, as `torch.chunk` does; part `index` is the shard. With
    `strides` > 1 the dimension is first cut into that many runs, and the shard has one part of
    each run. FSDP splits tensors this way that are sharded already.
    """

    dim: int
    parts: int
    index: int
    strides: int = 1


@dataclass(frozen=True, slots=True)
class MeshShard:
    """A placement of a DTensor: a mesh dimension splits dimension `dim` of the tensor.

    `strides` is the split factor of a `_StridedShard`, and 1 for a `Shard`.
    """

    mesh_dim: int
    dim: int
    strides: int = 1


def splits_of(
    mesh: Sequence[int], coordinate: Sequence[int], shards: Sequence[MeshShard]
) -> tuple[Split, ...]:
    """Return the splits by the placements of a DTensor, in order.

    A strided placement whose factor equals the number of later splits of its dimension is a plain
    split after these: FSDP makes it when tensor parallelism has sharded the tensor before.
    """
    splits: list[Split] = []
    afterwards: list[Split] = []
    for shard in shards:
        at = shard.mesh_dim
        later = math.prod(
            mesh[other.mesh_dim]
            for other in shards
            if other.mesh_dim > at and other.dim == shard.dim
        )
        if shard.strides > 1 and shard.strides == later:
            afterwards.insert(0, Split(shard.dim, mesh[at], coordinate[at]))
        else:
            splits.append(Split(shard.dim, mesh[at], coordinate[at], shard.strides))
    return (*splits, *afterwards)


def fragments_of_shard(shape: tuple[int, ...], splits: Sequence[Split]) -> list[tuple[Box, Box]]:
    """Return the boxes of a shard, which `splits` make from left to right.

    Returns:
        Pairs of a box of the global tensor and the same box in the local tensor. Only strided
        splits make several. An empty shard has none.

    Raises:
        LayoutError: the tensor lacks the dimension of a split.
    """
    runs: list[list[Interval]] = [[(0, n)] for n in shape]
    for split in splits:
        if not 0 <= split.dim < len(shape):
            raise LayoutError(f"cannot split dimension {split.dim} of a tensor of shape {shape}")
        runs[split.dim] = _apply(runs[split.dim], split)
    located = [_with_local_start(intervals) for intervals in runs]
    pairs = []
    for combination in itertools.product(*located):
        extent = tuple(stop - start for start, stop, _ in combination)
        if all(extent):
            there = Box(tuple(start for start, _, _ in combination), extent)
            pairs.append((there, Box(tuple(local for _, _, local in combination), extent)))
    return pairs


def _apply(intervals: list[Interval], split: Split) -> list[Interval]:
    total = sum(stop - start for start, stop in intervals)
    taken: list[Interval] = []
    for run in range(split.strides):
        start, stop = _chunk(*_chunk(0, total, split.strides, run), split.parts, split.index)
        taken += _cut(intervals, start, stop)
    return _joined(taken)


def _chunk(start: int, stop: int, parts: int, index: int) -> Interval:
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def _cut(intervals: list[Interval], start: int, stop: int) -> list[Interval]:
    """Return the part `start:stop` of intervals laid end to end."""
    cut: list[Interval] = []
    position = 0
    for low, high in intervals:
        a = low + max(0, start - position)
        b = low + min(high - low, stop - position)
        if a < b:
            cut.append((a, b))
        position += high - low
    return cut


def _joined(intervals: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, stop in intervals:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _with_local_start(intervals: list[Interval]) -> list[tuple[int, int, int]]:
    lengths = [stop - start for start, stop in intervals]
    starts = itertools.accumulate(lengths, initial=0)
    return [(a, b, local) for (a, b), local in zip(intervals, starts, strict=False)]
