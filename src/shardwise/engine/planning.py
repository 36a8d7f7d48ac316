"""Plan a save: all ranks agree on the save, and each rank learns which pieces it writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial

import msgspec

from shardwise.engine.agreement import (
    Agreement,
    ChoosePeers,
    EncodedPlan,
    PlanMessage,
    agree_on_plan,
    fingerprint_of,
)
from shardwise.engine.buffers import Arena
from shardwise.engine.exchange import collect, exchange, exchange_with_local_value
from shardwise.engine.group import Group
from shardwise.engine.options import SaveOptions
from shardwise.engine.replica_comparison import ReplicaComparison, ReplicaSample
from shardwise.engine.shared_values import SharedValues, merge_values
from shardwise.engine.tensors import describe_tensors
from shardwise.engine.write_file import FileSource
from shardwise.events import Recorder
from shardwise.manifest.data_file import encode_header_entries, lay_out_file
from shardwise.manifest.manifest import VERSION, FileEntry, Manifest, ObjectEntry, encode_manifest
from shardwise.manifest.names import data_file
from shardwise.plan.cache import PlanCache, RankPlan
from shardwise.plan.replica_sets import decode_replica_sets
from shardwise.plan.save import ManifestPlan, plan_save
from shardwise.plan.tables import Description, decode_description, decode_pieces
from shardwise.state.leaves import Fragment, LocalState
from shardwise.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """One rank's request to save.

    Attributes:
        state: the tensors and values of this rank.
        store: the place of the checkpoint in storage.
        arena: the buffers to write through.
        options: the options of the save.
        place: the destination, for error messages. Default: the store.
        message: a message to rank 0's `admit`; see `plan_together`.
    """

    state: LocalState
    store: Store
    arena: Arena
    options: SaveOptions
    place: str = ""
    message: bytes = b""

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

    def peer_sources(self) -> dict[int, FileSource]:
        """Return, for each peer, the source of its data section, read from this rank's replicas."""
        return {
            rank: FileSource.of(pieces, self.fragments) for rank, pieces in self.plan.peers.items()
        }

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


def plan_together(
    prepare: Callable[[], SaveRequest],
    admit: Callable[[SaveRequest, list[bytes]], str],
    group: Group,
    plan_cache: PlanCache,
    recorder: Recorder,
    *,
    choose_peers: ChoosePeers | None = None,
    check_room: Callable[[SaveRequest, int], None] | None = None,
    comparison: ReplicaComparison | None = None,
) -> PlannedSave | None:
    """Agree on a save, and plan it. All ranks call this function together.

    Args:
        prepare: makes this rank's request. A failure on one rank is raised on all ranks.
        admit: runs on rank 0, with its own request and the messages of all ranks. Returns an id
            for the save, or "" to skip the save.
        group: the ranks.
        plan_cache: plans of earlier saves, which this save reads and updates.
        recorder: gets an event for each stage.
        choose_peers: runs on rank 0. Default: no rank has peers.
        check_room: runs on rank 0, with its own request and the tensor bytes of the save. Raises
            if the storage has too little room.
        comparison: compares replicas of this save, and reports differences at the last save.

    Returns:
        The planned save; None if `admit` skipped the save.

    Raises:
        ShardwiseError: as for `shardwise.save`, on every rank.
    """

    def make_message() -> tuple[_DescribedSave, bytes]:
        with recorder.stage("describe"):
            local = _describe_save(prepare())
        with recorder.stage("plan"):
            digests = b"" if comparison is None else comparison.encode_message()
            return local, local.encode_message(plan_cache.fingerprints(group.rank), digests)

    def make_reply(local: _DescribedSave, messages: list[bytes]) -> list[bytes]:
        agreements = agree_on_plan(messages, partial(admit, local.save), choose_peers)
        cached = plan_cache.get(agreements[0].plan, 0) if agreements[0].is_cached else None
        if cached is not None and cached.manifest is not None and check_room is not None:
            check_room(local.save, cached.manifest.bytes_stored)
        return [msgspec.msgpack.encode(each) for each in agreements]

    local, reply = exchange_with_local_value(group, "agreeing on a save", make_message, make_reply)
    agreement = msgspec.msgpack.decode(reply, type=Agreement)
    if comparison is not None:
        comparison.conclude(agreement.differing, group, recorder)
    if not agreement.save_id:
        return None
    with recorder.stage("plan"):
        objects = _share_values(local.values, agreement, group)
        plan = plan_cache.get(agreement.plan, group.rank) if agreement.is_cached else None
        plan_cache.count(is_hit=plan is not None)
        if plan is None:
            plan = _plan_anew(local, agreement, group, check_room)
            plan_cache.put(agreement.plan, group.rank, plan)
    return local.with_plan(plan, agreement, objects, group, comparison)


@dataclass(frozen=True, slots=True)
class _DescribedSave:
    """A request of this rank, and the description of its tensors.

    Attributes:
        encoded: the encoded description.
        fingerprint: a digest of the encoded description.
        values: the plain values that all ranks share.
    """

    save: SaveRequest
    description: Description
    fragments: tuple[Fragment, ...]
    encoded: bytes
    fingerprint: bytes
    values: SharedValues

    def with_plan(
        self,
        plan: RankPlan,
        agreement: Agreement,
        objects: tuple[ObjectEntry, ...],
        group: Group,
        comparison: ReplicaComparison | None,
    ) -> PlannedSave:
        """Return the planned save, and begin its comparison of replicas."""
        sample, step = None, self.save.options.step or 0
        if comparison is not None:
            sample = comparison.begin(
                agreement.save_id, step, plan, self.description, self.fragments
            )
        return PlannedSave(
            save=self.save,
            save_id=agreement.save_id,
            rank=group.rank,
            world_size=group.size,
            plan=plan,
            cached=agreement.is_cached,
            description=self.description,
            fragments=self.fragments,
            objects=objects,
            sample=sample,
        )

    def encode_message(self, cached_plans: list[bytes], digests: bytes) -> bytes:
        """Return this rank's message to rank 0."""
        values_digest = self.values.digest()
        save = self.save
        message = PlanMessage(
            save.terms, self.fingerprint, cached_plans, values_digest, save.message, digests
        )
        return msgspec.msgpack.encode(message)


def _describe_save(save: SaveRequest) -> _DescribedSave:
    description, fragments = describe_tensors(save.state.tensors, tuple(save.state.per_rank))
    values = SharedValues.of(save.state)
    encoded = description.encode()
    return _DescribedSave(save, description, fragments, encoded, fingerprint_of(encoded), values)


def _share_values(
    values: SharedValues, agreement: Agreement, group: Group
) -> tuple[ObjectEntry, ...]:
    """Compare the plain values of all ranks, and return them on rank 0; empty on other ranks."""
    if agreement.gather_values:
        merged = collect(
            group,
            "comparing plain values",
            lambda: values.encode() if agreement.send_values else b"",
            merge_values,
        )
        return merged or ()
    return merge_values([values.encode()]) if group.rank == 0 else ()


def _plan_anew(
    local: _DescribedSave,
    agreement: Agreement,
    group: Group,
    check_room: Callable[[SaveRequest, int], None] | None,
) -> RankPlan:
    """Send all descriptions to rank 0, which plans, and return the plan of this rank."""

    def make_reply(messages: list[bytes]) -> list[bytes]:
        plan = plan_save([decode_description(data) for data in messages])
        if check_room is not None:
            check_room(local.save, plan.manifest.bytes_stored)
        pieces = [plan.encode_pieces(rank) for rank in range(len(messages))]
        replies = [
            EncodedPlan(own, {peer: pieces[peer] for peer in peers}, sets)
            for own, peers, sets in zip(pieces, agreement.peers, plan.replica_sets, strict=True)
        ]
        replies[0].manifest = plan.manifest
        return [msgspec.msgpack.encode(each) for each in replies]

    reply = exchange(group, "planning a save", lambda: local.encoded, make_reply)
    planned = msgspec.msgpack.decode(reply, type=EncodedPlan)
    description = local.description
    pieces = decode_pieces(planned.pieces, description)
    peers = {rank: decode_pieces(data, description) for rank, data in planned.peers.items()}
    return RankPlan(
        pieces,
        encode_header_entries(pieces.describe_pieces(description)),
        peers,
        planned.manifest,
        decode_replica_sets(planned.replica_sets, description),
    )
