"""Describe tensors of any kind as `TensorLeaf`s: plain ones, DTensors, subclasses and arrays."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.kernel.boxes import (
    Box,
    Sharding,
    ShardPlacement,
    Split,
    shard_boxes,
    splits_of,
)
from shardwise.kernel.errors import LayoutError, StateError
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.kernel.state.local_state import Fragment, Shards, TensorLeaf
from shardwise.kernel.state.stated_geometry import Geometry, stated_geometry

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

SHARD = "@shard:"
"""Separates the name of state from the shard that it belongs to."""
TensorLike = torch.Tensor | Shards | np.ndarray
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_PENDING = "torch.distributed._functional_collectives", "AsyncCollectiveTensor"
_DTYPES = frozenset(getattr(torch, name, None) for name in DTYPES)


def tensor_leaf(name: str, tensor: TensorLike, parameter: torch.Tensor | None = None) -> TensorLeaf:
    """Return the part of a tensor that this rank holds: a whole tensor or array, or shards.

    Args:
        name: the name of the tensor.
        tensor: the tensor.
        parameter: for a tensor of an optimizer's state, its parameter. If the tensor has the shape
            of a local tensor that states its boxes, it holds the same boxes.

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
    if type(tensor) not in _PLAIN:
        if is_lazy(tensor):
            raise StateError(
                f"{name}: a lazy parameter has no shape before the module's first forward: run the "
                "module once before saving or loading"
            )
        if is_dtensor(tensor):
            return sharded_leaf(name, tensor, tensor)
    if tensor.is_nested:
        raise StateError(f"{name}: nested tensors cannot be saved; save {name}.to_padded_tensor(0)")
    if tensor.layout != torch.strided:
        raise StateError(f"{name}: {tensor.layout} tensors cannot be saved; save {name}.to_dense()")
    stated = stated_geometry(name, tensor)
    if stated is None and parameter is not None and parameter.shape == tensor.shape:
        stated = None if is_dtensor(parameter) else stated_geometry(name, parameter)
    if stated is not None:
        return _stated_leaf(name, tensor, stated)
    shape = tuple(tensor.shape)
    data = detach_checked(name, tensor)
    after_load = None
    if data.is_conj() or data.is_neg():
        # The memory holds conjugated or negated values: fill a copy, and assign the copy.
        lazy_view, data = data, data.resolve_conj().resolve_neg()
        after_load = partial(lazy_view.copy_, data)
    fragments = (Fragment(_whole_box(shape), data),) if 0 not in shape else ()
    return TensorLeaf(name, tensor.dtype, shape, fragments, _tie_key(tensor, fragments), after_load)


def _stated_leaf(name: str, tensor: torch.Tensor, stated: Geometry) -> TensorLeaf:
    """Return the part of a global tensor that a plain local tensor holds."""
    data = tensor if stated.shards else detach_checked(name, tensor)
    if data.is_conj() or data.is_neg():
        raise StateError(
            f"{name}: a conjugated or negated view cannot be saved as part of a global tensor: "
            "save the tensor without .conj(), or .resolve_conj()"
        )
    return TensorLeaf(name, tensor.dtype, stated.shape, stated.fragments(data), id(tensor))


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
        StateError: torch does not support its dtype or strides, or the array has a mask.
    """
    if isinstance(array, np.ma.MaskedArray):
        raise StateError(
            f"{name}: a masked array would lose its mask: save array.data and array.mask"
        )
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
    while is_instance(tensor, *_PENDING):
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
        "its parts into the state, or a plain tensor"
        + (", for example .dequantize()" if found.dequantize is not torch.Tensor.dequantize else "")
    )


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor, without the slow import of DTensor's module."""
    return type(value) not in _PLAIN and is_instance(value, "torch.distributed.tensor", "DTensor")


def is_composite(value: Any) -> bool:
    """Return whether a value is a tensor that consists of others, or a DTensor of such tensors.

    It wraps them, or it is sparse, jagged or quantized. A `TensorClass` says how these are saved;
    see `shardwise.ports.tensor_classes`.
    """
    if type(value) in _PLAIN:  # nearly all values
        return value.layout is not torch.strided or value.is_quantized
    if not isinstance(value, torch.Tensor):
        return False
    local = local_tensor(value)
    if local.layout is not torch.strided or local.is_quantized:
        return True
    return is_traceable_wrapper_subclass(local) and not is_instance(local, *_PENDING)


def is_shard(name: str, value: TensorLike) -> bool:
    """Return whether a value is a part of a global tensor, by its type or by what it states."""
    if isinstance(value, np.ndarray):
        return False
    if isinstance(value, Shards) or hasattr(value, "placements"):
        return True
    return stated_geometry(name, value) is not None


def sharded_leaf(
    name: str, value: torch.Tensor, like: DTensor, parameter: DTensor | None = None
) -> TensorLeaf:
    """Return the part of a DTensor that this rank holds; none on a rank outside of its mesh.

    Args:
        name: the name of the tensor.
        value: the DTensor, or a local tensor that is sharded like it.
        like: the DTensor.
        parameter: the DTensor whose local tensor may state its boxes. Default: `like`.

    Raises:
        StateError: a placement is a pending reduction, or the local tensor has no memory.
        LayoutError: the local tensor does not match the placements.
    """
    parts = parts_of_dtensor(name, like)
    if parts is None:
        return TensorLeaf(name, value.dtype, tuple(like.shape), (), _tie_key(value, ()))
    pairs, sharding = parts
    shape, placements = tuple(like.shape), like.placements
    held = local_tensor(value)
    stated = stated_geometry(name, held, like)
    owner = local_tensor(like if parameter is None else parameter)
    if stated is None and owner.shape == held.shape:
        stated = stated_geometry(name, owner, like)
    local = held if stated is not None and stated.shards else detach_checked(name, held)
    if local.is_conj() or local.is_neg():
        raise StateError(
            f"{name}: the local tensor of the DTensor is a conjugated or negated view: save "
            "its values, for example DTensor.from_local(x.to_local().resolve_conj(), …)"
        )
    size = sum(box.size for box, _ in pairs)
    # Without elements, the other sizes of the local tensor do not matter.
    part = [max(stops) for stops in zip(*(at.stop for _, at in pairs), strict=True)]
    fits = size == local.numel() and (not size or part == list(local.shape))
    if stated is not None:
        fragments = stated.fragments(local)
        sharding = Sharding(sharding.mesh, ())
    elif fits:
        fragments = tuple(
            Fragment(box, local if len(pairs) == 1 else local[local_box.slices()])
            for box, local_box in pairs
        )
    else:
        raise LayoutError(
            f"{name}: the local tensor has shape {list(local.shape)}, but this rank's "
            f"part of the global shape {list(shape)}, with placements {placements} over mesh "
            f"{tuple(like.device_mesh.shape)}, has the shape {part}: pass the right shape= and "
            "stride= to DTensor.from_local()"
        )
    key = _tie_key(value, fragments)
    return TensorLeaf(name, value.dtype, shape, fragments, key, sharding=sharding)


def parts_of_dtensor(
    name: str, tensor: DTensor
) -> tuple[Sequence[tuple[Box, Box]], Sharding] | None:
    """Return the boxes of a DTensor that this rank holds, each with the same box in the local
    tensor, and the split that results in them; None on a rank outside of its mesh.

    Raises:
        StateError: a placement is a pending reduction.
        LayoutError: the placements do not fit the shape.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    splits, problem = _splits_of_placements(
        tuple(mesh.shape), tuple(coordinate), placements, *_order_of_shards(tensor)
    )
    if problem is not None:
        raise StateError(f"{name}: the DTensor has {problem}")
    try:
        return shard_boxes(tuple(tensor.shape), splits), Sharding(mesh, splits)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}: correct the placements {placements}") from error


def _order_of_shards(tensor: DTensor) -> tuple[tuple[int, ...] | None, bool]:
    """Return the mesh dimensions that split a DTensor, in the order in which they do so.

    The order is None if it is that of the mesh, or if strided placements may express it; the second
    result tells whether they may. PyTorch 2.9 knows no other orders.
    """
    spec = tensor._spec
    strides_are_order = getattr(spec, "use_strided_shard_as_shard_order", True) is not False
    order = getattr(spec, "shard_order", None) or ()
    if all(sorted(dims) == list(dims) for _, dims in order):
        return None, strides_are_order
    return tuple(chain(*(dims for _, dims in order))), strides_are_order


def mesh_axes(tensors: Iterable[TensorLeaf]) -> dict[str, int]:
    """Return the coordinate of this rank in each named axis of the meshes of its tensors.

    Example: `{"pp": 1, "dp": 3, "tp": 0}`. Axes without names are left out.
    """
    meshes: dict[Any, None]
    meshes = {leaf.sharding.mesh: None for leaf in tensors if leaf.sharding is not None}
    axes: dict[str, int] = {}
    for mesh in meshes:
        names = getattr(mesh, "mesh_dim_names", None) or ()
        coordinate = mesh.get_coordinate() if names else None
        for name, index in zip(names, coordinate or (), strict=False):
            axes.setdefault(name, index)
    return axes


@lru_cache(maxsize=4096)
def _splits_of_placements(
    mesh: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
    order: tuple[int, ...] | None,
    strides_are_order: bool,
) -> tuple[tuple[Split, ...], str | None]:
    """Return the splits of a tensor in the order in which they apply, and what is unsupported."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    for placement in placements:
        if not isinstance(placement, (Replicate, Shard, _StridedShard)):
            return (), (
                f"the placement {placement}, so ranks hold partial sums that are not reduced yet: "
                "redistribute it to Replicate() or Shard() first"
            )
    shards = [
        ShardPlacement(
            mesh_dim,
            placement.dim,
            int(placement.split_factor) if isinstance(placement, _StridedShard) else 1,
        )
        for mesh_dim, placement in enumerate(placements)
        if isinstance(placement, (Shard, _StridedShard))
    ]
    if order is not None and (
        sorted(order) != [shard.mesh_dim for shard in shards]
        or any(shard.split_factor > 1 for shard in shards)
    ):
        return (), f"the shard order {order}, which does not fit its placements {placements}"
    splits = splits_of(mesh, coordinate, shards, order, strides_are_order=strides_are_order)
    return splits, None


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, and any other tensor itself."""
    # to_local() would make an autograd node.
    return tensor._local_tensor if is_dtensor(tensor) else tensor
