"""The manifest of an average of checkpoints: which tensors and values it has, and the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import msgspec

from shardwise.errors import MismatchError, StateError
from shardwise.manifest.manifest import Manifest, ObjectEntry, TensorEntry
from shardwise.state.selection import Selection

AVERAGED_DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
"""8-bit floats are missing because their scales are separate tensors."""


def average_manifests(
    manifests: Mapping[str, Manifest], selection: Selection, take_first: Sequence[str]
) -> tuple[Manifest, tuple[str, ...]]:
    """Return the manifest of the average, and the names that it leaves out, with reasons.

    Plain values that differ are left out, unless `take_first` matches their names.

    Args:
        manifests: for each checkpoint's path, its manifest.

    Raises:
        MismatchError: names, shapes or kinds of numbers differ; `problems` lists them all.
    """
    (first_path, manifest), *others = manifests.items()
    selected = [entry for entry in manifest.tensors if selection.selects(entry.name)]
    problems: list[str] = []
    untied: set[str] = set()
    for path, other in others:
        unmatched = {each.name: each for each in other.tensors if selection.selects(each.name)}
        for entry in selected:
            found = unmatched.pop(entry.name, None)
            if found is None:
                problems.append(f"{entry.name}: in {first_path}, not in {path}")
            elif (found.shape, is_averaged(found)) != (entry.shape, is_averaged(entry)):
                first, second = (f"{each.dtype} {list(each.shape)}" for each in (entry, found))
                problems.append(f"{entry.name}: {first} in {first_path}, {second} in {path}")
            elif found.same_as != entry.same_as:
                untied.add(entry.name)
        problems += [f"{name}: in {path}, not in {first_path}" for name in unmatched]
    _refuse_unused_patterns(manifest, take_first, first_path)
    if problems:
        raise MismatchError(
            "the checkpoints cannot be averaged, because their tensors differ; only= and skip= "
            "select the tensors to average:",
            problems,
        )
    values, left_out = _average_values(manifest.objects, dict(others), selection, take_first)
    steps = {each.step for each in manifests.values()}
    averaged = msgspec.structs.replace(
        manifest,
        step=manifest.step if len(steps) == 1 else None,
        metrics={},
        objects=values,
        tensors=tuple(
            msgspec.structs.replace(entry, same_as=None) if entry.name in untied else entry
            for entry in manifest.tensors
        ),
    )
    return averaged, left_out


def _refuse_unused_patterns(manifest: Manifest, take_first: Sequence[str], path: str) -> None:
    names = [entry.name for entry in manifest.tensors] + [each.name for each in manifest.objects]
    unused = [each for each in take_first if not any(fnmatchcase(name, each) for name in names)]
    if unused:
        raise MismatchError(
            f"take_first= has patterns that match no name in {path}; correct or remove them:",
            unused,
        )


def _average_values(
    objects: Sequence[ObjectEntry],
    others: Mapping[str, Manifest],
    selection: Selection,
    take_first: Sequence[str],
) -> tuple[tuple[ObjectEntry, ...], tuple[str, ...]]:
    """Return the plain values to write, and the names of the others, with reasons."""
    kept: list[ObjectEntry] = []
    left_out: list[str] = []
    values_by_path = {
        path: {entry.name: entry.value for entry in other.objects} for path, other in others.items()
    }
    for entry in objects:
        name = entry.name
        missing = [path for path, values in values_by_path.items() if name not in values]
        differing = [
            path for path, values in values_by_path.items() if values.get(name) != entry.value
        ]
        if not differing or matches_any(name, take_first):
            kept.append(entry)
        elif selection.selects(name):
            reason = f"is not in {missing[0]}" if missing else f"differs in {differing[0]}"
            left_out.append(f"{name}: plain value {reason}; take_first= keeps the first one")
    return tuple(kept), tuple(left_out)


def normalize_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """Return the weights, scaled so that their sum is 1. None means equal weights.

    Raises:
        StateError: the weights are not `count` finite numbers with a positive sum.
    """
    given = [1.0] * count if weights is None else [*weights]
    finite = all(isinstance(each, (int, float)) and math.isfinite(each) for each in given)
    if len(given) != count or not finite or not 0 < sum(given) < math.inf:
        raise StateError(
            f"weights={weights!r}: expected {count} finite numbers with a positive sum, one for "
            "each checkpoint"
        )
    total = math.fsum(given)
    return [each / total for each in given]


def is_averaged(entry: TensorEntry) -> bool:
    """Return whether a tensor is averaged. Other tensors must be equal in all checkpoints."""
    return entry.dtype in AVERAGED_DTYPES


def matches_any(name: str, patterns: Sequence[str]) -> bool:
    """Return whether any of the shell patterns matches a name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
