"""Plan a save: all ranks agree on the save, and each rank computes which pieces it writes.

`plan_together` has the steps, which saves to storage and snapshots in memory share:

1. Each rank describes its state, and sends an `Offer` to all ranks.
2. If a structure is new, the first rank that has it sends it to all ranks. Plain values are sent
   likewise, if they differ.
3. Every rank computes the plan, unless all ranks have it in their caches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import msgspec
import numpy as np

from shardwise.boxes.box import IntArray
from shardwise.decoding import prepare_decoding
from shardwise.engine.buffers import Arena
from shardwise.engine.check_numbers import check_step
from shardwise.engine.commit import exists_error
from shardwise.engine.group import Group
from shardwise.engine.replica_watch import ReplicaSample, ReplicaWatch
from shardwise.engine.rounds import Round, combine_values, refuse_unequal, values_of
from shardwise.engine.tensors import describe_tensors
from shardwise.engine.write_file import FileSource
from shardwise.errors import MismatchError, StateError, StoreError
from shardwise.events import Recorder
from shardwise.manifest.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    ObjectEntry,
    check_name,
    data_file,
    encode_manifest,
    lay_out_file,
    new_save_id,
)
from shardwise.plan.save import PlanCache, SavePlan, plan_save
from shardwise.plan.structure import Coordinates, Structure
from shardwise.state.local_state import Fragment, LocalState
from shardwise.state.plain_values import JsonValue, find_differences
from shardwise.store import Store, free_bytes

DIFFERENT_VALUES = (
    "plain values differ between ranks; set equal hyperparameters on all ranks, and wrap other "
    "values that are meant to differ in sw.PerRank(value):"
)
MOST_PARTS_SHOWN = 5
LONGEST_SHOWN = 40
"""The most characters of a value to show in an error message."""


@dataclass(slots=True, kw_only=True)
class SaveRequest:
    """One rank's request to save.

    Attributes:
        state: the tensors and values of this rank.
        store: the place of the checkpoint in storage.
        arena: the buffers to write through.
        step, overwrite, check_replicas, metrics: as for `shardwise.save`.
        place: the destination, for error messages. Default: the store.
        note: what this rank tells the others; see `PlannedSave.notes`.

    Raises:
        StateError: the step is not an integer from 0, or a metric is not a number.
    """

    state: LocalState
    store: Store
    arena: Arena
    step: int | None = None
    overwrite: bool = False
    check_replicas: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    place: str = ""
    note: bytes = b""

    def __post_init__(self) -> None:
        self.step = None if self.step is None else check_step(self.step)
        metrics = {}
        try:
            for name, value in self.metrics.items():
                metrics[check_name(name)] = float(value)
        except StateError as error:
            raise StateError(f"metrics={self.metrics!r}: {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise StateError(
                f"metrics={self.metrics!r}: expected a dict of numbers, for example "
                f"{{'loss': 2.5}}: {error}"
            ) from error
        self.metrics = metrics

    def check_place(self, nbytes: int, steps: Collection[int] | None = None) -> None:
        """Refuse a save to a place that has a checkpoint, unless `overwrite` is set, or no room.

        Args:
            nbytes: the size of the tensors.
            steps: look only for checkpoints of these steps; None for all.

        Raises:
            CheckpointExistsError: the place has a checkpoint.
            StoreError: fewer than `nbytes` bytes are free.
        """
        store = self.store
        may_exist = not self.overwrite and (steps is None or self.step in steps)
        if may_exist and MANIFEST in store.list():
            raise exists_error(store)
        free = free_bytes(store)
        if free is not None and free < nbytes:
            raise StoreError(
                f"{store}: no room for this save: its tensors need {nbytes:,} bytes, but only "
                f"{free:,} are free; free some space or keep fewer checkpoints"
            )

    def manifest(
        self,
        save_id: str,
        world_size: int,
        files: Sequence[FileEntry],
        values: tuple[tuple[ObjectEntry, ...], tuple[str, ...]],
        tensors: msgspec.Raw,
    ) -> Manifest:
        """Return the manifest of the save.

        Args:
            save_id: the id of the save.
            world_size: the number of ranks.
            files: the data files.
            values: the plain values that all ranks share, and the names of the per-rank values.
            tensors: the list of tensors, encoded; see `manifest/pieces.py`.
        """
        return Manifest(
            save_id=save_id,
            step=self.step,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            world_size=world_size,
            metrics=dict(self.metrics),  # msgspec encodes numbers that are not finite as null
            per_rank=values[1],
            files=tuple(files),
            objects=values[0],
            tensors=tensors,
        )


@dataclass(slots=True)
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
        notes: the note in the request of each rank.
        sample: the boxes that this rank compares with other ranks; None if there are none.
    """

    request: SaveRequest
    save_id: str
    plan: SavePlan
    cached: bool
    fragments: tuple[Fragment, ...]
    objects: tuple[ObjectEntry, ...]
    holding_key: bytes = b""
    notes: Sequence[bytes] = ()
    sample: ReplicaSample | None = None

    @property
    def file_names(self) -> dict[int, str]:
        """The name of the file of each rank that writes one."""
        return {rank: data_file(rank, self.save_id) for rank in self.plan.writers.tolist()}

    def source(self) -> FileSource | None:
        """Return the source of this rank's file; None if the rank writes no file."""
        plan, per_rank = self.plan, self.request.state.per_rank
        if not (plan.pieces.fragment or per_rank):
            return None
        objects = msgspec.json.encode(per_rank) if per_rank else b""
        file = lay_out_file(self.save_id, plan.rank, plan.header_entries, len(objects))
        return FileSource(plan.pieces, self.fragments, file, objects)

    def source_of_peer(self, rank: int) -> FileSource:
        """Return the source of the data section of a rank that holds the same boxes as this one.

        The bytes are read from this rank's replicas.
        """
        return FileSource(self.plan.pieces_of(rank), self.fragments)

    def manifest(self, files: Sequence[FileEntry]) -> bytes:
        """Return the encoded manifest with these files. Only rank 0 calls this."""
        plan, values = self.plan, (self.objects, self.plan.per_rank)
        ranks, tensors = len(plan.limits) - 1, plan.encoded_tensors
        return encode_manifest(self.request.manifest(self.save_id, ranks, files, values, tensors))

    def choose_sample(self, watch: ReplicaWatch) -> None:
        """Choose the replicas to compare. Call this after all checks that can refuse the save."""
        step = self.request.step or 0
        self.sample = watch.begin(self.save_id, step, self.plan, self.fragments)


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
        note: the note in the rank's request.
    """

    settings: str
    fingerprint: bytes
    coordinates: Coordinates
    cached_plans: list[bytes]
    values_digest: bytes
    sample: bytes
    save_id: str
    note: bytes


SharedValues = tuple[dict[str, JsonValue], dict[str, list[tuple[tuple[str, ...], JsonValue]]]]
"""Two dicts of one rank: the plain values, by name; and the grouped values, by name. A grouped
value is a list of pairs: the names of some parameters, and the value that these parameters have in
common."""


def plan_together(
    prepare: Callable[[], SaveRequest],
    group: Group,
    plan_cache: PlanCache,
    recorder: Recorder,
    watch: ReplicaWatch | None = None,
) -> PlannedSave:
    """Describe a save, agree on it, and plan it. All ranks call this function together.

    Args:
        prepare: makes this rank's request. A failure on one rank is raised on all ranks.
        group: the ranks.
        plan_cache: plans of earlier saves, which this save reads and updates.
        recorder: gets an event for each stage.
        watch: the comparison of replicas; this call ends the comparison of the last save. None if
            replicas are not compared.

    Raises:
        ShardwiseError: as for `shardwise.save`, on every rank.
    """
    with Round(group, "agreeing on a save") as all_ranks:
        with recorder.stage("describe"):
            request = prepare()
            state = request.state
            description, fragments = describe_tensors(state.tensors, tuple(state.per_rank))
            structure = msgspec.msgpack.encode(description.structure)
        own = _make_offer(request, description.coordinates, structure, plan_cache, group, watch)
        offers = all_ranks.all_gather(own, Offer)
    # Each field, as the values of all ranks.
    settings, fingerprints, coordinates, cached_plans, digests, samples, save_ids, notes = zip(
        *map(msgspec.structs.astuple, offers), strict=True
    )
    if watch is not None:
        watch.conclude(watch.combine_messages(samples), group, recorder)
    refuse_unequal(
        "ranks do not save the same checkpoint in the same way; pass the same path, step and "
        "options on all ranks:",
        combine_values([values_of(rank, {"": each}) for rank, each in enumerate(settings)]),
    )
    key = _digest(msgspec.msgpack.encode((fingerprints, coordinates)))
    is_cached = all(key in keys for keys in cached_plans)
    with recorder.stage("plan"):
        plan = plan_cache.get(key, group.rank) if is_cached else None
        values = msgspec.json.encode((state.objects, state.grouped))
        new_structure = structure if plan is None else None
        structures, values_of_ranks = _share(new_structure, values, fingerprints, digests, group)
        objects = merge_values(values_of_ranks, DIFFERENT_VALUES)
        if plan is None:
            with Round(group, "planning a save"):
                known = {structure: description.structure}
                distinct = _decode_structures(structures, fingerprints, known)
                plan = plan_save(distinct, coordinates, group.rank, description)
            plan_cache.put(key, group.rank, plan)
    held = msgspec.msgpack.encode((own.fingerprint, own.coordinates))
    return PlannedSave(request, save_ids[0], plan, is_cached, fragments, objects, held, notes)


def _make_offer(
    request: SaveRequest,
    coordinates: Coordinates,
    structure: bytes,
    plan_cache: PlanCache,
    group: Group,
    watch: ReplicaWatch | None,
) -> Offer:
    settings = f"step {request.step} to {request.place or request.store}"
    settings += " with overwrite=True" if request.overwrite else ""
    settings += " with check_replicas=True" if request.check_replicas else ""
    values = request.state.objects, request.state.grouped
    return Offer(
        settings=settings,
        fingerprint=_digest(structure),
        coordinates=coordinates,
        cached_plans=plan_cache.fingerprints(group.rank),
        values_digest=_digest(msgspec.json.encode(values, order="sorted")),
        sample=b"" if watch is None else watch.encode_message(group.rank),
        save_id=new_save_id() if group.rank == 0 else "",
        note=request.note,
    )


def _share(
    structure: bytes | None,
    values: bytes,
    fingerprints: Sequence[bytes],
    digests: Sequence[bytes],
    group: Group,
) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """Send each structure, and each set of plain values, from the first rank that has it.

    Args:
        structure: the encoded structure of this rank; None if all ranks have the plan.
        values: the encoded plain values of this rank, which are sent only if they differ.
        fingerprints: the fingerprints of the structures of all ranks.
        digests: the digests of the plain values of all ranks.

    Returns:
        The structures and the plain values of all ranks. They are empty for a rank that has the
        same structure (or the same values) as an earlier rank.
    """
    rank, values_differ = group.rank, len(set(digests)) > 1
    if structure is None and not values_differ:
        return [], [values]
    with Round(group, "describing a save") as all_ranks:
        if structure is None or fingerprints.index(fingerprints[rank]) < rank:
            structure = b""
        sends_values = values_differ and digests.index(digests[rank]) == rank
        message = structure, values if sends_values else b""
        structures, values_of_ranks = zip(
            *all_ranks.all_gather(message, tuple[bytes, bytes]), strict=True
        )
    return structures, values_of_ranks if values_differ else [values]


def _decode_structures(
    structures: Sequence[bytes],
    fingerprints: Sequence[bytes],
    known: Mapping[bytes, Structure],
) -> list[tuple[Structure, IntArray]]:
    """Return the distinct structures, and the ranks that have each of them.

    Args:
        structures, fingerprints: of each rank; see `_share`.
        known: the structure of this rank, by its encoded bytes, so that it is not decoded again.
    """
    ranks_of: dict[bytes, list[int]] = {}
    for rank, fingerprint in enumerate(fingerprints):
        ranks_of.setdefault(fingerprint, []).append(rank)
    distinct = []
    for ranks in ranks_of.values():  # the first rank has sent the structure
        data = structures[ranks[0]]
        structure = known.get(data) or msgspec.msgpack.decode(data, type=Structure)
        distinct.append((structure, np.array(ranks, np.int64)))
    return distinct


def merge_values(encoded: Sequence[bytes], summary: str) -> tuple[ObjectEntry, ...]:
    """Merge the shared values of all ranks.

    Args:
        encoded: the encoded values of each rank; empty for a rank with the same values as an
            earlier one.
        summary: the first line of the error.

    Raises:
        MismatchError: ranks have different values with the same name. The error lists all names.
    """
    # A value and the first rank that has the value: in `objects` by name, and in `grouped` by name
    # and member of a group.
    objects: dict[str, tuple[JsonValue, int]] = {}
    grouped: dict[str, dict[str, tuple[JsonValue, int]]] = {}
    problems: list[str] = []
    for rank, data in enumerate(encoded):
        if not data:
            continue
        own_objects, own_groups = msgspec.json.decode(data, type=SharedValues)
        for name, value in own_objects.items():
            first, first_rank = objects.setdefault(name, (value, rank))
            if first != value:
                problems += _describe_differences(first, value, name, first_rank, rank)
        for name, groups in own_groups.items():
            first_of = grouped.setdefault(name, {})
            for members, value in groups:
                own = value, rank
                wrong = [each for each in members if first_of.setdefault(each, own)[0] != value]
                if wrong:
                    first, first_rank = first_of[wrong[0]]
                    more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                    group = f"{name} of {wrong[0]}{more}"
                    problems += _describe_differences(first, value, group, first_rank, rank)
    if problems:
        raise MismatchError(summary, problems)
    entries = [ObjectEntry(name, value) for name, (value, _) in objects.items()]
    for name, first_of in grouped.items():
        merged: dict[bytes, dict[str, Any]] = {}  # members with equal values are one group
        for member, (value, _) in first_of.items():
            key = msgspec.json.encode(value)
            merged.setdefault(key, {"members": [], "value": value})["members"].append(member)
        entries.append(ObjectEntry(name, [*merged.values()]))
    return tuple(entries)


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


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
