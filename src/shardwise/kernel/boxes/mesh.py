"""Regular shardings: tensors that are split over the dimensions of a device mesh."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.kernel.boxes.box import Box
from shardwise.kernel.errors import LayoutError

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Split:
    """The split of a tensor dimension by one mesh dimension.

    Attributes:
        dim: the dimension of the tensor.
        parts: the number of parts, which are cut as by `torch.chunk`.
        index: the index of this shard's part.
        split_factor: if greater than 1, the dimension is first cut into this many runs, and the
            shard has one part of each run. FSDP splits already sharded tensors in this way. For
            example, with 8 rows, `split_factor=2`, `parts=2` and `index=0`, the runs are the rows
            0:4 and 4:8, and the shard has the first part of each: the rows 0:2 and 4:6.
        mesh_dim: the mesh dimension.
    """

    dim: int
    parts: int
    index: int
    split_factor: int = 1
    mesh_dim: int = 0

    def __str__(self) -> str:
        runs = f"of{self.split_factor}runs" if self.split_factor > 1 else ""
        return f"dim{self.dim}={self.index}of{self.parts}{runs}"


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a tensor is split over a device mesh.

    Attributes:
        mesh: identifies the mesh in this process.
        splits: the splits, in the order in which they are applied; empty if every rank holds the
            whole tensor.
    """

    mesh: Hashable
    splits: tuple[Split, ...]


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """A placement of a DTensor that splits the tensor.

    Attributes:
        mesh_dim: the mesh dimension.
        dim: the dimension of the tensor.
        split_factor: the split factor of a `_StridedShard`; 1 for a `Shard`.
    """

    mesh_dim: int
    dim: int
    split_factor: int = 1


def splits_of(
    mesh: Sequence[int],
    coordinate: Sequence[int],
    shards: Sequence[ShardPlacement],
    order: Sequence[int] | None = None,
    *,
    strides_are_order: bool = True,
) -> tuple[Split, ...]:
    """Return the splits of a DTensor, in the order in which they are applied.

    Mostly, this is the order of mesh dimensions. FSDP over tensor parallelism is an exception. For
    example, the mesh is `(fsdp=2, tp=4)`, and the placements are `_StridedShard(0, split_factor=4)`
    and `Shard(0)`: tensor parallelism has split dimension 0 into 4 parts, and FSDP has split each
    part into 2. So the result is two ordinary splits (split factor 1): first tp, then fsdp.

    Args:
        mesh: the size of each mesh dimension.
        coordinate: the coordinate of this rank in the mesh.
        shards: the placements, in the order of mesh dimensions.
        order: the mesh dimensions of the placements, in the order in which they are applied.
            Default: the order that the split factors express, or else that of the mesh.
        strides_are_order: whether split factors can express an order.
    """
    splits = {
        s.mesh_dim: Split(
            s.dim, mesh[s.mesh_dim], coordinate[s.mesh_dim], s.split_factor, s.mesh_dim
        )
        for s in shards
    }
    if order is None and strides_are_order and any(shard.split_factor > 1 for shard in shards):
        order = _order_of_strides(mesh, shards)
    if order is None:
        return tuple(splits.values())
    return tuple(replace(splits[mesh_dim], split_factor=1) for mesh_dim in order)


def _order_of_strides(mesh: Sequence[int], shards: Sequence[ShardPlacement]) -> list[int] | None:
    """Return the order that split factors express; None if they express no order.

    The split factor of a placement is the number of parts into which placements of later mesh
    dimensions have split the tensor before.
    """
    orders: dict[int, list[int]] = {}
    for shard in reversed(shards):
        order, before = orders.setdefault(shard.dim, []), 1
        position = 0
        while before != shard.split_factor:
            if position == len(order):
                return None
            before *= mesh[order[position]]
            position += 1
        order.insert(position, shard.mesh_dim)
    return list(itertools.chain(*orders.values()))


@lru_cache(maxsize=4096)
def shard_boxes(shape: tuple[int, ...], splits: tuple[Split, ...]) -> tuple[tuple[Box, Box], ...]:
    """Return the boxes of a shard. Results are cached, because many tensors are split alike.

    Args:
        shape: the shape of the global tensor.
        splits: the splits, which are applied from left to right.

    Returns:
        Pairs of a box of the global tensor and the same box in the local tensor. Without strided
        splits, there is at most one pair. An empty shard has no boxes.

    Raises:
        LayoutError: the tensor lacks the dimension of a split.
    """
    intervals_by_dim: list[list[Interval]] = [[(0, n)] for n in shape]
    for split in splits:
        if not 0 <= split.dim < len(shape):
            raise LayoutError(
                f"cannot split dimension {split.dim} of a tensor of shape {list(shape)}, which has "
                f"{len(shape)} dimensions"
            )
        intervals_by_dim[split.dim] = _apply_split(intervals_by_dim[split.dim], split)
    located = [_add_local_starts(intervals) for intervals in intervals_by_dim]
    pairs = []
    for combination in itertools.product(*located):
        extent = tuple(stop - start for start, stop, _ in combination)
        if all(extent):
            global_box = Box(tuple(start for start, _, _ in combination), extent)
            pairs.append((global_box, Box(tuple(local for _, _, local in combination), extent)))
    return tuple(pairs)


def _apply_split(intervals: list[Interval], split: Split) -> list[Interval]:
    total = sum(stop - start for start, stop in intervals)
    kept: list[Interval] = []
    for index in range(split.split_factor):
        start, stop = _chunk(*_chunk(0, total, split.split_factor, index), split.parts, split.index)
        kept += _cut_intervals(intervals, start, stop)
    return _join_adjacent(kept)


def _chunk(start: int, stop: int, parts: int, index: int) -> Interval:
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def _cut_intervals(intervals: list[Interval], start: int, stop: int) -> list[Interval]:
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


def _join_adjacent(intervals: list[Interval]) -> list[Interval]:
    joined: list[Interval] = []
    for start, stop in intervals:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _add_local_starts(intervals: list[Interval]) -> list[tuple[int, int, int]]:
    lengths = [stop - start for start, stop in intervals]
    starts = itertools.accumulate(lengths, initial=0)
    return [(a, b, local) for (a, b), local in zip(intervals, starts, strict=False)]
