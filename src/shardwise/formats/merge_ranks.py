"""Merges the states that ranks saved separately, with DTensors, into one state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np

from shardwise.errors import FormatError
from shardwise.formats.containers.pickle_values import Record
from shardwise.formats.containers.torch_values import StoredShard
from shardwise.formats.foreign import Foreign, ForeignFile, StoredArray
from shardwise.formats.nested import foreign_of, nested_leaves
from shardwise.formats.optimizers import Path, is_of_optimizer
from shardwise.formats.piece_tables import joined, rows_of, table_of_boxes, with_ties

_COUNTERS = ("step", "global_step", "iteration", "epoch")
_OWN = object()
"""Stands for a value that differs between ranks."""

Box = tuple[tuple[int, ...], StoredArray]
Saved = tuple[int, Any]
"""The number of a rank's file, and the rank's value at a path."""
SameBytes = Callable[[StoredArray, StoredArray], bool]
LARGEST_RANDOM_STATE = 2**16
SAMPLED = 1024
"""Elements of a tensor that are compared when it is opened; all are compared when it is read."""


def lay_ranks(
    states: Sequence[Saved],
    files: tuple[ForeignFile, ...],
    where: str,
    format: str,  # noqa: A002 - as it is called in Foreign
    same_bytes: SameBytes,
) -> Foreign:
    """Return the manifest of the states of all ranks, named as `foreign_of` names one state.

    DTensors become global tensors. Plain tensors must be the same on all ranks and are recorded
    as replicas, which a load compares. Values that differ between ranks are left out, unless they
    belong to an optimizer or count steps.

    Args:
        states: each with the number of its file.
        where: the place that errors name.
        same_bytes: compares small arrays of two files, such as random generator states.

    Raises:
        FormatError: shards are missing, or the states are not from one save.
    """
    merging = _Merging(files, where, same_bytes)
    state = merging.merged(tuple(states), ())
    if state is _OWN:
        raise FormatError(
            f"{where}: the ranks saved different values, and not dicts: there is nothing to merge"
        )
    names = [".".join(map(str, path)) for path in merging.own]
    left_out = [f"{name}: its value differs between ranks" for name in names]
    leaves = nested_leaves(state if isinstance(state, dict) else {"value": state}, files)
    return merging.placed(with_ties(foreign_of(replace(leaves, left_out=left_out), format)))


@dataclass(slots=True)
class _Merging:
    """Walks the states of all ranks at once.

    The walk replaces a global tensor by a `StoredArray` with a negative file number, which
    identifies its shards until `placed` puts them in place.
    """

    files: tuple[ForeignFile, ...]
    where: str
    same_bytes: SameBytes
    shards: list[tuple[StoredShard, ...]] = field(default_factory=list)
    numbers: dict[tuple[StoredShard, ...], int] = field(default_factory=dict)
    copies: dict[StoredArray, list[StoredArray]] = field(default_factory=dict)
    own: list[Path] = field(default_factory=list)

    def merged(self, values: tuple[Saved, ...], path: Path) -> Any:
        """Return the one value that stands for the values of all ranks at a path."""
        first = values[0][1]
        if all(isinstance(value, dict) for _, value in values):
            return self._merged_dicts(values, path)
        if any(isinstance(value, StoredShard) for _, value in values):
            return self._global(values, path)
        if any(isinstance(value, StoredArray) for _, value in values):
            return self._replicated(values, path)
        listed = isinstance(first, (list, tuple)) and not hasattr(first, "_fields")
        if listed and all(type(v) is type(first) and len(v) == len(first) for _, v in values):
            items = [
                self.merged(tuple((file, value[i]) for file, value in values), (*path, i))
                for i in range(len(first))
            ]
            return _OWN if any(item is _OWN for item in items) else type(first)(items)
        differing = next((file for file, value in values[1:] if not _same(value, first)), None)
        if differing is None:
            return first
        if is_of_optimizer(path) or (path and path[-1] in _COUNTERS):
            raise self._unlike(path, values[0][0], differing, "differs")
        self.own.append(path)
        return _OWN

    def _merged_dicts(self, values: tuple[Saved, ...], path: Path) -> dict[Any, Any]:
        made: dict[Any, Any] = type(values[0][1])()
        for key in dict.fromkeys(key for _, value in values for key in value):
            part = key if isinstance(key, int) else str(key)
            having = tuple((file, value[key]) for file, value in values if key in value)
            merged = self.merged(having, (*path, part))
            if merged is not _OWN:
                made[key] = merged
        return made

    def _global(self, values: tuple[Saved, ...], path: Path) -> StoredArray:
        shards = tuple(value for _, value in values if isinstance(value, StoredShard))
        first = shards[0]
        wanted = first.shape, first.mesh, first.shards, first.local.dtype
        for file, value in values:
            if not isinstance(value, StoredShard):
                raise self._unlike(
                    path, values[0][0], file, "is a DTensor in only one of two files"
                )
            if (value.shape, value.mesh, value.shards, value.local.dtype) != wanted:
                raise self._unlike(path, values[0][0], file, "has different shapes or placements")
        self._check_whole(shards, path)
        number = self.numbers.setdefault(shards, len(self.shards))
        if number == len(self.shards):
            self.shards.append(shards)
        stride = tuple(prod(first.shape[i + 1 :]) for i in range(len(first.shape)))
        return StoredArray(-1 - number, 0, first.local.dtype, first.shape, stride)

    def _check_whole(self, shards: tuple[StoredShard, ...], path: Path) -> None:
        first = shards[0]
        split = sorted({shard.mesh_dim for shard in first.shards})
        seen = {tuple(each.coordinate[dim] for dim in split) for each in shards}
        wanted = prod(first.mesh[dim] for dim in split)
        if len(seen) == wanted or not prod(first.shape):
            return
        name = ".".join(map(str, path))
        if len(self.files) == 1:
            raise FormatError(
                f"{self.where} has only one rank's part of {name}, a DTensor of shape "
                f"{list(first.shape)} on {prod(first.mesh)} ranks. Open the directory that holds "
                "the files of all ranks"
            )
        ranges = product(*(range(first.mesh[dim]) for dim in split))
        missing = next(at for at in ranges if at not in seen)
        raise FormatError(
            f"{self.where}: {name} has only {len(seen)} of its {wanted} shards: the one at "
            f"{missing} of mesh dimensions {tuple(split)} is missing. Copy the files of all ranks "
            "into this directory"
        )

    def _replicated(self, values: tuple[Saved, ...], path: Path) -> Any:
        arrays = [value for _, value in values if isinstance(value, StoredArray)]
        first = arrays[0]
        for file, value in values:
            if not isinstance(value, StoredArray) or (value.dtype, value.shape) != (
                first.dtype,
                first.shape,
            ):
                raise self._unlike(
                    path, values[0][0], file, "is a plain tensor with different shapes or dtypes"
                )
        if len(arrays) > 1 and _may_be_random_state(first):
            if not all(self.same_bytes(first, other) for other in arrays[1:]):
                self.own.append(path)
                return _OWN
        elif len(arrays) > 1:
            if not self.same_bytes(_sample(first), _sample(arrays[-1])):
                raise self._unlike(
                    path,
                    first.file,
                    arrays[-1].file,
                    "is a plain tensor that differs between ranks, and the files do not say which "
                    "part each has (with FSDP1, save FSDP.optim_state_dict, not "
                    "optimizer.state_dict)",
                )
            self.copies.setdefault(first, arrays[1:])
        return first

    def _unlike(self, path: Path, one: int, other: int, how: str) -> FormatError:
        names = f"{self.files[one].name} and {self.files[other].name}"
        return FormatError(
            f"{self.where}: {'.'.join(map(str, path))} {how}: {names}. Either the files are from "
            "different saves, or only the program that wrote them knows how they fit together: "
            "then describe it by a specification (`spec=`)"
        )

    def placed(self, foreign: Foreign) -> Foreign:
        """Return the manifest with the pieces of shards for global tensors, and with replicas."""
        pieces = foreign.table.pieces
        boxes: list[tuple[int, tuple[int, ...], StoredArray]] = []
        copies: list[tuple[int, tuple[int, ...], StoredArray]] = []
        for row in np.flatnonzero(pieces.file < 0).tolist():
            tensor, seen = int(pieces.tensor[row]), set[tuple[int, ...]]()
            for shard in self.shards[-1 - int(pieces.file[row])]:
                for offset, part in _parts(shard):
                    (copies if offset in seen else boxes).append((tensor, offset, part))
                    seen.add(offset)
        owners = {
            (int(f), int(s)): int(t)
            for f, s, t in zip(pieces.file, pieces.start, pieces.tensor, strict=True)
        }
        for first, others in self.copies.items():
            tensor_of_first = owners.get((first.file, first.start))
            if tensor_of_first is not None:
                zeros = (0,) * len(first.shape)
                copies += [(tensor_of_first, zeros, other) for other in others]
        kept = rows_of(foreign.table, pieces.file >= 0)
        return replace(
            foreign, table=joined(kept, table_of_boxes(boxes)), replicas=table_of_boxes(copies)
        )


def _sample(array: StoredArray) -> StoredArray:
    """Return some adjacent elements; only the first, if the array is not contiguous."""
    steps = tuple(prod(array.shape[i + 1 :]) for i in range(len(array.shape)))
    count = min(prod(array.shape), SAMPLED) if array.stride == steps else 1
    return replace(array, shape=(count,) if prod(array.shape) else (0,), stride=(1,))


def _may_be_random_state(array: StoredArray) -> bool:
    small = prod(array.shape) <= LARGEST_RANDOM_STATE
    return array.dtype == "uint8" and len(array.shape) == 1 and small


def _parts(shard: StoredShard) -> list[Box]:
    """Return the boxes of a shard: the offset in the tensor, and the array in the file."""
    local = shard.local
    found = []
    for there, here in shard.boxes():
        moved = sum(o * s for o, s in zip(here.offset, local.stride, strict=True))
        start = local.start + moved * local.itemsize
        found.append((there.offset, replace(local, start=start, shape=here.shape)))
    return found


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Record):
        return _same((one.name, one.args, one.fields), (other.name, other.args, other.fields))
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return bool(one == other) or (one != one and other != other)
