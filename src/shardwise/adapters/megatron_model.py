"""What a module of Megatron-Core says of its tensors: which part of which global one each is.

`sharded_state_dict` is Megatron-Core's own description: it knows of tensor and expert parallelism,
of gates that are fused and of layers of other stages, and has the names that its checkpoints have.
Nothing is copied or gathered for it. Megatron-Core is not imported: classes go by their names.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise.adapters.parameters import FlatPart
from shardwise.errors import StateError, user_code
from shardwise.layout import Box, boxes_of_range

_EXTRA = re.compile(r"(?:.*\.)?_extra_state\d*")
_LAYER = re.compile(r"((?:.*?\.)?layers\.)(\d+)(?=\.)")
_EXPERT = re.compile(r"\.experts\.(?:local_experts\.|linear_fc\d\.(?:weight|bias))(\d+)")


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a global tensor: row-major elements of a flattened local one, from `start` on.

    `padded`: rows at the end of the global tensor may be padding, as those of vocabularies are.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    box: Box
    padded: bool


@dataclass(frozen=True, slots=True)
class Sharded:
    """A tensor of a module, as pieces of global ones that lie end to end in it.

    Attributes:
        module_name: what the module itself, if it were all on one rank, would call it.
        stacked: how many dimensions number tensors of the module, as experts.
        copy: whether it is a copy of what another pipeline stage has, as tied embeddings are.
    """

    tensor: torch.Tensor
    pieces: tuple[Piece, ...]
    module_name: str
    stacked: int
    copy: bool

    def as_in_module(self) -> Sharded:
        """The same under the module's own name, alone, as in Megatron-LM's older checkpoints."""
        n = self.stacked
        alone = (
            Piece(
                self.module_name,
                piece.shape[n:],
                piece.start,
                Box(piece.box.offset[n:], piece.box.shape[n:]),
                piece.padded,
            )
            for piece in self.pieces
        )
        return replace(self, pieces=tuple(alone), stacked=0)

    def parts(self, low: int, high: int) -> tuple[FlatPart, ...]:
        """What elements `low:high` of the flattened tensor are, counted from `low`."""
        parts: dict[str, FlatPart] = {}
        for piece in self.pieces:
            first = min(max(low - piece.start, 0), piece.box.size)
            last = min(max(high - piece.start, 0), piece.box.size)
            start = max(piece.start - low, 0)
            known = parts.setdefault(
                piece.name, FlatPart(piece.name, piece.shape, start, (), piece.padded)
            )
            if first < last:
                own = boxes_of_range(piece.box.shape, first, last)
                boxes = (*known.boxes, *(_moved(box, piece.box.offset) for box in own))
                start = known.start if known.boxes else start
                parts[piece.name] = replace(known, start=start, boxes=boxes)
        return tuple(part for part in parts.values() if part.boxes) or tuple(parts.values())


def _moved(box: Box, by: tuple[int, ...]) -> Box:
    return Box(tuple(o + n for o, n in zip(box.offset, by, strict=True)), box.shape)


@dataclass(frozen=True, slots=True)
class Extra:
    """Extra state at a path of a module, by the name that checkpoints have for it.

    Attributes:
        value: None if there is none, as of Transformer Engine without FP8.
        copy: whether it is a copy of what another rank has.
    """

    name: str
    path: str
    value: object
    copy: bool

    @property
    def plain(self) -> object:
        """The value, bytes where it is a file or a tensor of them."""
        if isinstance(self.value, io.BytesIO):
            return self.value.getvalue() or None
        if isinstance(self.value, torch.Tensor) and self.value.dtype == torch.uint8:
            return self.value.cpu().numpy().tobytes() or None
        return self.value

    def like(self, plain: object) -> object:
        """A plain value as the module has its own."""
        if isinstance(plain, bytes) and isinstance(self.value, io.BytesIO):
            return io.BytesIO(plain)
        if isinstance(plain, bytes) and isinstance(self.value, torch.Tensor):
            return torch.frombuffer(bytearray(plain), dtype=torch.uint8)
        return plain


@dataclass(frozen=True, slots=True)
class Contents:
    """What a module says that it has."""

    tensors: tuple[Sharded, ...]
    extras: tuple[Extra, ...]

    def as_in(self, has: Callable[[str], bool]) -> Contents:
        """The same by the module's own names, where a checkpoint has these and not the others."""

        def unknown(each: Sharded) -> bool:
            return has(each.module_name) and not any(has(piece.name) for piece in each.pieces)

        chosen = (each.as_in_module() if unknown(each) else each for each in self.tensors)
        return replace(self, tensors=tuple(chosen))


def contents_of(name: str, module: nn.Module) -> Contents:
    """What a module has, as it says itself.

    Raises:
        StateError: what it says leaves out a parameter, or cannot be followed.
    """
    described: Any = module
    with user_code(name, "sharded_state_dict()"):
        found = described.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    tensors: list[Sharded] = []
    extras: list[Extra] = []
    for path, value in found.items():
        kinds = {kind.__name__ for kind in type(value).__mro__}
        if kinds & {"ShardedTensor", "ShardedTensorFactory"}:
            tensors.append(_sharded(name, path, value))
        elif "ShardedObject" in kinds and _EXTRA.fullmatch(path):
            extras.append(Extra(_object_name(value), path, value.data, any(_replica(value))))
        else:
            raise StateError(
                f"{name}.{path}: sharded_state_dict() has a {type(value).__name__} there, and what "
                "that means is not known"
            )
    known = {id(each.tensor) for each in tensors}
    for path, parameter in module.named_parameters():
        if id(parameter) not in known:
            raise StateError(f"{name}.{path}: sharded_state_dict() does not say what it is")
    return Contents(tuple(tensors), tuple(extras))


def _sharded(root: str, path: str, described: Any) -> Sharded:
    name, tensor = f"{root}.{path}", described.data
    if not tensor.is_contiguous():
        raise StateError(f"{name}: only contiguous tensors can be described as Megatron-Core does")
    if hasattr(described, "build_fn"):
        built = described.build_fn(
            described.key, tensor, described.replica_id, described.flattened_range
        )
        parts = list(_leaves(built))
        pieces = _end_to_end(name, tensor, parts)
    else:
        parts = [described]
        pieces = [_piece(described, 0)]
    first = parts[0]
    return Sharded(
        tensor,
        tuple(pieces),
        _module_name(path, first.key, first.global_offset[: first.prepend_axis_num]),
        first.prepend_axis_num,
        bool(_replica(described)[0]),
    )


def _replica(described: Any) -> Sequence[int]:
    """Which copy it is: among pipeline stages, tensor-parallel and data-parallel ranks."""
    number = described.replica_id
    return number if isinstance(number, Sequence) else (0, 0, number)


def _module_name(path: str, key: str, stacked_at: tuple[int, ...]) -> str:
    """A path in the chunk of a rank with the numbers of the whole model: of layers, and experts."""
    here, there = _LAYER.match(path), _LAYER.match(key)
    if here and there:
        path = f"{here[1]}{there[2]}{path[here.end(2) :]}"
    expert = _EXPERT.search(path)
    if expert and len(stacked_at) == 1:
        path = f"{path[: expert.start(1)]}{stacked_at[0]}{path[expert.end(1) :]}"
    return path


def _end_to_end(name: str, tensor: torch.Tensor, parts: Sequence[Any]) -> list[Piece]:
    pieces = [_piece(each, _start_within(name, each.data, tensor)) for each in parts]
    pieces.sort(key=lambda piece: piece.start)
    end = 0
    for piece in pieces:
        if piece.start != end:
            raise _not_parts(name)
        end += piece.box.size
    if end != tensor.numel():
        raise _not_parts(name)
    return pieces


def _piece(described: Any, start: int) -> Piece:
    shape = (1,) * described.prepend_axis_num + tuple(described.local_shape)
    return Piece(
        described.key,
        tuple(described.global_shape),
        start,
        Box(tuple(described.global_offset), shape),
        bool(described.allow_shape_mismatch),
    )


def _start_within(name: str, view: torch.Tensor, tensor: torch.Tensor) -> int:
    """From which element on a contiguous part of a tensor lies in it."""
    same = view.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    if not same or not view.is_contiguous():
        raise _not_parts(name)
    return int(view.storage_offset() - tensor.storage_offset())


def _not_parts(name: str) -> StateError:
    return StateError(
        f"{name}: what sharded_state_dict() makes of it is no sequence of its parts, but copied or "
        "transposed, as of grouped experts in one matrix: use experts of their own "
        "(moe_grouped_gemm=False, or those of Transformer Engine)"
    )


def _leaves(tree: object) -> Iterator[Any]:
    """The sharded tensors in what a factory has built."""
    if isinstance(tree, Mapping):
        for each in tree.values():
            yield from _leaves(each)
    elif isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _leaves(each)
    elif hasattr(tree, "global_offset"):
        yield tree


def _object_name(described: Any) -> str:
    """The key, with numbers where there are several."""
    if all(n == 1 for n in described.global_shape):
        return str(described.key)
    return ".".join([described.key, *map(str, described.global_offset)])
