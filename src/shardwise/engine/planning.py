"""Plan a save: all ranks agree on the save, and each rank computes which pieces it writes.

A save begins with these steps, which `engine/save.py` and snapshots in memory share:

1. `describe_save`: describe the state of this rank.
2. Each rank sends an `Offer` to all ranks.
3. `DescribedSave.plan`: if a structure is new, the first rank that has it sends it to all ranks.
   Then every rank computes the plan. If all ranks have the plan in their caches, they send only
   plain values, if these differ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone

import msgspec
import numpy as np

from shardwise.decoding import prepare_decoding
from shardwise.engine.buffers import Arena
from shardwise.engine.commit import exists_error
from shardwise.engine.group import Group
from shardwise.engine.options import SaveOptions
from shardwise.engine.replica_watch import ReplicaSample, ReplicaWatch
from shardwise.engine.rounds import Round, require_equal
from shardwise.engine.tensors import describe_tensors
from shardwise.engine.write_file import FileSource
from shardwise.errors import MismatchError, StoreError
from shardwise.events import Recorder
from shardwise.manifest.data_file import lay_out_file
from shardwise.manifest.manifest import FileEntry, Manifest, ObjectEntry, encode_manifest
from shardwise.manifest.names import MANIFEST, data_file, new_save_id
from shardwise.plan.save import PlanCache, SavePlan, plan_save
from shardwise.plan.structure import Coordinates, Description, Structure, World
from shardwise.state.leaves import Fragment, LocalState
from shardwise.state.plain_values import JsonValue, find_differences
from shardwise.store import Store, free_bytes

MOST_PARTS_SHOWN = 5
LONGEST_SHOWN = 40
"""The most characters of a value to show in an error message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """One rank's request to save.

    Attributes:
        state: the tensors and values of this rank.
        store: the place of the checkpoint in storage.
        arena: the buffers to write through.
        options: the options of the save.
        place: the destination, for error messages. Default: the store.
        space_of: the storage to check for free space; None to skip the check.
    """

    state: LocalState
    store: Store
    arena: Arena
    options: SaveOptions
    place: str = ""
    space_of: Store | None = None

    @property
    def settings(self) -> str:
        """The settings that must be equal on all ranks, formatted for error messages."""
        options = self.options
        text = f"step {options.step} to {self.place or self.store}"
        text += " with overwrite=True" if options.overwrite else ""
        return text + (" with check_replicas=True" if options.check_replicas else "")

    def refuse_existing(self, steps: Collection[int] | None = None) -> None:
        """Refuse a save to a place that has a checkpoint, unless `overwrite` is set.

        Args:
            steps: look only for checkpoints of these steps; None for all.

        Raises:
            CheckpointExistsError: the place has a checkpoint.
        """
        if self.options.overwrite or (steps is not None and self.options.step not in steps):
            return
        if MANIFEST in self.store.list():
            raise exists_error(self.store)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSave:
    """One rank's part of a save, after all ranks agreed on its plan.

    Attributes:
        request: this rank's request.
        save_id: the id of the save, which is part of the names of its files.
        plan: the plan, with the description of this rank.
        cached: whether the plan of an earlier save was reused.
        fragments: the fragments in the description, with their memory.
        objects: the plain values that all ranks share.
        holding_key: a key, which is equal for ranks that hold the same boxes of the same tensors.
        sample: the boxes that this rank compares with other ranks; None if there are none.
    """

    request: SaveRequest
    save_id: str
    plan: SavePlan
    cached: bool
    fragments: tuple[Fragment, ...]
    objects: tuple[ObjectEntry, ...]
    holding_key: bytes = b""
    sample: ReplicaSample | None = None

    @property
    def file_names(self) -> dict[int, str]:
        """The name of the file of each rank that writes one."""
        return {rank: data_file(rank, self.save_id) for rank in self.plan.writers.tolist()}

    def source(self) -> FileSource | None:
        """Return the source of this rank's file; None if the rank writes no file."""
        plan, per_rank = self.plan, self.request.state.per_rank
        if not (len(plan.pieces) or per_rank):
            return None
        objects = msgspec.json.encode(per_rank) if per_rank else b""
        file = lay_out_file(self.save_id, plan.rank, plan.header_entries, len(objects))
        return FileSource.of(plan.pieces, self.fragments, file, objects)

    def source_of_peer(self, rank: int) -> FileSource:
        """Return the source of the data section of a rank that holds the same boxes as this one.

        The bytes are read from this rank's replicas.
        """
        return FileSource.of(self.plan.pieces_of(rank), self.fragments)

    def manifest(self, files: Sequence[FileEntry]) -> bytes:
        """Return the encoded manifest with these files. Only rank 0 calls this."""
        plan = self.plan
        values = self.objects, plan.world.per_rank
        tensors = plan.encoded_tensors
        options = self.request.options
        made = make_manifest(self.save_id, options, plan.world.size, files, values, tensors)
        return encode_manifest(made)

    def with_sample(self, watch: ReplicaWatch) -> PlannedSave:
        """Choose the replicas to compare. Call this after all checks that can refuse the save."""
        step = self.request.options.step or 0
        return replace(self, sample=watch.begin(self.save_id, step, self.plan, self.fragments))


def make_manifest(
    save_id: str,
    options: SaveOptions,
    world_size: int,
    files: Sequence[FileEntry],
    values: tuple[tuple[ObjectEntry, ...], tuple[str, ...]],
    tensors: msgspec.Raw,
) -> Manifest:
    """Return the manifest of a save.

    Args:
        save_id, options: the save.
        world_size: the number of ranks.
        files: the data files.
        values: the plain values that all ranks share, and the names of the per-rank values.
        tensors: the list of tensors, encoded; see `manifest/pieces.py`.
    """
    metrics = options.metrics.items()
    return Manifest(
        save_id=save_id,
        step=options.step,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        world_size=world_size,
        metrics={name: value if math.isfinite(value) else None for name, value in metrics},
        per_rank=values[1],
        files=tuple(files),
        objects=values[0],
        tensors=tensors,
    )


SharedValues = tuple[dict[str, JsonValue], dict[str, list[tuple[tuple[str, ...], JsonValue]]]]
"""The plain values of one rank by name; and for each name of grouped values, pairs of the names of
parameters and their common value."""


def merge_values(encoded: Sequence[bytes]) -> tuple[ObjectEntry, ...]:
    """Merge the shared values of all ranks.

    Args:
        encoded: the encoded values of each rank; empty for a rank with the same values as an
            earlier one.

    Raises:
        MismatchError: ranks have different values with the same name. The error lists all names.
    """
    objects: dict[str, JsonValue] = {}
    rank_of: dict[str, int] = {}
    found_on: dict[str, dict[str, tuple[JsonValue, int]]] = {}  # the value of a member, and a rank
    problems: list[str] = []
    for rank, data in enumerate(encoded):
        if not data:
            continue
        own_objects, own_groups = msgspec.json.decode(data, type=SharedValues)
        for name, value in own_objects.items():
            if name not in objects:
                objects[name], rank_of[name] = value, rank
            elif objects[name] != value:
                problems += _describe_differences(objects[name], value, name, rank_of[name], rank)
        for name, groups in own_groups.items():
            known = found_on.setdefault(name, {})
            for members, value in groups:
                first = [known.setdefault(each, (value, rank)) for each in members]
                different = [i for i, (other, _) in enumerate(first) if other != value]
                if different:
                    other, other_rank = first[different[0]]
                    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
                    group = f"{name} of {members[different[0]]}{more}"
                    problems += _describe_differences(other, value, group, other_rank, rank)
    if problems:
        raise MismatchError(
            "plain values differ between ranks; set equal hyperparameters on all ranks, and wrap "
            "other values that are meant to differ in sw.PerRank(value):",
            problems,
        )
    for name, known in found_on.items():
        objects[name] = _group_by_value({member: value for member, (value, _) in known.items()})
    return tuple(ObjectEntry(name, value) for name, value in objects.items())


def _describe_differences(
    a: JsonValue, b: JsonValue, name: str, first_rank: int, rank: int
) -> list[str]:
    """Return a line for each of the first few parts in which the values of two ranks differ."""
    lines = [
        f"{part}: {_shown(x)} on rank {first_rank}, {_shown(y)} on rank {rank}"
        for part, x, y in find_differences(a, b, name)
    ]
    if len(lines) > MOST_PARTS_SHOWN:
        lines[MOST_PARTS_SHOWN:] = [f"{name}: and {len(lines) - MOST_PARTS_SHOWN} more parts"]
    return lines


def _shown(encoded: JsonValue) -> str:
    text = "absent" if encoded is msgspec.UNSET else msgspec.json.encode(encoded).decode()
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


def _group_by_value(value_of_member: dict[str, JsonValue]) -> JsonValue:
    """Return the members, grouped by equal values."""
    groups: dict[bytes, tuple[list[JsonValue], JsonValue]] = {}
    for member, value in value_of_member.items():
        key = msgspec.json.encode(value)
        groups.setdefault(key, ([], value))[0].append(member)
    return [{"members": members, "value": value} for members, value in groups.values()]


@prepare_decoding
class Offer(msgspec.Struct, array_like=True):
    """What each rank tells the other ranks before a save.

    Attributes:
        settings: those that must be equal on all ranks, formatted for error messages.
        fingerprint: the fingerprint of the rank's structure.
        coordinates: the rank's coordinates in it.
        cached_plans: the fingerprints of the plans in the rank's cache.
        values_digest: the digest of the rank's plain values.
        sample: the rank's digests of the replicas that it compared at the last save.
        save_id: the id of the save, from rank 0.
    """

    settings: str
    fingerprint: bytes
    coordinates: Coordinates
    cached_plans: list[bytes]
    values_digest: bytes
    sample: bytes
    save_id: str


@dataclass(frozen=True, slots=True)
class DescribedSave:
    """A request of this rank, and the description of its tensors.

    Attributes:
        request: the request.
        description: the fragments of this rank, without bytes.
        fragments: the same fragments, with their memory.
        structure: the encoded structure of the description.
    """

    request: SaveRequest
    description: Description
    fragments: tuple[Fragment, ...]
    structure: bytes

    @property
    def values(self) -> SharedValues:
        """The plain values of this rank that all ranks share."""
        return self.request.state.objects, self.request.state.grouped

    def offer(
        self, plan_cache: PlanCache, group: Group, watch: ReplicaWatch | None = None
    ) -> Offer:
        """Return this rank's message about the save to the other ranks.

        Args:
            plan_cache: plans of earlier saves.
            group: the ranks.
            watch: has compared replicas at the last save.
        """
        return Offer(
            self.request.settings,
            _digest(self.structure),
            self.description.coordinates,
            plan_cache.fingerprints(group.rank),
            _digest(msgspec.json.encode(self.values, order="sorted")),
            b"" if watch is None else watch.encode_message(),
            new_save_id() if group.rank == 0 else "",
        )

    def plan(
        self, offers: Sequence[Offer], group: Group, plan_cache: PlanCache, recorder: Recorder
    ) -> PlannedSave:
        """Send the structures and plain values that other ranks lack. Then plan the save.

        All ranks call this together. Each computes the same plan.

        Args:
            offers: the offers of all ranks.
            group: the ranks.
            plan_cache: plans of earlier saves, which this save reads and updates.
            recorder: gets an event for each stage.

        Raises:
            MismatchError: ranks do not save the same checkpoint; or plain values, or dtypes or
                shapes of tensors, differ between ranks.
            LayoutError: as for `plan.save.plan_save`.
        """
        settings = [each.settings for each in offers]
        require_equal(
            settings,
            "ranks do not save the same checkpoint in the same way; pass the same path, step and "
            "options on all ranks:",
        )
        key = _digest(msgspec.msgpack.encode([(e.fingerprint, e.coordinates) for e in offers]))
        is_cached = all(key in each.cached_plans for each in offers)
        with recorder.stage("plan"):
            plan = plan_cache.get(key, group.rank) if is_cached else None
            plan_cache.count(is_hit=plan is not None)
            structures, objects = _share(self, offers, group, with_structures=plan is None)
            if plan is None:
                with Round(group, "planning a save"):
                    world = _unite(structures, offers, self)
                    plan = plan_save(world, group.rank, self.description)
                plan_cache.put(key, group.rank, plan)
        own = offers[group.rank]
        return PlannedSave(
            request=self.request,
            save_id=offers[0].save_id,
            plan=plan,
            cached=is_cached,
            fragments=self.fragments,
            objects=objects,
            holding_key=msgspec.msgpack.encode((own.fingerprint, own.coordinates)),
        )


def describe_save(request: SaveRequest) -> DescribedSave:
    """Describe the tensors of a request.

    Raises:
        StateError: as for `describe_tensors`.
    """
    state = request.state
    description, fragments = describe_tensors(state.tensors, tuple(state.per_rank))
    structure = msgspec.msgpack.encode(description.structure)
    return DescribedSave(request, description, fragments, structure)


def _share(
    described: DescribedSave, offers: Sequence[Offer], group: Group, *, with_structures: bool
) -> tuple[list[bytes], tuple[ObjectEntry, ...]]:
    """Send each structure, and each set of plain values, from the first rank that has it.

    Args:
        with_structures: whether to send structures. Plain values are sent only if they differ.

    Returns:
        The structures, encoded; and the plain values that all ranks share.
    """
    describers = _first_of_each([each.fingerprint for each in offers]) if with_structures else []
    senders = _first_of_each([each.values_digest for each in offers])
    own = msgspec.json.encode(described.values)
    if not with_structures and len(senders) == 1:
        return [], merge_values([own])
    with Round(group, "describing a save") as all_ranks:
        structure = described.structure if group.rank in describers else b""
        values = own if group.rank in senders and len(senders) > 1 else b""
        sent = all_ranks.all_gather((structure, values), tuple[bytes, bytes])
    objects = merge_values([values for _, values in sent] if len(senders) > 1 else [own])
    return [structure for structure, _ in sent if structure], objects


def _unite(structures: Sequence[bytes], offers: Sequence[Offer], own: DescribedSave) -> World:
    """Return the structures of all ranks.

    Args:
        structures: the distinct structures, encoded.
        offers: the offers of all ranks.
        own: the description of this rank, whose structure need not be decoded.
    """
    decoded: list[Structure] = []
    index_of: dict[bytes, int] = {}
    for data in structures:
        index_of[_digest(data)] = len(decoded)
        is_own = data == own.structure
        decoded.append(
            own.description.structure if is_own else msgspec.msgpack.decode(data, type=Structure)
        )
    structure_of = np.array([index_of[each.fingerprint] for each in offers], np.int64)
    return World(tuple(decoded), structure_of, tuple(each.coordinates for each in offers))


def refuse_if_full(store: Store | None, nbytes: int) -> None:
    """Refuse a save that does not fit into the free space of its storage.

    Args:
        store: the storage; None to skip the check.
        nbytes: the size of the tensors.

    Raises:
        StoreError: fewer than `nbytes` bytes are free.
    """
    free = None if store is None else free_bytes(store)
    if free is not None and free < nbytes:
        raise StoreError(
            f"{store}: no room for this save: its tensors need {nbytes:,} bytes, but only {free:,} "
            "are free; free some space or keep fewer checkpoints"
        )


def _first_of_each(values: Sequence[bytes]) -> list[int]:
    """Return the first rank of each distinct value."""
    first = {value: rank for rank, value in reversed(list(enumerate(values)))}
    return sorted(first.values())


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
