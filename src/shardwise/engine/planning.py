"""Planning of a save: all ranks agree on it, and each rank learns which pieces it writes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial

import msgspec

from shardwise.engine.buffers import Arena
from shardwise.engine.exchange import collect, exchange, exchange_keeping, require_equal
from shardwise.engine.files import FileSource
from shardwise.engine.group import Group
from shardwise.engine.options import SaveOptions
from shardwise.engine.shared_values import SharedValues, unite_values
from shardwise.engine.tensors import describe
from shardwise.events import Recorder
from shardwise.manifest.datafile import lay_out, list_pieces
from shardwise.manifest.manifest import (
    VERSION,
    FileEntry,
    Manifest,
    ObjectEntry,
    encode_manifest,
)
from shardwise.manifest.names import data_file
from shardwise.plan.cache import PlanCache, RankPlan
from shardwise.plan.save import ManifestPlan, plan_save
from shardwise.plan.tables import Description, decode_description, decode_pieces
from shardwise.state.leaves import Fragment, LocalState
from shardwise.store import Store

FormRings = Callable[[Sequence[bytes]], list[list[int]]]
"""Takes the fingerprints of all ranks' descriptions. Returns for each rank the other ranks whose
pieces it must know to copy them from its own replicas; equal fingerprints mean equal replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One rank's request to save.

    Attributes:
        state: what the rank has.
        store: the place of the checkpoint in storage.
        arena: the buffers to write with.
        place: the destination, for error messages; default: the store.
        message: a message to rank 0, which decides whether to admit the save.
    """

    state: LocalState
    store: Store
    arena: Arena
    options: SaveOptions
    place: str = ""
    message: bytes = b""

    @property
    def terms(self) -> str:
        """What must be equal on all ranks, in words."""
        options = self.options
        terms = f"step {options.step} to {self.place or self.store}"
        terms += " with overwrite=True" if options.overwrite else ""
        return terms + (" with check_replicas=True" if options.check_replicas else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSave:
    """A save that all ranks have agreed on, on one rank.

    Attributes:
        plan: what this rank writes.
        cached: whether the plan of an earlier save was reused.
        description: the fragments of this rank, without bytes.
        fragments: the same fragments, with their memory.
        objects: on rank 0, the plain values that all ranks share.
    """

    save: Save
    save_id: str
    rank: int
    world_size: int
    plan: RankPlan
    cached: bool
    description: Description
    fragments: tuple[Fragment, ...]
    objects: tuple[ObjectEntry, ...]

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
        layout = lay_out(self.plan.header, len(objects), metadata)
        return FileSource.of(self.plan.pieces, self.fragments, layout, objects)

    def peer_sources(self) -> dict[int, FileSource]:
        """Return the data sections of other ranks' files, out of this rank's replicas, by rank."""
        return {
            rank: FileSource.of(pieces, self.fragments) for rank, pieces in self.plan.peers.items()
        }

    def entry(self, source: FileSource, checksums_crc32: int = 0) -> FileEntry:
        """Return the entry of this rank's file in the manifest."""
        at = source.layout
        return FileEntry(
            self.key,
            self.rank,
            at.size,
            at.data_at,
            at.objects_at,
            at.checksums_at,
            checksums_crc32,
        )

    @property
    def manifest_plan(self) -> ManifestPlan:
        """The planned part of the manifest, which only rank 0 has."""
        if self.plan.manifest is None or self.rank != 0:
            raise RuntimeError(f"rank {self.rank} did not plan this save, and has no manifest")
        return self.plan.manifest

    def manifest(self, files: Sequence[FileEntry]) -> bytes:
        """Return the manifest with these files, encoded; on rank 0."""
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


def plan_together(
    prepare: Callable[[], Save],
    admit: Callable[[Save, list[bytes]], str],
    group: Group,
    plans: PlanCache,
    recorder: Recorder,
    *,
    rings: FormRings | None = None,
    check_room: Callable[[Save, int], None] | None = None,
) -> PlannedSave | None:
    """Agree on a save and plan it; all ranks call this. Returns None if rank 0 does not admit it.

    Args:
        prepare: makes this rank's request; a failure on one rank is a failure on all.
        admit: on rank 0, takes its own request and the messages of all, and returns an id for the
            save, or "" to skip it.
        plans: plans of earlier saves.
        rings: on rank 0, chooses the peers of each rank; default: none.
        check_room: on rank 0, takes its own request and the tensor bytes of the save, and raises
            if the storage has no room for them.

    Raises:
        ShardwiseError: as `shardwise.save` says, on every rank.
    """

    def request() -> tuple[_Local, bytes]:
        with recorder.stage("describe"):
            local = _describe(prepare())
        with recorder.stage("plan"):
            return local, local.request(plans)

    def answer(local: _Local, said: list[bytes]) -> list[bytes]:
        requests = [msgspec.msgpack.decode(each, type=_Request) for each in said]
        agreements = _agree(requests, partial(admit, local.save), rings)
        known = plans.get(agreements[0].plan) if agreements[0].is_cached else None
        if known is not None and known.manifest is not None and check_room is not None:
            check_room(local.save, known.manifest.bytes_stored)
        return [msgspec.msgpack.encode(each) for each in agreements]

    local, reply = exchange_keeping(group, "agreeing on a save", request, answer)
    agreed = msgspec.msgpack.decode(reply, type=_Agreement)
    if not agreed.save_id:
        return None
    with recorder.stage("plan"):
        objects = _share_values(local.values, agreed, group)
        plan = _cached_plan(agreed, plans)
        if plan is None:
            plan = _plan_anew(local, agreed, group, check_room)
            plans.put(agreed.plan, plan)
    return PlannedSave(
        save=local.save,
        save_id=agreed.save_id,
        rank=group.rank,
        world_size=group.size,
        plan=plan,
        cached=agreed.is_cached,
        description=local.description,
        fragments=local.fragments,
        objects=objects,
    )


@dataclass(frozen=True, slots=True)
class _Local:
    """A request of this rank, described. The fingerprint identifies the description."""

    save: Save
    description: Description
    fragments: tuple[Fragment, ...]
    encoded: bytes
    fingerprint: bytes
    values: SharedValues

    def request(self, plans: PlanCache) -> bytes:
        """Return the message by which this rank asks rank 0 for the save."""
        values = self.values.digest()
        save = self.save
        request = _Request(save.terms, self.fingerprint, plans.keys(), values, save.message)
        return msgspec.msgpack.encode(request)


class _Request(msgspec.Struct, array_like=True):
    """A rank's request; `plans` are the fingerprints of the plans in its cache."""

    terms: str
    fingerprint: bytes
    plans: list[bytes]
    values: bytes
    message: bytes


class _Agreement(msgspec.Struct, array_like=True):
    """Rank 0's reply to a rank.

    Attributes:
        plan: the fingerprint of the plan.
        is_cached: whether all ranks have the plan, and none needs to be made.
        send_values: whether this rank sends its plain values to rank 0.
        gather_values: whether any rank does.
        peers: on rank 0, for each rank the other ranks whose pieces it must know.
    """

    save_id: str
    plan: bytes
    is_cached: bool
    send_values: bool
    gather_values: bool
    peers: list[list[int]] = []


class _Pieces(msgspec.Struct, array_like=True):
    """What rank 0 planned for a rank: its pieces, those of its peers; on rank 0, the manifest."""

    own: bytes
    peers: dict[int, bytes]
    manifest: ManifestPlan | None = None


def _describe(save: Save) -> _Local:
    description, fragments = describe(save.state.tensors, tuple(save.state.per_rank))
    values = SharedValues.of(save.state)
    encoded = description.encode()
    return _Local(save, description, fragments, encoded, _fingerprint(encoded), values)


def _fingerprint(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _agree(
    requests: Sequence[_Request], admit: Callable[[list[bytes]], str], rings: FormRings | None
) -> list[_Agreement]:
    """Make rank 0's replies: the id of the save, its plan, and who sends plain values."""
    require_equal(
        [each.terms for each in requests],
        "ranks do not save the same checkpoint in the same way:",
    )
    save_id = admit([each.message for each in requests])
    fingerprints = [each.fingerprint for each in requests]
    peers = rings(fingerprints) if rings is not None else [[] for _ in requests]
    plan = _fingerprint(msgspec.msgpack.encode((fingerprints, peers)))
    is_cached = bool(save_id) and all(plan in each.plans for each in requests)
    first_with = {each.values: rank for rank, each in reversed(list(enumerate(requests)))}
    speakers = set(first_with.values())
    several = len(speakers) > 1
    return [
        _Agreement(save_id, plan, is_cached, rank in speakers, several, [] if rank else peers)
        for rank in range(len(requests))
    ]


def _share_values(
    values: SharedValues, agreed: _Agreement, group: Group
) -> tuple[ObjectEntry, ...]:
    """Return on rank 0 the plain values of all ranks, compared; nothing on other ranks."""
    if agreed.gather_values:
        united = collect(
            group,
            "comparing plain values",
            lambda: values.encode() if agreed.send_values else b"",
            unite_values,
        )
        return united or ()
    return unite_values([values.encode()]) if group.rank == 0 else ()


def _cached_plan(agreed: _Agreement, plans: PlanCache) -> RankPlan | None:
    """Return the plan of an earlier save, if all ranks have it."""
    plan = plans.get(agreed.plan) if agreed.is_cached else None
    if plan is None:
        plans.misses += 1
    else:
        plans.hits += 1
    return plan


def _plan_anew(
    local: _Local,
    agreed: _Agreement,
    group: Group,
    check_room: Callable[[Save, int], None] | None,
) -> RankPlan:
    """Plan on rank 0, from the descriptions of all ranks."""

    def answer(encoded: list[bytes]) -> list[bytes]:
        plan = plan_save([decode_description(data) for data in encoded])
        if check_room is not None:
            check_room(local.save, plan.manifest.bytes_stored)
        pieces = [plan.encode_pieces(rank) for rank in range(len(encoded))]
        replies = [
            _Pieces(own, {peer: pieces[peer] for peer in peers})
            for own, peers in zip(pieces, agreed.peers, strict=True)
        ]
        replies[0].manifest = plan.manifest
        return [msgspec.msgpack.encode(each) for each in replies]

    reply = exchange(group, "planning a save", lambda: local.encoded, answer)
    planned = msgspec.msgpack.decode(reply, type=_Pieces)
    description = local.description
    pieces = decode_pieces(planned.own, description)
    peers = {rank: decode_pieces(data, description) for rank, data in planned.peers.items()}
    return RankPlan(pieces, list_pieces(pieces.listed(description)), peers, planned.manifest)
