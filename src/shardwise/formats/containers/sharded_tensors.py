"""ShardedTensors in pickles, which FSDP1 saves: their local shards become ranges of files."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.errors import LayoutError
from shardwise.formats.containers.pickle_values import (
    AllowedCallable,
    AllowedNames,
    PickledInstance,
    allow_as_instances,
)
from shardwise.formats.containers.torch_values import (
    DTENSOR_NAMES,
    MOST_RANKS,
    REBUILD_FROM_TYPE,
    require_sizes,
)
from shardwise.formats.foreign import StoredArray, StoredPart
from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES

_SHARD_PACKAGE = "torch.distributed._shard"
_SHARDED_TENSOR = f"{_SHARD_PACKAGE}.sharded_tensor.api.ShardedTensor"
_PROCESS_GROUP_STATE = "ProcessGroupState"


def _rebuild_tensor_of_rank(
    rebuild: object, tensor_class: object, args: object, state: object = None
) -> object:
    if not isinstance(tensor_class, AllowedCallable) or tensor_class.name != _SHARDED_TENSOR:
        return DTENSOR_NAMES[REBUILD_FROM_TYPE](rebuild, tensor_class, args, state)  # type: ignore[operator]
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
        raise TypeError(f"a part of a ShardedTensor lacks the attribute {name}")
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


RANK_TENSOR_NAMES: AllowedNames = {
    **DTENSOR_NAMES,
    REBUILD_FROM_TYPE: _rebuild_tensor_of_rank,
    _SHARDED_TENSOR: _make_sharded_tensor,
    f"{_SHARDED_TENSOR}.{_PROCESS_GROUP_STATE}": lambda: PickledInstance(_PROCESS_GROUP_STATE),
    **allow_as_instances(
        f"{_SHARD_PACKAGE}.metadata.ShardMetadata",
        f"{_SHARD_PACKAGE}.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        f"{_SHARD_PACKAGE}.sharded_tensor.metadata.ShardedTensorMetadata",
        f"{_SHARD_PACKAGE}.sharded_tensor.shard.Shard",
        f"{_SHARD_PACKAGE}.sharding_spec.api.EnumerableShardingSpec",
        f"{_SHARD_PACKAGE}.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
        "torch.distributed.remote_device._remote_device",
    ),
}
"""Names for readers that handle `StoredPart`, besides `TORCH_NAMES`."""
