"""Reports how each tensor of a snapshot is protected by copies or parity."""

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
from shardwise.memory.home import Run, SnapshotDirectory
from shardwise.memory.observe import read_outcome, read_snapshot
from shardwise.memory.records import ProtectRequest
from shardwise.memory.redundancy.placement import ProtectionGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PartProtection:
    """The protection of part of a tensor.

    Attributes:
        kind: "copies" or "parity".
        survives: the number of `nodes` that can be lost without loss of the part.
        nodes: the nodes that store the part, its copies or its parity.
    """

    kind: str
    survives: int
    nodes: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatus:
    """A tensor of a snapshot.

    Attributes:
        name: the name of the tensor.
        bytes: the size of the tensor.
        nodes: the nodes that store its parts.
        survives: the number of nodes that can be lost, in any combination, without loss of the
            tensor; 0 if a part is not protected.
        protections: the protections of its parts, without repetitions.
    """

    name: str
    bytes: int
    nodes: list[str]
    survives: int
    protections: list[PartProtection]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorsStatus:
    """Some tensors of the newest committed snapshot of a run."""

    step: int
    tensors: list[TensorStatus]


def report_tensors(run: Run, pattern: str) -> TensorsStatus | None:
    """Return how tensors of the newest committed snapshot are protected; None without a snapshot.

    Args:
        pattern: a pattern of the names of the tensors, for example "model.*".

    Raises:
        FormatError: the manifest is invalid.
        StoreError: a record is damaged.
    """
    for step in reversed(run.steps()):
        place = SnapshotDirectory(run, step)
        if place.is_committed():
            try:
                manifest = decode_manifest(place.read_file(MANIFEST))
                tensors = _report_tensors_of(place, manifest, pattern)
            except FormatError as error:
                raise FormatError(f"{place.path}: {error}") from error
            return TensorsStatus(step=step, tensors=tensors)
    return None


def _report_tensors_of(
    place: SnapshotDirectory, manifest: Manifest, pattern: str
) -> list[TensorStatus]:
    pieces = validated_pieces(manifest)
    files_of: list[set[int]] = [set() for _ in manifest.tensors]
    for tensor, file in zip(pieces.tensor.tolist(), pieces.file.tolist(), strict=True):
        files_of[tensor].add(file)
    files_by_name = {
        entry.name: sorted(files) for entry, files in zip(manifest.tensors, files_of, strict=True)
    }
    node_of = _node_of_each_file(place, manifest.save_id)
    protection_of = _protection_of_each_file(place, manifest.save_id)
    found = []
    for entry in manifest.tensors:
        if not fnmatchcase(entry.name, pattern):
            continue
        names = [manifest.files[file].name for file in files_by_name[entry.same_as or entry.name]]
        protections = [protection_of.get(name) for name in names]
        found.append(
            TensorStatus(
                name=entry.name,
                bytes=math.prod(entry.shape) * DTYPES[entry.dtype].itemsize,
                nodes=sorted({node_of.get(name, "?") for name in names}),
                survives=min(
                    (0 if each is None else each.survives for each in protections), default=0
                ),
                protections=_distinct(protections),
            )
        )
    return found


def _node_of_each_file(place: SnapshotDirectory, save_id: str) -> dict[str, str]:
    save = read_snapshot(place).saves.get(save_id)
    return {} if save is None or save.pending is None else dict(save.pending.files)


def _protection_of_each_file(place: SnapshotDirectory, save_id: str) -> dict[str, PartProtection]:
    """Return the protection of each data file by name; empty until the snapshot is protected."""
    done = read_outcome(place, "protect", save_id)
    request = read_record(place.path / records.request_record("protect", save_id), ProtectRequest)
    if done is None or done.failure or request is None:
        return {}
    found: dict[str, PartProtection] = {}
    for group in request.protection.groups:
        for index, member in enumerate(group.members):
            protection = _protection_of_member(group, index)
            if protection is not None:
                found |= {name: protection for name, _ in member.files}
    return found


def _protection_of_member(group: ProtectionGroup, index: int) -> PartProtection | None:
    nodes = [member.node for member in group.members]
    if group.parity:
        return PartProtection(kind="parity", survives=group.parity, nodes=nodes)
    if group.copies:
        holders = (nodes[index:] + nodes[:index])[: group.copies + 1]
        return PartProtection(kind="copies", survives=group.copies, nodes=holders)
    return None


def _distinct(protections: Iterable[PartProtection | None]) -> list[PartProtection]:
    """Return the distinct protections, in the order in which they first occur."""
    by_nodes = {(each.kind, *each.nodes): each for each in protections if each is not None}
    return list(by_nodes.values())
