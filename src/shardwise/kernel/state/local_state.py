"""The local state of a rank: its fragments of tensors, and its plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.kernel.boxes import Box, Sharding
from shardwise.kernel.errors import LayoutError, StateError
from shardwise.kernel.state.json_fields import JsonValue

_NUMPY_DTYPE_BY_SIZE = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}

ParameterOrder = Sequence[Sequence[tuple[str, tuple[int, ...]]]]
"""The names and global shapes of the parameters in each group of an optimizer."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A box of a global tensor, and the local tensor of the same shape that holds it.

    Attributes:
        memory: for a load that converts, what receives the stored box, as a `TensorMemory` does,
            and fills `data`, which may then have another shape.
    """

    box: Box
    data: torch.Tensor
    memory: Any = None


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A global tensor, and this rank's fragments of the tensor.

    Attributes:
        name: the full name of the tensor.
        dtype: the dtype of the fragments.
        shape: the global shape.
        fragments: the fragments of this rank, none of them empty.
        tie_key: a key for tied weights: leaves with equal `tie_key` are the same tensor under
            several names. None if the tensor is not tied.
        after_load: called after a load has filled the fragments. Moves the values to their final
            memory, if the fragments are copies.
        padded: whether the last rows may be padding, as in Megatron's embedding. A load then
            accepts a checkpoint with fewer rows.
        sharding: the split over a device mesh that results in the fragments, if there is one.
        of_shard: for a plain tensor in the state of a sharded parameter, returns the tensor as
            state of this shard only, under a name of its own.
        is_like_parameter: whether such a tensor is sharded like the parameter. Other ones are
            whole; if they have one element, ranks may share it.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fragments: tuple[Fragment, ...]
    tie_key: object = None
    after_load: Callable[[], object] | None = None
    padded: bool = False
    sharding: Sharding | None = None
    of_shard: Callable[[], TensorLeaf] | None = None
    is_like_parameter: bool = False

    def without_padding(self, shape: tuple[int, ...]) -> TensorLeaf:
        """Return a padded leaf, cut to `shape` if this has fewer rows."""
        same_rows = len(shape) == len(self.shape) and shape[1:] == self.shape[1:]
        if not (same_rows and shape[0] < self.shape[0]):
            return self
        fragments = []
        for fragment in self.fragments:
            box = fragment.box
            rows = min(shape[0] - box.offset[0], box.shape[0])
            if rows > 0:
                kept = Box(box.offset, (rows, *box.shape[1:]))
                fragments.append(Fragment(kept, fragment.data[:rows]))
        return replace(self, shape=shape, fragments=tuple(fragments))


@dataclass(slots=True)
class LocalState:
    """The part of a state that this rank holds.

    Attributes:
        tensors: this rank's fragments of tensors.
        objects: plain values that are the same on all ranks, encoded.
        grouped: encoded values that several parameters share. For example,
            `{"optimizer.param_groups": [(("w", "b"), {"lr": 0.1})]}` says that the parameters w and
            b have the learning rate 0.1. A rank lists only its own parameters.
        per_rank: values that differ between ranks, encoded.
        problems: reasons why the state cannot be loaded.
        unselected: names that a load does not change, because they are not selected.
    """

    tensors: list[TensorLeaf] = field(default_factory=list)
    objects: dict[str, JsonValue] = field(default_factory=dict)
    grouped: dict[str, list[tuple[tuple[str, ...], JsonValue]]] = field(default_factory=dict)
    per_rank: dict[str, JsonValue] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unselected: list[str] = field(default_factory=list)

    @classmethod
    def unite(cls, parts: Iterable[LocalState]) -> LocalState:
        """Unite the local states of all values of a state.

        Raises:
            StateError: two values have the same name.
        """
        whole = cls()
        seen: set[str] = set()
        for part in parts:
            for name in part.names():
                if name in seen:
                    raise StateError(
                        f"{name!r}: two values of the state have this name; rename a key of the "
                        "state"
                    )
                seen.add(name)
            whole.add(part)
        return whole

    def add(self, other: LocalState) -> None:
        """Add another part of the state."""
        self.tensors += other.tensors
        self.objects |= other.objects
        self.grouped |= other.grouped
        self.per_rank |= other.per_rank
        self.problems += other.problems
        self.unselected += other.unselected

    def join_parts(self, *, to_fill: bool) -> None:
        """Join leaves of the same name: they are parts of one tensor, for example stacked experts.

        Args:
            to_fill: whether a load fills the leaves. If so, all copies of a scalar, such as a step
                count, are kept, because the load fills each copy.

        Raises:
            StateError: two leaves are the same part of a tensor.
        """
        joined: dict[str, TensorLeaf] = {}
        for leaf in self.tensors:
            first = joined.setdefault(leaf.name, leaf)
            if first is leaf or (leaf.shape == () and not to_fill):
                continue
            boxes = {fragment.box for fragment in first.fragments}
            if leaf.shape != () and any(fragment.box in boxes for fragment in leaf.fragments):
                raise StateError(
                    f"{leaf.name}: two values of the state have this name and hold the same part "
                    "of the tensor: put each model and optimizer under a separate key of a dict"
                )
            fragments = first.fragments + leaf.fragments
            joined[leaf.name] = replace(first, fragments=fragments, tie_key=None)
        self.tensors = [*joined.values()]

    def names(self) -> Iterator[str]:
        """Yield the names of all tensors and values."""
        for leaf in self.tensors:
            yield leaf.name
        yield from (*self.objects, *self.grouped, *self.per_rank)


def view_for_numpy(data: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory with a dtype of the same size that NumPy supports."""
    return data.detach().view(_NUMPY_DTYPE_BY_SIZE[data.element_size()])


def memory_extent(data: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first to its last element in memory."""
    if data.is_contiguous():
        return data.numel()
    return 1 + sum(s * (n - 1) for s, n in zip(data.stride(), data.shape, strict=True))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of the same shape and dtype have the same bits, also in NaNs."""
    flat_bytes = [
        view_for_numpy(each).contiguous().reshape(-1).view(torch.uint8) for each in (a, b)
    ]
    return torch.equal(*flat_bytes)


class Shards:
    """This rank's part of a global tensor: local tensors, and the box that each of them covers.

    Put a `Shards` into the state in place of a tensor. A load fills the local tensors.

    Example:

        rows = torch.empty(512, 1024)  # this rank's 512 rows of a (4096, 1024) tensor
        box = sw.Box((512 * rank, 0), (512, 1024))
        sw.save(path, {"table": sw.Shards((4096, 1024), rows.dtype, [(box, rows)])})

    Args:
        shape: the shape of the global tensor.
        dtype: the dtype of the global tensor.
        parts: pairs of a box and a local tensor of the box's shape; empty if this rank holds
            nothing.

    Raises:
        LayoutError: a local tensor does not match its box, or a box lies outside of the tensor.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        parts: Sequence[tuple[Box, torch.Tensor]],
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        whole = Box.whole(self.shape)
        for box, data in parts:
            if (
                tuple(data.shape) != box.shape
                or data.dtype != dtype
                or len(box.shape) != len(self.shape)
            ):
                raise LayoutError(
                    f"Shards: a local {data.dtype} tensor of shape {list(data.shape)} does not "
                    f"match the box {box} of a {dtype} tensor of shape {list(self.shape)}: pass "
                    "pairs of a box and a local tensor of the same shape and dtype"
                )
            if not whole.contains(box):
                raise LayoutError(
                    f"Shards: the box {box} lies outside of a tensor of shape {list(self.shape)}: "
                    "correct its offset, or pass the global shape as shape="
                )
        self.fragments = tuple(Fragment(box, data) for box, data in parts if box.size)


def copy_overlapping(leaves: Sequence[TensorLeaf]) -> list[TensorLeaf]:
    """Return leaves that a load can fill in any order.

    A leaf is replaced by a copy if its memory overlaps that of another leaf, or if it repeats
    elements, as an expanded tensor does. `after_load` of the copy moves the values to the original
    memory.
    """
    filled: list[tuple[TensorLeaf, TensorLeaf]] = []
    replaced = list(leaves)
    for index in sorted(_find_overlapping(leaves)):
        replaced[index] = _copy_leaf(leaves[index], filled)
    return replaced


def _find_overlapping(leaves: Sequence[TensorLeaf]) -> set[int]:
    """Return the indices of leaves whose memory overlaps, except those of tied tensors."""
    ranges: dict[torch.device, list[tuple[int, int, int, bool]]] = {}
    seen_tie_keys: set[object] = set()
    overlapping: set[int] = set()
    for index, leaf in enumerate(leaves):
        is_tied = leaf.tie_key is not None and leaf.tie_key in seen_tie_keys
        seen_tie_keys.add(leaf.tie_key)
        for fragment in leaf.fragments:
            data, is_contiguous = fragment.data, fragment.data.is_contiguous()
            if not is_contiguous and _overlaps_itself(data):
                overlapping.add(index)
            start = 0 if data.is_meta or is_tied else data.data_ptr()
            if start and data.numel():
                stop = start + memory_extent(data) * data.element_size()
                ranges.setdefault(data.device, []).append((start, stop, index, is_contiguous))
    for intervals in ranges.values():
        max_stop, owner, owner_is_contiguous = 0, -1, False
        for start, stop, index, is_contiguous in sorted(intervals):
            # Fragments of one leaf may alternate in memory, as the columns of a tensor do.
            if start < max_stop and (index != owner or (is_contiguous and owner_is_contiguous)):
                overlapping |= {index, owner}
            if stop > max_stop:
                max_stop, owner, owner_is_contiguous = stop, index, is_contiguous
    return overlapping


def _copy_leaf(leaf: TensorLeaf, filled: list[tuple[TensorLeaf, TensorLeaf]]) -> TensorLeaf:
    """Return a copy of a leaf. Its `after_load` moves the values, and compares overlapping ones."""
    copy = replace(leaf, fragments=tuple(Fragment(f.box, f.data.clone()) for f in leaf.fragments))

    def after_load() -> None:
        filled.append((leaf, copy))
        for original, copied in zip(leaf.fragments, copy.fragments, strict=True):
            # Dimensions without a stride repeat their first index, and cannot be assigned.
            first = tuple(slice(0, 1) if s == 0 else slice(None) for s in original.data.stride())
            original.data[first].copy_(copied.data[first])
        for other, copy_of_other in filled:
            for original, copied in zip(other.fragments, copy_of_other.fragments, strict=True):
                if not same_bytes(original.data, copied.data):
                    raise _different_values(leaf.name, other.name)
        if leaf.after_load is not None:
            leaf.after_load()

    return replace(copy, tie_key=None, after_load=after_load)


def _overlaps_itself(data: torch.Tensor) -> bool:
    """Return whether several indices share an element of memory, as in expanded tensors."""
    covered = 0
    for stride, n in sorted(zip(data.stride(), data.shape, strict=True)):
        if n > 1 and stride <= covered:
            return True
        covered += stride * (n - 1)
    return False


def _different_values(name: str, other: str) -> StateError:
    if name == other:
        return StateError(
            f"{name}: the tensor overlaps itself in memory, as expanded tensors do, but the saved "
            "values of indices that share memory differ: load into a clone() instead"
        )
    return StateError(
        f"{other} and {name} share memory in the state, but have different values in the "
        "checkpoint: load into clones instead"
    )
