"""Parts of global tensors in a module of Megatron-Core's, read from its `sharded_state_dict`.

This is Megatron-Core's own description. It covers tensor and expert parallelism, fused gates and
pipeline stages, and has the names that Megatron-Core's checkpoints have. It copies and gathers
nothing. Megatron-Core is not imported: classes are recognised by their names.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn

from shardwise.adapters.parameters import FlatRange
from shardwise.errors import StateError, user_code
from shardwise.layout import Box

_EXTRA = re.compile(r"(?:.*\.)?_extra_state\d*")
_LAYER = re.compile(r"((?:.*?\.)?layers\.)(\d+)(?=\.)")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.|linear_fc\d\.(?:weight|bias))(\d+)")


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of a module, and the global tensors that it holds.

    Attributes:
        ranges: ranges of the flattened tensor, end to end.
        module_name: name that the module would give the tensor if all of it were on one rank.
        stacked: leading dimensions of the global tensors that number tensors of the module, such
            as experts.
        copy: whether another pipeline stage has the same, such as a tied embedding.
    """

    tensor: torch.Tensor
    ranges: tuple[FlatRange, ...]
    module_name: str
    stacked: int
    copy: bool

    def as_in_module(self) -> ModelTensor:
        """Return the tensor by the module's own name, as in Megatron-LM's older checkpoints."""
        n, first = self.stacked, self.ranges[0]
        boxes = tuple(
            Box(box.offset[n:], box.shape[n:]) for each in self.ranges for box in each.boxes
        )
        alone = FlatRange(self.module_name, first.shape[n:], first.start, boxes, first.padded)
        return replace(self, ranges=(alone,), stacked=0)

    def cut(self, low: int, high: int) -> tuple[FlatRange, ...]:
        """Return the ranges in elements `low:high` of the flattened tensor, counted from `low`."""
        parts = tuple(each.cut(low, high) for each in self.ranges)
        return tuple(part for part in parts if part.boxes) or parts


@dataclass(frozen=True, slots=True)
class ExtraState:
    """Extra state of a part of a module.

    Attributes:
        name: name in checkpoints.
        path: key in the module's state dict.
        value: the extra state; None for Transformer Engine without FP8.
        copy: whether another rank has the same.
    """

    name: str
    path: str
    value: object
    copy: bool

    @property
    def plain(self) -> object:
        """The value; as bytes if it is a file in memory or a tensor of bytes."""
        if isinstance(self.value, io.BytesIO):
            return self.value.getvalue() or None
        if isinstance(self.value, torch.Tensor) and self.value.dtype == torch.uint8:
            return self.value.cpu().numpy().tobytes() or None
        return self.value

    def like(self, plain: object) -> object:
        """Return a plain value as the type that the module's own value has."""
        if isinstance(plain, bytes) and isinstance(self.value, io.BytesIO):
            return io.BytesIO(plain)
        if isinstance(plain, bytes) and isinstance(self.value, torch.Tensor):
            return torch.frombuffer(bytearray(plain), dtype=torch.uint8)
        return plain


@dataclass(frozen=True, slots=True)
class Description:
    """The tensors and the extra state that a module describes."""

    tensors: tuple[ModelTensor, ...]
    extras: tuple[ExtraState, ...]

    def as_in(self, has: Callable[[str], bool]) -> Description:
        """Return the description with the module's own names where a checkpoint has only these."""

        def unknown(each: ModelTensor) -> bool:
            return has(each.module_name) and not any(has(part.name) for part in each.ranges)

        chosen = (each.as_in_module() if unknown(each) else each for each in self.tensors)
        return replace(self, tensors=tuple(chosen))


def description_of(name: str, module: nn.Module) -> Description:
    """Return what a module's `sharded_state_dict()` describes.

    Raises:
        StateError: the description lacks a parameter or has an unknown type of value.
    """
    described: Any = module
    with user_code(name, "sharded_state_dict()"):
        found = described.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    tensors: list[ModelTensor] = []
    extras: list[ExtraState] = []
    for path, value in found.items():
        kinds = {kind.__name__ for kind in type(value).__mro__}
        if kinds & {"ShardedTensor", "ShardedTensorFactory"}:
            tensors.append(_sharded(name, path, value))
        elif "ShardedObject" in kinds and _EXTRA.fullmatch(path):
            extras.append(ExtraState(_object_name(value), path, value.data, any(_replica(value))))
        else:
            raise StateError(
                f"{name}.{path}: sharded_state_dict() has a {type(value).__name__}, which "
                "shardwise cannot read"
            )
    known = {id(each.tensor) for each in tensors}
    for path, parameter in module.named_parameters():
        if id(parameter) not in known:
            raise StateError(f"{name}.{path}: sharded_state_dict() lacks this parameter")
    return Description(tuple(tensors), tuple(extras))


def _sharded(root: str, path: str, described: Any) -> ModelTensor:
    name, tensor = f"{root}.{path}", described.data
    if not tensor.is_contiguous():
        raise StateError(
            f"{name}: the tensor is not contiguous, so Megatron-Core's sharded_state_dict() cannot "
            "describe it: make it contiguous"
        )
    if hasattr(described, "build_fn"):
        built = described.build_fn(
            described.key, tensor, described.replica_id, described.flattened_range
        )
        parts = list(_leaves(built))
        ranges = _end_to_end(name, tensor, parts)
    else:
        parts = [described]
        ranges = [_range(described, 0)]
    first = parts[0]
    return ModelTensor(
        tensor,
        tuple(ranges),
        _module_name(path, first.key, first.global_offset[: first.prepend_axis_num]),
        first.prepend_axis_num,
        bool(_replica(described)[0]),
    )


def _replica(described: Any) -> Sequence[int]:
    """Return the replica's number by pipeline stage, tensor-parallel and data-parallel rank."""
    number = described.replica_id
    return number if isinstance(number, Sequence) else (0, 0, number)


def _module_name(path: str, key: str, stacked_at: tuple[int, ...]) -> str:
    """Return a path with the numbers of layers and experts that the whole model has."""
    here, there = _LAYER.match(path), _LAYER.match(key)
    if here and there:
        path = f"{here[1]}{there[2]}{path[here.end(2) :]}"
    expert = _EXPERT.search(path)
    if expert and len(stacked_at) == 1:
        path = f"{path[: expert.start(1)]}{stacked_at[0]}{path[expert.end(1) :]}"
    return path


def _end_to_end(name: str, tensor: torch.Tensor, parts: Sequence[Any]) -> list[FlatRange]:
    """Return the ranges of a flattened tensor's parts, those of one global tensor as one."""
    found = [_range(each, _start_within(name, each.data, tensor)) for each in parts]
    found.sort(key=lambda each: each.start)
    end = 0
    for each in found:
        if each.start != end:
            raise _not_parts(name)
        end += each.boxes[0].size
    if end != tensor.numel():
        raise _not_parts(name)
    ranges = []
    for _, same in groupby(found, key=lambda each: each.name):
        first, *others = same
        boxes = (*first.boxes, *(box for each in others for box in each.boxes))
        ranges.append(replace(first, boxes=boxes))
    return ranges


def _range(described: Any, start: int) -> FlatRange:
    shape = (1,) * described.prepend_axis_num + tuple(described.local_shape)
    return FlatRange(
        described.key,
        tuple(described.global_shape),
        start,
        (Box(tuple(described.global_offset), shape),),
        bool(described.allow_shape_mismatch),
    )


def _start_within(name: str, view: torch.Tensor, tensor: torch.Tensor) -> int:
    """Return the first element of a contiguous view in a tensor."""
    same = view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    if not same or not view.is_contiguous():
        raise _not_parts(name)
    return int(view.storage_offset() - tensor.storage_offset())


def _not_parts(name: str) -> StateError:
    return StateError(
        f"{name}: sharded_state_dict() copies or transposes it, as it does grouped experts in one "
        "matrix: use separate experts (moe_grouped_gemm=False, or those of Transformer Engine)"
    )


def _leaves(tree: object) -> Iterator[Any]:
    """Yield the sharded tensors that a factory built."""
    if isinstance(tree, Mapping):
        for each in tree.values():
            yield from _leaves(each)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _leaves(each)
    elif hasattr(tree, "global_offset"):
        yield tree


def _object_name(described: Any) -> str:
    """Return the key, with its position if there are several of the same key."""
    if all(n == 1 for n in described.global_shape):
        return str(described.key)
    return ".".join([described.key, *map(str, described.global_offset)])
