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
