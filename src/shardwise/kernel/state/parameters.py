"""Parameters as optimizers hold them: their names, and their ranges in flattened tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from shardwise.kernel.boxes import Box, boxes_of_range
from shardwise.kernel.errors import StateError
from shardwise.kernel.state.json_fields import JsonValue
from shardwise.kernel.state.local_state import Fragment, TensorLeaf
from shardwise.kernel.state.stated_geometry import stated_geometry
from shardwise.kernel.state.tensors import (
    SHARD,
    detach_checked,
    is_composite,
    is_dtensor,
    local_tensor,
    sharded_leaf,
    tensor_leaf,
)

LOCAL = "@local"
"""Ends the name of a plain value that says how a state lay on the ranks: `Parameter.layout`."""


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

    @property
    def shard(self) -> str:
        """A suffix for the names of state that belongs to the range."""
        return SHARD + "+".join(map(str, self.boxes))

    def leaf(self, name: str, flat: torch.Tensor, tie_key: object = None) -> TensorLeaf:
        """Return the range of a flat tensor as a leaf of the global tensor."""
        memory, start = detach_checked(name, flat), self.start
        fragments = []
        for box in self.boxes:
            fragments.append(Fragment(box, memory[start : start + box.size].view(box.shape)))
            start += box.size
        return TensorLeaf(
            name, flat.dtype, self.shape, tuple(fragments), tie_key, padded=self.padded
        )


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
        return tuple(part.name for part in self.flat) if self.flat else (self.name,)

    @property
    def name_and_shape(self) -> tuple[str, tuple[int, ...]]:
        """The name and global shape of the parameter, or of the first one in a flattened tensor."""
        if self.flat:
            return self.flat[0].name, self.flat[0].shape
        stated = None if is_dtensor(self.tensor) else stated_geometry(self.name, self.tensor)
        return self.name, tuple(self.tensor.shape) if stated is None else stated.shape

    def add_prefix(self, prefix: str) -> Parameter:
        """Return the parameter with a prefix before its names."""
        flat = tuple(replace(part, name=f"{prefix}.{part.name}") for part in self.flat)
        return replace(self, name=f"{prefix}.{self.name}", flat=flat)

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds no element of the parameter, and so no optimizer state."""
        return bool(self.flat) and not local_tensor(self.tensor).numel()

    @property
    def representative_name(self) -> str:
        """The name of the first parameter that is not a scalar.

        The optimizer's state of a flattened tensor, for example `exp_avg`, exists once for all
        parameters in the tensor. So one name is enough to look up its keys.
        """
        for part in self.flat:
            if part.shape:
                return part.name
        return self.names[0]

    def leaves(self, prefix: str, key: str, value: torch.Tensor) -> list[TensorLeaf]:
        """Return a tensor of the optimizer's state as leaves, one for each original parameter.

        The value is sharded like the parameter if it is a DTensor too, or if its shape is that of
        the parameter's local tensor. Any other value of a sharded parameter belongs to the shard,
        except one element, which ranks may share. The ranks decide together at their first save.

        Args:
            prefix: name of the optimizer.
            key: key of the state, for example `exp_avg`.
            value: the state tensor. It has the parameter's layout, or is replicated.

        Raises:
            StateError: the sharding of the value is unknown.
        """
        if not self.flat:
            name = f"{prefix}.{self.name}.{key}"
            if is_dtensor(value) and value.shape == self.tensor.shape and is_dtensor(self.tensor):
                return [sharded_leaf(name, value, value, self.tensor)]
            is_whole = not is_dtensor(self.tensor) and not stated_geometry(name, self.tensor)
            if is_whole or is_dtensor(value):
                return [tensor_leaf(name, value)]
            is_like = value.shape == local_tensor(self.tensor).shape
            if is_like and is_dtensor(self.tensor):
                leaf = sharded_leaf(name, value, self.tensor)
            else:
                leaf = tensor_leaf(name, value, self.tensor if is_like else None)
            of_shard = partial(self._leaf_of_shard, name, value)
            return [replace(leaf, of_shard=of_shard, is_like_parameter=is_like)]
        local = local_tensor(self.tensor)
        same_layout = value.shape == local.shape and value.is_contiguous()
        is_flat = same_layout or (value.dim() == 1 and value.numel() == local.numel())
        leaves = []
        for part in self.flat:
            name = f"{prefix}.{part.name}.{key}"
            if is_flat:
                leaves.append(part.leaf(name, detach_checked(name, value).view(-1)))
            else:
                _refuse_unless_scalar(name, value)
                of_shard = partial(self._leaf_of_shard, name, value, part)
                leaves.append(replace(tensor_leaf(name, value), of_shard=of_shard))
        return leaves

    def _leaf_of_shard(
        self, name: str, value: torch.Tensor, part: FlatRange | None = None
    ) -> TensorLeaf:
        return tensor_leaf(name + (self.shard if part is None else part.shard), value)

    @property
    def shard(self) -> str:
        """A suffix for the names of state that belongs to this rank's shard.

        For example, `@shard:dim0=1of2`. Empty for a parameter that is not sharded.
        """
        if self.flat:
            name = self.representative_name
            return next(part.shard for part in self.flat if part.name == name)
        if is_composite(self.tensor) and not is_dtensor(self.tensor):
            return ""
        leaf = tensor_leaf(self.name, self.tensor)
        if leaf.sharding is not None and leaf.sharding.splits:
            return SHARD + ",".join(map(str, leaf.sharding.splits))
        is_plain = not is_dtensor(self.tensor) and leaf.shape == self.tensor.shape
        return "" if is_plain else SHARD + "+".join(str(each.box) for each in leaf.fragments)

    def allocate_state(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        device: torch.device,
        *,
        layout: object = None,
    ) -> torch.Tensor:
        """Allocate a state tensor of a global shape.

        State with the shape of the parameter is sharded like the parameter. All state of a
        flattened parameter, except scalars, is sharded too. Other state is replicated.

        Args:
            dtype, shape, device: those of the tensor.
            layout: how the optimizer kept it, as `layout` has told. It is not trusted. If the mesh
                has another number of dimensions now, a DTensor is replicated.
        """
        tensor, is_plain = self.tensor, layout is True
        dims = layout if isinstance(layout, list) else None
        if is_plain and not self.flat and shape == self.name_and_shape[1]:
            return torch.zeros(local_tensor(tensor).shape, dtype=dtype, device=device)
        has_shape_of_part = shape != () and shape in {part.shape for part in self.flat}
        if self.flat and (has_shape_of_part or math.prod(shape) > 1):
            return torch.zeros(
                local_tensor(tensor).shape, dtype=dtype, device=local_tensor(tensor).device
            )
        if shape == self.name_and_shape[1] and shape != () and dims is None:
            return torch.zeros_like(tensor, dtype=dtype)
        if is_plain or not is_dtensor(tensor) or (shape == () and dims is None):
            return torch.zeros(shape, dtype=dtype, device=device)
        mesh, of_torch = tensor.device_mesh, torch.distributed.tensor
        dims = dims if dims is not None and len(dims) == mesh.ndim else [None] * mesh.ndim
        placements = [
            of_torch.Replicate()
            if dim not in range(len(shape))
            else (own if dim == getattr(own, "dim", None) else of_torch.Shard(dim))
            for own, dim in zip(tensor.placements, dims, strict=True)
        ]
        return of_torch.zeros(*shape, dtype=dtype, device_mesh=mesh, placements=placements)

    def unusual_order(self, value: torch.Tensor) -> tuple[int, ...] | None:
        """Return in which order the dimensions of a state tensor lie in memory, if it is unusual.

        The order decides in which order an optimizer adds numbers, and so how they are rounded.
        """
        if self.flat or is_dtensor(value) or value.dim() < 2:
            return None
        like = self.tensor if self.tensor.shape == value.shape else None
        if value.is_contiguous() and (like is None or like.is_contiguous()):
            return None
        order = _dimension_order(value)
        usual = _dimension_order(like) if like is not None else (*range(value.dim()),)
        return None if order == usual else order

    def layout(self, value: torch.Tensor) -> JsonValue:
        """Return how a state tensor lies on the ranks, if `allocate_state` could not tell it.

        Returns:
            True: a plain tensor, though the parameter is a DTensor. False: a DTensor over another
            mesh than that of the parameter. A list: a DTensor, with the dimension that each
            dimension of the mesh shards, or None. None: there is nothing to tell.
        """
        mesh, own = (getattr(each, "device_mesh", None) for each in (value, self.tensor))
        if self.flat or (mesh is None and (own is None or not value.dim())):
            return None
        if mesh is None or mesh != own:
            return mesh is None
        of_both = [each.placements for each in (value, self.tensor) if is_dtensor(each)]
        is_alike = of_both[0] == of_both[1] and value.shape == self.tensor.shape != ()
        return None if is_alike else [getattr(each, "dim", None) for each in of_both[0]]


def _dimension_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions of a tensor, those with large strides first."""
    strides = [0 if n == 1 else s for s, n in zip(tensor.stride(), tensor.shape, strict=True)]
    return tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))


def _refuse_unless_scalar(name: str, value: torch.Tensor) -> None:
    if value.numel() > 1:
        raise StateError(
            f"{name}: the optimizer keeps a plain tensor of shape {list(value.shape)} for a "
            "flattened parameter, so its sharding is unknown: use FSDP2, or an optimizer that "
            "keeps state of the shape of the parameter"
        )
