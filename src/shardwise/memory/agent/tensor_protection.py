"""How each tensor of a snapshot is protected, according to its manifest and records."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from shardwise.errors import FormatError
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import Manifest, decode_manifest
from shardwise.manifest.names import MANIFEST
from shardwise.manifest.validate import validated_pieces
from shardwise.memory import records
from shardwise.memory.files import read_record
from shardwise.memory.home import Place, Run
from shardwise.memory.observe import read_outcome
from shardwise.memory.records import Protect
from shardwise.memory.redundancy.placement import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The protection of part of a tensor.

    Attributes:
        kind: "copies" or "parity".
        survives: how many of `nodes` may be lost.
        nodes: the nodes that hold the part, and those that store its copies or parity.
    """

    kind: str
    survives: int
    nodes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatus:
    """A tensor of a snapshot.

    Attributes:
        bytes: the tensor's size.
        nodes: the nodes that hold it.
        survives: how many nodes may be lost, whichever they are; 0 if any part is not protected.
        guards: the protection of its parts.
    """

    name: str
    bytes: int
    nodes: list[str]
    survives: int
    guards: list[Guard]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsStatus:
    """The newest committed snapshot of a run, and some of its tensors."""

    step: int
    tensors: list[TensorStatus]


def tensors_of(run: Run, pattern: str) -> TensorsStatus | None:
    """Return how the tensors whose names match a pattern are protected; None without a snapshot.

    Raises:
        FormatError: the manifest is invalid.
        StoreError: a record is damaged.
    """
    for step in reversed(run.steps()):
        place = Place(run, step)
        if place.is_committed():
            try:
                manifest = decode_manifest((place.path / MANIFEST).read_bytes())
                tensors = _tensors(place, manifest, pattern)
            except FormatError as error:
                raise FormatError(f"{place.path}: {error}") from error
            return TensorsStatus(step=step, tensors=tensors)
    return None


def _tensors(place: Place, manifest: Manifest, pattern: str) -> list[TensorStatus]:
    pieces = validated_pieces(manifest)
    files_of: list[set[int]] = [set() for _ in manifest.tensors]
    for tensor, file in zip(pieces.tensor.tolist(), pieces.file.tolist(), strict=True):
        files_of[tensor].add(file)
    stored = {entry.name: files for entry, files in zip(manifest.tensors, files_of, strict=True)}
    node_of = _nodes(place, manifest.save_id)
    guard_of = _guards(place, manifest.save_id)
    found = []
    for entry in manifest.tensors:
        if not fnmatchcase(entry.name, pattern):
            continue
        names = [manifest.files[file].name for file in sorted(stored[entry.same_as or entry.name])]
        guards = [guard_of.get(name) for name in names]
        found.append(
            TensorStatus(
                name=entry.name,
                bytes=math.prod(entry.shape) * DTYPES[entry.dtype].itemsize,
                nodes=sorted({node_of.get(name, "?") for name in names}),
                survives=min((0 if each is None else each.survives for each in guards), default=0),
                guards=_distinct(guards),
            )
        )
    return found


def _nodes(place: Place, save_id: str) -> dict[str, str]:
    """Return the node of each data file, from the pending manifest."""
    found = [
        each
        for each in place.pending_manifests() + place.pending_copies()
        if each.save_id == save_id
    ]
    return dict(found[0].files) if found else {}


def _guards(place: Place, save_id: str) -> dict[str, Guard]:
    """Return the protection of each data file; none until protection is complete."""
    done = read_outcome(place, "protect", save_id)
    request = read_record(place.path / records.request_record("protect", save_id), Protect)
    if done is None or done.failure or request is None:
        return {}
    found: dict[str, Guard] = {}
    for group in request.protection.groups:
        for at, member in enumerate(group.members):
            guard = _guard(group, at)
            if guard is not None:
                found |= {name: guard for name, _ in member.files}
    return found


def _guard(group: Group, at: int) -> Guard | None:
    ring = [member.node for member in group.members]
    if group.parity:
        return Guard(kind="parity", survives=group.parity, nodes=ring)
    if group.copies:
        holders = (ring[at:] + ring[:at])[: group.copies + 1]
        return Guard(kind="copies", survives=group.copies, nodes=holders)
    return None


def _distinct(guards: Iterable[Guard | None]) -> list[Guard]:
    """Return each once, in order."""
    by_nodes = {(each.kind, *each.nodes): each for each in guards if each is not None}
    return list(by_nodes.values())
