"""Values of torch in pickles: tensors, DTensors and storages as places in files."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_values import (
    Builder,
    Constant,
    Name,
    Opaque,
    Record,
    Stubs,
    records,
)
from shardwise.formats.foreign import StoredArray
from shardwise.layout import Box, MeshShard, fragments_of_shard, splits_of
from shardwise.manifest.dtypes import DTYPES

RESOLVE = (
    "a conjugated or negated view: its values differ from the stored bytes; save "
    "tensor.resolve_conj().resolve_neg() instead"
)
MOST_DIMS = 64
EXPANDED = 2**26
"""The largest size in bytes of a tensor that is larger than its storage (strides of 0)."""


class UnresolvedError(FormatError):
    """A tensor is a view whose values differ from the bytes of its storage."""


@dataclass(frozen=True, slots=True)
class Unresolved:
    """A placeholder for a tensor that raised `UnresolvedError`."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage: bytes `[start, start + size)` of a file.

    `dtype` is torch's name, or None for an untyped storage.
    """

    file: int
    start: int
    size: int
    dtype: str | None


@dataclass(frozen=True, slots=True)
class StorageType:
    """A class of storages; `dtype` is None for untyped ones."""

    dtype: str | None

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return 1 if self.dtype is None else DTYPES[self.dtype].itemsize


def _tensor(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    requires_grad: object = False,
    hooks: object = None,
    metadata: object = None,
) -> object:
    if isinstance(storage, Opaque):
        return storage
    if not isinstance(storage, Storage) or storage.dtype is None:
        raise TypeError("a tensor has no typed storage")
    return _stored(storage, storage.dtype, offset, shape, stride, metadata)


def _tensor_of_dtype(
    storage: object,
    offset: object,
    shape: object,
    stride: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> object:
    if not isinstance(storage, Storage) or not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor has no storage, or no dtype")
    return _stored(storage, _name(dtype), offset, shape, stride, metadata)


def _stored(
    storage: Storage, dtype: str, offset: object, shape: object, stride: object, metadata: object
) -> StoredArray:
    if metadata:
        raise UnresolvedError(RESOLVE)
    if not (isinstance(shape, tuple) and isinstance(stride, tuple) and isinstance(offset, int)):
        raise TypeError("the shape, strides or offset of a tensor are not numbers")
    if len(shape) != len(stride) or len(shape) > MOST_DIMS:
        raise ValueError(
            f"a tensor has {len(shape)} sizes and {len(stride)} strides; they must be "
            f"equally many, and at most {MOST_DIMS}"
        )
    itemsize = DTYPES[dtype].itemsize
    reach, size = 1, itemsize
    for n, step in zip(shape, stride, strict=True):
        if type(n) is not int or type(step) is not int or n < 0 or step < 0:
            raise ValueError("a tensor has sizes or strides that are not integers, or are negative")
        reach += (n - 1) * step
        size *= n
    if offset < 0 or (size and (offset + reach) * itemsize > storage.size):
        raise ValueError(f"a tensor of shape {list(shape)[:8]} reaches beyond its storage")
    if size > max(storage.size, EXPANDED) or max(shape, default=0) > 2**62:
        raise ValueError(
            f"a tensor of shape {list(shape)[:8]} repeats the few bytes of its storage too often"
        )
    start = storage.start + offset * itemsize if size else storage.start
    return StoredArray(storage.file, start, dtype, tuple(shape), stride)


def _or_unresolved(build: Builder) -> Builder:
    def built(*args: object) -> object:
        try:
            return build(*args)
        except UnresolvedError:
            return Unresolved()

    return built


def _parameter(data: object, *_: object) -> object:
    return data


def _of_type(rebuild: object, kind: object, args: object, state: object = None) -> object:
    if isinstance(kind, Opaque) or isinstance(rebuild, Opaque):
        return kind if isinstance(kind, Opaque) else rebuild
    if not isinstance(rebuild, Name) or not isinstance(args, tuple):
        raise TypeError("a tensor is rebuilt by something that is not a function")
    return rebuild.build(*args)


def _size(numbers: object = ()) -> torch.Size:
    if not isinstance(numbers, tuple) or not all(
        type(n) is int and -(2**63) <= n < 2**63 for n in numbers
    ):
        raise TypeError("torch.Size() of something that is not integers")
    return torch.Size(numbers)


def _device(kind: object, index: object = None) -> torch.device:
    if not isinstance(kind, str) or not (index is None or type(index) is int):
        raise TypeError("torch.device() of something that is not a name and an index")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _layout(text: object) -> object:
    if not isinstance(text, str):
        raise TypeError("a torch.layout or version that is not text")
    return text


def _version(text: object) -> object:
    return _layout(text)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


STORAGES = {
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

_TENSORS: dict[str, Builder] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
}
UNRESOLVED: Stubs = {name: _or_unresolved(build) for name, build in _TENSORS.items()}
"""Replacements for functions in `TORCH`, to find the names of tensors that cannot be read."""

TORCH: Stubs = {
    **_TENSORS,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch.Tensor": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.nn.parameter.Buffer": _parameter,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "torch.torch_version.TorchVersion": _version,
    **{f"torch.{kind}Storage": Constant(StorageType(dtype)) for kind, dtype in STORAGES.items()},
    "torch.storage.UntypedStorage": Constant(StorageType(None)),
    **{
        f"torch.{name}": Constant(dtype)
        for name, dtype in vars(torch).items()
        if isinstance(dtype, torch.dtype) and _name(dtype) in DTYPES
    },
}
"""Stubs for torch. Sparse, quantized and other tensors that are not an array in a storage are not
on the list, nor are subclasses of tensors; errors give the names of their functions and classes."""


MOST_RANKS = 2**24
MOST_RUNS = 64
"""The largest number of boxes in a shard. Strided placements have several."""
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_OF_TYPE = "torch._tensor._rebuild_from_type_v2"


@dataclass(frozen=True, slots=True)
class StoredShard:
    """The local tensor of a DTensor in a file, and its place in the global tensor.

    Attributes:
        local: the local tensor.
        shape: the shape of the global tensor.
        mesh: the shape of the device mesh.
        coordinate: the coordinate of the rank in the mesh.
        shards: the mesh dimensions that shard the tensor; it is replicated over the others.
    """

    local: StoredArray
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    shards: tuple[MeshShard, ...]

    def boxes(self) -> list[tuple[Box, Box]]:
        """Return the boxes of the global tensor in this shard, with their local boxes."""
        return fragments_of_shard(self.shape, splits_of(self.mesh, self.coordinate, self.shards))


def _dtensor_or_tensor(rebuild: object, kind: object, args: object, state: object = None) -> object:
    if not isinstance(rebuild, Name) or rebuild.name != _WRAPPER or not isinstance(kind, Name):
        return TORCH[_OF_TYPE](rebuild, kind, args, state)  # type: ignore[operator]
    if not isinstance(args, tuple) or len(args) < 3:
        raise TypeError("a DTensor without a shape")
    attributes = Record("DTensor")
    attributes.set_state(state)
    local, spec = (attributes.fields.get(name) for name in ("_local_tensor", "_spec"))
    if not isinstance(local, StoredArray) or not isinstance(spec, Record):
        raise TypeError("a DTensor without a plain local tensor")
    placements, mesh = spec.fields.get("placements"), spec.fields.get("mesh")
    if not isinstance(placements, (tuple, list)) or not isinstance(mesh, Record):
        raise TypeError("a DTensor without placements or mesh")
    sizes = _mesh_shape(mesh)
    coordinate = _counts(mesh.fields.get("_coordinate_on_dim"), "a coordinate in the mesh")
    if not len(placements) == len(sizes) == len(coordinate):
        raise ValueError("a DTensor has not one placement for each dimension of its mesh")
    if any(at >= size for at, size in zip(coordinate, sizes, strict=True)):
        raise ValueError("a DTensor has a coordinate outside of its mesh")
    shape = _counts(args[2], "the shape of a DTensor")
    shards = tuple(
        shard
        for i, placement in enumerate(placements)
        if (shard := _shard(i, placement, len(shape))) is not None
    )
    if prod(sizes) > MOST_RANKS:
        raise ValueError(f"a mesh of more than {MOST_RANKS} ranks")
    if prod(split.strides for split in splits_of(sizes, coordinate, shards)) > MOST_RUNS:
        raise ValueError(f"a shard that consists of more than {MOST_RUNS} boxes")
    made = StoredShard(local, shape, sizes, coordinate, shards)
    if sum(box.size for box, _ in made.boxes()) != prod(local.shape):
        raise ValueError(
            f"the local tensor of a DTensor has shape {list(local.shape)}, which disagrees with "
            f"its placements and the global shape {list(shape)}"
        )
    return made


def _shard(mesh_dim: int, placement: object, dims: int) -> MeshShard | None:
    name = placement.name.rpartition(".")[2] if isinstance(placement, Record) else ""
    if not isinstance(placement, Record) or name not in ("Shard", "_StridedShard", "Replicate"):
        raise ValueError(
            f"its placement is {name or 'none'}: save a DTensor that is sharded or replicated"
        )
    if name == "Replicate":
        return None
    dim, factor = placement.fields.get("dim"), placement.fields.get("split_factor", 1)
    if type(dim) is not int or type(factor) is not int or not -dims <= dim < dims:
        raise ValueError("a DTensor is sharded along a dimension that it does not have")
    if factor < 1:
        raise ValueError("a DTensor has a split_factor below 1")
    return MeshShard(mesh_dim, dim % dims, factor)


def _mesh_shape(mesh: Record) -> tuple[int, ...]:
    """Return the shape of a mesh, as pickled by torch 2.4 to 2.13."""
    layout = mesh.fields.get("_layout")
    if isinstance(layout, Record) and isinstance(layout.fields.get("axes"), tuple):
        axes = [each.fields.get("shape") for each in layout.fields["axes"] if _is_record(each)]  # type: ignore[attr-defined]
        return tuple(prod(_counts(each, "an axis of the mesh")) for each in axes)
    if isinstance(layout, Record) and "shape" in layout.fields:
        sizes = layout.fields["shape"]
        return _counts((sizes,) if type(sizes) is int else sizes, "the shape of the mesh")
    array = mesh.fields.get("mesh", mesh.fields.get("_mesh"))
    if not isinstance(array, StoredArray):
        raise TypeError("a mesh without a shape")
    return _counts(array.shape, "the shape of the mesh")


def _is_record(value: object) -> bool:
    return isinstance(value, Record)


def _counts(values: object, what: str) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or len(values) > MOST_DIMS:
        raise TypeError(f"{what} is not a list of numbers")
    if not all(type(n) is int and 0 <= n < 2**62 for n in values):
        raise ValueError(f"{what} has negative or too large numbers")
    return tuple(values)


_TENSOR = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._tensor.api")
_PLACEMENTS = (
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor.placement_types",
    "torch.distributed.tensor._dtensor_spec",
)
_PARTS = (
    *("Shard", "_StridedShard", "Replicate", "Partial", "_Partial"),
    *("DTensorSpec", "TensorMeta", "ShardOrderEntry"),
)


def _unused(*_: object) -> object:
    raise TypeError("a DTensor is rebuilt in an unknown way")


DTENSORS: Stubs = {
    _OF_TYPE: _dtensor_or_tensor,
    _WRAPPER: _unused,
    **{f"{module}.DTensor": _unused for module in (*_TENSOR, "torch.distributed.tensor._api")},
    **records(
        *(f"{module}.{name}" for module in _PLACEMENTS for name in _PARTS),
        "torch.distributed.device_mesh.DeviceMesh",
        "torch.distributed._mesh_layout._MeshLayout",
        "torch.distributed._mesh_layout._FlatLayout",
    ),
}
"""Stubs for readers that handle `StoredShard`, in addition to `TORCH`."""
