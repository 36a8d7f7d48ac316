"""Two checkpoints, name by name and byte by byte. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardwise.cli.elements import compare_tensors
from shardwise.cli.named import rank_values
from shardwise.cli.outline import tensor_bytes
from shardwise.cli.places import Saved
from shardwise.cli.terminal import progress
from shardwise.manifest.manifest import Manifest, TensorEntry


@dataclass(frozen=True, slots=True)
class Unlike:
    """Something that has a name in both, and is `a` in one and `b` in the other."""

    name: str
    a: object
    b: object


@dataclass(frozen=True, slots=True)
class Differing:
    """A tensor of which `differing` of its `elements` have other bytes.

    `max_abs_difference` is the largest |a - b| among them; see `Tally.largest`.
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
    """The tensors whose bytes differ; those that are tied in both are compared once."""
    stored = {(x.same_as or x.name, y.same_as or y.name): x for x, y in pairs}
    with progress(sum(map(tensor_bytes, stored.values()))) as advance:
        found = compare_tensors(a, b, list(stored.values()), advance)
    differing = []
    for x, y in pairs:
        tally = found[stored[x.same_as or x.name, y.same_as or y.name].name]
        if tally.differing:
            elements = math.prod(x.shape)
            differing.append(Differing(x.name, elements, tally.differing, tally.largest))
    return differing
