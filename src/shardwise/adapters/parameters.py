"""Parameters as optimizers hold them: their names, and where flat tensors hold which parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardwise.adapters.dtensor import fragments_at
from shardwise.adapters.tensors import tensor_leaf
from shardwise.errors import StateError
from shardwise.layout import Box, boxes_of_range
from shardwise.state.leaves import Fragment, TensorLeaf

_WRAPPER_PARTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True, slots=True)
class FlatRange:
    """A range of a flat local tensor, and the part of a global tensor that it holds.

    Attributes:
        name: name of the global tensor.
        shape: shape of the global tensor.
        start: first element of the range in the local tensor.
        boxes: boxes of the global tensor, end to end in the range, each in row-major order.
        padded: whether the last rows of the global tensor may be padding.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    boxes: tuple[Box, ...]
    padded: bool = False

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], start: int = 0) -> FlatRange:
        """Return the range that holds all of a tensor."""
        return cls(name, tuple(shape), start, (Box.whole(tuple(shape)),))

    def cut(self, low: int, high: int) -> FlatRange:
        """Return the common part with elements `low:high`, its `start` counted from `low`."""
        boxes: list[Box] = []
        at = self.start
        for box in self.boxes:
            first, last = (min(max(edge - at, 0), box.size) for edge in (low, high))
            for part in boxes_of_range(box.shape, first, last):
                offset = tuple(o + p for o, p in zip(box.offset, part.offset, strict=True))
                boxes.append(Box(offset, part.shape))
            at += box.size
        return replace(self, start=max(self.start - low, 0), boxes=tuple(boxes))

    def fragments(self, flat: torch.Tensor) -> tuple[Fragment, ...]:
        """Return the boxes with their memory in the flat tensor."""
        fragments = []
        at = self.start
        for box in self.boxes:
            fragments.append(Fragment(box, flat[at : at + box.size].view(box.shape)))
            at += box.size
        return tuple(fragments)

    def leaf(self, name: str, flat: torch.Tensor, identity: object = None) -> TensorLeaf:
        """Return the part that a flat tensor holds of the global tensor, as a leaf."""
        fragments = self.fragments(flat)
        return TensorLeaf(name, flat.dtype, self.shape, fragments, identity, padded=self.padded)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as an optimizer holds it.

    Attributes:
        tensor: the tensor in the optimizer's param groups.
        name: name of the parameter; unused if `flat` is not empty.
        flat: the named parameters that a flattened tensor holds.
        copy: whether other ranks have the same parameter, divided otherwise, and save it. A copy
            is only loaded.
    """

    tensor: torch.Tensor
    name: str
    flat: tuple[FlatRange, ...] = ()
    copy: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters in the tensor."""
        return tuple(part.name for part in self.flat) or (self.name,)

    @property
    def named_shape(self) -> tuple[str, tuple[int, ...]]:
        """Name and global shape; of a flattened tensor, those of its first parameter."""
        if self.flat:
            return self.flat[0].name, self.flat[0].shape
        return self.name, tuple(self.tensor.shape)

    def below(self, prefix: str) -> Parameter:
        """Return the parameter with a prefix added to its names."""
        flat = tuple(replace(part, name=f"{prefix}.{part.name}") for part in self.flat)
        return replace(self, name=f"{prefix}.{self.name}", flat=flat)

    @property
    def empty(self) -> bool:
        """Whether this rank has no memory for it, not even padding, and so no optimizer state."""
        return bool(self.flat) and not _local(self.tensor).numel()

    @property
    def foremost(self) -> str:
        """The parameter whose saved state describes all: the first that has dimensions."""
        return next((part.name for part in self.flat if part.shape), self.names[0])

    def leaves(self, prefix: str, key: str, value: torch.Tensor) -> list[TensorLeaf]:
        """Return a state tensor of this parameter as one leaf for each name.

        Raises:
            StateError: the sharding of the value is unknown.
        """
        if not self.flat:
            name = f"{prefix}.{self.name}.{key}"
            if isinstance(value, DTensor) or not isinstance(self.tensor, DTensor):
                return [tensor_leaf(name, value)]
            if value.shape == _local(self.tensor).shape != self.tensor.shape:
                return [_leaf_like(name, value, self.tensor)]
            _refuse_unless_scalar(name, value)
            return [tensor_leaf(name, value)]
        local = _local(self.tensor)
        same_layout = value.shape == local.shape and value.is_contiguous()
        flat = same_layout or (value.dim() == 1 and value.numel() == local.numel())
        leaves = []
        for part in self.flat:
            name = f"{prefix}.{part.name}.{key}"
            if flat:
                leaves.append(part.leaf(name, value.detach().view(-1)))
            else:
                _refuse_unless_scalar(name, value)
                leaves.append(tensor_leaf(name, value))
        return leaves

    def new_state(
        self, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
    ) -> torch.Tensor:
        """Allocate a state tensor that the checkpoint has with this global shape.

        State of the parameter's shape, and all state of a flattened parameter, is sharded as the
        parameter is. Other state is replicated, as an optimizer would create it.
        """
        tensor = self.tensor
        like_a_part = shape != () and shape in {part.shape for part in self.flat}
        if self.flat and (like_a_part or math.prod(shape) > 1):
            return torch.zeros(_local(tensor).shape, dtype=dtype, device=_local(tensor).device)
        if shape == tuple(tensor.shape) and shape != ():
            return torch.zeros_like(tensor, dtype=dtype)
        if not isinstance(tensor, DTensor) or shape == ():
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.distributed.tensor.zeros(
            *shape,
            dtype=dtype,
            device_mesh=tensor.device_mesh,
            placements=[Replicate()] * tensor.device_mesh.ndim,
        )


def joined(leaves: Iterable[TensorLeaf], *, to_fill: bool) -> list[TensorLeaf]:
    """Join leaves of the same name, which are parts of one tensor, such as stacked experts.

    Args:
        to_fill: keep every copy of a scalar, such as a step count. A save needs only one.

    Raises:
        StateError: two leaves are the same part: two modules have the same names.
    """
    named: dict[str, list[TensorLeaf]] = {}
    for leaf in leaves:
        named.setdefault(leaf.name, []).append(leaf)
    return [same[0] if len(same) == 1 else _joined(same, to_fill) for same in named.values()]


def _joined(leaves: Sequence[TensorLeaf], to_fill: bool) -> TensorLeaf:
    first = leaves[0]
    fragments = [fragment for leaf in leaves for fragment in leaf.fragments]
    if first.shape == ():
        return first if not to_fill else replace(first, fragments=tuple(fragments), identity=None)
    if len({fragment.box for fragment in fragments}) < len(fragments):
        raise StateError(
            f"{first.name}: two values of the state have this name and hold the same part of the "
            "tensor: give several models, or optimizers, a dict and a key each"
        )
    return replace(first, fragments=tuple(fragments), identity=None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # to_local() would make an autograd node.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _leaf_like(name: str, value: torch.Tensor, like: DTensor) -> TensorLeaf:
    shape = tuple(like.shape)
    fragments = fragments_at(name, value.detach(), shape, like.device_mesh, like.placements)
    return TensorLeaf(name, value.dtype, shape, fragments)


def _refuse_unless_scalar(name: str, value: torch.Tensor) -> None:
    if value.numel() > 1:
        raise StateError(
            f"{name}: a plain tensor of shape {list(value.shape)}, kept for a sharded parameter, "
            "does not show how it is sharded: keep it as a DTensor"
        )


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside DistributedDataParallel or DataParallel."""
    while isinstance(module, (DataParallel, DistributedDataParallel)):
        module = module.module
    return module


class CleanNames:
    """Names of a model's parts without the parts that wrappers add.

    Removes what torch.compile, activation checkpointing and FSDP add, and the `module` of a
    data-parallel wrapper.
    """

    def __init__(self, root: nn.Module) -> None:
        self._known: dict[str, tuple[object, str]] = {"": (root, "")}

    def __call__(self, path: str) -> str:
        """Return the clean name of a path below the root."""
        above, _, last = path.rpartition(".")
        module, prefix = self._above(above)
        return prefix[:-1] if _is_wrapper_part(module, last) else prefix + last

    def _above(self, path: str) -> tuple[object, str]:
        """Return the module at a path, and the prefix of all names below it."""
        known = self._known.get(path)
        if known is None:
            above, _, last = path.rpartition(".")
            module, prefix = self._above(above)
            longer = prefix if _is_wrapper_part(module, last) else f"{prefix}{last}."
            known = self._known[path] = getattr(module, last, None), longer
        return known


def _is_wrapper_part(module: object, part: str) -> bool:
    if part == "module":
        return isinstance(module, (DataParallel, DistributedDataParallel))
    return part in _WRAPPER_PARTS
