"""The elements of two checkpoints' tensors, compared in bounded memory. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.cli.places import Saved
from shardwise.engine.buffers import Arena
from shardwise.engine.load import read_boxes
from shardwise.engine.opened import Opened, opened_manifest, read_manifest
from shardwise.layout import Box, boxes_of
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import TensorEntry

LARGEST_BATCH = 16 << 20
"""Bytes of each of the two checkpoints that are compared at once."""
LARGEST_CONVERSION = 1 << 20
"""Elements whose difference is taken at once, as float64."""
BUFFER = 32 << 20
"""Bytes of the buffers that both checkpoints are read through."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor."""

    tensor: TensorEntry
    box: Box

    @property
    def nbytes(self) -> int:
        """Of the box."""
        return self.box.size * DTYPES[self.tensor.dtype].itemsize


@dataclass(slots=True)
class Tally:
    """How many elements of a tensor have other bytes, and the largest |a - b| among them.

    `largest` is taken in float64: not a number where one of the two is none, and None where the
    dtype has no arithmetic.
    """

    differing: int = 0
    largest: float | None = 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Compare two parts of the same shape and dtype."""
        bits_x, bits_y = _bits(x), _bits(y)
        differ = (bits_x != bits_y).any(1)
        count = int(differ.sum())
        self.differing += count
        if count:
            bits_x, bits_y = bits_x[differ], bits_y[differ]
            for low in range(0, count, LARGEST_CONVERSION):
                part = slice(low, low + LARGEST_CONVERSION)
                found = _largest_difference(bits_x[part].view(x.dtype), bits_y[part].view(x.dtype))
                self.largest = _larger(self.largest, found)


def compare_tensors(
    a: Saved, b: Saved, tensors: Sequence[TensorEntry], advance: Callable[[str, int], None]
) -> dict[str, Tally]:
    """Compare tensors that both checkpoints have, of the same dtypes and shapes.

    Args:
        advance: told the tensor, and how many more bytes of it were compared.

    Returns:
        What was found, by name.

    Raises:
        CorruptionError: one of the checkpoints is damaged.
    """
    arena = Arena(BUFFER)
    sides = [
        _Side(each.foreign or opened_manifest(each.store, read_manifest(each.store)), arena)
        for each in (a, b)
    ]
    found = {entry.name: Tally() for entry in tensors}
    for batch in batches(tensors):
        read = [side.read(batch) for side in sides]
        for part, x, y in zip(batch, *read, strict=True):
            found[part.tensor.name].add(x, y)
            advance(part.tensor.name, part.nbytes)
    return found


def batches(tensors: Iterable[TensorEntry]) -> Iterator[list[Part]]:
    """All of the tensors in parts, as many together as may be compared at once."""
    batch: list[Part] = []
    room = LARGEST_BATCH
    for entry in tensors:
        for box in boxes_of(entry.shape, LARGEST_BATCH // DTYPES[entry.dtype].itemsize):
            part = Part(entry, box)
            if part.nbytes > room:
                yield batch
                batch, room = [], LARGEST_BATCH
            batch.append(part)
            room -= part.nbytes
    if batch:
        yield batch


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two checkpoints."""

    opened: Opened
    arena: Arena

    def read(self, parts: Sequence[Part]) -> list[Tensor]:
        """The parts, verified, read together."""
        boxes = [(part.tensor, part.box) for part in parts]
        return read_boxes(boxes, self.opened, self.arena, verify=True)


def _bits(part: Tensor) -> Tensor:
    """A part as integers, a row for each element."""
    itemsize = part.dtype.itemsize
    return part.reshape(-1).view(_BITS[itemsize]).reshape(-1, 2 if itemsize == 16 else 1)


def _largest_difference(x: Tensor, y: Tensor) -> float | None:
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    try:
        return float((x.to(wide) - y.to(wide)).abs().max())
    except (RuntimeError, NotImplementedError):
        return None  # a dtype that holds bits, not numbers


def _larger(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return None
    return max(a, b) if a == a and b == b else math.nan
