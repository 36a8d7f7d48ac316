"""Plan a save: all ranks agree on the save, and each rank computes which pieces it writes.

`plan_together` has three steps, which `engine/save.py` and snapshots in memory share:

1. `_describe`: describe the state of this rank.
2. Each rank sends an offer to rank 0, which compares the offers (`_agree`), begins the save, and
   replies with an agreement.
3. `_complete_plan`: ranks with a new structure send it to rank 0, which sends all structures to all
   ranks. Then every rank computes the plan. If all ranks have the plan in their caches, nothing is
   sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import msgspec
import numpy as np

from shardwise.decoding import prepare_decoding
from shardwise.engine.buffers import Arena
from shardwise.engine.exchange import exchange, exchange_with_local_value, require_equal, run_on_all
from shardwise.engine.group import Group
from shardwise.engine.options import SaveOptions
from shardwise.engine.replica_watch import ReplicaSample, ReplicaWatch
from shardwise.engine.shared_values import SharedValues, merge_values
from shardwise.engine.tensors import describe_tensors
from shardwise.engine.write_file import FileSource
from shardwise.errors import StoreError
from shardwise.events import Recorder
from shardwise.manifest.data_file import lay_out_file
from shardwise.manifest.dtypes import DTYPES
from shardwise.manifest.manifest import VERSION, FileEntry, Manifest, ObjectEntry, encode_manifest
from shardwise.manifest.names import data_file
from shardwise.plan.cache import PlanCache
from shardwise.plan.save import ManifestPlan, RankPlan
from shardwise.plan.structure import Coordinates, Description, Structure, World
from shardwise.state.leaves import Fragment, LocalState
from shardwise.store import Store, free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """One rank's request to save.

    Attributes:
        state: the tensors and values of this rank.
        store: the place of the checkpoint in storage.
        arena: the buffers to write through.
        options: the options of the save.
        place: the destination, for error messages. Default: the store.
        written_to: the storage that needs room for the save now; None if there is none.
        note: what this rank tells rank 0 besides.
    """

    state: LocalState
    store: Store
    arena: Arena
    options: SaveOptions
    place: str = ""
    written_to: Store | None = None
    note: bytes = b""

    @property
    def terms(self) -> str:
        """The settings that must be equal on all ranks, formatted for error messages."""
        options = self.options
        terms = f"step {options.step} to {self.place or self.store}"
        terms += " with overwrite=True" if options.overwrite else ""
        return terms + (" with check_replicas=True" if options.check_replicas else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSave:
    """One rank's part of a save, after all ranks agreed on its plan.

    Attributes:
        save: this rank's request.
        save_id: the id of the save, which is part of the names of its files.
        rank: this rank.
        world_size: the number of ranks.
        plan: the pieces that this rank writes.
        cached: whether the plan of an earlier save was reused.
        description: the fragments of this rank, without bytes.
        fragments: the same fragments, with their memory.
        objects: on rank 0, the plain values that all ranks share; empty on other ranks.
        held: bytes that are equal for ranks that hold the same boxes of the same tensors.
        sample: the boxes that this rank compares with other ranks; None if there are none.
    """

    save: SaveRequest
    save_id: str
    rank: int
    world_size: int
    plan: RankPlan
    cached: bool
    description: Description
    fragments: tuple[Fragment, ...]
    objects: tuple[ObjectEntry, ...]
    held: bytes = b""
    sample: ReplicaSample | None = None

    @property
    def key(self) -> str:
        """The name of this rank's data file."""
        return data_file(self.rank, self.save_id)

    def source(self) -> FileSource | None:
        """Return the source of this rank's file; None if the rank writes no file."""
        per_rank = self.save.state.per_rank
        if not (len(self.plan.pieces) or per_rank):
            return None
        objects = msgspec.json.encode(per_rank) if per_rank else b""
        metadata = {"shardwise": str(VERSION), "save_id": self.save_id, "rank": str(self.rank)}
        layout = lay_out_file(self.plan.header, len(objects), metadata)
        return FileSource.of(self.plan.pieces, self.fragments, layout, objects)

    def source_of_peer(self, rank: int) -> FileSource:
        """Return the source of the data section of a rank that holds the same boxes as this one.

        The bytes are read from this rank's replicas.
        """
        return FileSource.of(self.plan.plan.pieces_of(rank, self.description), self.fragments)

    def entry(self, source: FileSource, checksums_crc32: int = 0) -> FileEntry:
        """Return the entry of this rank's file in the manifest.

        Args:
            source: the source of the file.
            checksums_crc32: the CRC-32 of the file's checksums, if they are known.
        """
        layout = source.layout
        return FileEntry(
            self.key,
            self.rank,
            layout.size,
            layout.data_at,
            layout.objects_at,
            layout.checksums_at,
            checksums_crc32,
        )

    @property
    def manifest_plan(self) -> ManifestPlan:
        """The planned part of the manifest, which only rank 0 has."""
        if self.plan.manifest is None or self.rank != 0:
            raise RuntimeError(f"rank {self.rank} has no manifest: only rank 0 plans a save")
        return self.plan.manifest

    def manifest(self, files: Sequence[FileEntry]) -> bytes:
        """Return the encoded manifest with these files. Only rank 0 can call this."""
        planned, options = self.manifest_plan, self.save.options
        metrics = options.metrics.items()
        manifest = Manifest(
            save_id=self.save_id,
            step=options.step,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            world_size=self.world_size,
            metrics={name: value if math.isfinite(value) else None for name, value in metrics},
            per_rank=planned.per_rank,
            files=tuple(files),
            objects=self.objects,
            tensors=(),
        )
        return encode_manifest(manifest, planned.tensors)


@dataclass(frozen=True, slots=True)
class _DescribedSave:
    """A request of this rank, and the description of its tensors.

    Attributes:
        request: the request.
        description: the fragments of this rank, without bytes.
        fragments: the same fragments, with their memory.
        encoded: the encoded structure.
        fingerprint: a digest of the structure.
        values: the plain values that all ranks share.
    """

    request: SaveRequest
    description: Description
    fragments: tuple[Fragment, ...]
    encoded: bytes
    fingerprint: bytes
    values: SharedValues


@prepare_decoding
class _Offer(msgspec.Struct, array_like=True):
    """A rank's message to rank 0.

    Attributes:
        terms: the settings that must be equal on all ranks.
        fingerprint: the fingerprint of the rank's structure.
        coordinates: the rank's coordinates in it.
        cached_plans: the fingerprints of the plans in the rank's cache.
        values_digest: the digest of the rank's plain values.
        digests: the rank's message about the replicas that it compared at the last save.
        note: that of its request.
    """

    terms: str
    fingerprint: bytes
    coordinates: Coordinates
    cached_plans: list[bytes]
    values_digest: bytes
    digests: bytes
    note: bytes


@prepare_decoding
class _Agreement(msgspec.Struct, array_like=True):
    """Rank 0's reply to all ranks.

    Attributes:
        plan: the fingerprint of the plan.
        is_cached: whether all ranks have the plan in their caches.
        describers: the ranks that send their structures: one of each structure.
        value_senders: the ranks that send their plain values; none if the values are equal.
        differing: the sets of replicas that differed at the last save; see `ReplicaWatch`.
        save_id: the id of the save; "" if the save is skipped.
    """

    plan: bytes
    is_cached: bool
    describers: list[int]
    value_senders: list[int]
    differing: dict[int, int]
    save_id: str = ""


@prepare_decoding
class _EncodedWorld(msgspec.Struct, array_like=True):
    """The structures of all ranks, as rank 0 sends them; see `plan.structure.World`."""

    structures: list[bytes]
    structure_of: list[int]
    coordinates: list[Coordinates]

    def decode(self) -> World:
        structures = [msgspec.msgpack.decode(each, type=Structure) for each in self.structures]
        return World(
            tuple(structures), np.array(self.structure_of, np.int64), tuple(self.coordinates)
        )


def plan_together(
    prepare: Callable[[], SaveRequest],
    begin: Callable[[SaveRequest, list[bytes]], str],
    group: Group,
    plan_cache: PlanCache,
    recorder: Recorder,
    watch: ReplicaWatch | None = None,
) -> PlannedSave | None:
    """Agree on a save, and plan it. All ranks call this function together.

    Args:
        prepare: makes this rank's request. A failure on one rank is raised on all ranks.
        begin: called on rank 0 with its request and the notes of all ranks, once all requests are
            known to be equal. It returns the id of the save; or "" to skip the save.
        group: the ranks.
        plan_cache: plans of earlier saves, which this save reads and updates.
        recorder: gets an event for each stage.
        watch: compares replicas at several saves, if it is not None.

    Returns:
        This rank's part of the save; None if the save is skipped.

    Raises:
        StateError: as for `describe_tensors`.
        MismatchError: ranks do not save the same checkpoint in the same way.
        LayoutError: as for `plan.save.plan_save`.
        StoreError: the storage has too little room.
    """

    def offer() -> tuple[_DescribedSave, bytes]:
        with recorder.stage("describe"):
            described = _describe(prepare())
        own = _Offer(
            described.request.terms,
            described.fingerprint,
            described.description.coordinates,
            plan_cache.fingerprints(group.rank),
            described.values.digest(),
            b"" if watch is None else watch.encode_message(),
            described.request.note,
        )
        return described, msgspec.msgpack.encode(own)

    def reply(own: _DescribedSave, encoded: list[bytes]) -> bytes:
        offers = [msgspec.msgpack.decode(each, type=_Offer) for each in encoded]
        agreement = _agree(offers, own.request, plan_cache, watch)
        agreement.save_id = begin(own.request, [each.note for each in offers])
        return msgspec.msgpack.encode(agreement)

    described, encoded = exchange_with_local_value(group, "agreeing on a save", offer, reply)
    agreement = msgspec.msgpack.decode(encoded, type=_Agreement)
    if watch is not None:
        watch.conclude(agreement.differing, group, recorder)
    if not agreement.save_id:
        return None
    return _complete_plan(described, agreement, group, plan_cache, recorder, watch)


def _describe(request: SaveRequest) -> _DescribedSave:
    state = request.state
    description, fragments = describe_tensors(state.tensors, tuple(state.per_rank))
    encoded = msgspec.msgpack.encode(description.structure)
    values = SharedValues.of(state)
    return _DescribedSave(request, description, fragments, encoded, _digest(encoded), values)


def _agree(
    offers: Sequence[_Offer],
    request: SaveRequest,
    plan_cache: PlanCache,
    watch: ReplicaWatch | None,
) -> _Agreement:
    """Compare the offers of all ranks on rank 0; the request and the rest are those of rank 0."""
    require_equal(
        [each.terms for each in offers], "ranks do not save the same checkpoint in the same way:"
    )
    described = [(each.fingerprint, each.coordinates) for each in offers]
    plan = _digest(msgspec.msgpack.encode(described))
    is_cached = all(plan in each.cached_plans for each in offers)
    cached = plan_cache.get(plan, 0) if is_cached else None
    if cached is not None and cached.manifest is not None:
        _refuse_if_full(request, cached.manifest.bytes_stored)
    value_senders = _first_of_each([each.values_digest for each in offers])
    return _Agreement(
        plan,
        is_cached,
        _first_of_each([each.fingerprint for each in offers]),
        value_senders if len(value_senders) > 1 else [],
        {} if watch is None else watch.find_differing([each.digests for each in offers]),
    )


def _complete_plan(
    described: _DescribedSave,
    agreement: _Agreement,
    group: Group,
    plan_cache: PlanCache,
    recorder: Recorder,
    watch: ReplicaWatch | None,
) -> PlannedSave:
    """Send structures and plain values as far as other ranks lack them, and plan the save."""
    with recorder.stage("plan"):
        plan = plan_cache.get(agreement.plan, group.rank) if agreement.is_cached else None
        plan_cache.count(is_hit=plan is not None)
        world, objects = _share(described, agreement, group)
        if plan is None:
            description = described.description
            plan = run_on_all(
                group, "planning a save", lambda: RankPlan.of(world, group.rank, description)
            )
            plan_cache.put(agreement.plan, group.rank, plan)
    sample = None
    if watch is not None:
        step = described.request.options.step or 0
        sample = watch.begin(
            agreement.save_id, step, plan, described.description, described.fragments
        )
    return PlannedSave(
        save=described.request,
        save_id=agreement.save_id,
        rank=group.rank,
        world_size=group.size,
        plan=plan,
        cached=agreement.is_cached,
        description=described.description,
        fragments=described.fragments,
        objects=objects,
        held=msgspec.msgpack.encode((described.fingerprint, described.description.coordinates)),
        sample=sample,
    )


def _share(
    described: _DescribedSave, agreement: _Agreement, group: Group
) -> tuple[World, tuple[ObjectEntry, ...]]:
    """Send what other ranks lack.

    Returns:
        The structures of all ranks, unless the plan is cached; and on rank 0, the plain values that
        all ranks share.
    """
    own = described.values.encode()
    if agreement.is_cached and not agreement.value_senders:
        return _EncodedWorld([], [], []).decode(), merge_values([own]) if group.rank == 0 else ()
    objects: tuple[ObjectEntry, ...] = ()

    def make_message() -> bytes:
        sends_structure = group.rank in agreement.describers and not agreement.is_cached
        message = _DescriptionMessage(
            described.fingerprint,
            described.description.coordinates,
            described.encoded if sends_structure else b"",
            own if group.rank in agreement.value_senders else b"",
        )
        return msgspec.msgpack.encode(message)

    def make_reply(encoded: list[bytes]) -> bytes:
        nonlocal objects
        messages = [msgspec.msgpack.decode(each, type=_DescriptionMessage) for each in encoded]
        values = [each.values for each in messages] if agreement.value_senders else [own]
        objects = merge_values(values)
        index = {each.fingerprint: i for i, each in enumerate(m for m in messages if m.structure)}
        world = _EncodedWorld([], [], [])
        if not agreement.is_cached:
            world = _EncodedWorld(
                [each.structure for each in messages if each.structure],
                [index[each.fingerprint] for each in messages],
                [each.coordinates for each in messages],
            )
            _refuse_if_full(described.request, _size_of_tensors(world.decode()))
        return msgspec.msgpack.encode(world)

    reply = exchange(group, "describing a save", make_message, make_reply)
    return msgspec.msgpack.decode(reply, type=_EncodedWorld).decode(), objects


@prepare_decoding
class _DescriptionMessage(msgspec.Struct, array_like=True):
    """A rank's structure and plain values, as far as rank 0 needs them; empty otherwise."""

    fingerprint: bytes
    coordinates: Coordinates
    structure: bytes
    values: bytes


def _size_of_tensors(world: World) -> int:
    """Return the bytes of all tensors, without replicas."""
    sizes = {
        name: math.prod(shape) * DTYPES[dtype].itemsize
        for each in world.structures
        for name, dtype, shape in zip(each.names, each.dtypes, each.shapes, strict=True)
    }
    return sum(sizes.values())


def _refuse_if_full(request: SaveRequest, nbytes: int) -> None:
    if request.written_to is not None:
        refuse_if_full(request.written_to, nbytes)


def refuse_if_full(store: Store, nbytes: int) -> None:
    """Refuse a save that does not fit into the free space of its storage.

    Raises:
        StoreError: fewer than `nbytes` bytes are free.
    """
    free = free_bytes(store)
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
