"""Describe tensors of any kind as `TensorLeaf`s, and load into tensors whose memory overlaps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from shardwise.adapters.dtensor import fragments_of_dtensor, is_dtensor, sharding_of_dtensor
from shardwise.errors import StateError
from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES
from shardwise.state.leaves import Fragment, Shards, TensorLeaf, memory_extent, same_bytes
from shardwise.state.tensor_memory import with_memory

TensorLike = torch.Tensor | Shards


def tensor_leaf(name: str, tensor: TensorLike) -> TensorLeaf:
    """Return the part of a tensor that this rank holds: a plain tensor, or a DTensor's shard.

    Raises:
        StateError: this kind of tensor cannot be saved.
    """
    if isinstance(tensor, Shards):
        check_dtype(name, tensor.dtype)
        fragments = tuple(Fragment(f.box, with_memory(name, f.data)) for f in tensor.fragments)
        return TensorLeaf(name, tensor.dtype, tensor.shape, fragments, id(tensor))
    check_dtype(name, tensor.dtype)
    if is_lazy(tensor):
        raise StateError(
            f"{name}: a lazy parameter has no shape before the module's first forward: run the "
            "module once before saving or loading"
        )
    if is_dtensor(tensor):
        shape, fragments = tuple(tensor.shape), fragments_of_dtensor(name, tensor)
        key, sharding = _tie_key(tensor, fragments), sharding_of_dtensor(tensor)
        return TensorLeaf(name, tensor.dtype, shape, fragments, key, sharding=sharding)
    if tensor.is_nested:
        raise StateError(f"{name}: nested tensors cannot be saved; save {name}.to_padded_tensor(0)")
    if tensor.layout != torch.strided:
        raise StateError(f"{name}: {tensor.layout} tensors cannot be saved; save {name}.to_dense()")
    shape = tuple(tensor.shape)
    data = with_memory(name, tensor)
    after_load = None
    if data.is_conj() or data.is_neg():
        # The memory holds conjugated or negated values: fill a copy, and assign the copy.
        lazy_view, data = data, data.resolve_conj().resolve_neg()
        after_load = partial(lazy_view.copy_, data)
    fragments = (Fragment(_whole_box(shape), data),) if data.numel() else ()
    return TensorLeaf(name, tensor.dtype, shape, fragments, _tie_key(tensor, fragments), after_load)


def check_dtype(name: str, dtype: torch.dtype) -> str:
    """Return the name of a dtype, for example `bfloat16`.

    Raises:
        StateError: checkpoints cannot hold this dtype.
    """
    dtype_name = _dtype_name(dtype)
    if dtype_name is None:
        raise StateError(
            f"{name}: {dtype} tensors cannot be saved, because their values depend on a "
            f"quantizer: save {name}.int_repr(), .q_scale() and .q_zero_point() instead"
        )
    return dtype_name


@lru_cache
def _dtype_name(dtype: torch.dtype) -> str | None:
    dtype_name = str(dtype).removeprefix("torch.")
    return dtype_name if dtype_name in DTYPES else None


@lru_cache(maxsize=4096)
def _whole_box(shape: tuple[int, ...]) -> Box:
    return Box.whole(shape)


def _tie_key(tensor: torch.Tensor, fragments: tuple[Fragment, ...]) -> object:
    """Return a value that is equal for all tensors in the same memory, such as tied weights."""
    if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
        return id(tensor)
    if not fragments:
        return None
    data = fragments[0].data
    if data.is_meta:
        return id(tensor)
    if not data.data_ptr():
        return None
    memory = data.data_ptr(), data.shape, data.stride(), data.device
    return memory, tensor.dtype, fragments[0].box


def tensor_of_array(name: str, array: np.ndarray) -> torch.Tensor:
    """Return a tensor that shares a numpy array's memory.

    Raises:
        StateError: torch does not support its dtype or strides.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise StateError(
            f"{name}: this NumPy array of {array.dtype} with strides {array.strides} cannot become "
            f"a tensor: {error}"
        ) from error


def make_leaves_fillable(leaves: Sequence[TensorLeaf]) -> list[TensorLeaf]:
    """Return leaves that a load can fill in any order.

    Leaves whose memory overlaps are replaced by copies. `after_load` of a leaf moves the filled
    copy to the original memory.
    """
    overlapping = _find_overlapping(leaves)
    filled_leaves: list[tuple[TensorLeaf, TensorLeaf]] = []
    return [
        _copy_leaf(leaf, filled_leaves) if index in overlapping else make_fillable(leaf)
        for index, leaf in enumerate(leaves)
    ]


def _find_overlapping(leaves: Sequence[TensorLeaf]) -> set[int]:
    """Return the indices of leaves whose memory overlaps with another leaf, except tied tensors."""
    ranges: dict[torch.device, list[tuple[int, int, int]]] = {}
    seen_tie_keys: set[object] = set()
    for index, leaf in enumerate(leaves):
        if leaf.tie_key is not None and leaf.tie_key in seen_tie_keys:
            continue
        seen_tie_keys.add(leaf.tie_key)
        for data in (fragment.data for fragment in leaf.fragments):
            start = 0 if data.is_meta else data.data_ptr()
            if start and data.numel():
                stop = start + memory_extent(data) * data.element_size()
                ranges.setdefault(data.device, []).append((start, stop, index))
    overlapping: set[int] = set()
    for intervals in ranges.values():
        max_stop, owner = 0, -1
        for start, stop, index in sorted(intervals):
            if start < max_stop and index != owner:
                overlapping |= {index, owner}
            if stop > max_stop:
                max_stop, owner = stop, index
    return overlapping


def _copy_leaf(leaf: TensorLeaf, filled_leaves: list[tuple[TensorLeaf, TensorLeaf]]) -> TensorLeaf:
    """Return a copy of a leaf. Its `after_load` moves the values, and compares overlapping ones."""
    copies = tuple(Fragment(f.box, f.data.clone()) for f in leaf.fragments)
    copy = TensorLeaf(leaf.name, leaf.dtype, leaf.shape, copies)

    def after_load() -> None:
        filled_leaves.append((leaf, copy))
        for original, copied in zip(leaf.fragments, copies, strict=True):
            original.data.copy_(copied.data)
        for earlier, filled in filled_leaves:
            for original, copied in zip(earlier.fragments, filled.fragments, strict=True):
                if not same_bytes(original.data, copied.data):
                    raise StateError(
                        f"{earlier.name} and {leaf.name} share memory in the state, but have "
                        "different values in the checkpoint: load into clones instead"
                    )
        if leaf.after_load is not None:
            leaf.after_load()

    return replace(leaf, fragments=copies, tie_key=None, after_load=after_load)


def make_fillable(leaf: TensorLeaf) -> TensorLeaf:
    """Return a leaf that can be filled: the leaf itself, or a copy if its tensor is expanded.

    An expanded tensor has one element of memory at many indices. `after_load` moves the copy into
    it, if the saved values at these indices are equal.
    """
    if len(leaf.fragments) != 1:
        return leaf
    box, data = leaf.fragments[0].box, leaf.fragments[0].data
    if not _overlaps_itself(data):
        return leaf
    copy = torch.empty(data.shape, dtype=data.dtype, device=data.device).copy_(data)

    def after_load() -> None:
        _copy_into_overlapping(leaf.name, copy, data)

    return replace(leaf, fragments=(Fragment(box, copy),), tie_key=None, after_load=after_load)


def _overlaps_itself(data: torch.Tensor) -> bool:
    if data.is_contiguous():
        return False
    covered = 0
    for stride, n in sorted(zip(data.stride(), data.shape, strict=True)):
        if n > 1 and stride <= covered:
            return True
        covered += stride * (n - 1)
    return False


def _copy_into_overlapping(name: str, copy: torch.Tensor, data: torch.Tensor) -> None:
    first_indices = tuple(slice(0, 1) if s == 0 else slice(None) for s in data.stride())
    base = data[first_indices]
    index_ranges = [torch.arange(n, device="cpu") for n in base.shape]
    for index in torch.cartesian_prod(*index_ranges).reshape(-1, base.dim()):
        base[tuple(index)] = copy[first_indices][tuple(index)]
    if not same_bytes(data, copy):
        raise StateError(
            f"{name}: the tensor overlaps itself in memory, as expanded tensors do, but the saved "
            "values of indices that share memory differ: load into a clone() instead"
        )
