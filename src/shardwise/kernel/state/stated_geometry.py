"""Tensors that state which boxes of a global tensor they hold.

Two protocols of `torch.distributed.checkpoint` do so. A tensor of the first one has the attributes
`global_shape`, `global_offsets`, `local_offsets` and `local_sizes` (`CheckpointableTensor`). One of
the second has the methods `__create_chunk_list__` and `__create_write_items__`. Megatron-FSDP, for
example, sets these methods on the local tensors of DTensors with uneven shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import torch

from shardwise.kernel.boxes import Box, find_overlaps
from shardwise.kernel.errors import LayoutError, user_code
from shardwise.kernel.state.local_state import Fragment

ATTRIBUTES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
METHODS = ("__create_chunk_list__", "__create_write_items__")


@dataclass(frozen=True, slots=True)
class Geometry:
    """The boxes of a global tensor that a local tensor holds.

    Attributes:
        shape: the shape of the global tensor.
        boxes: boxes of the global tensor, none of them empty or overlapping.
        parts: the box of the local tensor that holds each of them; it may have fewer dimensions,
            because its first dimension stands for several of the global tensor.
        shards: the memory of each box, if the local tensor has no memory of its own.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    parts: tuple[Box, ...]
    shards: tuple[torch.Tensor, ...] = ()

    def fragments(self, local: torch.Tensor) -> tuple[Fragment, ...]:
        """Return the boxes, with their memory in a local tensor."""
        memory = self.shards or [
            local[part.slices()].view(box.shape)
            for box, part in zip(self.boxes, self.parts, strict=True)
        ]
        return tuple(map(Fragment, self.boxes, memory))


def stated_geometry(
    name: str, tensor: torch.Tensor, whole: torch.Tensor | None = None
) -> Geometry | None:
    """Return the boxes that a tensor states; None if it states nothing.

    Args:
        name: the name of the tensor, for error messages.
        tensor: a plain tensor, a subclass, or the local tensor of a DTensor.
        whole: the DTensor.

    Raises:
        LayoutError: the tensor contradicts itself.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not vars(tensor):
        return None  # nearly all tensors
    geometry = None
    for names, read in ((METHODS, _read_methods), (ATTRIBUTES, _read_attributes)):
        lacking = [each for each in names if getattr(tensor, each, None) is None]
        if len(lacking) == len(names):
            continue
        if lacking:
            raise _contradiction(
                name,
                f"it has {', '.join(each for each in names if each not in lacking)}, but not "
                f"{', '.join(lacking)}",
            )
        found = read(name, tensor, whole)
        if geometry is not None and (found.shape, {*found.boxes}) != (
            geometry.shape,
            {*geometry.boxes},
        ):
            raise _contradiction(name, f"its {METHODS[0]} and its {ATTRIBUTES[1]} differ")
        geometry = geometry or found
    if geometry is not None and whole is not None and geometry.shape != tuple(whole.shape):
        raise _contradiction(
            name,
            f"the global shape is {[*geometry.shape]}, but that of the DTensor {[*whole.shape]}",
        )
    return geometry


def copy_statements(source: torch.Tensor, copy: torch.Tensor) -> None:
    """Let a copy of a tensor state the same boxes, or the local tensor of a copied DTensor."""
    source, copy = (getattr(each, "_local_tensor", each) for each in (source, copy))
    for each in (*ATTRIBUTES, *METHODS):
        if each in vars(source):
            setattr(copy, each, vars(source)[each])


def _read_attributes(name: str, tensor: Any, whole: torch.Tensor | None) -> Geometry:
    shape = _integers(name, ATTRIBUTES[0], tensor.global_shape)
    columns = []
    for each in ATTRIBUTES[1:]:
        rows = getattr(tensor, each)
        if not isinstance(rows, (tuple, list)):
            raise _contradiction(name, f"{each} is {rows!r}, not a tuple of tuples of integers")
        columns.append([_integers(name, each, row) for row in rows])
    if len({*map(len, columns)}) != 1:
        counts = [
            f"{len(column)} {each}" for each, column in zip(ATTRIBUTES[1:], columns, strict=True)
        ]
        raise _contradiction(name, f"it has {', '.join(counts)}")
    boxes, parts = [], []
    for offset, local_offset, size in zip(*columns, strict=True):
        local_size = _merge_first(size, tensor.dim())
        if not len(offset) == len(size) == len(shape) or len(local_offset) != len(local_size):
            raise _contradiction(
                name,
                f"a shard has the offset {[*offset]}, the local offset {[*local_offset]} and the "
                f"size {[*size]}, the global tensor has the shape {[*shape]}, and the local one "
                f"{[*tensor.shape]}",
            )
        boxes.append(Box(offset, size))
        parts.append(Box(local_offset, local_size))
    return _checked(name, shape, boxes, tuple(tensor.shape), parts)


def _merge_first(size: tuple[int, ...], dims: int) -> tuple[int, ...]:
    """Return the size with its first dimensions merged into one, so that `dims` are left."""
    merged = len(size) - dims + 1
    return (math.prod(size[:merged]), *size[merged:]) if 1 < merged <= len(size) else size


def _read_methods(name: str, tensor: Any, whole: torch.Tensor | None) -> Geometry:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    with user_code(name, f"{METHODS[0]}()"):
        chunks = [
            (tuple(each.offsets), tuple(each.sizes)) for each in tensor.__create_chunk_list__()
        ]
    with user_code(name, f"{METHODS[1]}()"):
        items = [
            each.tensor_data
            for each in tensor.__create_write_items__(name, tensor if whole is None else whole)
        ]
        if None in items:
            raise _contradiction(name, f"{METHODS[1]} returns an item that is not a tensor")
        written = {(tuple(each.chunk.offsets), tuple(each.chunk.sizes)) for each in items}
        shapes = {tuple(each.size) for each in items}
    chunks = [(offset, size) for offset, size in chunks if 0 not in size]
    written = {(offset, size) for offset, size in written if 0 not in size}
    if written != {*chunks}:
        raise _contradiction(
            name, f"{METHODS[0]} returns the chunks {chunks}, {METHODS[1]} {sorted(written)}"
        )
    shape = tuple((tensor if whole is None else whole).shape)
    if whole is None and len(shapes) == 1:
        shape = shapes.pop()
    if shapes - {shape}:
        raise _contradiction(
            name, f"{METHODS[1]} returns the global shape {[*min(shapes)]}, not {[*shape]}"
        )
    boxes = [Box(_integers(name, METHODS[0], o), _integers(name, METHODS[0], n)) for o, n in chunks]
    if getattr(tensor, "__get_tensor_shard__", None) is None:
        parts = [Box((0,) * len(box.shape), box.shape) for box in boxes]
        if len(boxes) > 1 or (tensor.numel() and [tuple(tensor.shape)] != [b.shape for b in boxes]):
            raise _contradiction(
                name,
                f"{METHODS[0]} returns the chunks {[*map(str, boxes)]}, but the local tensor has "
                f"shape {[*tensor.shape]}",
            )
        return _checked(name, shape, boxes, tuple(tensor.shape), parts)
    with user_code(name, "__get_tensor_shard__()"):
        shards = tuple(
            tensor.__get_tensor_shard__(MetadataIndex(name, torch.Size(box.offset), i)).detach()
            for i, box in enumerate(boxes)
        )
    for box, shard in zip(boxes, shards, strict=True):
        if tuple(shard.shape) != box.shape:
            raise _contradiction(name, f"the shard at {box} has shape {[*shard.shape]}")
    _checked(name, shape, boxes, (), ())
    return Geometry(shape, tuple(boxes), (), shards)


def _checked(
    name: str,
    shape: tuple[int, ...],
    boxes: Sequence[Box],
    local_shape: tuple[int, ...],
    parts: Sequence[Box],
) -> Geometry:
    """Return the geometry without empty boxes, after checking that boxes fit and do not overlap."""
    for whole, listed, what in (
        (shape, boxes, "the global tensor"),
        (local_shape, parts, "the local tensor"),
    ):
        for box in listed:
            if len(box.shape) != len(whole) or not Box.whole(whole).contains(box):
                raise _contradiction(
                    name, f"the shard {box} lies outside of {what}, of shape {[*whole]}"
                )
        held = [box for box in listed if box.size]
        if len(held) > 1 and _overlap(held):
            raise _contradiction(name, f"shards overlap in {what}: {', '.join(map(str, held[:8]))}")
    if not parts:
        return Geometry(shape, (), ())
    pairs = [(box, part) for box, part in zip(boxes, parts, strict=True) if box.size]
    return Geometry(shape, tuple(box for box, _ in pairs), tuple(part for _, part in pairs))


def _overlap(boxes: Sequence[Box]) -> bool:
    offset = np.array([box.offset for box in boxes], np.int64).reshape(len(boxes), -1)
    shape = np.array([box.shape for box in boxes], np.int64).reshape(len(boxes), -1)
    table = np.zeros(len(boxes), np.int64), offset, shape
    return len(find_overlaps(table, table)[0]) > len(boxes)


def _integers(name: str, attribute: str, values: object) -> tuple[int, ...]:
    if isinstance(values, (tuple, list)) and not any(isinstance(n, bool) for n in values):
        try:
            found = tuple(map(index, values))
        except TypeError:
            found = (-1,)
        if min(found, default=0) >= 0:
            return found
    raise _contradiction(name, f"{attribute} has {values!r}, not a tuple of integers of at least 0")


def _contradiction(name: str, problem: str) -> LayoutError:
    return LayoutError(
        f"{name}: the tensor states which part of a global tensor it holds, but contradicts "
        f"itself: {problem}: correct {', '.join(ATTRIBUTES)}, or {' and '.join(METHODS)}, or "
        "remove them, or pass the parts as sw.Shards"
    )
