"""Find the differences between two checkpoints: names, values and tensor bytes.

`shardwise diff` imports this module late, because it imports torch. Memory is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwise.cli.find_checkpoints import CommittedCheckpoint
from shardwise.cli.inspect import rank_values
from shardwise.cli.name_tree import tensor_bytes
from shardwise.cli.terminal import Advance, progress
from shardwise.engine.buffers import Arena
from shardwise.engine.load import read_boxes
from shardwise.engine.opened import open_manifest, read_manifest
from shardwise.layout import Box, boxes_of
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import Manifest, TensorEntry

MAX_BATCH_BYTES = 16 << 20
"""The most bytes of each checkpoint to compare at a time."""
MAX_CONVERTED_ELEMENTS = 1 << 20
"""The most elements to convert to float64 at a time."""
ARENA_BYTES = 32 << 20
"""The size of the buffers for reading both checkpoints."""

_INTEGER_OF_ITEMSIZE = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.int64,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """What a name has in checkpoint A and in checkpoint B: a kind, dtype, shape or value."""

    name: str
    a: object
    b: object


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """A tensor whose bytes differ.

    Attributes:
        elements: the number of elements.
        differing: the number of elements whose bytes differ.
        max_abs_difference: the largest |a - b|. NaN if a or b is NaN in an element that differs.
            None for dtypes without arithmetic.
    """

    name: str
    elements: int
    differing: int
    max_abs_difference: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All differences between two checkpoints.

    Attributes:
        a, b: paths of the checkpoints.
        same: whether there are no differences.
        tensors_compared: the number of tensors whose bytes were compared.
        kinds: names of a tensor in one checkpoint and of a plain value in the other.
    """

    a: str
    b: str
    same: bool = False
    tensors_compared: int
    only_in_a: list[str]
    only_in_b: list[str]
    kinds: list[Difference]
    dtypes: list[Difference]
    shapes: list[Difference]
    values: list[Difference]
    tensors: list[TensorDifference]

    @property
    def differences(self) -> int:
        """The number of differences."""
        names = len(self.only_in_a) + len(self.only_in_b) + len(self.kinds)
        return names + len(self.dtypes) + len(self.shapes) + len(self.values) + len(self.tensors)


def compare_checkpoints(a: CommittedCheckpoint, b: CommittedCheckpoint) -> Comparison:
    """Compare two checkpoints, including every byte of the tensors that both have.

    Raises:
        CorruptionError: one of the checkpoints is damaged.
    """
    kinds_a, kinds_b = _kinds_by_name(a.manifest), _kinds_by_name(b.manifest)
    common_names = [name for name in kinds_a if name in kinds_b]
    tensors_a, tensors_b = _tensors_by_name(a.manifest), _tensors_by_name(b.manifest)
    pairs = [(tensors_a[name], tensors_b[name]) for name in tensors_a if name in tensors_b]
    comparable = [(x, y) for x, y in pairs if (x.dtype, x.shape) == (y.dtype, y.shape)]
    values = _compare_values(a, b)
    comparison = Comparison(
        a=str(a.store),
        b=str(b.store),
        tensors_compared=len(comparable),
        only_in_a=[name for name in kinds_a if name not in kinds_b] + values.only_in_a,
        only_in_b=[name for name in kinds_b if name not in kinds_a] + values.only_in_b,
        kinds=[
            Difference(name, kinds_a[name], kinds_b[name])
            for name in common_names
            if kinds_a[name] != kinds_b[name]
        ],
        dtypes=[Difference(x.name, x.dtype, y.dtype) for x, y in pairs if x.dtype != y.dtype],
        shapes=[Difference(x.name, x.shape, y.shape) for x, y in pairs if x.shape != y.shape],
        values=values.differing,
        tensors=_compare_all_tensors(a, b, comparable),
    )
    return replace(comparison, same=comparison.differences == 0)


def _kinds_by_name(manifest: Manifest) -> dict[str, str]:
    return {
        **{entry.name: "tensor" for entry in manifest.tensors},
        **{entry.name: "value" for entry in manifest.objects},
        **dict.fromkeys(manifest.per_rank, "value of each rank"),
    }


def _tensors_by_name(manifest: Manifest) -> dict[str, TensorEntry]:
    return {entry.name: entry for entry in manifest.tensors}


@dataclass(slots=True)
class _ValueDifferences:
    """The differences between plain values."""

    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    differing: list[Difference] = field(default_factory=list)

    def compare(self, a: object, b: object, name: str) -> None:
        """Compare two values item by item, and collect the dotted names of items that differ."""
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
            self.differing.append(Difference(name, a, b))


def _compare_values(a: CommittedCheckpoint, b: CommittedCheckpoint) -> _ValueDifferences:
    differences = _ValueDifferences()
    values_b = {entry.name: entry.value for entry in b.manifest.objects}
    for entry in a.manifest.objects:
        if entry.name in values_b:
            differences.compare(entry.value, values_b[entry.name], entry.name)
    for name in a.manifest.per_rank:
        if name in b.manifest.per_rank:
            differences.compare(rank_values(a, name), rank_values(b, name), name)
    return differences


def _compare_all_tensors(
    a: CommittedCheckpoint, b: CommittedCheckpoint, pairs: Sequence[tuple[TensorEntry, TensorEntry]]
) -> list[TensorDifference]:
    """Return the tensors whose bytes differ. Tensors that are tied in a and in b are read once."""
    # The keys are the names under which a and b store the bytes.
    read_tensors = {(x.same_as or x.name, y.same_as or y.name): x for x, y in pairs}
    with progress(sum(map(tensor_bytes, read_tensors.values()))) as advance:
        tallies = _compare_tensors(a, b, list(read_tensors.values()), advance)
    differences = []
    for x, y in pairs:
        tally = tallies[read_tensors[x.same_as or x.name, y.same_as or y.name].name]
        if tally.differing:
            elements = math.prod(x.shape)
            differences.append(
                TensorDifference(x.name, elements, tally.differing, tally.max_abs_difference)
            )
    return differences


@dataclass(frozen=True, slots=True)
class TensorBox:
    """A box of a tensor."""

    tensor: TensorEntry
    box: Box

    @property
    def nbytes(self) -> int:
        """The size of the box in bytes."""
        return self.box.size * DTYPES[self.tensor.dtype].itemsize


@dataclass(slots=True)
class _TensorTally:
    """The number of differing elements of a tensor, and the largest |a - b| in float64."""

    differing: int = 0
    max_abs_difference: float | None = 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Compare two boxes of the same shape and dtype."""
        bits_x, bits_y = _as_integers(x), _as_integers(y)
        differ = (bits_x != bits_y).any(1)
        count = int(differ.sum())
        self.differing += count
        if count:
            bits_x, bits_y = bits_x[differ], bits_y[differ]
            for start in range(0, count, MAX_CONVERTED_ELEMENTS):
                part = slice(start, start + MAX_CONVERTED_ELEMENTS)
                difference = _max_abs_difference(
                    bits_x[part].view(x.dtype), bits_y[part].view(x.dtype)
                )
                self.max_abs_difference = _larger_or_nan(self.max_abs_difference, difference)


def _compare_tensors(
    a: CommittedCheckpoint, b: CommittedCheckpoint, tensors: Sequence[TensorEntry], advance: Advance
) -> dict[str, _TensorTally]:
    """Compare tensors that have equal dtypes and shapes in both checkpoints."""
    arena = Arena(ARENA_BYTES)
    opened_checkpoints = [
        each.foreign or open_manifest(each.store, read_manifest(each.store)) for each in (a, b)
    ]
    tallies = {entry.name: _TensorTally() for entry in tensors}
    for batch in batch_boxes(tensors):
        boxes = [(each.tensor, each.box) for each in batch]
        data = [read_boxes(boxes, opened, arena, verify=True) for opened in opened_checkpoints]
        for each, x, y in zip(batch, *data, strict=True):
            tallies[each.tensor.name].add(x, y)
            advance(each.tensor.name, each.nbytes)
    return tallies


def batch_boxes(tensors: Iterable[TensorEntry]) -> Iterator[list[TensorBox]]:
    """Cut tensors into boxes, and yield lists of boxes of at most `MAX_BATCH_BYTES` in all."""
    batch: list[TensorBox] = []
    remaining_bytes = MAX_BATCH_BYTES
    for entry in tensors:
        for box in boxes_of(entry.shape, MAX_BATCH_BYTES // DTYPES[entry.dtype].itemsize):
            tensor_box = TensorBox(entry, box)
            if tensor_box.nbytes > remaining_bytes:
                yield batch
                batch, remaining_bytes = [], MAX_BATCH_BYTES
            batch.append(tensor_box)
            remaining_bytes -= tensor_box.nbytes
    if batch:
        yield batch


def _as_integers(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers, with one row for each element."""
    itemsize = tensor.dtype.itemsize
    integers = tensor.reshape(-1).view(_INTEGER_OF_ITEMSIZE[itemsize])
    return integers.reshape(-1, 2 if itemsize == 16 else 1)


def _max_abs_difference(x: Tensor, y: Tensor) -> float | None:
    wide_dtype = torch.complex128 if x.dtype.is_complex else torch.float64
    try:
        return float((x.to(wide_dtype) - y.to(wide_dtype)).abs().max())
    except (RuntimeError, NotImplementedError):
        return None  # torch has no arithmetic for this dtype


def _larger_or_nan(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return None
    return max(a, b) if a == a and b == b else math.nan
