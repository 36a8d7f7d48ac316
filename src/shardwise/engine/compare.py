"""Compare two checkpoints: names, plain values, and the bytes of tensors, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from msgspec import UNSET
from torch import Tensor

from shardwise.boxes import Box, batch_boxes
from shardwise.engine.buffers import Arena
from shardwise.engine.group import SoloGroup
from shardwise.engine.load import read_boxes, read_per_rank
from shardwise.events import Recorder, format_count
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.layout import Layout
from shardwise.manifest.manifest import TensorEntry
from shardwise.plan.name_lookup import SavedNames
from shardwise.state.leaves import view_for_numpy
from shardwise.state.plain_values import find_differences
from shardwise.store import Files

MAX_BATCH_BYTES = 16 << 20
"""The most bytes of each checkpoint to compare at a time."""
MAX_CONVERTED_ELEMENTS = 1 << 20
"""The most elements to convert to float64 at a time."""

Source: TypeAlias = tuple[Files, Layout]
"""The files and the layout of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What a name has in checkpoint A and in checkpoint B: a kind, dtype, shape or value.

    Values are encoded as in the manifest.
    """

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
    """All differences between two checkpoints; see `Checkpoint.compare`.

    Attributes:
        a, b: the paths of the checkpoints.
        same: whether there are no differences.
        tensors_compared: the number of tensors whose bytes were compared.
        only_in_a, only_in_b: the names in one checkpoint only.
        kinds: the names of a tensor in one checkpoint and of a plain value in the other.
        dtypes, shapes: the tensors with other dtypes and shapes.
        values: the plain values that differ; parts of values have dotted names.
        tensors: the tensors whose bytes differ.
    """

    a: str
    b: str
    same: bool
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

    def __str__(self) -> str:
        found = "the same" if self.same else format_count(self.differences, "difference")
        return f"{self.a} and {self.b}: {found}"


def compare(a: Source, b: Source, arena: Arena, recorder: Recorder) -> Comparison:
    """Compare two checkpoints, including every byte of the tensors that both have.

    Args:
        a, b: the files and the layout of each checkpoint.
        recorder: gets an event for each batch of tensors.

    Raises:
        CorruptionError: one of the checkpoints is damaged.
    """
    (store_a, layout_a), (store_b, layout_b) = a, b
    kinds_a, kinds_b = _kinds_by_name(layout_a), _kinds_by_name(layout_b)
    common = [name for name in kinds_a if name in kinds_b]
    kinds = [
        Difference(name, kinds_a[name], kinds_b[name])
        for name in common
        if kinds_a[name] != kinds_b[name]
    ]
    tensors_b = {entry.name: entry for entry in layout_b.tensors}
    pairs = [(x, tensors_b[x.name]) for x in layout_a.tensors if x.name in tensors_b]
    comparable = [(x, y) for x, y in pairs if (x.dtype, x.shape) == (y.dtype, y.shape)]
    values_a, values_b = _values_of(*a), _values_of(*b)
    values = [
        Difference(*difference)
        for name in common
        if name in values_a and kinds_a[name] == kinds_b[name]
        for difference in find_differences(values_a[name], values_b[name], name)
    ]
    found = Comparison(
        a=str(store_a),
        b=str(store_b),
        same=False,
        tensors_compared=len(comparable),
        only_in_a=[
            *(name for name in kinds_a if name not in kinds_b),
            *(each.name for each in values if each.b is UNSET),
        ],
        only_in_b=[
            *(name for name in kinds_b if name not in kinds_a),
            *(each.name for each in values if each.a is UNSET),
        ],
        kinds=kinds,
        dtypes=[Difference(x.name, x.dtype, y.dtype) for x, y in pairs if x.dtype != y.dtype],
        shapes=[Difference(x.name, x.shape, y.shape) for x, y in pairs if x.shape != y.shape],
        values=[each for each in values if UNSET not in (each.a, each.b)],
        tensors=_compare_tensors(a, b, comparable, arena, recorder),
    )
    return replace(found, same=not found.differences)


def _kinds_by_name(layout: Layout) -> dict[str, str]:
    return {
        **{entry.name: "tensor" for entry in layout.tensors},
        **{entry.name: "value" for entry in layout.objects},
        **dict.fromkeys(layout.per_rank, "value of each rank"),
    }


def _values_of(store: Files, layout: Layout) -> dict[str, object]:
    """Return the encoded values of all ranks, and a list of each value that differs by rank."""
    values: dict[str, object] = {entry.name: entry.value for entry in layout.objects}
    if layout.per_rank:
        values |= read_per_rank(store, layout, layout.per_rank, SoloGroup(), verify=True)
    return values


@dataclass(slots=True)
class _Tally:
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
    a: Source,
    b: Source,
    pairs: Sequence[tuple[TensorEntry, TensorEntry]],
    arena: Arena,
    recorder: Recorder,
) -> list[TensorDifference]:
    """Return the tensors whose bytes differ. Tensors that are tied in a and in b are read once."""
    names_a, names_b = SavedNames(a[1]), SavedNames(b[1])
    # The keys are the indices by which a and b store the bytes.
    stored = {(names_a.stored_index(x.name), names_b.stored_index(y.name)): x for x, y in pairs}
    tallies = {key: _Tally() for key in stored}
    boxes = ((k, Box.whole(x.shape), DTYPES[x.dtype].itemsize) for k, x in stored.items())
    for batch in batch_boxes(boxes, MAX_BATCH_BYTES):
        nbytes = sum(box.size * DTYPES[stored[key].dtype].itemsize for key, box in batch)
        with recorder.stage("compare", nbytes):
            in_a = read_boxes([(i, box) for (i, _), box in batch], *a, arena, verify=True)
            in_b = read_boxes([(j, box) for (_, j), box in batch], *b, arena, verify=True)
            for (key, _), data_a, data_b in zip(batch, in_a, in_b, strict=True):
                tallies[key].add(data_a, data_b)
    differences = []
    for x, y in pairs:
        tally = tallies[names_a.stored_index(x.name), names_b.stored_index(y.name)]
        if tally.differing:
            elements = math.prod(x.shape)
            differences.append(
                TensorDifference(x.name, elements, tally.differing, tally.max_abs_difference)
            )
    return differences


def _as_integers(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers, with one row for each element."""
    bits = view_for_numpy(tensor.reshape(-1))
    integers = bits.view(torch.int64) if bits.is_complex() else bits
    return integers.reshape(tensor.numel(), -1)


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
