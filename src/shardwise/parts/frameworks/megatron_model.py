"""Megatron-Core's models: which parts of global tensors a module holds.

The module's `sharded_state_dict` describes the parts, with tensor, expert and pipeline parallelism
and fused gates. It uses the names of Megatron-Core's checkpoints, and does not copy or gather
tensors. Megatron-Core is not imported: its classes are recognised by their names.
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

from shardwise.kernel.errors import StateError, user_code
from shardwise.ports.binding import Box, FlatRange, Parameter

_EXTRA_STATE_PATH = re.compile(r"(?:.*\.)?_extra_state\d*")
_LAYER_NUMBER = re.compile(r"((?:.*?\.)?layers\.)(\d+)(?=\.)")
_NAMES_OF_NORMS = (
    ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    ("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_"),
    ("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_"),
)
"""The names of norms as modules of their own, and within the linear layers after them."""
_EXPERT_NUMBER = re.compile(r"\.experts\.(?:local_experts\.|linear_fc\d\.(?:weight|bias))(\d+)")


def with_checkpoint_name(parameter: Parameter, has_tensor: Callable[[str], bool]) -> Parameter:
    """Return a tensor of a module under the name that a checkpoint has.

    Older checkpoints of Megatron-LM have the module's own names. If the checkpoint has only this
    name, use it. The tensor then is not a part of a stack, for example of experts. The same applies
    to norms, which Transformer Engine and Megatron-Core itself name differently.

    Args:
        parameter: the tensor, as `describe_model` returns it.
        has_tensor: returns whether the checkpoint has a tensor of a name.
    """
    flat = parameter.flat
    if any(has_tensor(part.name) for part in flat):
        return parameter
    own = parameter.name
    names = (own, *_other_names(own), *_other_names(flat[0].name))
    name = next(filter(has_tensor, names), None)
    if name is None:
        return parameter
    stacked_dims = len(flat[0].shape) - parameter.tensor.dim()
    boxes = tuple(
        Box(box.offset[stacked_dims:], box.shape[stacked_dims:])
        for part in flat
        for box in part.boxes
    )
    own_range = replace(flat[0], name=name, shape=flat[0].shape[stacked_dims:], boxes=boxes)
    return replace(parameter, flat=(own_range,))


def _other_names(name: str) -> Iterator[str]:
    """Yield the names that a norm has if other modules make up the layer."""
    for pair in _NAMES_OF_NORMS:
        for present, other in (pair, pair[::-1]):
            if f".{present}" in name:
                yield name.replace(f".{present}", f".{other}")


def cut_ranges(ranges: Sequence[FlatRange], low: int, high: int) -> tuple[FlatRange, ...]:
    """Return the ranges in elements `low:high` of a flattened tensor, relative to `low`."""
    parts = tuple(each.cut(low, high) for each in ranges)
    return tuple(part for part in parts if part.boxes) or parts


@dataclass(frozen=True, slots=True)
class ExtraState:
    """Extra state of a part of a module.

    Attributes:
        name: name in checkpoints.
        path: key in the module's state dict.
        value: the extra state; None for Transformer Engine without FP8.
        is_copy: whether another rank holds the same extra state.
    """

    name: str
    path: str
    value: object
    is_copy: bool

    @property
    def plain_value(self) -> object:
        """The value, converted to bytes if it is a `BytesIO` or a uint8 tensor."""
        if isinstance(self.value, io.BytesIO):
            return self.value.getvalue() or None
        if isinstance(self.value, torch.Tensor) and self.value.dtype == torch.uint8:
            return self.value.cpu().numpy().tobytes() or None
        return self.value

    def restore_type(self, plain: object) -> object:
        """Convert a plain value back to the type of the module's own value."""
        if isinstance(plain, bytes) and isinstance(self.value, io.BytesIO):
            return io.BytesIO(plain)
        if isinstance(plain, bytes) and isinstance(self.value, torch.Tensor):
            return torch.frombuffer(bytearray(plain), dtype=torch.uint8)
        return plain


def describe_model(name: str, module: nn.Module) -> tuple[list[Parameter], list[ExtraState]]:
    """Return the tensors and the extra state that a module's `sharded_state_dict()` describes.

    The name of a tensor is the one that it would have in a module with the whole model. It is a
    copy if another pipeline stage holds the same tensor, for example a tied embedding.

    Raises:
        StateError: the description lacks a parameter or has an unknown type of value.
    """
    described: Any = module
    with user_code(name, "sharded_state_dict()"):
        state_dict = described.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    tensors: list[Parameter] = []
    extras: list[ExtraState] = []
    for path, value in state_dict.items():
        class_names = {cls.__name__ for cls in type(value).__mro__}
        if class_names & {"ShardedTensor", "ShardedTensorFactory"}:
            tensors.append(_model_tensor(name, path, value))
        elif "ShardedObject" in class_names and _EXTRA_STATE_PATH.fullmatch(path):
            # If several objects have the same key, their names have their positions.
            is_one = all(stacked_dims == 1 for stacked_dims in value.global_shape)
            position = [] if is_one else map(str, value.global_offset)
            name_of_object = ".".join([value.key, *position])
            is_copy = any(_replica_numbers(value))
            extras.append(ExtraState(name_of_object, path, value.data, is_copy))
        else:
            raise StateError(
                f"{name}.{path}: the module's sharded_state_dict() has a {type(value).__name__}, "
                "which shardwise cannot read: save with megatron.core.dist_checkpointing; "
                "shardwise can open such checkpoints"
            )
    described_ids = {id(each.tensor) for each in tensors}
    for path, parameter in module.named_parameters():
        if id(parameter) not in described_ids:
            raise StateError(
                f"{name}.{path}: sharded_state_dict() lacks this parameter: add it there"
            )
    return tensors, extras


def _model_tensor(model_name: str, path: str, described: Any) -> Parameter:
    name, tensor = f"{model_name}.{path}", described.data
    if not tensor.is_contiguous():
        raise StateError(
            f"{name}: the tensor is not contiguous, so Megatron-Core's sharded_state_dict() cannot "
            "describe it: replace it with tensor.contiguous()"
        )
    if hasattr(described, "build_fn"):
        built_parts = described.build_fn(
            described.key, tensor, described.replica_id, described.flattened_range
        )
        parts = list(_sharded_tensors_in(built_parts))
        ranges = _join_ranges(name, tensor, parts)
    else:
        parts = [described]
        ranges = [_range_of_part(described, 0)]
    first_part = parts[0]
    return Parameter(
        tensor,
        _module_name(path, first_part.key, first_part.global_offset[: first_part.prepend_axis_num]),
        tuple(ranges),
        bool(_replica_numbers(described)[0]),
    )


def _replica_numbers(described: Any) -> Sequence[int]:
    """Return which replica this is among the pipeline, tensor-parallel and data-parallel ranks."""
    replica_numbers = described.replica_id
    return replica_numbers if isinstance(replica_numbers, Sequence) else (0, 0, replica_numbers)


def _module_name(path: str, key: str, stacked_offset: tuple[int, ...]) -> str:
    """Replace the local layer and expert numbers in a path by the global ones.

    Args:
        path: the path of the tensor in the local module.
        key: the key of the global tensor, which has the global layer number.
        stacked_offset: the offset in the stacked dimensions: the global expert number.
    """
    path_layer, key_layer = _LAYER_NUMBER.match(path), _LAYER_NUMBER.match(key)
    if path_layer and key_layer:
        path = f"{path_layer[1]}{key_layer[2]}{path[path_layer.end(2) :]}"
    expert = _EXPERT_NUMBER.search(path)
    if expert and len(stacked_offset) == 1:
        path = f"{path[: expert.start(1)]}{stacked_offset[0]}{path[expert.end(1) :]}"
    return path


def _join_ranges(name: str, tensor: torch.Tensor, parts: Sequence[Any]) -> list[FlatRange]:
    """Return the ranges of a flattened tensor's parts. Parts of one global tensor are joined."""
    separate = [_range_of_part(each, _start_within(name, each.data, tensor)) for each in parts]
    separate.sort(key=lambda each: each.start)
    end = 0
    for each in separate:
        if each.start != end:
            raise _unsupported_parts(name)
        end += each.boxes[0].size
    if end != tensor.numel():
        raise _unsupported_parts(name)
    joined = []
    for _, same_tensor in groupby(separate, key=lambda each: each.name):
        first, *others = same_tensor
        boxes = (*first.boxes, *(box for each in others for box in each.boxes))
        joined.append(replace(first, boxes=boxes))
    return joined


def _range_of_part(described: Any, start: int) -> FlatRange:
    shape = (1,) * described.prepend_axis_num + tuple(described.local_shape)
    return FlatRange(
        described.key,
        tuple(described.global_shape),
        start,
        (Box(tuple(described.global_offset), shape),),
        bool(described.allow_shape_mismatch),
    )


def _start_within(name: str, view: torch.Tensor, tensor: torch.Tensor) -> int:
    """Return the index in a flattened tensor of the first element of a contiguous view."""
    same_tensor = view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    if not same_tensor or not view.is_contiguous():
        raise _unsupported_parts(name)
    return int(view.storage_offset() - tensor.storage_offset())


def _unsupported_parts(name: str) -> StateError:
    return StateError(
        f"{name}: sharded_state_dict() returns copies or transposed parts of this tensor, so a "
        "load could not fill the tensor. This happens with grouped experts in one matrix: set "
        "moe_grouped_gemm=False, or use Transformer Engine's grouped experts"
    )


def _sharded_tensors_in(tree: object) -> Iterator[Any]:
    """Yield the sharded tensors in the nested containers that a factory built."""
    if isinstance(tree, Mapping):
        for each in tree.values():
            yield from _sharded_tensors_in(each)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _sharded_tensors_in(each)
    elif hasattr(tree, "global_offset"):
        yield tree
