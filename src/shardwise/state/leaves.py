"""What a rank has of a state: tensors as fragments, and plain values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from shardwise.errors import LayoutError
from shardwise.layout import Box
from shardwise.state.objects import JsonValue

_CARRIERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}

ParameterOrder = Sequence[Sequence[tuple[str, tuple[int, ...]]]]
"""Names and shapes of the parameters of each group of an optimizer."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A box of a global tensor, and the local tensor of the same shape that holds it."""

    box: Box
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """What this rank has of a global tensor.

    Attributes:
        fragments: none of them is empty.
        identity: equal for leaves that are one tensor under several names.
        finish: moves the values to their final memory after a load filled `fragments`, if these
            are copies.
        padded: whether the last rows may be padding, of which a checkpoint may have fewer.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    fragments: tuple[Fragment, ...]
    identity: object = None
    finish: Callable[[], object] | None = None
    padded: bool = False

    def cut(self, shape: tuple[int, ...]) -> TensorLeaf:
        """Return the leaf without the rows of padding that a tensor of this shape lacks."""
        fewer = len(shape) == len(self.shape) and shape[1:] == self.shape[1:] and shape < self.shape
        if not (self.padded and fewer):
            return self
        fragments = []
        for fragment in self.fragments:
            box = fragment.box
            rows = min(shape[0] - box.offset[0], box.shape[0])
            if rows > 0:
                kept = Box(box.offset, (rows, *box.shape[1:]))
                fragments.append(Fragment(kept, fragment.data[:rows]))
        return replace(self, shape=shape, fragments=tuple(fragments))


@dataclass(frozen=True, slots=True)
class GroupedValue:
    """A value that several members share, such as the hyperparameters of a param group."""

    members: tuple[str, ...]
    value: JsonValue


@dataclass(slots=True)
class LocalState:
    """What this rank has of a state, or of a part of it.

    Attributes:
        tensors: this rank's fragments of tensors.
        objects: plain values, the same on all ranks.
        grouped: values shared by groups of members; a rank has those of its own members.
        per_rank: values that differ between ranks.
        problems: reasons why it cannot be loaded.
        left: names that a load leaves alone because they are not selected.
    """

    tensors: list[TensorLeaf] = field(default_factory=list)
    objects: dict[str, JsonValue] = field(default_factory=dict)
    grouped: dict[str, list[GroupedValue]] = field(default_factory=dict)
    per_rank: dict[str, JsonValue] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def add(self, other: LocalState) -> None:
        """Add another part of the state."""
        self.tensors += other.tensors
        self.objects |= other.objects
        self.grouped |= other.grouped
        self.per_rank |= other.per_rank
        self.problems += other.problems
        self.left += other.left

    def names(self) -> Iterator[str]:
        """Yield the names of all tensors and values."""
        yield from (leaf.name for leaf in self.tensors)
        yield from (*self.objects, *self.grouped, *self.per_rank)


def as_carrier(data: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory as a dtype of the same size that numpy knows."""
    plain = data.detach()
    carrier = _CARRIERS[plain.element_size()]
    if plain.dtype == carrier:
        return plain
    return plain.view(carrier)


def byte_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of a row-major array."""
    strides = [itemsize]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides[: len(shape)]))


def reach(data: torch.Tensor) -> int:
    """Return the elements of memory from a tensor's first element to its last, inclusive."""
    if data.is_contiguous():
        return data.numel()
    return 1 + sum(s * (n - 1) for s, n in zip(data.stride(), data.shape, strict=True))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of the same shape and dtype have the same bits, NaNs included."""
    flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
    return torch.equal(*flat)


def host_array(data: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """Return a CPU tensor's memory as a numpy array of a dtype of the same size."""
    array: np.ndarray[tuple[int, ...], np.dtype[np.generic]] = as_carrier(data).numpy()
    return array


class Shards:
    """This rank's part of a global tensor: local tensors, and the box that each one covers.

    Use it in the state in place of a tensor. A load fills the local tensors.

    Args:
        shape: the shape of the global tensor.
        dtype: the dtype of the global tensor.
        parts: pairs of a box and a local tensor of the box's shape; empty if this rank holds
            nothing.

    Raises:
        LayoutError: a part does not match its box, or lies outside the tensor.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        parts: Sequence[tuple[Box, torch.Tensor]],
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        whole = Box.whole(self.shape)
        for box, data in parts:
            if (
                tuple(data.shape) != box.shape
                or data.dtype != dtype
                or len(box.shape) != len(self.shape)
            ):
                raise LayoutError(
                    f"a local {data.dtype} tensor of shape {list(data.shape)} does not match box "
                    f"{box} of a {dtype} tensor of shape {list(self.shape)}"
                )
            if not whole.contains(box):
                raise LayoutError(f"box {box} lies outside a tensor of shape {list(self.shape)}")
        self.fragments = tuple(Fragment(box, data) for box, data in parts if box.size)
