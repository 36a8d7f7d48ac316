"""The boxes of a DTensor's shards, from its placements on a device mesh."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardwise.errors import LayoutError, StateError
from shardwise.layout import Box, MeshShard, Split, fragments_of_shard, splits_of
from shardwise.state.leaves import Fragment

_KNOWN = (Replicate, Shard, _StridedShard)


def dtensor_fragments(name: str, tensor: DTensor) -> tuple[Fragment, ...]:
    """Return the boxes of a DTensor that this rank holds, with their local memory.

    Raises:
        StateError: a placement is a pending reduction.
        LayoutError: the local tensor does not match the placements.
    """
    local = tensor._local_tensor.detach()  # what to_local() gives, without its autograd node
    return fragments_at(name, local, tuple(tensor.shape), tensor.device_mesh, tensor.placements)


def fragments_at(
    name: str,
    local: torch.Tensor,
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
) -> tuple[Fragment, ...]:
    """Return the boxes of a local tensor that is sharded as a DTensor of these placements is."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    splits = _splits(tuple(mesh.shape), tuple(coordinate), placements)
    if splits is None:
        pending = next(p for p in placements if not isinstance(p, _KNOWN))
        raise StateError(
            f"{name}: its placement is {pending}: ranks hold summands that are not reduced yet; "
            "redistribute it to Replicate() or Shard() first"
        )
    pairs, size = _boxes(shape, splits)
    if size != local.numel():
        raise LayoutError(
            f"{name}: the local tensor has shape {list(local.shape)}, but "
            f"{placements} of {list(shape)} over mesh {tuple(mesh.shape)} give this rank another"
        )
    if len(pairs) == 1:
        return (Fragment(pairs[0][0], local),)
    return tuple(Fragment(box, local[within.slices()]) for box, within in pairs)


@lru_cache(maxsize=4096)
def _boxes(shape: tuple[int, ...], splits: tuple[Split, ...]) -> tuple[list[tuple[Box, Box]], int]:
    pairs = fragments_of_shard(shape, splits)
    return pairs, sum(box.size for box, _ in pairs)


@lru_cache(maxsize=4096)
def _splits(
    mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[Split, ...] | None:
    """Return how placements split a tensor, in the order of the splits; None if one is Partial."""
    if not all(isinstance(placement, _KNOWN) for placement in placements):
        return None
    shards = [
        MeshShard(i, p.dim, int(p.split_factor) if isinstance(p, _StridedShard) else 1)
        for i, p in enumerate(placements)
        if isinstance(p, (Shard, _StridedShard))
    ]
    return splits_of(mesh, coordinate, shards)
