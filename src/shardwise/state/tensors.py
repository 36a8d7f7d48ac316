"""Describe tensors of any kind as `TensorLeaf`s: plain ones, DTensors, subclasses and arrays.

`Parameter` and `FlatRange` describe parameters as optimizers hold them: their names, and their
ranges in flattened tensors.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from shardwise.boxes import (
    Box,
    Sharding,
    ShardPlacement,
    Split,
    boxes_of_range,
    shard_boxes,
    splits_of,
)
from shardwise.errors import LayoutError, StateError
from shardwise.manifest.dtypes import DTYPES
from shardwise.state.local_state import Fragment, Shards, TensorLeaf

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
    if type(tensor) not in _PLAIN:
        if is_lazy(tensor):
            raise StateError(
                f"{name}: a lazy parameter has no shape before the module's first forward: run the "
                "module once before saving or loading"
            )
        if is_dtensor(tensor):
            return _sharded_leaf(name, tensor, tensor)
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


def _sharded_leaf(name: str, value: torch.Tensor, like: DTensor) -> TensorLeaf:
    """Return the part of a DTensor that this rank holds; none on a rank outside of its mesh.

    Args:
        name: the name of the tensor.
        value: the DTensor, or a local tensor that is sharded like it.
        like: the DTensor.

    Raises:
        StateError: a placement is a pending reduction, or the local tensor has no memory.
        LayoutError: the local tensor does not match the placements.
    """
    local = detach_checked(name, _local_tensor(value))
    shape, mesh, placements = tuple(like.shape), like.device_mesh, like.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return TensorLeaf(name, value.dtype, shape, (), _tie_key(value, ()))
    splits, pending = _splits_of_placements(tuple(mesh.shape), tuple(coordinate), placements)
    if pending is not None:
        raise StateError(
            f"{name}: the DTensor has the placement {pending}, so ranks hold partial sums that "
            "are not reduced yet: redistribute it to Replicate() or Shard() first"
        )
    try:
        pairs = shard_boxes(shape, splits)
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}: correct the placements {placements}") from error
    size = sum(box.size for box, _ in pairs)
    # Without elements, the other sizes of the local tensor do not matter.
    part = [max(stops) for stops in zip(*(at.stop for _, at in pairs), strict=True)]
    if size != local.numel() or (size and part != list(local.shape)):
        raise LayoutError(
            f"{name}: the local tensor has shape {list(local.shape)}, but this rank's "
            f"part of the global shape {list(shape)}, with placements {placements} over mesh "
            f"{tuple(mesh.shape)}, has the shape {part}: pass the right shape= and stride= to "
            "DTensor.from_local()"
        )
    fragments = tuple(
        Fragment(box, local if len(pairs) == 1 else local[local_box.slices()])
        for box, local_box in pairs
    )
    key, sharding = _tie_key(value, fragments), Sharding(mesh, splits)
    return TensorLeaf(name, value.dtype, shape, fragments, key, sharding=sharding)


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


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A range of a flat (1-d) local tensor that holds boxes of a global tensor.

    Attributes:
        name: name of the global tensor.
        shape: shape of the global tensor.
        start: index in the local tensor of the range's first element.
        boxes: boxes of the global tensor. They lie end to end in the range, in row-major order.
        padded: whether the last rows of the global tensor may be padding.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    boxes: tuple[Box, ...]
    padded: bool = False

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], start: int = 0) -> FlatRange:
        """Return the range that holds a whole tensor."""
        return cls(name, tuple(shape), start, (Box.whole(tuple(shape)),))

    def cut(self, low: int, high: int) -> FlatRange:
        """Return the part of the range in elements `low:high` of the local tensor.

        The result describes a local tensor that begins at `low`.
        """
        boxes: list[Box] = []
        start_of_box = self.start
        for box in self.boxes:
            first, last = (min(max(edge - start_of_box, 0), box.size) for edge in (low, high))
            for part in boxes_of_range(box.shape, first, last):
                offset = tuple(o + p for o, p in zip(box.offset, part.offset, strict=True))
                boxes.append(Box(offset, part.shape))
            start_of_box += box.size
        return replace(self, start=max(self.start - low, 0), boxes=tuple(boxes))

    def leaf(self, name: str, flat: torch.Tensor, tie_key: object = None) -> TensorLeaf:
        """Return the range of a flat tensor as a leaf of the global tensor."""
        memory, start = detach_checked(name, flat), self.start
        fragments = []
        for box in self.boxes:
            fragments.append(Fragment(box, memory[start : start + box.size].view(box.shape)))
            start += box.size
        return TensorLeaf(
            name, flat.dtype, self.shape, tuple(fragments), tie_key, padded=self.padded
        )


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as an optimizer holds it.

    Attributes:
        tensor: the tensor in the optimizer's param groups.
        name: name of the parameter; unused if `flat` is not empty.
        flat: the ranges of the original parameters, if the tensor is flattened.
        is_copy: whether other ranks save the same parameter, so that this rank only loads it.
    """

    tensor: torch.Tensor
    name: str
    flat: tuple[FlatRange, ...] = ()
    is_copy: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all original parameters in the tensor."""
        return tuple(part.name for part in self.flat) if self.flat else (self.name,)

    @property
    def name_and_shape(self) -> tuple[str, tuple[int, ...]]:
        """The name and global shape of the parameter, or of the first one in a flattened tensor."""
        if self.flat:
            return self.flat[0].name, self.flat[0].shape
        return self.name, tuple(self.tensor.shape)

    def add_prefix(self, prefix: str) -> Parameter:
        """Return the parameter with a prefix before its names."""
        flat = tuple(replace(part, name=f"{prefix}.{part.name}") for part in self.flat)
        return replace(self, name=f"{prefix}.{self.name}", flat=flat)

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds no element of the parameter, and so no optimizer state."""
        return bool(self.flat) and not _local_tensor(self.tensor).numel()

    @property
    def representative_name(self) -> str:
        """The name of the first parameter that is not a scalar.

        The optimizer's state of a flattened tensor, for example `exp_avg`, exists once for all
        parameters in the tensor. So one name is enough to look up its keys.
        """
        for part in self.flat:
            if part.shape:
                return part.name
        return self.names[0]

    def leaves(self, prefix: str, key: str, value: torch.Tensor) -> list[TensorLeaf]:
        """Return a tensor of the optimizer's state as leaves, one for each original parameter.

        The value is sharded like the parameter if it is a DTensor too, or if its shape is that of
        the parameter's local tensor. A value that is sharded in no known way must be a scalar.

        Args:
            prefix: name of the optimizer.
            key: key of the state, for example `exp_avg`.
            value: the state tensor. It has the parameter's layout, or is replicated.

        Raises:
            StateError: the sharding of the value is unknown.
        """
        if not self.flat:
            name = f"{prefix}.{self.name}.{key}"
            if is_dtensor(value) or not is_dtensor(self.tensor):
                return [tensor_leaf(name, value)]
            if value.shape == _local_tensor(self.tensor).shape != self.tensor.shape:
                return [_sharded_leaf(name, value, self.tensor)]
            _refuse_unless_scalar(name, value)
            return [tensor_leaf(name, value)]
        local = _local_tensor(self.tensor)
        same_layout = value.shape == local.shape and value.is_contiguous()
        is_flat = same_layout or (value.dim() == 1 and value.numel() == local.numel())
        leaves = []
        for part in self.flat:
            name = f"{prefix}.{part.name}.{key}"
            if is_flat:
                leaves.append(part.leaf(name, detach_checked(name, value).view(-1)))
            else:
                _refuse_unless_scalar(name, value)
                leaves.append(tensor_leaf(name, value))
        return leaves

    def allocate_state(
        self, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
    ) -> torch.Tensor:
        """Allocate a state tensor of a global shape.

        State with the shape of the parameter is sharded like the parameter. All state of a
        flattened parameter, except scalars, is sharded too. Other state is replicated.
        """
        tensor = self.tensor
        has_shape_of_part = shape != () and shape in {part.shape for part in self.flat}
        if self.flat and (has_shape_of_part or math.prod(shape) > 1):
            return torch.zeros(
                _local_tensor(tensor).shape, dtype=dtype, device=_local_tensor(tensor).device
            )
        if shape == tuple(tensor.shape) and shape != ():
            return torch.zeros_like(tensor, dtype=dtype)
        if not is_dtensor(tensor) or shape == ():
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.distributed.tensor.zeros(
            *shape,
            dtype=dtype,
            device_mesh=tensor.device_mesh,
            placements=[torch.distributed.tensor.Replicate()] * tensor.device_mesh.ndim,
        )


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    # to_local() would make an autograd node.
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def _refuse_unless_scalar(name: str, value: torch.Tensor) -> None:
    if value.numel() > 1:
        raise StateError(
            f"{name}: the optimizer keeps a plain tensor of shape {list(value.shape)} for a "
            "sharded parameter, so its sharding is unknown: let the optimizer keep it as a DTensor"
        )
