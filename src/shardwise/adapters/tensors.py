"""A tensor of any kind as a leaf: what this rank holds of which global tensor."""

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
    """What this rank holds of a tensor: all of a plain one, its shard of a DTensor.

    Raises:
        StateError: the tensor has no values that could be stored as they are.
    """
    if isinstance(tensor, Shards):
        check_dtype(name, tensor.dtype)
        return TensorLeaf(name, tensor.dtype, tensor.shape, tensor.fragments, id(tensor))
    check_dtype(name, tensor.dtype)
    if is_lazy(tensor):
        raise StateError(f"{name}: it has no shape before the module's first forward")
    if isinstance(tensor, DTensor):
        shape, fragments = tuple(tensor.shape), dtensor_fragments(name, tensor)
        return TensorLeaf(name, tensor.dtype, shape, fragments, _identity(tensor, fragments))
    if tensor.is_nested:
        raise StateError(f"{name}: nested tensors are not stored; save {name}.to_padded_tensor(0)")
    if tensor.layout != torch.strided:
        raise StateError(f"{name}: {tensor.layout} tensors are not stored; save {name}.to_dense()")
    shape = tuple(tensor.shape)
    data = tensor.detach()
    finish = None
    if data.is_conj() or data.is_neg():
        # Its memory holds other values than it has: fill a copy, and assign that to it.
        lazy, data = data, data.resolve_conj().resolve_neg()
        finish = partial(lazy.copy_, data)
    whole = (Fragment(_whole(shape), data),) if data.numel() else ()
    return TensorLeaf(name, tensor.dtype, shape, whole, _identity(tensor, whole), finish)


def check_dtype(name: str, dtype: torch.dtype) -> str:
    """The name of a dtype that checkpoints hold.

    Raises:
        StateError: they do not hold this one.
    """
    text = _stored(dtype)
    if text is None:
        raise StateError(
            f"{name}: {dtype} tensors are not stored, because their values need a quantizer "
            "beside them: save q.int_repr(), q.q_scale() and q.q_zero_point()"
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
    """Equal for two names of one memory. A parameter is itself, even where its shard is empty."""
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
    """A tensor over a numpy array's memory.

    Raises:
        StateError: torch has no such type, or no such memory layout.
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
    """Leaves that can be filled in any order: copies where memory overlaps, moved when filled."""
    tangled = _tangled(leaves)
    moved: list[tuple[TensorLeaf, TensorLeaf]] = []
    return [
        _copied(leaf, moved) if i in tangled else fillable(leaf) for i, leaf in enumerate(leaves)
    ]


def _tangled(leaves: Sequence[TensorLeaf]) -> set[int]:
    """Leaves whose memory lies between that of others; not those of one and the same memory."""
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
    """A leaf of memory of its own, moved to where `leaf` lies when filled, after those `moved`."""
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
                        f"{earlier.name} and {leaf.name} share memory in the target, and differ "
                        "there in the checkpoint; load into clones instead"
                    )
        if leaf.finish is not None:
            leaf.finish()

    return replace(leaf, fragments=copies, identity=None, finish=finish)


def fillable(leaf: TensorLeaf) -> TensorLeaf:
    """The leaf itself, or a copy that is moved to it when filled: of memory that overlaps itself.

    An expanded tensor holds one element in many places. It is filled from a copy, and only if the
    saved values allow it.
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
            f"{name}: the tensor overlaps itself in memory, and the saved values differ where one "
            "element lies in several places; load into a clone() instead"
        )
