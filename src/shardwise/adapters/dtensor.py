"""Compute the boxes of a DTensor's shards from its placements on a device mesh."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import LayoutError, StateError
from shardwise.layout import Box, MeshShard, Sharding, Split, fragments_of_shard, splits_of
from shardwise.state.leaves import Fragment
from shardwise.state.tensor_memory import is_instance, with_memory

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor, without the slow import of DTensor's module."""
    return is_instance(value, "torch.distributed.tensor", "DTensor")


def fragments_of_dtensor(name: str, tensor: DTensor) -> tuple[Fragment, ...]:
    """Return the boxes of a DTensor that this rank holds, with their local memory.

    Raises:
        StateError: a placement is a pending reduction.
        LayoutError: the local tensor does not match the placements.
    """
    return fragments_of_local_tensor(
        name,
        tensor._local_tensor,  # to_local() would make an autograd node
        tuple(tensor.shape),
        tensor.device_mesh,
        tensor.placements,
    )


def sharding_of_dtensor(tensor: DTensor) -> Sharding | None:
    """Return how a DTensor is split over its mesh; None on a rank outside of the mesh."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    splits, _ = _splits_of_placements(tuple(mesh.shape), tuple(coordinate), tensor.placements)
    return Sharding(mesh, splits)


def fragments_of_local_tensor(
    name: str,
    local: torch.Tensor,
    shape: tuple[int, ...],
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
) -> tuple[Fragment, ...]:
    """Return the boxes of a local tensor, given the global shape, the mesh and the placements.

    Raises:
        StateError: a placement is a pending reduction, or the local tensor has no memory.
        LayoutError: the local tensor does not match the placements.
    """
    local = with_memory(name, local)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    splits, pending = _splits_of_placements(tuple(mesh.shape), tuple(coordinate), placements)
    if pending is not None:
        raise StateError(
            f"{name}: the DTensor has the placement {pending}, so ranks hold partial sums that "
            "are not reduced yet: redistribute it to Replicate() or Shard() first"
        )
    try:
        pairs, size = _boxes_and_size(shape, splits)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}: correct the placements {placements}") from error
    if size != local.numel():
        raise LayoutError(
            f"{name}: the local tensor has shape {list(local.shape)}, but this rank's "
            f"part of the global shape {list(shape)}, with placements {placements} over mesh "
            f"{tuple(mesh.shape)}, has {size} elements: pass the right shape= and stride= to "
            "DTensor.from_local()"
        )
    if len(pairs) == 1:
        return (Fragment(pairs[0][0], local),)
    return tuple(Fragment(box, local[local_box.slices()]) for box, local_box in pairs)


@lru_cache(maxsize=4096)
def _boxes_and_size(
    shape: tuple[int, ...], splits: tuple[Split, ...]
) -> tuple[list[tuple[Box, Box]], int]:
    pairs = fragments_of_shard(shape, splits)
    return pairs, sum(box.size for box, _ in pairs)


@lru_cache(maxsize=4096)
def _splits_of_placements(
    mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[tuple[Split, ...], Placement | None]:
    """Return the splits of a tensor in the order in which they apply, and a pending reduction."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    for placement in placements:
        if not isinstance(placement, (Replicate, Shard, _StridedShard)):
            return (), placement
    shards = [
        MeshShard(
            mesh_dim,
            placement.dim,
            int(placement.split_factor) if isinstance(placement, _StridedShard) else 1,
        )
        for mesh_dim, placement in enumerate(placements)
        if isinstance(placement, (Shard, _StridedShard))
    ]
    return splits_of(mesh, coordinate, shards), None
