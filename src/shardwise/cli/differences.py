"""Compare two checkpoints by names, values and tensor bytes, in bounded memory. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwise.cli.find_checkpoints import Saved
from shardwise.cli.inspect import rank_values
from shardwise.cli.name_tree import tensor_bytes
from shardwise.cli.terminal import Advance, progress
from shardwise.engine.buffers import Arena
from shardwise.engine.load import read_boxes
from shardwise.engine.opened import opened_manifest, read_manifest
from shardwise.layout import Box, boxes_of
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import Manifest, TensorEntry

LARGEST_BATCH = 16 << 20
"""Bytes of each checkpoint that are compared at a time."""
LARGEST_CONVERSION = 1 << 20
"""Elements that are converted to float64 at a time."""
BUFFER = 32 << 20
"""Bytes of the buffers that both checkpoints are read through."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


@dataclass(frozen=True, slots=True)
class Unlike:
    """A name that is in both checkpoints, and what differs: `a` in one and `b` in the other."""

    name: str
    a: object
    b: object


@dataclass(frozen=True, slots=True)
class Differing:
    """A tensor with `differing` elements whose bytes differ.

    `max_abs_difference` is the largest |a - b| among them: NaN if either is NaN, None for dtypes
    without arithmetic.
    """

    name: str
    elements: int
    differing: int
    max_abs_difference: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All differences between two checkpoints. `same` is True if there are none."""

    a: str
    b: str
    same: bool = False
    tensors_compared: int
    only_in_a: list[str]
    only_in_b: list[str]
    kinds: list[Unlike]
    dtypes: list[Unlike]
    shapes: list[Unlike]
    values: list[Unlike]
    tensors: list[Differing]

    @property
    def differences(self) -> int:
        """The number of differences."""
        names = len(self.only_in_a) + len(self.only_in_b) + len(self.kinds)
        return names + len(self.dtypes) + len(self.shapes) + len(self.values) + len(self.tensors)


def compare(a: Saved, b: Saved) -> Comparison:
    """Compare two checkpoints, with every byte of the tensors that both have.

    Raises:
        CorruptionError: one of the checkpoints is damaged.
    """
    kinds_a, kinds_b = _kinds(a.manifest), _kinds(b.manifest)
    both = [name for name in kinds_a if name in kinds_b]
    tensors_a, tensors_b = _tensors(a.manifest), _tensors(b.manifest)
    pairs = [(tensors_a[name], tensors_b[name]) for name in tensors_a if name in tensors_b]
    fitting = [(x, y) for x, y in pairs if (x.dtype, x.shape) == (y.dtype, y.shape)]
    values = _compare_values(a, b)
    found = Comparison(
        a=str(a.store),
        b=str(b.store),
        tensors_compared=len(fitting),
        only_in_a=[name for name in kinds_a if name not in kinds_b] + values.only_in_a,
        only_in_b=[name for name in kinds_b if name not in kinds_a] + values.only_in_b,
        kinds=[Unlike(n, kinds_a[n], kinds_b[n]) for n in both if kinds_a[n] != kinds_b[n]],
        dtypes=[Unlike(x.name, x.dtype, y.dtype) for x, y in pairs if x.dtype != y.dtype],
        shapes=[Unlike(x.name, x.shape, y.shape) for x, y in pairs if x.shape != y.shape],
        values=values.unlike,
        tensors=_differing(a, b, fitting),
    )
    return replace(found, same=found.differences == 0)


def _kinds(manifest: Manifest) -> dict[str, str]:
    return {
        **{entry.name: "tensor" for entry in manifest.tensors},
        **{entry.name: "value" for entry in manifest.objects},
        **dict.fromkeys(manifest.per_rank, "value of each rank"),
    }


def _tensors(manifest: Manifest) -> dict[str, TensorEntry]:
    return {entry.name: entry for entry in manifest.tensors}


@dataclass(slots=True)
class _Values:
    """The differences between plain values."""

    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    unlike: list[Unlike] = field(default_factory=list)

    def compare(self, a: object, b: object, name: str) -> None:
        """Compare two values item by item, and collect the dotted names that differ."""
        if isinstance(a, dict) and isinstance(b, dict):
            if "$" not in a and "$" not in b:
                self.only_in_a += [f"{name}.{key}" for key in a if key not in b]
                self.only_in_b += [f"{name}.{key}" for key in b if key not in a]
                for key in (key for key in a if key in b):
                    self.compare(a[key], b[key], f"{name}.{key}")
                return
            if a.get("$") == b.get("$") == "tuple":
                self.compare(a.get("v"), b.get("v"), name)
                return
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            for index, (x, y) in enumerate(zip(a, b, strict=True)):
                self.compare(x, y, f"{name}.{index}")
        elif type(a) is not type(b) or a != b:
            self.unlike.append(Unlike(name, a, b))


def _compare_values(a: Saved, b: Saved) -> _Values:
    found = _Values()
    values_b = {entry.name: entry.value for entry in b.manifest.objects}
    for entry in a.manifest.objects:
        if entry.name in values_b:
            found.compare(entry.value, values_b[entry.name], entry.name)
    for name in a.manifest.per_rank:
        if name in b.manifest.per_rank:
            found.compare(rank_values(a, name), rank_values(b, name), name)
    return found


def _differing(
    a: Saved, b: Saved, pairs: Sequence[tuple[TensorEntry, TensorEntry]]
) -> list[Differing]:
    """Return the tensors whose bytes differ. Tensors that are tied in both are read once."""
    stored = {(x.same_as or x.name, y.same_as or y.name): x for x, y in pairs}
    with progress(sum(map(tensor_bytes, stored.values()))) as advance:
        found = _compare_tensors(a, b, list(stored.values()), advance)
    differing = []
    for x, y in pairs:
        tally = found[stored[x.same_as or x.name, y.same_as or y.name].name]
        if tally.differing:
            elements = math.prod(x.shape)
            differing.append(Differing(x.name, elements, tally.differing, tally.largest))
    return differing


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor."""

    tensor: TensorEntry
    box: Box

    @property
    def nbytes(self) -> int:
        """The size of the box in bytes."""
        return self.box.size * DTYPES[self.tensor.dtype].itemsize


@dataclass(slots=True)
class _Tally:
    """The number of differing elements of a tensor, and the largest |a - b| in float64."""

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


def _compare_tensors(
    a: Saved, b: Saved, tensors: Sequence[TensorEntry], advance: Advance
) -> dict[str, _Tally]:
    """Compare tensors that have the same dtype and shape in both checkpoints."""
    arena = Arena(BUFFER)
    sides = [
        each.foreign or opened_manifest(each.store, read_manifest(each.store)) for each in (a, b)
    ]
    found = {entry.name: _Tally() for entry in tensors}
    for batch in batches(tensors):
        boxes = [(part.tensor, part.box) for part in batch]
        read = [read_boxes(boxes, opened, arena, verify=True) for opened in sides]
        for part, x, y in zip(batch, *read, strict=True):
            found[part.tensor.name].add(x, y)
            advance(part.tensor.name, part.nbytes)
    return found


def batches(tensors: Iterable[TensorEntry]) -> Iterator[list[Part]]:
    """Cut tensors into parts, and yield lists of parts of at most `LARGEST_BATCH` bytes."""
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


def _bits(part: Tensor) -> Tensor:
    """Return a part as integers, with a row for each element."""
    itemsize = part.dtype.itemsize
    return part.reshape(-1).view(_BITS[itemsize]).reshape(-1, 2 if itemsize == 16 else 1)


def _largest_difference(x: Tensor, y: Tensor) -> float | None:
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    try:
        return float((x.to(wide) - y.to(wide)).abs().max())
    except (RuntimeError, NotImplementedError):
        return None  # a dtype of bits, not of numbers


def _larger(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return None
    return max(a, b) if a == a and b == b else math.nan
