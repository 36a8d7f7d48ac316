"""Tensors that state random boxes: uneven, replicated, strided and padded; saved and resharded."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

import shardwise as sw
from shardwise.testing.thread_group import ThreadGroup, run_ranks
from tests.breadth import examples

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.complex64, torch.bool)
MARK = 1  # the byte of all memory outside of the boxes
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Memory:
    """How a local tensor lies in memory: the order of its dimensions, gaps, and its offset."""

    order: tuple[int, ...]
    step: int
    skip: int

    def allocate(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of this shape, of which each byte is `MARK`."""
        order = sorted(range(len(shape)), key=lambda dim: self.order[dim])
        spread = [shape[dim] for dim in order]
        spread[-1] *= self.step
        flat = torch.full(
            ((self.skip + math.prod(spread)) * dtype.itemsize,), MARK, dtype=torch.uint8
        )
        outer = flat.view(dtype)[self.skip :].view(spread)[..., :: self.step]
        return outer.permute([order.index(dim) for dim in range(len(shape))])


@dataclass(frozen=True)
class Held:
    """What a rank holds.

    Attributes:
        kind: how its tensor states this.
        boxes: the boxes, in the order in which they lie in the local tensor.
        margins: for each box, how far it lies from the preceding one and from the sides.
        memory: how the local tensor lies in memory.
    """

    kind: str
    boxes: tuple[sw.Box, ...]
    margins: tuple[int, ...]
    memory: Memory

    def make(self, whole: torch.Tensor, *, filled: bool) -> tuple[Any, list[torch.Tensor]]:
        """Return the tensor that states the boxes, and all memory that it needs."""
        make = {"attributes": self._padded, "merged": self._merged, "methods": self._methods}
        return make[self.kind](whole, filled)

    def _padded(self, whole: torch.Tensor, filled: bool) -> tuple[Any, list[torch.Tensor]]:
        """Stack the boxes along the first dimension of one local tensor, with margins."""
        sizes = [
            [n + margin for n in box.shape]
            for box, margin in zip(self.boxes, self.margins, strict=True)
        ]
        rest = [max((size[dim] for size in sizes), default=1) for dim in range(1, whole.dim())]
        local = self.memory.allocate((sum(size[0] for size in sizes), *rest), whole.dtype)
        offsets, row = [], 0
        for size, margin in zip(sizes, self.margins, strict=True):
            offsets.append((row + margin, *[margin] * len(rest)))
            row += size[0]
        parts = [sw.Box(at, box.shape) for at, box in zip(offsets, self.boxes, strict=True)]
        memory = [local[part.slices()] for part in parts]
        return self._state(local, whole, offsets, memory, filled)

    def _merged(self, whole: torch.Tensor, filled: bool) -> tuple[Any, list[torch.Tensor]]:
        """Lay the boxes end to end in one dimension, with margins."""
        total = sum(self.margins) + sum(box.size for box in self.boxes)
        local = self.memory.allocate((total,), whole.dtype)
        offsets, memory, at = [], [], 0
        for box, margin in zip(self.boxes, self.margins, strict=True):
            at += margin
            offsets.append((at,))
            memory.append(local[at : at + box.size].view(box.shape))
            at += box.size
        return self._state(local, whole, offsets, memory, filled)

    def _state(
        self,
        local: Any,
        whole: torch.Tensor,
        offsets: Sequence[Shape],
        memory: Sequence[torch.Tensor],
        filled: bool,
    ) -> tuple[Any, list[torch.Tensor]]:
        for box, part in zip(self.boxes, memory, strict=True):
            if filled:
                part.copy_(whole[box.slices()])
        local.global_shape = tuple(whole.shape)
        local.global_offsets = tuple(box.offset for box in self.boxes)
        local.local_offsets = tuple(offsets)
        local.local_sizes = tuple(box.shape for box in self.boxes)
        return local, [local]

    def _methods(self, whole: torch.Tensor, filled: bool) -> tuple[Any, list[torch.Tensor]]:
        """Keep each box in a tensor of its own; one box alone is the tensor that states it."""
        memory = [self.memory.allocate(box.shape, whole.dtype) for box in self.boxes]
        for box, part in zip(self.boxes, memory, strict=True):
            if filled:
                part.copy_(whole[box.slices()])
        stated: Any = memory[0] if len(memory) == 1 else torch.empty(0, dtype=whole.dtype)
        chunks = [
            ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
            for box in self.boxes
        ]
        empty = ChunkStorageMetadata(torch.Size([0] * whole.dim()), torch.Size([0] * whole.dim()))

        def create_write_items(name: str, tensor: torch.Tensor) -> list[WriteItem]:
            properties = TensorProperties.create_from_tensor(stated)
            return [
                WriteItem(
                    MetadataIndex(name, chunk.offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(chunk, properties, whole.size()),
                )
                for chunk in chunks or [empty]
            ]

        stated.__create_chunk_list__ = lambda: chunks
        stated.__create_write_items__ = create_write_items
        if len(memory) != 1:
            by_offset = {box.offset: part for box, part in zip(self.boxes, memory, strict=True)}
            stated.__get_tensor_shard__ = lambda index: by_offset[tuple(index.offset)]
        return stated, [stated, *memory]


@st.composite
def shardings(draw: st.DrawFn, shape: Shape) -> tuple[Held, ...]:
    """Cut a tensor into boxes of any size, and give each one to one rank or more."""
    boxes = [sw.Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, box.shape[dim]))
        for low, size in ((0, at), (at, box.shape[dim] - at)):
            offset, part = [*box.offset], [*box.shape]
            offset[dim], part[dim] = offset[dim] + low, size
            boxes.append(sw.Box(tuple(offset), tuple(part)))
    boxes = [box for box in boxes if box.size]
    world = draw(st.integers(1, 4))
    ranks = st.sets(st.integers(0, world - 1), min_size=1, max_size=2)
    owners = [draw(ranks) for _ in boxes]
    return tuple(
        draw(holdings([box for box, owner in zip(boxes, owners, strict=True) if rank in owner]))
        for rank in range(world)
    )


@st.composite
def holdings(draw: st.DrawFn, boxes: list[sw.Box]) -> Held:
    kind = draw(st.sampled_from(["attributes", "merged", "methods"]))
    order = tuple(draw(st.permutations(range(3))))
    memory = Memory(order, draw(st.integers(1, 2)), draw(st.integers(0, 2)))
    margins = tuple(draw(st.integers(0, 2)) for _ in boxes)
    return Held(kind, tuple(draw(st.permutations(boxes))), margins, memory)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[Held, ...], tuple[Held, ...]]:
    """Return a tensor of random bytes, and how two worlds hold it."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    most = 2 if dtype is torch.bool else 256
    count = math.prod(shape) * dtype.itemsize
    data = torch.randint(0, most, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape), draw(shardings(shape)), draw(shardings(shape))


def bytes_of(memory: Sequence[torch.Tensor]) -> list[bytes]:
    """Return all bytes of some tensors, also those between their elements."""
    return [bytes(tensor.untyped_storage()) for tensor in memory]


@examples(40)
@given(cases())
def test_any_geometry_is_saved_and_fills_any_other(
    case: tuple[torch.Tensor, tuple[Held, ...], tuple[Held, ...]],
) -> None:
    whole, saved, loaded = case

    def save(group: ThreadGroup) -> None:
        tensor, memory = saved[group.rank].make(whole, filled=True)
        before = bytes_of(memory)
        sw.save(path, {"t": tensor}, group=group)
        assert bytes_of(memory) == before

    def load(group: ThreadGroup) -> None:
        tensor, memory = loaded[group.rank].make(whole, filled=False)
        _, expected = loaded[group.rank].make(whole, filled=True)
        sw.load(path, {"t": tensor}, group=group)
        assert bytes_of(memory) == bytes_of(expected)

    with tempfile.TemporaryDirectory() as path:
        run_ranks(len(saved), save)
        opened = sw.open(path)["t"]
        assert isinstance(opened, sw.SavedTensor)
        assert bytes_of([opened.tensor()]) == bytes_of([whole])
        run_ranks(len(loaded), load)
