"""Tensors of any kind as leaves, and targets whose memory overlaps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardwise.adapters.dtensor import dtensor_fragments
from shardwise.errors import StateError
from shardwise.layout import Box
from shardwise.manifest.dtypes import DTYPES
from shardwise.state.leaves import Fragment, Shards, TensorLeaf, reach, same_bytes

TensorLike = torch.Tensor | Shards


def tensor_leaf(name: str, tensor: TensorLike) -> TensorLeaf:
    """Return what this rank holds of a tensor: all of a plain one, its shard of a DTensor.

    Raises:
        StateError: the tensor cannot be saved as it is.
    """
    if isinstance(tensor, Shards):
        check_dtype(name, tensor.dtype)
        return TensorLeaf(name, tensor.dtype, tensor.shape, tensor.fragments, id(tensor))
    check_dtype(name, tensor.dtype)
    if is_lazy(tensor):
        raise StateError(
            f"{name}: a lazy parameter, which has no shape before the module's first forward"
        )
    if isinstance(tensor, DTensor):
        shape, fragments = tuple(tensor.shape), dtensor_fragments(name, tensor)
        return TensorLeaf(name, tensor.dtype, shape, fragments, _identity(tensor, fragments))
    if tensor.is_nested:
        raise StateError(f"{name}: nested tensors cannot be saved; save {name}.to_padded_tensor(0)")
    if tensor.layout != torch.strided:
        raise StateError(f"{name}: {tensor.layout} tensors cannot be saved; save {name}.to_dense()")
    shape = tuple(tensor.shape)
    data = tensor.detach()
    finish = None
    if data.is_conj() or data.is_neg():
        # Its memory holds other values: fill a copy, and assign the copy.
        lazy, data = data, data.resolve_conj().resolve_neg()
        finish = partial(lazy.copy_, data)
    whole = (Fragment(_whole(shape), data),) if data.numel() else ()
    return TensorLeaf(name, tensor.dtype, shape, whole, _identity(tensor, whole), finish)


def check_dtype(name: str, dtype: torch.dtype) -> str:
    """Return the name of a dtype.

    Raises:
        StateError: checkpoints cannot hold this dtype.
    """
    text = _stored(dtype)
    if text is None:
        raise StateError(
            f"{name}: {dtype} tensors cannot be saved, because their values need a quantizer: "
            "save q.int_repr(), q.q_scale() and q.q_zero_point()"
        )
    return text


@lru_cache
def _stored(dtype: torch.dtype) -> str | None:
    text = str(dtype).removeprefix("torch.")
    return text if text in DTYPES else None


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Box:
    return Box.whole(shape)


def _identity(tensor: torch.Tensor, fragments: tuple[Fragment, ...]) -> object:
    """Return a value that is equal for all names of the same memory."""
    if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
        return id(tensor)
    if not fragments:
        return None
    data = fragments[0].data
    if data.is_meta:
        return id(tensor)
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
            f"{name}: numpy array of {array.dtype} with strides {array.strides}: {error}"
        ) from error


def fillable_leaves(leaves: Sequence[TensorLeaf]) -> list[TensorLeaf]:
    """Return leaves that can be filled in any order.

    Where the memory of targets overlaps, a load fills copies, and moves them when all are filled.
    """
    tangled = _tangled(leaves)
    moved: list[tuple[TensorLeaf, TensorLeaf]] = []
    return [
        _copied(leaf, moved) if i in tangled else fillable(leaf) for i, leaf in enumerate(leaves)
    ]


def _tangled(leaves: Sequence[TensorLeaf]) -> set[int]:
    """Return the indices of leaves whose memory overlaps in part; tied tensors excepted."""
    ranges: dict[torch.device, list[tuple[int, int, int]]] = {}
    seen: set[object] = set()
    for i, leaf in enumerate(leaves):
        if leaf.identity is not None and leaf.identity in seen:
            continue
        seen.add(leaf.identity)
        for data in (fragment.data for fragment in leaf.fragments):
            if data.numel() and not data.is_meta:
                start = data.data_ptr()
                stop = start + reach(data) * data.element_size()
                ranges.setdefault(data.device, []).append((start, stop, i))
    found: set[int] = set()
    for lying in ranges.values():
        furthest, owner = 0, -1
        for start, stop, i in sorted(lying):
            if start < furthest and i != owner:
                found |= {i, owner}
            if stop > furthest:
                furthest, owner = stop, i
    return found


def _copied(leaf: TensorLeaf, moved: list[tuple[TensorLeaf, TensorLeaf]]) -> TensorLeaf:
    """Return a copy of a leaf that is moved into its memory when filled, and compared."""
    copies = tuple(Fragment(f.box, f.data.clone()) for f in leaf.fragments)
    copy = TensorLeaf(leaf.name, leaf.dtype, leaf.shape, copies)

    def finish() -> None:
        moved.append((leaf, copy))
        for here, there in zip(leaf.fragments, copies, strict=True):
            here.data.copy_(there.data)
        for earlier, filled in moved:
            for here, there in zip(earlier.fragments, filled.fragments, strict=True):
                if not same_bytes(here.data, there.data):
                    raise StateError(
                        f"{earlier.name} and {leaf.name} share memory in the target, but have "
                        "different values in the checkpoint; load into clones instead"
                    )
        if leaf.finish is not None:
            leaf.finish()

    return replace(leaf, fragments=copies, identity=None, finish=finish)


def fillable(leaf: TensorLeaf) -> TensorLeaf:
    """Return a leaf that can be filled: the leaf itself, or a copy if its memory overlaps itself.

    An expanded tensor has one element at many indices. The copy is moved into it when filled, if
    the saved values at these indices are equal.
    """
    if len(leaf.fragments) != 1:
        return leaf
    box, data = leaf.fragments[0].box, leaf.fragments[0].data
    if not _overlaps_itself(data):
        return leaf
    copy = torch.empty(data.shape, dtype=data.dtype, device=data.device).copy_(data)

    def finish() -> None:
        _move_overlapping(leaf.name, copy, data)

    return replace(leaf, fragments=(Fragment(box, copy),), identity=None, finish=finish)


def _overlaps_itself(data: torch.Tensor) -> bool:
    if data.is_contiguous():
        return False
    covered = 0
    for stride, n in sorted(zip(data.stride(), data.shape, strict=True)):
        if n > 1 and stride <= covered:
            return True
        covered += stride * (n - 1)
    return False


def _move_overlapping(name: str, copy: torch.Tensor, data: torch.Tensor) -> None:
    first = tuple(slice(0, 1) if s == 0 else slice(None) for s in data.stride())
    base = data[first]
    every = [torch.arange(n, device="cpu") for n in base.shape]
    for index in torch.cartesian_prod(*every).reshape(-1, base.dim()):
        base[tuple(index)] = copy[first][tuple(index)]
    if not same_bytes(data, copy):
        raise StateError(
            f"{name}: the tensor overlaps itself in memory, but the saved values of indices that "
            "share an element differ; load into a clone() instead"
        )
