"""Parameters as optimizers hold them: their names, and their ranges in flattened tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwise.adapters.dtensor import fragments_of_local_tensor, is_dtensor
from shardwise.adapters.tensors import tensor_leaf
from shardwise.errors import StateError
from shardwise.layout import Box, boxes_of_range
from shardwise.state.leaves import Fragment, TensorLeaf
from shardwise.state.tensor_memory import with_memory

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A range of a flat (1-d) local tensor that holds boxes of a global tensor.

    Attributes:
        name: name of the global tensor.
        shape: shape of the global tensor.
        start: index in the local tensor of the range's first element.
        boxes: boxes of the global tensor. They lie end to end in the range, in row-major order.
        padded: whether the last rows of the global tensor may be padding.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    boxes: tuple[Box, ...]
    padded: bool = False

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], start: int = 0) -> FlatRange:
        """Return the range that holds a whole tensor."""
        return cls(name, tuple(shape), start, (Box.whole(tuple(shape)),))

    def cut(self, low: int, high: int) -> FlatRange:
        """Return the part of the range in elements `low:high` of the local tensor.

        The result describes a local tensor that begins at `low`.
        """
        boxes: list[Box] = []
        start_of_box = self.start
        for box in self.boxes:
            first, last = (min(max(edge - start_of_box, 0), box.size) for edge in (low, high))
            for part in boxes_of_range(box.shape, first, last):
                offset = tuple(o + p for o, p in zip(box.offset, part.offset, strict=True))
                boxes.append(Box(offset, part.shape))
            start_of_box += box.size
        return replace(self, start=max(self.start - low, 0), boxes=tuple(boxes))

    def fragments(self, flat: torch.Tensor) -> tuple[Fragment, ...]:
        """Return the boxes, each with its memory in the flat tensor."""
        fragments = []
        start_of_box = self.start
        for box in self.boxes:
            fragments.append(
                Fragment(box, flat[start_of_box : start_of_box + box.size].view(box.shape))
            )
            start_of_box += box.size
        return tuple(fragments)

    def leaf(self, name: str, flat: torch.Tensor, tie_key: object = None) -> TensorLeaf:
        """Return the range of a flat tensor as a leaf of the global tensor."""
        fragments = self.fragments(with_memory(name, flat))
        return TensorLeaf(name, flat.dtype, self.shape, fragments, tie_key, padded=self.padded)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as an optimizer holds it.

    Attributes:
        tensor: the tensor in the optimizer's param groups.
        name: name of the parameter; unused if `flat` is not empty.
        flat: the ranges of the original parameters, if the tensor is flattened.
        is_copy: whether other ranks save the same parameter, so that this rank only loads it.
    """

    tensor: torch.Tensor
    name: str
    flat: tuple[FlatRange, ...] = ()
    is_copy: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all original parameters in the tensor."""
        return tuple(part.name for part in self.flat) or (self.name,)

    @property
    def name_and_shape(self) -> tuple[str, tuple[int, ...]]:
        """The name and global shape of the parameter, or of the first one in a flattened tensor."""
        if self.flat:
            return self.flat[0].name, self.flat[0].shape
        return self.name, tuple(self.tensor.shape)

    def add_prefix(self, prefix: str) -> Parameter:
        """Return the parameter with a prefix before its names."""
        flat = tuple(replace(part, name=f"{prefix}.{part.name}") for part in self.flat)
        return replace(self, name=f"{prefix}.{self.name}", flat=flat)

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds no element of the parameter, and so no optimizer state."""
        return bool(self.flat) and not _local_tensor(self.tensor).numel()

    @property
    def representative_name(self) -> str:
        """The name of the first parameter that is not a scalar.

        All parameters in the tensor have the same keys of state as this one.
        """
        return next((part.name for part in self.flat if part.shape), self.names[0])

    def leaves(self, prefix: str, key: str, value: torch.Tensor) -> list[TensorLeaf]:
        """Return a tensor of the optimizer's state as leaves, one for each original parameter.

        Args:
            prefix: name of the optimizer.
            key: key of the state, for example `exp_avg`.
            value: the state tensor. It has the parameter's layout, or is replicated.

        Raises:
            StateError: the sharding of the value is unknown.
        """
        if not self.flat:
            name = f"{prefix}.{self.name}.{key}"
            if is_dtensor(value) or not is_dtensor(self.tensor):
                return [tensor_leaf(name, value)]
            if value.shape == _local_tensor(self.tensor).shape != self.tensor.shape:
                return [_leaf_like(name, value, self.tensor)]
            _refuse_unless_scalar(name, value)
            return [tensor_leaf(name, value)]
        local = _local_tensor(self.tensor)
        same_layout = value.shape == local.shape and value.is_contiguous()
        is_flat = same_layout or (value.dim() == 1 and value.numel() == local.numel())
        leaves = []
        for part in self.flat:
            name = f"{prefix}.{part.name}.{key}"
            if is_flat:
                leaves.append(part.leaf(name, with_memory(name, value).view(-1)))
            else:
                _refuse_unless_scalar(name, value)
                leaves.append(tensor_leaf(name, value))
        return leaves

    def allocate_state(
        self, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
    ) -> torch.Tensor:
        """Allocate a state tensor of a global shape.

        State with the shape of the parameter is sharded like the parameter. All state of a
        flattened parameter, except scalars, is sharded too. Other state is replicated.
        """
        tensor = self.tensor
        has_shape_of_part = shape != () and shape in {part.shape for part in self.flat}
        if self.flat and (has_shape_of_part or math.prod(shape) > 1):
            return torch.zeros(
                _local_tensor(tensor).shape, dtype=dtype, device=_local_tensor(tensor).device
            )
        if shape == tuple(tensor.shape) and shape != ():
            return torch.zeros_like(tensor, dtype=dtype)
        if not is_dtensor(tensor) or shape == ():
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.distributed.tensor.zeros(
            *shape,
            dtype=dtype,
            device_mesh=tensor.device_mesh,
            placements=[torch.distributed.tensor.Replicate()] * tensor.device_mesh.ndim,
        )


def join_leaves(leaves: Iterable[TensorLeaf], *, to_fill: bool) -> list[TensorLeaf]:
    """Join leaves of the same name: they are parts of one tensor, for example stacked experts.

    Args:
        to_fill: whether a load fills the leaves. If so, all copies of a scalar, such as a step
            count, are kept, because the load fills each copy.

    Raises:
        StateError: two leaves are the same part of a tensor.
    """
    leaves_by_name: dict[str, list[TensorLeaf]] = {}
    for leaf in leaves:
        leaves_by_name.setdefault(leaf.name, []).append(leaf)
    return [
        leaves_of_name[0] if len(leaves_of_name) == 1 else _join_fragments(leaves_of_name, to_fill)
        for leaves_of_name in leaves_by_name.values()
    ]


def _join_fragments(leaves: Sequence[TensorLeaf], to_fill: bool) -> TensorLeaf:
    first_leaf = leaves[0]
    fragments = [fragment for leaf in leaves for fragment in leaf.fragments]
    if first_leaf.shape == ():
        return (
            first_leaf
            if not to_fill
            else replace(first_leaf, fragments=tuple(fragments), tie_key=None)
        )
    if len({fragment.box for fragment in fragments}) < len(fragments):
        raise StateError(
            f"{first_leaf.name}: two values of the state have this name and hold the same part of "
            "the tensor: put each model and optimizer under a separate key of a dict"
        )
    return replace(first_leaf, fragments=tuple(fragments), tie_key=None)


def _local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    # to_local() would make an autograd node.
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def _leaf_like(name: str, value: torch.Tensor, like: DTensor) -> TensorLeaf:
    shape = tuple(like.shape)
    fragments = fragments_of_local_tensor(name, value, shape, like.device_mesh, like.placements)
    return TensorLeaf(name, value.dtype, shape, fragments)


def _refuse_unless_scalar(name: str, value: torch.Tensor) -> None:
    if value.numel() > 1:
        raise StateError(
            f"{name}: the optimizer keeps a plain tensor of shape {list(value.shape)} for a "
            "sharded parameter, so its sharding is unknown: let the optimizer keep it as a DTensor"
        )


def unwrap_data_parallel(module: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel or DataParallel."""
    while isinstance(module, (DataParallel, DistributedDataParallel)):
        module = module.module
    return module


class NameCleaner:
    """Removes the parts of names that wrappers of modules add.

    Wrappers are torch.compile, activation checkpointing, FSDP and data parallelism.
    """

    def __init__(self, root: nn.Module) -> None:
        self._cache: dict[str, tuple[object, str]] = {"": (root, "")}

    def __call__(self, path: str) -> str:
        """Return the clean name of a path below the root."""
        parent_path, _, last_part = path.rpartition(".")
        module, prefix = self._module_at(parent_path)
        return prefix[:-1] if _is_wrapper_part(module, last_part) else prefix + last_part

    def _module_at(self, path: str) -> tuple[object, str]:
        """Return the module at a path, and the clean prefix of all names below the module."""
        cached = self._cache.get(path)
        if cached is None:
            parent_path, _, last_part = path.rpartition(".")
            module, prefix = self._module_at(parent_path)
            clean_prefix = (
                prefix if _is_wrapper_part(module, last_part) else f"{prefix}{last_part}."
            )
            cached = self._cache[path] = getattr(module, last_part, None), clean_prefix
        return cached


def _is_wrapper_part(module: object, part: str) -> bool:
    if part == "module":
        return isinstance(module, (DataParallel, DistributedDataParallel))
    return part in _WRAPPER_PARTS
