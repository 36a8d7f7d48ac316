"""Merges the states that ranks saved separately, with DTensors or ShardedTensors, into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, TypeAlias

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_values import PickledInstance
from shardwise.formats.containers.sharded_tensors import StoredShardedTensor
from shardwise.formats.containers.torch_values import StoredShard
from shardwise.formats.foreign import Foreign, ForeignFile, StoredArray, row_major_strides
from shardwise.formats.nested import build_foreign, find_leaves
from shardwise.formats.optimizers import Path, is_in_optimizer
from shardwise.formats.piece_tables import (
    join_tables,
    select_rows,
    table_of_boxes,
    tie_equal_arrays,
)

_COUNTERS = ("step", "global_step", "iteration", "epoch", "last_epoch", "_step_count")
_DIFFERS = object()
"""Stands for a value that differs between ranks."""

LocalPart: TypeAlias = StoredShard | StoredShardedTensor
"""A rank's part of a global tensor."""
RankValue: TypeAlias = tuple[int, Any]
"""The index of a rank's file, and the rank's value at a path."""
SameBytes: TypeAlias = Callable[[StoredArray, StoredArray], bool]
LARGEST_RANDOM_STATE = 2**16
"""The largest size, in bytes, of a `uint8` tensor that may be the state of a random generator."""
SAMPLE_SIZE = 1024
"""The number of elements of a plain tensor to compare when the checkpoint is opened.

A load compares all elements."""


def merge_ranks(
    states: Sequence[RankValue],
    files: tuple[ForeignFile, ...],
    path: str,
    format: str,  # noqa: A002 - as it is called in Foreign
    same_bytes: SameBytes,
) -> Foreign:
    """Return the description of all ranks' states together. `build_foreign` names the tensors.

    DTensors and ShardedTensors become global tensors. Plain tensors must be the same on all ranks
    and are recorded as replicas, which a load compares. Values that differ between ranks are left
    out, unless they belong to an optimizer or count steps.

    Args:
        states: the state of each rank, with the index of its file.
        files: the files of the ranks.
        path: the path of the checkpoint, for messages.
        format: the name of the format.
        same_bytes: compares small arrays of two files, for example random generator states.

    Raises:
        FormatError: shards are missing, or the states are not from one save.
    """
    merger = _Merger(files, path, same_bytes)
    state = merger.merge(tuple(states), ())
    if state is _DIFFERS:
        raise FormatError(
            f"{path}: the ranks saved different values, and not dicts, so they cannot be merged: "
            "open the file of one rank"
        )
    left_out = [
        f"{_name_of_path(each)}: its value differs between ranks" for each in merger.differing_paths
    ]
    leaves = find_leaves(state if isinstance(state, dict) else {"value": state}, files)
    return merger.place_shards(
        tie_equal_arrays(build_foreign(replace(leaves, left_out=left_out), format))
    )


@dataclass(slots=True)
class _Merger:
    """Walks the states of all ranks together.

    The walk replaces a global tensor with a `StoredArray` that has a negative file index, which
    identifies its shards. `place_shards` then replaces these arrays with the shards.

    Attributes:
        files, path, same_bytes: as in `merge_ranks`.
        shards: the shards of each global tensor.
        indices: for the shards of each tensor, their index in `shards`.
        copies: for each plain tensor, the same tensor in the files of other ranks.
        differing_paths: the paths of values that differ between ranks.
        has_compared_steps: whether a tensor that counts steps was compared on all ranks.
    """

    files: tuple[ForeignFile, ...]
    path: str
    same_bytes: SameBytes
    shards: list[tuple[LocalPart, ...]] = field(default_factory=list)
    indices: dict[tuple[LocalPart, ...], int] = field(default_factory=dict)
    copies: dict[StoredArray, list[StoredArray]] = field(default_factory=dict)
    differing_paths: list[Path] = field(default_factory=list)
    has_compared_steps: bool = False

    def merge(self, values: tuple[RankValue, ...], path: Path) -> Any:
        """Return one value for the values of all ranks at a path."""
        first = values[0][1]
        if all(isinstance(value, dict) for _, value in values):
            return self._merge_dicts(values, path)
        if any(isinstance(value, LocalPart) for _, value in values):
            return self._merge_shards(values, path)
        if any(isinstance(value, StoredArray) for _, value in values):
            return self._merge_plain_tensors(values, path)
        is_list = isinstance(first, (list, tuple)) and not hasattr(first, "_fields")
        if is_list and all(type(v) is type(first) and len(v) == len(first) for _, v in values):
            items = [
                self.merge(tuple((file, value[i]) for file, value in values), (*path, i))
                for i in range(len(first))
            ]
            return _DIFFERS if any(item is _DIFFERS for item in items) else type(first)(items)
        differing_file = next(
            (file for file, value in values[1:] if not _are_equal(value, first)), None
        )
        if differing_file is None:
            return first
        if is_in_optimizer(path) or (path and path[-1] in _COUNTERS):
            raise self._conflict_error(path, values[0][0], differing_file, "differs")
        self.differing_paths.append(path)
        return _DIFFERS

    def _merge_dicts(self, values: tuple[RankValue, ...], path: Path) -> dict[Any, Any]:
        merged: dict[Any, Any] = type(values[0][1])()
        for key in dict.fromkeys(key for _, value in values for key in value):
            path_part = key if isinstance(key, int) else str(key)
            values_at_key = tuple((file, value[key]) for file, value in values if key in value)
            item = self.merge(values_at_key, (*path, path_part))
            if item is not _DIFFERS:
                merged[key] = item
        return merged

    def _merge_shards(self, values: tuple[RankValue, ...], path: Path) -> StoredArray:
        shards = tuple(value for _, value in values if isinstance(value, LocalPart))
        first, expected = shards[0], _layout_of(shards[0])
        for file, value in values:
            if not isinstance(value, type(first)):
                raise self._conflict_error(
                    path, values[0][0], file, "is sharded in only one of two files"
                )
            if _layout_of(value) != expected:
                raise self._conflict_error(
                    path, values[0][0], file, "has different shapes or placements"
                )
        if isinstance(first, StoredShard):
            self._require_all_shards(
                [each for each in shards if isinstance(each, StoredShard)], path
            )
        else:
            self._require_all_boxes(
                [each for each in shards if not isinstance(each, StoredShard)], path
            )
        index = self.indices.setdefault(shards, len(self.shards))
        if index == len(self.shards):
            self.shards.append(shards)
        stride = row_major_strides(first.shape)
        return StoredArray(-1 - index, 0, _dtype_of(first), first.shape, stride)

    def _require_all_shards(self, shards: Sequence[StoredShard], path: Path) -> None:
        first = shards[0]
        mesh_dims = sorted({shard.mesh_dim for shard in first.mesh_shards})
        found_coordinates = {tuple(shard.coordinate[dim] for dim in mesh_dims) for shard in shards}
        shard_count = prod(first.mesh_shape[dim] for dim in mesh_dims)
        if len(found_coordinates) == shard_count or not prod(first.shape):
            return
        if len(self.files) == 1:
            raise self._single_file_error(path, first, "DTensor", prod(first.mesh_shape))
        coordinates = product(*(range(first.mesh_shape[dim]) for dim in mesh_dims))
        missing = next(
            coordinate for coordinate in coordinates if coordinate not in found_coordinates
        )
        raise FormatError(
            f"{self.path}: {_name_of_path(path)} has only {len(found_coordinates)} of its "
            f"{shard_count} shards: the one at {missing} of mesh dimensions {tuple(mesh_dims)} is "
            "missing. Copy the files of all ranks into this directory"
        )

    def _require_all_boxes(self, parts: Sequence[StoredShardedTensor], path: Path) -> None:
        first = parts[0]
        found_count = len({box for part in parts for box, _ in part.local})
        if found_count >= first.shard_count or not prod(first.shape):
            return
        if len(self.files) == 1:
            raise self._single_file_error(path, first, "ShardedTensor", first.world_size)
        missing = sorted({*range(first.world_size)} - {part.rank for part in parts})
        ranks = f"; no file is from ranks {missing[:8]} of its process group" if missing else ""
        raise FormatError(
            f"{self.path}: {_name_of_path(path)} has only {found_count} of its "
            f"{first.shard_count} shards{ranks}. Copy the files of all ranks into this directory"
        )

    def _single_file_error(
        self, path: Path, part: LocalPart, kind: str, rank_count: int
    ) -> FormatError:
        return FormatError(
            f"{self.path} has only one rank's part of {_name_of_path(path)}, a {kind} of shape "
            f"{list(part.shape)} on {rank_count} ranks. Open the directory that holds the files of "
            "all ranks"
        )

    def _merge_plain_tensors(self, values: tuple[RankValue, ...], path: Path) -> Any:
        arrays = [value for _, value in values if isinstance(value, StoredArray)]
        first = arrays[0]
        dtype_and_shape = first.dtype, first.shape
        for file, value in values:
            if not isinstance(value, StoredArray) or (value.dtype, value.shape) != dtype_and_shape:
                raise self._conflict_error(
                    path, values[0][0], file, "is a plain tensor with different shapes or dtypes"
                )
        if len(arrays) > 1 and _may_be_random_state(first):
            if not all(self.same_bytes(first, other) for other in arrays[1:]):
                self.differing_paths.append(path)
                return _DIFFERS
        elif len(arrays) > 1:
            others = arrays[-1:]
            if path[-1] in _COUNTERS and not self.has_compared_steps:
                others, self.has_compared_steps = arrays[1:], True
            for other in others:
                if not self.same_bytes(select_sample(first), select_sample(other)):
                    raise self._conflict_error(
                        path,
                        first.file,
                        other.file,
                        "is a plain tensor that differs between ranks, and the files do not say "
                        "which part each has (with FSDP1, save FSDP.optim_state_dict, not "
                        "optimizer.state_dict)",
                    )
            self.copies.setdefault(first, arrays[1:])
        return first

    def _conflict_error(self, path: Path, file: int, other: int, difference: str) -> FormatError:
        names = f"{self.files[file].name} and {self.files[other].name}"
        return FormatError(
            f"{self.path}: {_name_of_path(path)} {difference}: {names}. Either the files are from "
            "different saves, or only the program that wrote them knows how they fit together: "
            "then describe it by a specification (`spec=`)"
        )

    def place_shards(self, foreign: Foreign) -> Foreign:
        """Return the description with the pieces of global tensors, and with replicas."""
        pieces = foreign.table.pieces
        boxes: list[tuple[int, tuple[int, ...], StoredArray]] = []
        replicas: list[tuple[int, tuple[int, ...], StoredArray]] = []
        for row in np.flatnonzero(pieces.file < 0).tolist():
            tensor, offsets = int(pieces.tensor[row]), set[tuple[int, ...]]()
            for shard in self.shards[-1 - int(pieces.file[row])]:
                for offset, array in _boxes_of_part(shard):
                    (replicas if offset in offsets else boxes).append((tensor, offset, array))
                    offsets.add(offset)
        tensor_by_start = {
            (int(file), int(start)): int(tensor)
            for file, start, tensor in zip(pieces.file, pieces.start, pieces.tensor, strict=True)
        }
        for first, others in self.copies.items():
            tensor_of_first = tensor_by_start.get((first.file, first.start))
            if tensor_of_first is not None:
                zeros = (0,) * len(first.shape)
                replicas += [(tensor_of_first, zeros, other) for other in others]
        kept = select_rows(foreign.table, pieces.file >= 0)
        return replace(
            foreign,
            table=join_tables(kept, table_of_boxes(boxes)),
            replicas=table_of_boxes(replicas),
        )


def _name_of_path(path: Path) -> str:
    return ".".join(map(str, path))


def select_sample(array: StoredArray) -> StoredArray:
    """Return the first elements of an array; only one if the array is not contiguous."""
    size = prod(array.shape)
    count = min(size, SAMPLE_SIZE) if array.stride == row_major_strides(array.shape) else 1
    return replace(array, shape=(count if size else 0,), stride=(1,))


def _may_be_random_state(array: StoredArray) -> bool:
    is_small = prod(array.shape) <= LARGEST_RANDOM_STATE
    return array.dtype == "uint8" and len(array.shape) == 1 and is_small


def _layout_of(part: LocalPart) -> tuple[object, ...]:
    """Return what the parts of all ranks have in common."""
    if isinstance(part, StoredShard):
        return part.shape, part.mesh_shape, part.mesh_shards, part.local.dtype
    return part.shape, part.dtype, part.shard_count, part.world_size


def _dtype_of(part: LocalPart) -> str:
    return part.local.dtype if isinstance(part, StoredShard) else part.dtype


def _boxes_of_part(part: LocalPart) -> list[tuple[tuple[int, ...], StoredArray]]:
    """Return the boxes in a file: the offset in the tensor, and the array in the file."""
    if isinstance(part, StoredShardedTensor):
        return [(box.offset, array) for box, array in part.local if box.size]
    local = part.local
    boxes = []
    for global_box, local_box in part.boxes():
        skipped_elements = sum(o * s for o, s in zip(local_box.offset, local.stride, strict=True))
        start = local.start + skipped_elements * local.itemsize
        boxes.append((global_box.offset, replace(local, start=start, shape=local_box.shape)))
    return boxes


def _are_equal(one: Any, other: Any) -> bool:
    """Return whether two plain values are equal; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, PickledInstance):
        return _are_equal((one.name, one.args, one.fields), (other.name, other.args, other.fields))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_are_equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_equal, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return bool(one == other) or (one != one and other != other)
