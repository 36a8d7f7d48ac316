"""Agree on a save and its plan: what ranks send each other until each has a `PlannedSave`.

`plan_together` has the steps, which saves to storage and snapshots in memory share:

1. Each rank describes its state, and offers to save it. From the offers, rank 0 concludes whether
   all ranks have a plan of their states in their caches.
2. Otherwise, the distinct structures and the coordinates of all ranks are sent to all ranks, and
   every rank computes the plan.
3. If plain values of ranks differ, they are sent to all ranks, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Protocol

import msgspec
import torch

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.engine.buffers import Arena
from shardwise.kernel.engine.check_numbers import check_step
from shardwise.kernel.engine.checkpoint_directory import CheckpointDirectory
from shardwise.kernel.engine.describe import Described, StateToSave
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.rounds import Round, Values, combine_values, refuse_unequal, values_of
from shardwise.kernel.engine.shared_structures import digest_of, share_structures
from shardwise.kernel.engine.shared_values import encode_values, share_values
from shardwise.kernel.engine.write_file import FileSource
from shardwise.kernel.errors import StateError, StoreError, storage_errors
from shardwise.kernel.events import Recorder
from shardwise.kernel.manifest.manifest import (
    FileEntry,
    Manifest,
    ObjectEntry,
    check_name,
    data_file,
    encode_manifest,
    lay_out_file,
    new_save_id,
)
from shardwise.kernel.plan.save import PlanCache, SavePlan, plan_save
from shardwise.kernel.state.local_state import Fragment
from shardwise.kernel.store import Store, free_bytes

_PLANS_DIFFER = (
    "ranks have planned different files for this save, so their checkpoint would be wrong; nothing "
    "was written. This is a bug of shardwise: report it, with the shapes and placements of the "
    "tensors:"
)


class Destination(Protocol):
    """Where a save goes: a store, or the memory of the nodes."""

    def offer(self, request: SaveRequest) -> bytes:
        """Prepare for a save on this rank, and return a note for the others.

        Raises:
            ShardwiseError: the save cannot begin; it is raised on all ranks.
        """

    def lock(self, request: SaveRequest) -> None:
        """Lock the place of the save. Rank 0 calls it when the ranks agree, before it replies.

        Raises:
            ShardwiseError: the place cannot be locked; it is raised on all ranks.
        """

    def move(self, planned: PlannedSave, group: Group, recorder: Recorder) -> tuple[str, int]:
        """Move the bytes of this rank, and complete the save or hand it over. A collective.

        Returns:
            Where the checkpoint is, and the size of this rank's file; 0 if it has none.

        Raises:
            ShardwiseError: the save failed, on every rank.
        """


class Claim(Protocol):
    """The claim of a job to the root that it saves to; see `parts/lineage.py: RootClaim`."""

    def for_agents(self, *, force: bool) -> tuple[str, str | None]:
        """Return what agents need to claim the root."""

    def take(self, *, force: bool) -> None:
        """Claim the root at the first save; `force`: also from another job."""

    def require(self) -> None:
        """Raise if another job has claimed the root since then."""


@dataclass(slots=True, kw_only=True)
class SaveRequest:
    """One rank's request to save.

    Attributes:
        state: what this rank saves.
        store: the place of the checkpoint in storage.
        arena: the buffers to write through.
        step, overwrite, metrics: as for `shardwise.save`.
        check_replicas: whether this rank asks to compare replicas; all ranks do if any rank asks.
        place: the destination, for error messages. Default: the store.
        needs_room: whether the store must have room for all tensors before the save.
        save_id: the id of the save, if this is rank 0.
        claim: the claim to the root; None if the save belongs to no root.
        takes_root: whether to claim the root even if another job saves to it.

    Raises:
        StateError: the step is not an integer from 0, or a metric is not a number.
    """

    state: StateToSave
    store: Store
    arena: Arena
    step: int | None = None
    overwrite: bool = False
    check_replicas: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    place: str = ""
    needs_room: bool = True
    save_id: str = field(default_factory=new_save_id)
    claim: Claim | None = None
    takes_root: bool = False

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

    def check_place(self, steps: Collection[int] | None = None) -> None:
        """Refuse a save to a place that has a checkpoint, unless `overwrite` is set.

        Args:
            steps: look only for checkpoints of these steps; None for all.

        Raises:
            CheckpointExistsError: the place has a checkpoint.
            StoreError: the place cannot be listed.
        """
        may_exist = not self.overwrite and (steps is None or self.step in steps)
        with storage_errors(self.store):
            directory = CheckpointDirectory(self.store)
            if may_exist and directory.state() == "committed":
                raise directory.exists_error(self.step if self.claim is not None else None)

    def claim_root(self) -> None:
        """Claim the root of the save, if it has one. Only rank 0 calls this.

        Raises:
            CheckpointExistsError: another job saves to the root.
            StoreError: the root cannot be read or written.
        """
        if self.claim is not None:
            with storage_errors(self.store):
                self.claim.take(force=self.takes_root)

    def check_room(self, nbytes: int) -> None:
        """Check that the store has room for all tensors, if the save needs it.

        Args:
            nbytes: the size of the tensors.

        Raises:
            StoreError: fewer than `nbytes` bytes are free.
        """
        free = free_bytes(self.store) if self.needs_room else None
        if free is not None and free < nbytes:
            raise StoreError(
                f"{self.store}: no room for this save: its tensors need {nbytes:,} bytes, but only "
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
            tensors: the list of tensors, encoded; see `kernel/manifest/pieces.py`.
        """
        return Manifest(
            save_id=save_id,
            step=self.step,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            world_size=world_size,
            metrics=dict(self.metrics),  # msgspec encodes numbers that are not finite as null
            per_rank=values[1],
            files=files,
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
        notes: what ranks told the others (`Destination.offer`): the distinct notes, in the order of
            their first ranks.
        axes, devices: as in `Described`.
        checks_replicas: whether all ranks compare their replicas at this save.
    """

    request: SaveRequest
    save_id: str
    plan: SavePlan
    cached: bool
    fragments: Sequence[Fragment]
    objects: tuple[ObjectEntry, ...]
    holding_key: bytes = b""
    notes: Sequence[bytes] = ()
    axes: Mapping[str, int] = field(default_factory=dict)
    devices: frozenset[torch.device] = frozenset()
    checks_replicas: bool = False

    @property
    def file_names(self) -> dict[int, str]:
        """The name of the file of each rank that writes one."""
        return {rank: data_file(rank, self.save_id) for rank in self.plan.writers.tolist()}

    def source(self) -> FileSource | None:
        """Return the source of this rank's file; None if the rank writes no file."""
        plan, per_rank = self.plan, self.request.state.values.per_rank
        if not (plan.pieces.fragment or per_rank):
            return None
        objects = msgspec.json.encode(per_rank) if per_rank else b""
        file = lay_out_file(self.save_id, plan.rank, plan.header_entries, len(objects))
        devices = self.devices
        return FileSource(plan.pieces, self.fragments, file, objects, devices=devices)

    def source_of_peer(self, rank: int) -> FileSource:
        """Return the source of the data section of a rank that holds the same boxes as this one.

        The bytes are read from this rank's replicas.
        """
        return FileSource(self.plan.pieces_of(rank), self.fragments, devices=self.devices)

    def manifest(self, files: Sequence[FileEntry]) -> bytes:
        """Return the encoded manifest with these files. Only rank 0 calls this."""
        plan, values = self.plan, (self.objects, self.plan.per_rank)
        request = self.request
        return encode_manifest(
            request.manifest(self.save_id, plan.world, files, values, plan.encoded_tensors)
        )


@prepare_decoding
class _Offer(msgspec.Struct, array_like=True):
    """The combined offers of some ranks to rank 0, before a save.

    Attributes:
        settings: those that must be equal on all ranks, formatted for error messages.
        plans: the keys of plans that all of these ranks have in their caches, for their state.
        digests: the distinct digests of plain values; more than two are not kept.
        check_replicas: whether any of these ranks asks to compare replicas.
        save_id: the id of the save, from rank 0.
        notes: the distinct notes in the requests, with the first rank of each.
        elements: plain tensors in the state of sharded parameters, by name: the bytes of one
            element, which ranks may share; none if the tensor is sharded like its parameter. The
            result is None if ranks differ: then the tensor is saved for each shard. Ranks that have
            a plan leave out tensors that were equal when they made the plan.
    """

    settings: Values
    plans: list[bytes]
    digests: list[bytes]
    check_replicas: bool
    save_id: str
    notes: dict[bytes, int]
    elements: dict[str, bytes | None]


@prepare_decoding
class _Agreement(msgspec.Struct, array_like=True):
    """What rank 0 concludes from the offers of all ranks.

    Attributes:
        plan: the key of a plan that all ranks have in their caches; None if there is none.
        values_differ: whether plain values of ranks differ.
        check_replicas: as in the offers.
        save_id: the id of the save.
        notes: the distinct notes, in the order of their first ranks.
        of_shards: the names of the tensors that are saved for each shard.
    """

    plan: bytes | None
    values_differ: bool
    check_replicas: bool
    save_id: str
    notes: list[bytes]
    of_shards: list[str]


def plan_together(
    make_request: Callable[[], SaveRequest],
    destination: Destination | None,
    group: Group,
    plan_cache: PlanCache,
    recorder: Recorder,
) -> PlannedSave:
    """Describe a save, agree on it, and plan it. All ranks call this function together.

    Args:
        make_request: makes this rank's request. A failure on one rank is raised on all ranks.
        destination: where the save goes; None to plan without a save.
        group: the ranks.
        plan_cache: plans of earlier saves, which this save reads and updates.
        recorder: gets an event for each stage.

    Raises:
        ShardwiseError: as for `shardwise.save`, on every rank.
    """
    with Round(group, "agreeing on a save") as all_ranks:
        with recorder.stage("describe"):
            request = make_request()
            note = b"" if destination is None else destination.offer(request)
            described = request.state.describe(plan_cache.of_shards)
            coordinates = described.description.coordinates
            own = group.rank, group.size, described.fingerprint, coordinates
            known = plan_cache.plans_for(*own)
        agreement = all_ranks.all_reduce(
            _make_offer(request, known, note, group, plan_cache.of_shards),
            _Offer,
            _combine_offers,
            partial(_conclude, request=request, plans=plan_cache, destination=destination),
            _Agreement,
        )
    if not plan_cache.of_shards.issuperset(agreement.of_shards):
        plan_cache.of_shards |= {*agreement.of_shards}
        described = request.state.describe(plan_cache.of_shards)
    with recorder.stage("plan"):
        if agreement.plan is not None:
            plan = plan_cache.get(agreement.plan, group.rank)
        else:
            plan = _plan_anew(request, described, group, plan_cache)
        values, differ = request.state.values, agreement.values_differ
        objects = share_values(values, described.fingerprint, plan, group, differ=differ)
    held = msgspec.msgpack.encode((described.fingerprint, described.description.coordinates))
    return PlannedSave(
        request=request,
        save_id=agreement.save_id,
        plan=plan,
        cached=agreement.plan is not None,
        fragments=described.fragments,
        objects=objects,
        holding_key=held,
        notes=agreement.notes,
        axes=described.axes,
        devices=described.devices,
        checks_replicas=agreement.check_replicas,
    )


def _plan_anew(
    request: SaveRequest, described: Described, group: Group, plan_cache: PlanCache
) -> SavePlan:
    """Send each other the structures, plan the save, and add the plan to the cache."""
    fingerprint, description = described.fingerprint, described.description
    key, structures = share_structures(fingerprint, description, group)
    with Round(group, "planning a save") as all_ranks:
        plan = plan_save(structures, group.size, group.rank, description)
        if group.rank == 0:
            request.check_room(plan.bytes_stored)
        all_ranks.require_equal({"digest": plan.digest.hex()}, _PLANS_DIFFER)
    plan_cache.put(digest_of(key + plan.digest), group.rank, fingerprint, plan)
    return plan


def _make_offer(
    request: SaveRequest,
    known: Mapping[bytes, SavePlan],
    note: bytes,
    group: Group,
    of_shards: Collection[str],
) -> _Offer:
    settings = f"step {request.step} to {request.place or request.store}"
    settings += " with overwrite=True" if request.overwrite else ""
    # Elements that were equal may differ now. The optimizers of torch have a step count at most.
    is_prepared = bool(known) and not request.state.why_bound
    elements = dict.fromkeys(of_shards) if is_prepared else request.state.elements(of_shards)
    return _Offer(
        settings=values_of(group.rank, {"": settings}),
        plans=sorted(known),
        digests=[digest_of(encode_values(request.state.values, order="sorted"))],
        check_replicas=request.check_replicas,
        save_id=request.save_id if group.rank == 0 else "",
        notes={note: group.rank} if note else {},
        elements={**elements},
    )


def _combine_offers(offers: Sequence[_Offer]) -> _Offer:
    plans = set(offers[0].plans).intersection(*(each.plans for each in offers[1:]))
    notes: dict[bytes, int] = {}
    elements: dict[str, bytes | None] = {}
    for each in offers:
        for note, rank in each.notes.items():
            notes[note] = min(rank, notes.get(note, rank))
        for name, value in each.elements.items():
            elements[name] = value if elements.get(name, value) == value else None
    return _Offer(
        settings=combine_values([each.settings for each in offers]),
        plans=sorted(plans),
        digests=sorted({digest for each in offers for digest in each.digests})[:2],
        check_replicas=any(each.check_replicas for each in offers),
        save_id="".join(each.save_id for each in offers),
        notes=notes,
        elements=elements,
    )


def _conclude(
    offer: _Offer,
    request: SaveRequest,
    plans: PlanCache,
    destination: Destination | None,
) -> _Agreement:
    refuse_unequal(
        "ranks do not save the same checkpoint in the same way; pass the same path, step and "
        "options on all ranks:",
        offer.settings,
    )
    if destination is not None:
        destination.lock(request)
    of_shards = [name for name, value in offer.elements.items() if value is None]
    plan = offer.plans[0] if offer.plans and plans.of_shards.issuperset(of_shards) else None
    if plan is not None:
        request.check_room(plans.get(plan, 0).bytes_stored)
    return _Agreement(
        plan=plan,
        values_differ=len(offer.digests) > 1,
        check_replicas=offer.check_replicas,
        save_id=offer.save_id,
        notes=sorted(offer.notes, key=offer.notes.__getitem__),
        of_shards=of_shards,
    )
