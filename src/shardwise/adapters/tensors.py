"""A tensor of any kind as a leaf: what this rank holds of which global tensor."""

from __future__ import annotations

import warnings
from functools import lru_cache, partial

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parameter import is_lazy

from shardwise.errors import LayoutError, StateError
from shardwise.layout import Box, MeshShard, Split, fragments_of_shard, splits_of
from shardwise.manifest.dtypes import DTYPES
from shardwise.state.leaves import Fragment, Shards, TensorLeaf

TensorLike = torch.Tensor | Shards
_KNOWN = (Replicate, Shard, _StridedShard)


def tensor_leaf(name: str, tensor: TensorLike) -> TensorLeaf:
    """What this rank holds of a tensor: all of a plain one, its shard of a DTensor.

    Raises:
        StateError: the tensor has no values that could be stored as they are.
    """
    if isinstance(tensor, Shards):
        check_dtype(name, tensor.dtype)
        return TensorLeaf(name, tensor.dtype, tensor.shape, tensor.fragments, id(tensor))
    check_dtype(name, tensor.dtype)
    if is_lazy(tensor):
        raise StateError(f"{name}: it has no shape before the module's first forward")
    if isinstance(tensor, DTensor):
        shape, fragments = tuple(tensor.shape), dtensor_fragments(name, tensor)
        return TensorLeaf(name, tensor.dtype, shape, fragments, _identity(tensor, fragments))
    if tensor.is_nested:
        raise StateError(f"{name}: nested tensors are not stored; save {name}.to_padded_tensor(0)")
    if tensor.layout != torch.strided:
        raise StateError(f"{name}: {tensor.layout} tensors are not stored; save {name}.to_dense()")
    shape = tuple(tensor.shape)
    data = tensor.detach()
    finish = None
    if data.is_conj() or data.is_neg():
        # Its memory holds other values than it has: fill a copy, and assign that to it.
        lazy, data = data, data.resolve_conj().resolve_neg()
        finish = partial(lazy.copy_, data)
    whole = (Fragment(_whole(shape), data),) if data.numel() else ()
    return TensorLeaf(name, tensor.dtype, shape, whole, _identity(tensor, whole), finish)


def check_dtype(name: str, dtype: torch.dtype) -> str:
    """The name of a dtype that checkpoints hold.

    Raises:
        StateError: they do not hold this one.
    """
    text = _stored(dtype)
    if text is None:
        raise StateError(
            f"{name}: {dtype} tensors are not stored, because their values need a quantizer "
            "beside them: save q.int_repr(), q.q_scale() and q.q_zero_point()"
        )
    return text


def dtensor_fragments(name: str, tensor: DTensor) -> tuple[Fragment, ...]:
    """The boxes of a DTensor that this rank holds, and their local memory.

    Raises:
        StateError: a placement is a pending reduction.
        LayoutError: the local tensor is not what its placements say.
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
    """The same for a local tensor that lies as a DTensor of these placements would."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    splits = _splits(tuple(mesh.shape), tuple(coordinate), placements)
    if splits is None:
        pending = next(p for p in placements if not isinstance(p, _KNOWN))
        raise StateError(
            f"{name}: its placement is {pending}: every rank has a summand, and none the value; "
            "redistribute it to Replicate() or Shard() first"
        )
    pairs, size = _boxes(shape, splits)
    if size != local.numel():
        raise LayoutError(
            f"{name}: the local tensor has shape {list(local.shape)}, which is not what "
            f"{placements} of {list(shape)} over mesh {tuple(mesh.shape)} gives this rank"
        )
    if len(pairs) == 1:
        return (Fragment(pairs[0][0], local),)
    return tuple(Fragment(box, local[within.slices()]) for box, within in pairs)


@lru_cache
def _stored(dtype: torch.dtype) -> str | None:
    text = str(dtype).removeprefix("torch.")
    return text if text in DTYPES else None


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box.whole(shape)


@lru_cache(maxsize=4096)
def _boxes(shape: tuple[int, ...], splits: tuple[Split, ...]) -> tuple[list[tuple[Box, Box]], int]:
    pairs = fragments_of_shard(shape, splits)
    return pairs, sum(box.size for box, _ in pairs)


@lru_cache(maxsize=4096)
def _splits(
    mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[Split, ...] | None:
    """How placements split a tensor, in the order of the splits; None if one is no sharding."""
    if not all(isinstance(placement, _KNOWN) for placement in placements):
        return None
    shards = [
        MeshShard(i, p.dim, int(p.split_factor) if isinstance(p, _StridedShard) else 1)
        for i, p in enumerate(placements)
        if isinstance(p, (Shard, _StridedShard))
    ]
    return splits_of(mesh, coordinate, shards)


def _identity(tensor: torch.Tensor, fragments: tuple[Fragment, ...]) -> object:
    """Equal for two names of one memory. A parameter is itself, even where its shard is empty."""
    if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
        return id(tensor)
    if not fragments:
        return None
    data = fragments[0].data
    if data.is_meta:
        return id(tensor)
    memory = data.data_ptr(), data.shape, data.stride(), data.device
    return memory, tensor.dtype, fragments[0].box


def tensor_of_array(name: str, array: np.ndarray) -> torch.Tensor:
    """A tensor over a numpy array's memory.

    Raises:
        StateError: torch has no such type, or no such memory layout.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise StateError(
            f"{name}: numpy array of {array.dtype} with strides {array.strides}: {error}"
        ) from error
