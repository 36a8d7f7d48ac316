"""Load into tensors whose memory overlaps: fill copies, and move their values afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from shardwise.errors import StateError
from shardwise.state.leaves import Fragment, TensorLeaf, memory_extent, same_bytes


def copy_overlapping(leaves: Sequence[TensorLeaf]) -> list[TensorLeaf]:
    """Return leaves that a load can fill in any order.

    A leaf is replaced by a copy if its memory overlaps that of another leaf, or if it repeats
    elements, as an expanded tensor does. `after_load` of the copy moves the values to the original
    memory.
    """
    overlapping = _find_overlapping(leaves)
    filled: list[tuple[TensorLeaf, TensorLeaf]] = []
    return [
        _copy_leaf(leaf, filled) if index in overlapping else leaf
        for index, leaf in enumerate(leaves)
    ]


def _find_overlapping(leaves: Sequence[TensorLeaf]) -> set[int]:
    """Return the indices of leaves whose memory overlaps, except those of tied tensors."""
    ranges: dict[torch.device, list[tuple[int, int, int, bool]]] = {}
    seen_tie_keys: set[object] = set()
    overlapping: set[int] = set()
    for index, leaf in enumerate(leaves):
        if any(_overlaps_itself(fragment.data) for fragment in leaf.fragments):
            overlapping.add(index)
        if leaf.tie_key is not None and leaf.tie_key in seen_tie_keys:
            continue
        seen_tie_keys.add(leaf.tie_key)
        for data in (fragment.data for fragment in leaf.fragments):
            start = 0 if data.is_meta else data.data_ptr()
            if start and data.numel():
                stop = start + memory_extent(data) * data.element_size()
                found = ranges.setdefault(data.device, [])
                found.append((start, stop, index, data.is_contiguous()))
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
            _copy_into(original.data, copied.data)
        for other, copy_of_other in filled:
            for original, copied in zip(other.fragments, copy_of_other.fragments, strict=True):
                if not same_bytes(original.data, copied.data):
                    raise _different_values(leaf.name, other.name)
        if leaf.after_load is not None:
            leaf.after_load()

    return replace(copy, tie_key=None, after_load=after_load)


def _overlaps_itself(data: torch.Tensor) -> bool:
    """Return whether several indices share an element of memory, as in expanded tensors."""
    if data.is_contiguous():
        return False
    covered = 0
    for stride, n in sorted(zip(data.stride(), data.shape, strict=True)):
        if n > 1 and stride <= covered:
            return True
        covered += stride * (n - 1)
    return False


def _copy_into(data: torch.Tensor, copy: torch.Tensor) -> None:
    if not _overlaps_itself(data):
        data.copy_(copy)
        return
    first_indices = tuple(slice(0, 1) if s == 0 else slice(None) for s in data.stride())
    base = data[first_indices]
    index_ranges = [torch.arange(n, device="cpu") for n in base.shape]
    for index in torch.cartesian_prod(*index_ranges).reshape(-1, base.dim()):
        base[tuple(index)] = copy[first_indices][tuple(index)]


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
