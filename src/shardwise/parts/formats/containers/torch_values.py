"""Values of torch in pickles: tensors, shards of tensors and storages become ranges of files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from shardwise.kernel.boxes import Box, ShardPlacement, shard_boxes, splits_of
from shardwise.kernel.errors import LayoutError
from shardwise.kernel.manifest.dtypes import DTYPES
from shardwise.parts.formats.containers.pickle_values import (
    AllowedCallable,
    AllowedNames,
    PickledInstance,
    UnknownObject,
    UnsupportedValueError,
    allow_as_instances,
    call_with,
)
from shardwise.parts.formats.containers.wrapper_classes import (
    MOST_DIMS,
    rebuild_composite,
    require_sizes,
)
from shardwise.parts.formats.foreign import StoredArray, StoredComposite, StoredPart

_REBUILD_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_SHARD_PACKAGE = "torch.distributed._shard"
_SHARDED_TENSOR = f"{_SHARD_PACKAGE}.sharded_tensor.api.ShardedTensor"
_PROCESS_GROUP_STATE = "ProcessGroupState"
_SUB_BYTE = re.compile(r"u?int[1-7]")
"""The names of dtypes that tensors of codes have as a plain value."""
LARGEST_EXPANDED = 2**26
"""The largest size in bytes of a tensor that is larger than its storage, because strides are 0."""


def _rebuild_tensor(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    requires_grad: object = False,
    hooks: object = None,
    metadata: object = None,
) -> object:
    if isinstance(storage, UnknownObject):
        return storage
    if not isinstance(storage, StoredArray):
        raise TypeError("a tensor has no storage")
    return _make_array(storage, storage.dtype, offset, shape, stride, metadata)


def _rebuild_tensor_v3(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> object:
    if not isinstance(storage, StoredArray) or not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor has no storage, or no dtype")
    return _make_array(storage, name_of_dtype(dtype), offset, shape, stride, metadata)


def _make_array(
    storage: StoredArray,
    dtype: str,
    offset: object,
    shape: object,
    stride: object,
    metadata: object,
) -> StoredArray:
    if metadata:
        raise UnsupportedValueError(
            "a conjugated or negated view, whose values differ from the stored bytes",
            "save tensor.resolve_conj().resolve_neg() instead",
        )
    if not (isinstance(shape, tuple) and isinstance(stride, tuple) and isinstance(offset, int)):
        raise TypeError("a tensor's shape and strides are not tuples, or its offset is no integer")
    if len(shape) != len(stride) or len(shape) > MOST_DIMS:
        raise ValueError(
            f"a tensor has {len(shape)} sizes and {len(stride)} strides; they must be "
            f"equally many, and at most {MOST_DIMS}"
        )
    if storage.stride != (1,):
        raise TypeError("the storage of a tensor is another tensor")
    if dtype not in DTYPES:
        raise UnsupportedValueError(f"a tensor of dtype {dtype}", "save it as a tensor of bytes")
    storage_size = storage.shape[0] * storage.itemsize
    itemsize = DTYPES[dtype].itemsize
    extent, size = 1, itemsize
    for n, step in zip(shape, stride, strict=True):
        if type(n) is not int or type(step) is not int or n < 0 or step < 0:
            raise ValueError(
                f"a tensor has size {n!r:.40} and stride {step!r:.40} in one dimension; both must "
                "be integers and not negative"
            )
        extent += (n - 1) * step
        size *= n
    if offset < 0 or (size and (offset + extent) * itemsize > storage_size):
        raise ValueError(
            f"a tensor of shape {list(shape)[:8]}, strides {list(stride)[:8]} and offset {offset} "
            f"(dtype {dtype}) reaches beyond its storage of {storage_size} bytes"
        )
    if size > max(storage_size, LARGEST_EXPANDED) or max(shape, default=0) > 2**62:
        raise UnsupportedValueError(
            f"a tensor of shape {list(shape)[:8]} repeats the {storage_size} bytes of its storage",
            "save tensor.contiguous() instead",
        )
    start = storage.start + offset * itemsize if size else storage.start
    return StoredArray(storage.file, start, dtype, tuple(shape), stride)


def _return_first_argument(data: object, *_: object) -> object:
    return data


def _rebuild_from_type(
    rebuild: object, tensor_class: object, args: object, state: object = None
) -> object:
    for each in (tensor_class, rebuild):
        if isinstance(each, UnknownObject):
            return each
    if isinstance(tensor_class, AllowedCallable):
        if tensor_class.name == _SHARDED_TENSOR:
            return _rebuild_sharded_tensor(state)
        if isinstance(rebuild, AllowedCallable) and rebuild.name == _REBUILD_WRAPPER:
            if ":" in tensor_class.name:
                return rebuild_composite(tensor_class.name, args, state)
            return _rebuild_dtensor(args, state)
    if not isinstance(rebuild, AllowedCallable) or not isinstance(args, tuple):
        raise TypeError("a tensor is rebuilt by a value that is not a function")
    return rebuild.construct(*args)


def _refuse_wrapper(*_: object) -> object:
    raise UnsupportedValueError("a DTensor is not pickled as by torch.save", "use torch.save")


def _make_size(numbers: object = ()) -> torch.Size:
    if not isinstance(numbers, tuple) or not all(
        type(n) is int and -(2**63) <= n < 2**63 for n in numbers
    ):
        raise TypeError("torch.Size() is called with values that are not 64-bit integers")
    return torch.Size(numbers)


def name_of_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype, without `torch`."""
    return str(dtype).removeprefix("torch.")


STORAGE_DTYPES = {
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
}
"""Dtypes by the first part of the name of torch's storage classes."""


class _TensorProperties(PickledInstance):
    """The properties of a tensor, which are pickled as a tuple that starts with the dtype."""

    __slots__ = ()

    def set_state(self, state: object) -> None:
        """Set the attribute `dtype` from the tuple.

        Raises:
            TypeError: the state is not a tuple.
        """
        if not isinstance(state, tuple) or not state:
            raise TypeError("the properties of a tensor are not a tuple")
        self.fields["dtype"] = state[0]


MOST_RANKS = 2**24
MOST_SHARD_BOXES = 64
"""The largest number of boxes in a shard. Shards of strided placements have several boxes."""


def _rebuild_dtensor(args: object, state: object) -> StoredPart:
    if not isinstance(args, tuple) or len(args) < 3:
        raise TypeError("a DTensor has no shape")
    (attributes := PickledInstance("DTensor")).set_state(state)
    local, spec = _field(attributes, "_local_tensor"), _field(attributes, "_spec")
    placements, mesh = _field(spec, "placements"), _field(spec, "mesh")
    if not isinstance(local, (StoredArray, StoredComposite)) or not isinstance(
        placements, (tuple, list)
    ):
        raise TypeError("a DTensor has no plain local tensor or no placements")
    mesh_shape = _parse_mesh_shape(mesh)
    coordinate = require_sizes(_field(mesh, "_coordinate_on_dim"), "a coordinate in the mesh")
    if not len(placements) == len(mesh_shape) == len(coordinate):
        raise ValueError(
            f"a DTensor has {len(placements)} placements for a mesh of {len(mesh_shape)} dimensions"
        )
    if any(index >= size for index, size in zip(coordinate, mesh_shape, strict=True)):
        raise ValueError("a DTensor has a coordinate outside of its mesh")
    shape = require_sizes(args[2], "the shape of a DTensor")
    mesh_shards = tuple(
        shard
        for i, placement in enumerate(placements)
        if (shard := _parse_placement(i, placement, len(shape))) is not None
    )
    if prod(mesh_shape) > MOST_RANKS:
        raise ValueError(f"the mesh of a DTensor has more than {MOST_RANKS} ranks")
    order, strides_are_order = _parse_shard_order(spec, mesh_shards)
    splits = splits_of(
        mesh_shape, coordinate, mesh_shards, order, strides_are_order=strides_are_order
    )
    if prod(split.split_factor for split in splits) > MOST_SHARD_BOXES:
        raise UnsupportedValueError(
            f"a shard of a DTensor that consists of more than {MOST_SHARD_BOXES} boxes",
            "save with fewer strided placements",
        )
    boxes = shard_boxes(shape, splits)
    if sum(box.size for box, _ in boxes) != prod(local.shape):
        raise ValueError(
            f"the local tensor of a DTensor has shape {list(local.shape)}, which disagrees with "
            f"its placements and the global shape {list(shape)}"
        )
    dims = sorted({shard.mesh_dim for shard in mesh_shards})
    part = StoredPart(
        kind="DTensor",
        dtype=local.dtype,
        shape=shape,
        boxes=(),
        place=tuple(coordinate[dim] for dim in dims),
        places=tuple(mesh_shape[dim] for dim in dims),
        arrangement=(mesh_shape, mesh_shards, order, strides_are_order),
        local=local,
    )
    if isinstance(local, StoredComposite):
        return replace(part, pairs=tuple(boxes))
    placed = ((box.offset, local.part(inner.offset, inner.shape)) for box, inner in boxes)
    return replace(part, boxes=tuple(placed))


def _parse_placement(mesh_dim: int, placement: object, ndim: int) -> ShardPlacement | None:
    name = placement.name.rpartition(".")[2] if isinstance(placement, PickledInstance) else ""
    if not isinstance(placement, PickledInstance) or name not in (
        "Shard",
        "_StridedShard",
        "Replicate",
    ):
        raise UnsupportedValueError(
            f"a DTensor: its placement is {name or 'none'}",
            "save a DTensor that is sharded or replicated",
        )
    if name == "Replicate":
        return None
    dim, factor = placement.fields.get("dim"), placement.fields.get("split_factor", 1)
    if type(dim) is not int or type(factor) is not int or not -ndim <= dim < ndim:
        raise ValueError("a DTensor is sharded along a dimension that it does not have")
    if factor < 1:
        raise ValueError("a DTensor has a split_factor below 1")
    return ShardPlacement(mesh_dim, dim % ndim, factor)


def _parse_shard_order(
    spec: object, shards: tuple[ShardPlacement, ...]
) -> tuple[tuple[int, ...] | None, bool]:
    """Return the order of the mesh dimensions, and whether strides are one, for `splits_of`.

    Specs of torch before 2.10 have no order.
    """
    fields = spec.fields if isinstance(spec, PickledInstance) else {}
    strides_are_order = fields.get("use_strided_shard_as_shard_order") is not False
    order: list[int] = []
    is_order_of_mesh = True
    entries = fields.get("shard_order") or ()
    for entry in entries if isinstance(entries, (tuple, list)) else (None,):
        args = entry.args if isinstance(entry, PickledInstance) else ()
        if len(args) != 2:
            raise TypeError("the shard order of a DTensor is not a list of dimensions")
        dims = require_sizes(args[1], "the shard order of a DTensor")
        is_order_of_mesh &= list(dims) == sorted(dims)
        order += dims
    if is_order_of_mesh:
        return None, strides_are_order
    if sorted(order) != [s.mesh_dim for s in shards] or any(s.split_factor > 1 for s in shards):
        raise ValueError("the shard order of a DTensor does not fit its placements")
    return tuple(order), strides_are_order


def _parse_mesh_shape(mesh: object) -> tuple[int, ...]:
    """Return the shape of a device mesh, which torch 2.4 to 2.13 pickle in three ways."""
    if not isinstance(mesh, PickledInstance):
        raise TypeError("a DTensor has no mesh")
    layout = mesh.fields.get("_layout")
    axes = layout.fields.get("axes") if isinstance(layout, PickledInstance) else None
    if isinstance(axes, tuple):
        sizes_of_axes = (
            require_sizes(_field(each, "shape"), "an axis of the mesh") for each in axes
        )
        return tuple(map(prod, sizes_of_axes))
    if isinstance(layout, PickledInstance) and "shape" in layout.fields:
        sizes = layout.fields["shape"]
        return require_sizes((sizes,) if type(sizes) is int else sizes, "the shape of the mesh")
    array = mesh.fields.get("mesh", mesh.fields.get("_mesh"))
    if not isinstance(array, StoredArray):
        raise TypeError("the mesh of a DTensor has no shape")
    return require_sizes(array.shape, "the shape of the mesh")


def _rebuild_sharded_tensor(state: object) -> StoredPart:
    if not isinstance(state, tuple) or len(state) != 5:
        raise TypeError("the state of a ShardedTensor is not a tuple of five values")
    shards, metadata, group = state[:3]
    shape = require_sizes(_field(metadata, "size"), "the shape of a ShardedTensor")
    properties = _field(metadata, "tensor_properties")
    dtype = str(_field(properties, "dtype")).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ValueError(f"a ShardedTensor has dtype {dtype[:40]}, which is not supported")
    shard_count = len(_list(_field(metadata, "shards_metadata")))
    local = []
    for shard in _list(shards):
        box, array = _parse_box(_field(shard, "metadata"), shape), _field(shard, "tensor")
        if not isinstance(array, StoredArray) or (array.dtype, array.shape) != (dtype, box.shape):
            raise ValueError(
                f"a shard of a ShardedTensor is not a plain tensor of shape {list(box.shape)} and "
                f"dtype {dtype}, as its metadata says"
            )
        if box.size:
            local.append((box.offset, array))
    rank, world_size = require_sizes(
        [_field(group, "local_rank"), _field(group, "local_world_size")],
        "the process group of a ShardedTensor",
    )
    if rank >= world_size or world_size > MOST_RANKS:
        raise ValueError("a ShardedTensor has a rank outside of its process group")
    arrangement = (shard_count,)
    return StoredPart(
        "ShardedTensor", dtype, shape, tuple(local), (rank,), (world_size,), arrangement
    )


def _field(value: object, name: str) -> object:
    if not isinstance(value, PickledInstance) or name not in value.fields:
        raise TypeError(f"a part of a sharded tensor lacks the attribute {name}")
    return value.fields[name]


def _list(values: object) -> Sequence[object]:
    if not isinstance(values, list) or len(values) > MOST_RANKS:
        raise TypeError("the shards of a ShardedTensor are not a list")
    return values


def _parse_box(metadata: object, shape: tuple[int, ...]) -> Box:
    offset = require_sizes(_field(metadata, "shard_offsets"), "the offset of a shard")
    sizes = require_sizes(_field(metadata, "shard_sizes"), "the shape of a shard")
    try:
        box = Box(offset, sizes)
        inside = len(sizes) == len(shape) and Box.whole(shape).contains(box)
    except LayoutError as error:
        raise ValueError(str(error)) from error
    if not inside:
        raise ValueError(f"a ShardedTensor of shape {list(shape)} has a shard outside: {box}")
    return box


def _make_sharded_tensor(member: object = None) -> object:
    # Before protocol 4, a class inside of a class is pickled as `getattr(ShardedTensor, name)`.
    if member != _PROCESS_GROUP_STATE:
        raise TypeError("a ShardedTensor is not pickled as by torch.save")
    return AllowedCallable(_PROCESS_GROUP_STATE, lambda: PickledInstance(_PROCESS_GROUP_STATE))


_DTENSOR_MODULES = (
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed._tensor.api",
    "torch.distributed.tensor._api",
)
_PLACEMENT_MODULES = (
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor.placement_types",
    "torch.distributed.tensor._dtensor_spec",
)
_PLACEMENT_CLASSES = (
    *("Shard", "_StridedShard", "Replicate", "Partial", "_Partial"),
    *("DTensorSpec", "TensorMeta", "ShardOrderEntry"),
)

TORCH_NAMES: AllowedNames = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _return_first_argument,
    "torch._utils._rebuild_parameter_with_state": _return_first_argument,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    _REBUILD_WRAPPER: _refuse_wrapper,
    "torch.Tensor": _return_first_argument,
    "torch.nn.parameter.Parameter": _return_first_argument,
    "torch.nn.parameter.Buffer": _return_first_argument,
    "torch.Size": _make_size,
    "torch.device": call_with(torch.device, str, int),
    "torch.serialization._get_layout": call_with(str, str),
    "torch.torch_version.TorchVersion": call_with(str, str),
    **{
        f"torch.{type_name}Storage": getattr(torch, dtype)
        for type_name, dtype in STORAGE_DTYPES.items()
    },
    **{
        f"{module}.TensorProperties": lambda *args: _TensorProperties("TensorProperties", args)
        for module in (
            "torch.distributed.checkpoint.metadata",
            f"{_SHARD_PACKAGE}.sharded_tensor.metadata",
        )
    },
    "torch.storage.UntypedStorage": torch.uint8,
    **{
        f"torch.{name}": dtype
        for name, dtype in vars(torch).items()
        if isinstance(dtype, torch.dtype)
        and (name_of_dtype(dtype) in DTYPES or _SUB_BYTE.fullmatch(name))
    },
    **{f"{module}.DTensor": _refuse_wrapper for module in _DTENSOR_MODULES},
    _SHARDED_TENSOR: _make_sharded_tensor,
    f"{_SHARDED_TENSOR}.{_PROCESS_GROUP_STATE}": lambda: PickledInstance(_PROCESS_GROUP_STATE),
    **allow_as_instances(
        *(f"{module}.{name}" for module in _PLACEMENT_MODULES for name in _PLACEMENT_CLASSES),
        "torch.distributed.device_mesh.DeviceMesh",
        "torch.distributed._mesh_layout._MeshLayout",
        "torch.distributed._mesh_layout._FlatLayout",
        f"{_SHARD_PACKAGE}.metadata.ShardMetadata",
        f"{_SHARD_PACKAGE}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        f"{_SHARD_PACKAGE}.sharded_tensor.metadata.ShardedTensorMetadata",
        f"{_SHARD_PACKAGE}.sharded_tensor.shard.Shard",
        f"{_SHARD_PACKAGE}.sharding_spec.api.EnumerableShardingSpec",
        f"{_SHARD_PACKAGE}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
        "torch.distributed.remote_device._remote_device",
    ),
}
"""The names of torch that pickles may contain.

Sparse and quantized tensors and subclasses of tensors are not allowed, because they are not one
array in a storage. Errors give the names of their functions and classes."""
