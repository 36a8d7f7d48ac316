"""Describe tensors of any kind as `TensorLeaf`s: plain ones, DTensors, subclasses and arrays."""

from __future__ import annotations

import sys
import warnings
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeGuard

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from shardwise.boxes import Box, Sharding, ShardPlacement, Split, shard_boxes, splits_of
from shardwise.errors import LayoutError, StateError
from shardwise.manifest.dtypes import DTYPES
from shardwise.state.leaves import Fragment, Shards, TensorLeaf

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

TensorLike = torch.Tensor | Shards | np.ndarray
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPES = frozenset(getattr(torch, name, None) for name in DTYPES)


def tensor_leaf(name: str, tensor: TensorLike) -> TensorLeaf:
    """Return the part of a tensor that this rank holds: a whole tensor or array, or shards.

    Raises:
        StateError: this kind of tensor cannot be saved.
    """
    if isinstance(tensor, np.ndarray):
        tensor = tensor_of_array(name, tensor)
    if tensor.dtype not in _DTYPES:
        raise _unknown_dtype_error(name, tensor.dtype)
    if isinstance(tensor, Shards):
        fragments = tuple(Fragment(f.box, detach_checked(name, f.data)) for f in tensor.fragments)
        return TensorLeaf(name, tensor.dtype, tensor.shape, fragments, id(tensor))
    if type(tensor) not in _PLAIN and is_lazy(tensor):
        raise StateError(
            f"{name}: a lazy parameter has no shape before the module's first forward: run the "
            "module once before saving or loading"
        )
    if is_dtensor(tensor):
        fragments = fragments_like(name, tensor._local_tensor, tensor)
        shape, key = tuple(tensor.shape), _tie_key(tensor, fragments)
        sharding = _sharding_of(name, tensor)
        return TensorLeaf(name, tensor.dtype, shape, fragments, key, sharding=sharding)
    if tensor.is_nested:
        raise StateError(f"{name}: nested tensors cannot be saved; save {name}.to_padded_tensor(0)")
    if tensor.layout != torch.strided:
        raise StateError(f"{name}: {tensor.layout} tensors cannot be saved; save {name}.to_dense()")
    shape = tuple(tensor.shape)
    data = detach_checked(name, tensor)
    after_load = None
    if data.is_conj() or data.is_neg():
        # The memory holds conjugated or negated values: fill a copy, and assign the copy.
        lazy_view, data = data, data.resolve_conj().resolve_neg()
        after_load = partial(lazy_view.copy_, data)
    fragments = (Fragment(_whole_box(shape), data),) if 0 not in shape else ()
    return TensorLeaf(name, tensor.dtype, shape, fragments, _tie_key(tensor, fragments), after_load)


def _unknown_dtype_error(name: str, dtype: torch.dtype) -> StateError:
    if str(dtype).startswith("torch.q"):
        return StateError(
            f"{name}: {dtype} tensors cannot be saved, because their values depend on a "
            f"quantizer: save {name}.int_repr(), .q_scale() and .q_zero_point() instead"
        )
    return StateError(
        f"{name}: this version of shardwise does not know the dtype {dtype}: update shardwise, "
        f"or save {name}.view(torch.uint8)"
    )


@lru_cache(maxsize=4096)
def _whole_box(shape: tuple[int, ...]) -> Box:
    return Box.whole(shape)


def _tie_key(tensor: torch.Tensor, fragments: tuple[Fragment, ...]) -> object:
    """Return a value that is equal for all tensors in the same memory, such as tied weights."""
    if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
        return id(tensor)
    if not fragments:
        return None
    data = fragments[0].data
    if data.is_meta:
        return id(tensor)
    if not data.data_ptr():
        return None
    memory = data.data_ptr(), data.shape, data.stride(), data.device
    return memory, tensor.dtype, fragments[0].box


def tensor_of_array(name: str, array: np.ndarray) -> torch.Tensor:
    """Return a tensor that shares a numpy array's memory.

    Raises:
        StateError: torch does not support its dtype or strides.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise StateError(
            f"{name}: this NumPy array of {array.dtype} with strides {array.strides} cannot become "
            f"a tensor: {error}; save array.copy(), as an array of numbers"
        ) from error


def is_instance(value: object, module: str, name: str) -> bool:
    """Return whether a value is of the class `name` of a module.

    The module is not imported: if nobody has imported it, there are no instances.
    """
    found = getattr(sys.modules.get(module), name, None)
    return isinstance(found, type) and isinstance(value, found)


def detach_checked(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same values, detached, whose memory holds them.

    If the tensor is the pending result of a collective, wait for it. Otherwise, the result shares
    the memory of the tensor.

    Args:
        name: the name of the tensor, for the error message.
        tensor: any tensor but a DTensor.

    Raises:
        StateError: the tensor wraps other tensors, or has no values.
    """
    if type(tensor) in _PLAIN:
        return tensor.detach()
    while is_instance(tensor, "torch.distributed._functional_collectives", "AsyncCollectiveTensor"):
        tensor = tensor.trigger_wait()  # type: ignore[attr-defined]
    if type(tensor) not in _PLAIN and _has_no_memory(tensor):
        raise StateError(f"{name}: {_why_without_memory(tensor)}")
    return tensor.detach()


def _has_no_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor on a device has no address, though its storage was not freed."""
    if tensor.is_meta or not tensor.numel():
        return False
    try:
        return not tensor.data_ptr() and bool(tensor.untyped_storage().nbytes())
    except (NotImplementedError, RuntimeError):
        return True


def _why_without_memory(tensor: torch.Tensor) -> str:
    found = type(tensor)
    class_name = f"{found.__module__}.{found.__qualname__}"
    if is_instance(tensor, "torch._subclasses.fake_tensor", "FakeTensor"):
        return f"a {class_name} has no values: create the tensor outside of FakeTensorMode"
    parts = ""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        parts = f" ({', '.join(flatten()[0])})"
    return (
        f"a {class_name} has no memory of its own, because it wraps other tensors{parts}: put "
        "its parts into the state, or a plain tensor, for example .dequantize()"
    )


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor, without the slow import of DTensor's module."""
    return type(value) not in _PLAIN and is_instance(value, "torch.distributed.tensor", "DTensor")


def _sharding_of(name: str, tensor: DTensor) -> Sharding | None:
    """Return how a DTensor is split over its mesh; None on a rank outside of the mesh.

    Raises:
        StateError: a placement is a pending reduction.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    splits, pending = _splits_of_placements(tuple(mesh.shape), tuple(coordinate), tensor.placements)
    if pending is not None:
        raise StateError(
            f"{name}: the DTensor has the placement {pending}, so ranks hold partial sums that "
            "are not reduced yet: redistribute it to Replicate() or Shard() first"
        )
    return Sharding(mesh, splits)


def fragments_like(name: str, local: torch.Tensor, like: DTensor) -> tuple[Fragment, ...]:
    """Return the boxes of a DTensor that this rank holds, with memory.

    Args:
        local: the memory: the DTensor's own local tensor, or one that is sharded alike.

    Raises:
        StateError: a placement is a pending reduction, or the local tensor has no memory.
        LayoutError: the local tensor does not match the placements.
    """
    local, shape = detach_checked(name, local), tuple(like.shape)
    sharding = _sharding_of(name, like)
    if sharding is None:
        return ()
    try:
        pairs = shard_boxes(shape, sharding.splits)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}: correct the placements {like.placements}") from error
    size = sum(box.size for box, _ in pairs)
    if size != local.numel():
        raise LayoutError(
            f"{name}: the local tensor has shape {list(local.shape)}, but this rank's "
            f"part of the global shape {list(shape)}, with placements {like.placements} over mesh "
            f"{tuple(like.device_mesh.shape)}, has {size} elements: pass the right shape= and "
            "stride= to DTensor.from_local()"
        )
    if len(pairs) == 1:
        return (Fragment(pairs[0][0], local),)
    return tuple(Fragment(box, local[local_box.slices()]) for box, local_box in pairs)


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
        ShardPlacement(
            mesh_dim,
            placement.dim,
            int(placement.split_factor) if isinstance(placement, _StridedShard) else 1,
        )
        for mesh_dim, placement in enumerate(placements)
        if isinstance(placement, (Shard, _StridedShard))
    ]
    return splits_of(mesh, coordinate, shards), None
