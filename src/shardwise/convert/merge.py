"""Merge a LoRA adapter into a model, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from shardwise.convert.lora import Bias, Change, LowRank, Whole
from shardwise.convert.plan import Part
from shardwise.convert.stream import Source
from shardwise.engine.buffers import aligned_buffer
from shardwise.layout import Box
from shardwise.store.store import Buffer


class Merged:
    """A source that reads a base model with an adapter merged into it.

    Sums are computed in single precision, or in double precision if the base has it, and rounded
    once.

    Args:
        changed: the changes by the base's names.
        held: bytes of host memory to use, in addition to that of the sources and the target.
    """

    def __init__(
        self, base: Source, adapter: Source, changed: Mapping[str, Change], held: int
    ) -> None:
        self._base = base
        self._adapter = adapter
        self._changed = changed
        self._held = held
        self._factors: dict[str, tuple[Part, torch.Tensor]] = {}

    def read(self, parts: list[tuple[Part, Buffer]]) -> None:
        """Fill each buffer with its part.

        Raises:
            CorruptionError: bytes differ from those that were saved.
        """
        plain = []
        for part, buffer in parts:
            change = self._changed.get(part.name)
            if change is None:
                plain.append((part, buffer))
            elif isinstance(change, Whole):
                self._adapter.read([(Part(change.name, part.box, part.dtype), buffer)])
            else:
                self._merge(part, buffer, change)
        self._base.read(plain)

    def _merge(self, part: Part, buffer: Buffer, change: LowRank | Bias) -> None:
        entry = self._base.saved.tensor(part.name)
        kind = "float64" if entry is not None and entry.dtype == "float64" else "float32"
        dtype: torch.dtype = getattr(torch, part.dtype)
        rank = change.rank if isinstance(change, LowRank) else 1
        itemsize = getattr(torch, kind).itemsize
        out = torch.from_numpy(buffer)
        if buffer.ctypes.data % dtype.itemsize:
            out = torch.empty(part.size, dtype=torch.uint8, device="cpu")
        whole = out.view(dtype).view(part.box.shape)
        own = change.base if isinstance(change, LowRank) else None
        source, name = (self._base, part.name) if own is None else (self._adapter, own)
        for within in _tiles(part.box.shape, rank, self._held // itemsize):
            offset = tuple(a + b for a, b in zip(part.box.offset, within.offset, strict=True))
            box = Box(offset, within.shape)
            value = _read(source, name, box, kind)
            value += self._delta(box, change, kind)
            whole[within.slices()] = value.to(dtype)
        if out.data_ptr() != buffer.ctypes.data:
            buffer[:] = out.numpy()

    def _delta(self, box: Box, change: LowRank | Bias, kind: str) -> torch.Tensor:
        if isinstance(change, Bias):
            return _read(self._adapter, change.name, box, kind) * change.scaling
        (row, column), (rows, columns) = box.offset, box.shape
        if change.transposed:
            row, column, rows, columns = column, row, columns, rows
        a = self._factor("a", Part(change.a, Box((0, column), (change.rank, columns)), kind))
        b = self._factor("b", Part(change.b, Box((row, 0), (rows, change.rank)), kind))
        product = (b @ a) * change.scaling
        return product.T if change.transposed else product

    def _factor(self, side: str, part: Part) -> torch.Tensor:
        """Return a part of a factor. The last one of each side is kept, as tiles share it."""
        kept = self._factors.pop(side, None)
        if kept is None or kept[0] != part:
            kept = None  # not two at a time
            kept = part, _read(self._adapter, part.name, part.box, part.dtype)
        self._factors[side] = kept
        return kept[1]


def _read(source: Source, name: str, box: Box, kind: str) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, kind)
    buffer = aligned_buffer(box.size * dtype.itemsize)
    source.read([(Part(name, box, kind), buffer)])
    return torch.from_numpy(buffer).view(dtype).view(box.shape)


def _tiles(shape: Sequence[int], rank: int, most: int) -> Iterator[Box]:
    """Cut a vector or matrix into boxes that, with their factors, have at most `most` elements."""
    if len(shape) == 1:
        step = max(1, most // 4)
        for at in range(0, shape[0], step):
            yield Box((at,), (min(step, shape[0] - at),))
        return
    rows, columns = shape
    across = min(columns, max(1, most // (4 * rank)))
    down = max(1, (most - rank * across) // (rank + 4 * across))
    for left in range(0, columns, across):
        for top in range(0, rows, down):
            yield Box((top, left), (min(down, rows - top), min(across, columns - left)))
