"""Merges the states that ranks saved separately, with DTensors or ShardedTensors, into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import prod
from typing import Any, TypeAlias

from shardwise.kernel.errors import FormatError
from shardwise.parts.formats.foreign import (
    Placed,
    StoredArray,
    StoredComposite,
    StoredPart,
    StoredTensor,
)
from shardwise.parts.formats.optimizers import Path, is_in_optimizer
from shardwise.parts.formats.stored_composites import describe, join_shards
from shardwise.parts.formats.values import are_plain_values_equal

_COUNTERS = ("step", "global_step", "iteration", "epoch", "last_epoch", "_step_count")
_DIFFERS = object()
"""Stands for a value that differs between ranks."""

RankValue: TypeAlias = tuple[str, Any]
"""The name of a rank's file, and the rank's value at a path."""
SameBytes: TypeAlias = Callable[[StoredArray, StoredArray], bool]
LARGEST_RANDOM_STATE = 2**16
"""The largest size, in bytes, of a `uint8` tensor that may be the state of a random generator."""
SAMPLE_SIZE = 1024
"""The number of elements of a plain tensor to compare when the checkpoint is opened.

A load compares all elements."""


def merge_ranks(
    states: Sequence[RankValue], label: str, same_bytes: SameBytes
) -> tuple[Any, list[str]]:
    """Return the states of all ranks as one.

    DTensors and ShardedTensors become global tensors. Plain tensors must be the same on all ranks;
    the copies become replicas, which a load compares. Values that differ between ranks are left
    out, unless they belong to an optimizer or count steps.

    Args:
        states: the state of each rank, with the name of its file.
        label: the path of the checkpoint, for messages.
        same_bytes: compares small arrays of two files, for example random generator states.

    Returns:
        The state, with `StoredTensor`s for tensors that several ranks have; and the names of
        values that differ between ranks, and that the state lacks.

    Raises:
        FormatError: shards are missing, or the states are not from one save.
    """
    merger = _Merger(len({file for file, _ in states}), label, same_bytes)
    state = merger.merge(tuple(states), ())
    if state is _DIFFERS:
        raise FormatError(
            f"{label}: the ranks saved different values, and not dicts, so they cannot be merged: "
            "open the file of one rank"
        )
    return state, list(map(_name_of_path, merger.differing_paths))


@dataclass(slots=True)
class _Merger:
    """Walks the states of all ranks together.

    Attributes:
        file_count: the number of files.
        label, same_bytes: as in `merge_ranks`.
        differing_paths: the paths of values that differ between ranks.
        has_compared_steps: whether a tensor that counts steps was compared on all ranks.
    """

    file_count: int
    label: str
    same_bytes: SameBytes
    differing_paths: list[Path] = field(default_factory=list)
    has_compared_steps: bool = False

    def merge(self, values: tuple[RankValue, ...], path: Path) -> Any:
        """Return one value for the values of all ranks at a path."""
        first = values[0][1]
        if all(isinstance(value, dict) for _, value in values):
            return self._merge_dicts(values, path)
        if any(isinstance(value, StoredPart) for _, value in values):
            return self._merge_parts(values, path)
        if any(isinstance(value, StoredComposite) for _, value in values):
            return self._merge_composites(values, path)
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
            (file for file, value in values[1:] if not are_plain_values_equal(value, first)), None
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

    def _merge_composites(self, values: tuple[RankValue, ...], path: Path) -> StoredComposite:
        """Merge copies of a tensor that wraps others."""
        name, (first_file, value) = _name_of_path(path), values[0]
        first: StoredComposite = value
        for file, value in values:
            if not isinstance(value, StoredComposite) or (
                file != first_file and describe(name, value) != describe(name, first)
            ):
                raise self._conflict_error(path, first_file, file, "has another class or context")
        inner = []
        for key, _ in first.inner:
            copies = tuple((file, dict(value.inner)[key]) for file, value in values)
            merged = self.merge(copies, (*path, key))
            if merged is _DIFFERS:
                raise self._conflict_error((*path, key), first_file, values[-1][0], "differs")
            inner.append((key, merged))
        return replace(first, inner=tuple(inner))

    def _merge_parts(
        self, values: tuple[RankValue, ...], path: Path
    ) -> StoredTensor | StoredComposite:
        files_and_parts = [(file, v) for file, v in values if isinstance(v, StoredPart)]
        first_file, first = files_and_parts[0]
        for file, value in values:
            if not isinstance(value, StoredPart) or value.kind != first.kind:
                raise self._conflict_error(
                    path, first_file, file, "is sharded in only one of two files"
                )
            if _division_of(value) != _division_of(first):
                raise self._conflict_error(
                    path, first_file, file, "has different shapes or placements"
                )
        parts = [part for _, part in files_and_parts]
        shards = [(p.pairs, p.local) for p in parts if isinstance(p.local, StoredComposite)]
        if shards:
            found = {box for pairs, _ in shards for box, _ in pairs}
            if sum(box.size for box in found) < prod(first.shape) or len(shards) < len(parts):
                raise self._incomplete_error(path, parts)
            return join_shards(_name_of_path(path), first.shape, shards)
        boxes: dict[tuple[int, ...], StoredArray] = {}
        replicas: list[Placed] = []
        for offset, array in (box for part in parts for box in part.boxes):
            if boxes.setdefault(offset, array) is not array:
                replicas.append((offset, array))
        if sum(prod(array.shape) for array in boxes.values()) < prod(first.shape):
            raise self._incomplete_error(path, parts)
        return StoredTensor(first.dtype, first.shape, (*boxes.items(),), (*replicas,))

    def _incomplete_error(self, path: Path, parts: Sequence[StoredPart]) -> FormatError:
        first, found = parts[0], {part.place for part in parts}
        name, count = _name_of_path(path), prod(first.places)
        if self.file_count == 1:
            return FormatError(
                f"{self.label} has only one rank's part of {name}, a {first.kind} of shape "
                f"{list(first.shape)} in {count} shards. Open the directory that holds the files "
                "of all ranks"
            )
        places = product(*map(range, first.places))
        missing = [list(place) for place in islice(places, 2**16) if place not in found]
        return FormatError(
            f"{self.label}: {name} has only {len(found)} of its {count} shards: missing are those "
            f"at {', '.join(map(str, missing[:8]))} of the mesh. Copy the files of all ranks into "
            "this directory"
        )

    def _merge_plain_tensors(self, values: tuple[RankValue, ...], path: Path) -> Any:
        files_and_arrays = [(file, v) for file, v in values if isinstance(v, StoredArray)]
        first_file, first = files_and_arrays[0]
        dtype_and_shape = first.dtype, first.shape
        for file, value in values:
            if not isinstance(value, StoredArray) or (value.dtype, value.shape) != dtype_and_shape:
                difference = f"is {_describe(first)} and {_describe(value)}"
                raise self._conflict_error(path, first_file, file, difference)
        arrays = [array for _, array in files_and_arrays]
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
            origin = (0,) * len(first.shape)
            replicas = tuple((origin, other) for other in arrays[1:])
            return StoredTensor(first.dtype, first.shape, ((origin, first),), replicas)
        return first

    def _conflict_error(self, path: Path, file: str, other: str, difference: str) -> FormatError:
        return FormatError(
            f"{self.label}: {_name_of_path(path)} {difference}: {file} and {other}. Either the "
            "files are from different saves, or only the program that wrote them knows how they "
            "fit together: then describe it by a specification (`spec=`)"
        )


def _name_of_path(path: Path) -> str:
    return ".".join(map(str, path))


def _describe(value: object) -> str:
    if isinstance(value, StoredArray):
        return f"a tensor of dtype {value.dtype} and shape {list(value.shape)}"
    return f"a value of type {type(value).__name__}"


def select_sample(array: StoredArray) -> StoredArray:
    """Return the first elements of an array; only one if the array is not contiguous."""
    size = prod(array.shape)
    is_contiguous = array == array.contiguous(array.file, array.start, array.dtype, array.shape)
    count = min(size, SAMPLE_SIZE) if is_contiguous else 1
    return replace(array, shape=(count if size else 0,), stride=(1,))


def _may_be_random_state(array: StoredArray) -> bool:
    is_small = prod(array.shape) <= LARGEST_RANDOM_STATE
    return array.dtype == "uint8" and len(array.shape) == 1 and is_small


def _division_of(part: StoredPart) -> tuple[object, ...]:
    """Return what the parts of all ranks have in common."""
    return part.shape, part.dtype, part.places, part.arrangement
