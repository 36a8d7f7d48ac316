"""DTensors in pickles: which part of a global tensor lies in a file."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from shardwise.formats.catalogue import StoredArray
from shardwise.formats.stored.pickled import Name, Record, Stubs, records
from shardwise.formats.stored.torchtypes import MOST_DIMS, TORCH
from shardwise.layout import Box, MeshShard, fragments_of_shard, splits_of

MOST_RANKS = 2**24
MOST_RUNS = 64
"""Boxes of one shard, as strided placements have several."""
_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_OF_TYPE = "torch._tensor._rebuild_from_type_v2"


@dataclass(frozen=True, slots=True)
class StoredShard:
    """The local tensor of a DTensor, as it lies in a file, and what it is a part of.

    Attributes:
        shape: of the global tensor.
        mesh: sizes of the dimensions of the device mesh; `coordinate` is this rank's place in it.
        shards: how the mesh splits the tensor; it is replicated over dimensions without one.
    """

    local: StoredArray
    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    shards: tuple[MeshShard, ...]

    def boxes(self) -> list[tuple[Box, Box]]:
        """The boxes of the global tensor that it holds, each with its box of the local one."""
        return fragments_of_shard(self.shape, splits_of(self.mesh, self.coordinate, self.shards))


def _of_type(rebuild: object, kind: object, args: object, state: object = None) -> object:
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
    coordinate = _numbers(mesh.fields.get("_coordinate_on_dim"), "a coordinate in the mesh")
    if not len(placements) == len(sizes) == len(coordinate):
        raise ValueError("a DTensor with other placements than its mesh has dimensions")
    if any(at >= size for at, size in zip(coordinate, sizes, strict=True)):
        raise ValueError("a coordinate lies outside of the mesh")
    shape = _numbers(args[2], "the shape of a DTensor")
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
            f"a local tensor of shape {list(local.shape)} is not what its placements give this rank"
            f" of {list(shape)}"
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
        raise ValueError("a DTensor is sharded by an absurd factor")
    return MeshShard(mesh_dim, dim % dims, factor)


def _mesh_shape(mesh: Record) -> tuple[int, ...]:
    """The sizes of a mesh, as versions of torch from 2.4 to 2.13 have them."""
    layout = mesh.fields.get("_layout")
    if isinstance(layout, Record) and isinstance(layout.fields.get("axes"), tuple):
        axes = [each.fields.get("shape") for each in layout.fields["axes"] if _is_record(each)]  # type: ignore[attr-defined]
        return tuple(prod(_numbers(each, "an axis of the mesh")) for each in axes)
    if isinstance(layout, Record) and "shape" in layout.fields:
        sizes = layout.fields["shape"]
        return _numbers((sizes,) if type(sizes) is int else sizes, "the shape of the mesh")
    array = mesh.fields.get("mesh", mesh.fields.get("_mesh"))
    if not isinstance(array, StoredArray):
        raise TypeError("a mesh without a shape")
    return _numbers(array.shape, "the shape of the mesh")


def _is_record(value: object) -> bool:
    return isinstance(value, Record)


def _numbers(values: object, what: str) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or len(values) > MOST_DIMS:
        raise TypeError(f"{what} is not a list of numbers")
    if not all(type(n) is int and 0 <= n < 2**62 for n in values):
        raise ValueError(f"{what} has numbers that make no sense")
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
    raise TypeError("a DTensor that is made in a way that is not known")


DTENSORS: Stubs = {
    _OF_TYPE: _of_type,
    _WRAPPER: _unused,
    **{f"{module}.DTensor": _unused for module in (*_TENSOR, "torch.distributed.tensor._api")},
    **records(
        *(f"{module}.{name}" for module in _PLACEMENTS for name in _PARTS),
        "torch.distributed.device_mesh.DeviceMesh",
        "torch.distributed._mesh_layout._MeshLayout",
        "torch.distributed._mesh_layout._FlatLayout",
    ),
}
"""Beside `TORCH`, for readers that know what to do with a `StoredShard`."""
