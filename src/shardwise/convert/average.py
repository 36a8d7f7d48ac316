"""The weighted mean of several checkpoints of one model, computed part by part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec
import torch

from shardwise.convert.plan import Part
from shardwise.convert.stream import Source
from shardwise.engine.buffers import aligned_buffer
from shardwise.errors import MismatchError, StateError
from shardwise.layout import Box, boxes_of
from shardwise.manifest.manifest import Manifest, ObjectEntry, TensorEntry
from shardwise.state.selection import Selection
from shardwise.store.store import Buffer

MIXED = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")


def averaged(
    manifests: Mapping[str, Manifest], selection: Selection, take_first: Sequence[str]
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest of the mean, and what it leaves out, with reasons.

    Plain values that differ have no mean. They are left out unless `take_first` matches them.

    Args:
        manifests: the manifests by the paths of the checkpoints.

    Raises:
        MismatchError: names, shapes or kinds of numbers differ; `problems` lists them all.
    """
    (first, manifest), *others = manifests.items()
    chosen = [entry for entry in manifest.tensors if selection.chooses(entry.name)]
    problems: list[str] = []
    untied: set[str] = set()
    for place, other in others:
        theirs = {each.name: each for each in other.tensors if selection.chooses(each.name)}
        for entry in chosen:
            found = theirs.pop(entry.name, None)
            if found is None:
                problems.append(f"{entry.name}: in {first}, not in {place}")
            elif (found.shape, _mixes(found)) != (entry.shape, _mixes(entry)):
                here, there = (f"{e.dtype} {list(e.shape)}" for e in (entry, found))
                problems.append(f"{entry.name}: {here} in {first}, {there} in {place}")
            elif found.same_as != entry.same_as:
                untied.add(entry.name)
        problems += [f"{name}: in {place}, not in {first}" for name in theirs]
    names = [entry.name for entry in manifest.tensors] + [each.name for each in manifest.objects]
    idle = [each for each in take_first if not any(fnmatchcase(name, each) for name in names)]
    if idle:
        raise MismatchError(f"these patterns of take_first= match nothing in {first}:", idle)
    if problems:
        raise MismatchError(
            "the checkpoints cannot be averaged, because their tensors differ:", problems
        )
    values, left_out = _values(manifest.objects, dict(others), selection, take_first)
    steps = {each.step for each in manifests.values()}
    return (
        msgspec.structs.replace(
            manifest,
            step=manifest.step if len(steps) == 1 else None,
            metrics={},
            objects=values,
            tensors=tuple(
                msgspec.structs.replace(entry, same_as=None) if entry.name in untied else entry
                for entry in manifest.tensors
            ),
        ),
        left_out,
    )


class Averaged:
    """A source that reads the weighted mean of several checkpoints.

    Floating-point and complex tensors are summed in double precision and rounded once. Other
    tensors must be equal in all checkpoints, or be taken from the first.

    Args:
        sources: the checkpoints by path.
        weights: one for each checkpoint; their sum is 1.
        take_first: shell patterns of tensors to take from the first checkpoint.
        held: bytes of host memory to use, in addition to that of the sources and the target.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        weights: Sequence[float],
        take_first: Sequence[str],
        held: int,
    ) -> None:
        self._sources = sources
        self._weights = weights
        self._take_first = take_first
        self._held = held

    def read(self, parts: list[tuple[Part, Buffer]]) -> None:
        """Fill each buffer with its part of the mean.

        Raises:
            CorruptionError: bytes differ from those that were saved.
            MismatchError: a tensor that cannot be averaged differs.
        """
        first = next(iter(self._sources.values()))
        plain = []
        for part, buffer in parts:
            entry = first.saved.tensor(part.name)
            if entry is None or _matches(part.name, self._take_first):
                plain.append((part, buffer))
            elif _mixes(entry):
                self._mix(part, buffer, entry)
            else:
                plain.append((part, buffer))
                self._compare(part)
        first.read(plain)

    def _mix(self, part: Part, buffer: Buffer, entry: TensorEntry) -> None:
        kind = "complex128" if getattr(torch, entry.dtype).is_complex else "float64"
        wide, dtype = getattr(torch, kind), getattr(torch, part.dtype)
        at = 0
        for box in _boxes(part, self._held // (2 * wide.itemsize)):
            size = box.size * wide.itemsize
            term, total = (aligned_buffer(size) for _ in range(2))
            mean = torch.from_numpy(total).view(wide)
            for source, weight in zip(self._sources.values(), self._weights, strict=True):
                source.read([(Part(part.name, box, kind), term)])
                mean.add_(torch.from_numpy(term).view(wide), alpha=weight)
            out = mean.to(dtype).view(torch.uint8).numpy()
            buffer[at : at + len(out)] = out
            at += len(out)

    def _compare(self, part: Part) -> None:
        """Raise an error if a tensor that cannot be averaged differs between checkpoints."""
        first, *others = self._sources.items()
        own = first[1].saved.tensor(part.name)
        dtype = part.dtype if own is None else own.dtype
        for box in _boxes(part, self._held // (2 * getattr(torch, dtype).itemsize)):
            piece = Part(part.name, box, dtype)
            wanted, found = (aligned_buffer(piece.size) for _ in range(2))
            first[1].read([(piece, wanted)])
            for place, source in others:
                source.read([(piece, found)])
                if wanted.tobytes() != found.tobytes():
                    raise MismatchError(
                        "tensors that are not floating-point must be equal in all checkpoints; "
                        "take_first= takes them from the first checkpoint, skip= leaves them out:",
                        [f"{part.name}: differs between {first[0]} and {place}"],
                    )


def _boxes(part: Part, most: int) -> list[Box]:
    """Cut a part into boxes of at most `most` elements that are contiguous in memory."""
    return [
        Box(tuple(a + b for a, b in zip(part.box.offset, box.offset, strict=True)), box.shape)
        for box in boxes_of(part.box.shape, max(1, most))
    ]


def _values(
    objects: Sequence[ObjectEntry],
    others: Mapping[str, Manifest],
    selection: Selection,
    take_first: Sequence[str],
) -> tuple[tuple[ObjectEntry, ...], tuple[str, ...]]:
    kept: list[ObjectEntry] = []
    left_out: list[str] = []
    held = {place: {e.name: e.value for e in other.objects} for place, other in others.items()}
    for entry in objects:
        absent = [place for place, values in held.items() if entry.name not in values]
        unlike = [p for p, values in held.items() if values.get(entry.name) != entry.value]
        if not unlike or _matches(entry.name, take_first):
            kept.append(entry)
        elif selection.chooses(entry.name):
            why = f"is not in {absent[0]}" if absent else f"differs in {unlike[0]}"
            left_out.append(f"{entry.name}: plain value {why}; take_first= keeps the first one")
    return tuple(kept), tuple(left_out)


def checked_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """Return the weights, scaled so that their sum is 1.

    Raises:
        StateError: they are not `count` finite numbers with a positive sum.
    """
    given = [1.0] * count if weights is None else [*weights]
    usable = all(isinstance(each, (int, float)) and math.isfinite(each) for each in given)
    if len(given) != count or not usable or not 0 < sum(given) < math.inf:
        raise StateError(
            f"weights={weights!r}: expected {count} finite numbers with a positive sum, one for "
            "each checkpoint"
        )
    total = math.fsum(given)
    return [each / total for each in given]


def _mixes(entry: TensorEntry) -> bool:
    """Whether a tensor is averaged. 8-bit floats are not: their scales are other tensors."""
    return entry.dtype in MIXED


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
