"""Two checkpoints, name by name and byte by byte, in bounded memory. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from shardwise.api import open as open_checkpoint
from shardwise.checkpoint import Checkpoint, SavedTensor
from shardwise.cli.named import rank_values
from shardwise.cli.outline import tensor_bytes
from shardwise.cli.places import Saved
from shardwise.cli.terminal import progress
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import Manifest, TensorEntry

LARGEST_PART = 16 << 20
"""Bytes of each of the two tensors that are compared at once."""
LARGEST_CONVERSION = 1 << 20
"""Elements whose difference is taken at once, as float64."""


@dataclass(frozen=True, slots=True)
class Unlike:
    """Something that has a name in both, and is `a` in one and `b` in the other."""

    name: str
    a: object
    b: object


@dataclass(frozen=True, slots=True)
class Differing:
    """A tensor of which `differing` of its `elements` have other bytes.

    `max_abs_difference` is the largest |a - b| in float64, not a number where one of them is none,
    and None where the dtype has no arithmetic.
    """

    name: str
    elements: int
    differing: int
    max_abs_difference: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All in which two checkpoints differ; `same` says that it is nothing."""

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
        """How many there are."""
        names = len(self.only_in_a) + len(self.only_in_b) + len(self.kinds)
        return names + len(self.dtypes) + len(self.shapes) + len(self.values) + len(self.tensors)


@dataclass(slots=True)
class _Values:
    """What was found in plain values: names in one only, and values that differ."""

    only_in_a: list[str] = field(default_factory=list)
    only_in_b: list[str] = field(default_factory=list)
    unlike: list[Unlike] = field(default_factory=list)

    def compare(self, a: object, b: object, name: str) -> None:
        """Descend into what both have, and note what differs by its dotted name."""
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


def compare(a: Saved, b: Saved) -> Comparison:
    """Compare two checkpoints, every byte that both have.

    Raises:
        CorruptionError: one of them is damaged.
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
        tensors=list(_differing(a, b, fitting)),
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
) -> Iterator[Differing]:
    """The tensors whose bytes differ; those that are tied to one are read once."""
    opened_a, opened_b = open_checkpoint(a.store), open_checkpoint(b.store)
    done: dict[tuple[str, str], tuple[int, float | None]] = {}
    with progress(sum(tensor_bytes(x) for x, _ in pairs)) as advance:
        for x, y in pairs:
            stored = x.same_as or x.name, y.same_as or y.name
            if stored not in done:
                parts = _parts(opened_a, opened_b, x)
                done[stored] = _difference(parts, getattr(torch, x.dtype))
            advance(x.name, tensor_bytes(x))
            differing, largest = done[stored]
            if differing:
                yield Differing(x.name, math.prod(x.shape), differing, largest)


def _parts(a: Checkpoint, b: Checkpoint, entry: TensorEntry) -> Iterator[tuple[Tensor, Tensor]]:
    """A tensor of both checkpoints, part after part, as bytes of shape (elements, itemsize)."""
    x, y = a[entry.name], b[entry.name]
    if not isinstance(x, SavedTensor) or not isinstance(y, SavedTensor):
        return
    itemsize = DTYPES[entry.dtype].itemsize
    for index in parts_of(entry.shape, LARGEST_PART // itemsize):
        yield _as_bytes(x[index], itemsize), _as_bytes(y[index], itemsize)


def _as_bytes(part: Tensor, itemsize: int) -> Tensor:
    return part.reshape(-1).view(torch.uint8).reshape(-1, itemsize)


def parts_of(shape: tuple[int, ...], most: int) -> Iterator[tuple[slice, ...]]:
    """Indices of parts of a tensor, disjoint and in order, of at most `most` elements each."""
    row = math.prod(shape[1:])
    if math.prod(shape) <= most:
        if 0 not in shape:
            yield tuple(slice(0, n) for n in shape)
    elif row <= most:
        several = most // row
        for low in range(0, shape[0], several):
            rest = (slice(0, n) for n in shape[1:])
            yield (slice(low, min(low + several, shape[0])), *rest)
    else:
        for at in range(shape[0]):
            for below in parts_of(shape[1:], most):
                yield (slice(at, at + 1), *below)


def _difference(
    parts: Iterator[tuple[Tensor, Tensor]], dtype: torch.dtype
) -> tuple[int, float | None]:
    """How many elements have other bytes, and the largest absolute difference between them."""
    differing = 0
    largest: float | None = 0.0
    for x, y in parts:
        rows = (x != y).any(1)
        count = int(rows.sum())
        differing += count
        if not count or largest is None:
            continue
        some, others = x[rows], y[rows]
        for low in range(0, count, LARGEST_CONVERSION):
            part = slice(low, low + LARGEST_CONVERSION)
            largest = _larger(largest, _largest_difference(some[part], others[part], dtype))
    return differing, largest


def _largest_difference(x: Tensor, y: Tensor, dtype: torch.dtype) -> float | None:
    wide = torch.complex128 if dtype.is_complex else torch.float64
    try:
        values = [each.contiguous().view(dtype).to(wide) for each in (x, y)]
    except (RuntimeError, NotImplementedError):
        return None  # dtypes that hold bits, not numbers
    return float((values[0] - values[1]).abs().max())


def _larger(a: float | None, b: float | None) -> float | None:
    """The larger; not a number if one of them is none."""
    if a is None or b is None:
        return None
    return max(a, b) if a == a and b == b else math.nan
