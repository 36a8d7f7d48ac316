"""What optimizers need to know of parameters: names, and how tensors like them are sharded."""

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
from shardwise.layout import Box
from shardwise.state.leaves import Fragment, TensorLeaf


@dataclass(frozen=True, slots=True)
class FlatPart:
    """One original parameter's part of a flattened local tensor.

    `boxes` are those of the parameter that lie, end to end and each row-major, in elements
    `[start, start + sum of sizes)` of the local tensor. `padded`: its last rows may be padding.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    boxes: tuple[Box, ...]
    padded: bool = False

    @property
    def size(self) -> int:
        """Number of local elements."""
        return sum(box.size for box in self.boxes)

    def fragments(self, flat: torch.Tensor) -> tuple[Fragment, ...]:
        """The boxes with their memory, in a local tensor of the parameter's local size."""
        fragments = []
        at = self.start
        for box in self.boxes:
            fragments.append(Fragment(box, flat[at : at + box.size].view(box.shape)))
            at += box.size
        return tuple(fragments)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as an optimizer holds it: under its name, or flattened from several (`flat`).

    `copy`: other ranks have it too, divided otherwise, and save it; here it is filled only.
    """

    tensor: torch.Tensor
    name: str
    flat: tuple[FlatPart, ...] = ()
    copy: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters that it is made of."""
        return tuple(part.name for part in self.flat) or (self.name,)

    @property
    def named_shape(self) -> tuple[str, tuple[int, ...]]:
        """Its name and its shape, before it was divided; of the first that it is made of."""
        if self.flat:
            return self.flat[0].name, self.flat[0].shape
        return self.name, tuple(self.tensor.shape)

    def below(self, prefix: str) -> Parameter:
        """The same parameter, named from one level further up."""
        flat = tuple(replace(part, name=f"{prefix}.{part.name}") for part in self.flat)
        return replace(self, name=f"{prefix}.{self.name}", flat=flat)

    @property
    def empty(self) -> bool:
        """Whether this rank has no memory for it, padding included: no state will exist here."""
        return bool(self.flat) and not _local(self.tensor).numel()

    @property
    def foremost(self) -> str:
        """The name whose state shows what that of all of them is: of a tensor with dimensions."""
        return next((part.name for part in self.flat if part.shape), self.names[0])

    def leaves(self, prefix: str, key: str, value: torch.Tensor) -> list[TensorLeaf]:
        """A state tensor of this parameter, as a leaf for each name that it is made of.

        Raises:
            StateError: it does not show how the value is sharded.
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
        leaves = []
        for part in self.flat:
            name = f"{prefix}.{part.name}.{key}"
            alike = value.shape == local.shape and value.is_contiguous()
            if alike or (value.dim() == 1 and value.numel() == local.numel()):
                fragments = part.fragments(value.detach().view(-1))
                leaves.append(
                    TensorLeaf(name, value.dtype, part.shape, fragments, padded=part.padded)
                )
            else:
                _refuse_unless_scalar(name, value)
                leaves.append(tensor_leaf(name, value))
        return leaves

    def new_state(
        self, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
    ) -> torch.Tensor:
        """Memory for a state tensor of this global shape that the checkpoint holds.

        Shaped like the parameter it is sharded like it, as is all that a flattened one has; else
        every rank has all of it, as an optimizer would have made it.
        """
        tensor = self.tensor
        alike = shape != () and shape in {part.shape for part in self.flat}
        if self.flat and (alike or math.prod(shape) > 1):
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
    """Leaves of different names: those of one are parts of one tensor, as stacked experts are.

    Args:
        to_fill: keep every leaf of one number, such as a count. Of what is saved, one is enough.

    Raises:
        StateError: two of them are the same part, as of two modules of one name.
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
            f"{first.name}: two values of the state have this name, and are the same part of it: "
            "give several models, or optimizers, a dict and a key each"
        )
    return replace(first, fragments=tuple(fragments), identity=None)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    # Not to_local(), which makes an autograd node.
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


_MARKS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel or DataParallel."""
    while isinstance(module, (DataParallel, DistributedDataParallel)):
        module = module.module
    return module


class CleanNames:
    """Paths below `root` as the unwrapped model would have them.

    Left out are the marks of torch.compile, activation checkpointing and FSDP, and `module` where
    a data-parallel wrapper put it.
    """

    def __init__(self, root: nn.Module) -> None:
        self._known: dict[str, tuple[object, str]] = {"": (root, "")}

    def __call__(self, path: str) -> str:
        """The name for a path."""
        above, _, last = path.rpartition(".")
        module, prefix = self._above(above)
        return prefix[:-1] if _is_left_out(module, last) else prefix + last

    def _above(self, path: str) -> tuple[object, str]:
        """What lies at a path, and what the names of all below it begin with."""
        known = self._known.get(path)
        if known is None:
            above, _, last = path.rpartition(".")
            module, prefix = self._above(above)
            longer = prefix if _is_left_out(module, last) else f"{prefix}{last}."
            known = self._known[path] = getattr(module, last, None), longer
        return known


def _is_left_out(module: object, part: str) -> bool:
    if part == "module":
        return isinstance(module, (DataParallel, DistributedDataParallel))
    return part in _MARKS
