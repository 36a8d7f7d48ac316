"""Ranks agree on a save, and on who writes what of it: all that comes before a byte is moved."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

import msgspec

from shardwise.engine.agree import SharedValues, unite_values
from shardwise.engine.exchange import exchange
from shardwise.engine.files import Content, data_of
from shardwise.engine.group import Group
from shardwise.engine.options import SaveOptions
from shardwise.engine.tensors import Described, describe
from shardwise.errors import MismatchError
from shardwise.events import Recorder
from shardwise.manifest.datafile import lay_out, list_pieces
from shardwise.manifest.manifest import (
    VERSION,
    FileEntry,
    Manifest,
    ObjectEntry,
    encode_manifest,
    encode_tensors,
)
from shardwise.manifest.names import data_file
from shardwise.plan.cache import Plan, PlanCache, Published
from shardwise.plan.description import decode_description
from shardwise.plan.save import decode_share, plan_save
from shardwise.plan.section import named_pieces, section_of
from shardwise.state.leaves import LocalState

Rings = Callable[[Sequence[bytes]], list[list[int]]]
"""From the fingerprints of all ranks' descriptions: for each rank, those whose shares it is told
beside its own. What such ranks hold is described alike, so they hold each other's replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What one rank wants to save, and how; `note` is for rank 0, which decides on it."""

    held: LocalState
    options: SaveOptions
    place: str
    note: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A save that all ranks have agreed on, as one of them knows it.

    Attributes:
        plan: what this rank writes, and what others write of which it holds replicas.
        template: on rank 0, what the manifest takes but for its files.
        cached: whether the plan of an earlier save was used.
    """

    save_id: str
    rank: int
    plan: Plan
    held: LocalState
    described: Described
    template: Template | None
    cached: bool

    @property
    def key(self) -> str:
        """The name of this rank's data file."""
        return data_file(self.rank, self.save_id)

    def content(self) -> Content | None:
        """What is in this rank's file; None if it writes none."""
        if not (len(self.plan.section) or self.held.per_rank):
            return None
        objects = msgspec.json.encode(self.held.per_rank) if self.held.per_rank else b""
        metadata = {"shardwise": str(VERSION), "save_id": self.save_id, "rank": str(self.rank)}
        layout = lay_out(self.plan.listed, len(objects), metadata)
        return Content(layout, data_of(self.plan.section, self.described.fragments), objects)

    def entry(self, content: Content, checksums_crc32: int = 0) -> FileEntry:
        """The file's entry in the manifest."""
        at = content.layout
        return FileEntry(
            self.key,
            self.rank,
            at.size,
            at.data_at,
            at.objects_at,
            at.checksums_at,
            checksums_crc32,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A manifest without its files; `ranks` are those that write one, in the manifest's order."""

    save_id: str
    options: SaveOptions
    world_size: int
    objects: tuple[ObjectEntry, ...]
    published: Published

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that write a file, in the manifest's order."""
        return self.published.files

    def encode(self, files: Sequence[FileEntry]) -> bytes:
        """The manifest with these files."""
        metrics = self.options.metrics.items()
        manifest = Manifest(
            save_id=self.save_id,
            step=self.options.step,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            world_size=self.world_size,
            metrics={name: value if math.isfinite(value) else None for name, value in metrics},
            per_rank=self.published.per_rank,
            files=tuple(files),
            objects=self.objects,
            tensors=(),
        )
        return encode_manifest(manifest, self.published.tensors)


class _Request(msgspec.Struct, array_like=True):
    terms: str
    fingerprint: bytes
    plans: list[bytes]
    values: bytes
    note: bytes


class _Grant(msgspec.Struct, array_like=True):
    save_id: str
    plan: bytes
    cached: bool
    send_values: bool
    gather_values: bool


class _Told(msgspec.Struct, array_like=True):
    share: bytes
    peers: dict[int, bytes]


def plan_together(
    prepare: Callable[[], Wish],
    admit: Callable[[list[bytes]], str],
    group: Group,
    plans: PlanCache,
    recorder: Recorder,
    *,
    rings: Rings | None = None,
    check_room: Callable[[int], None] | None = None,
) -> Planned | None:
    """Agree on a save and plan it; called by all ranks. None if rank 0 does not admit it.

    Args:
        prepare: says what this rank wants; a failure of it is a failure on all ranks.
        admit: on rank 0, takes all ranks' notes and gives an id for the save, or "".
        plans: of earlier saves.
        rings: on rank 0, who is told of whose shares; the same for the same fingerprints.
        check_room: on rank 0, takes the tensor bytes of the save, and raises if they have no room.

    Raises:
        ShardwiseError: as `shardwise.save` says, on every rank.
    """
    wishes: list[_Planning] = []

    def ask() -> bytes:
        with recorder.stage("describe"):
            wishes.append(_Planning(prepare(), group, plans, rings, check_room))
        with recorder.stage("plan"):
            return wishes[0].request()

    answer = exchange(
        group, "agreeing on a save", ask, lambda asked: wishes[0].grant_all(asked, admit)
    )
    grant = msgspec.msgpack.decode(answer, type=_Grant)
    if not grant.save_id:
        return None
    with recorder.stage("plan"):
        return wishes[0].plan(grant)


class _Planning:
    """One rank's part in planning a save."""

    def __init__(
        self,
        wish: Wish,
        group: Group,
        plans: PlanCache,
        rings: Rings | None,
        check_room: Callable[[int], None] | None,
    ) -> None:
        self._check_room = check_room or (lambda nbytes: None)
        self._wish = wish
        self._group = group
        self._plans = plans
        self._rings = rings
        self._described = describe(wish.held.tensors, tuple(wish.held.per_rank))
        self._values = SharedValues.of(wish.held)
        self._encoded = self._described.description.encode()
        self._fingerprint = hashlib.blake2b(self._encoded, digest_size=16).digest()
        self._objects: tuple[ObjectEntry, ...] = ()
        self._peers: list[list[int]] = []

    def request(self) -> bytes:
        """What this rank asks for."""
        options = self._wish.options
        terms = f"step {options.step} to {self._wish.place}"
        terms += " with overwrite=True" if options.overwrite else ""
        terms += " with check_replicas=True" if options.check_replicas else ""
        values = self._values.digest()
        known = self._plans.keys()
        request = _Request(terms, self._fingerprint, known, values, self._wish.note)
        return msgspec.msgpack.encode(request)

    def grant_all(self, asked: Sequence[bytes], admit: Callable[[list[bytes]], str]) -> list[bytes]:
        """Rank 0's answer to what all ask for."""
        requests = [msgspec.msgpack.decode(each, type=_Request) for each in asked]
        _refuse_unlike(requests)
        save_id = admit([request.note for request in requests])
        plan = self._identify([request.fingerprint for request in requests])
        cached = all(plan in request.plans for request in requests)
        known = self._plans.get(plan) if cached and save_id else None
        if known is not None and known.published is not None:
            self._check_room(known.published.bytes_stored)
        first_with = {request.values: i for i, request in reversed(list(enumerate(requests)))}
        speakers = set(first_with.values())
        return [
            msgspec.msgpack.encode(_Grant(save_id, plan, cached, i in speakers, len(speakers) > 1))
            for i in range(len(requests))
        ]

    def _identify(self, fingerprints: list[bytes]) -> bytes:
        """The fingerprint of all descriptions together, and of who is told of whom."""
        self._peers = [[] for _ in fingerprints]
        if self._rings is not None:
            self._peers = self._rings(fingerprints)
        everything = msgspec.msgpack.encode((fingerprints, self._peers))
        return hashlib.blake2b(everything, digest_size=16).digest()

    def plan(self, grant: _Grant) -> Planned:
        """This rank's part of a save that was granted."""
        self._gather_values(grant)
        plan = self._plan(grant)
        rank = self._group.rank
        template = None
        if plan.published is not None and rank == 0:
            template = Template(
                save_id=grant.save_id,
                options=self._wish.options,
                world_size=self._group.size,
                objects=self._objects,
                published=plan.published,
            )
        return Planned(
            save_id=grant.save_id,
            rank=rank,
            plan=plan,
            held=self._wish.held,
            described=self._described,
            template=template,
            cached=grant.cached,
        )

    def _plan(self, grant: _Grant) -> Plan:
        """From the cache, or out of what rank 0 plans from all descriptions."""
        known = self._plans.get(grant.plan)
        if grant.cached and known is not None:
            self._plans.hits += 1
            return known
        self._plans.misses += 1
        published: list[Published] = []

        def answer(encoded: list[bytes]) -> list[bytes]:
            told, mine = self._plan_all(encoded)
            self._check_room(mine.bytes_stored)
            published.append(mine)
            return told

        reply = exchange(self._group, "planning a save", lambda: self._encoded, answer)
        told = msgspec.msgpack.decode(reply, type=_Told)
        mine, description = decode_share(told.share), self._described.description
        plan = Plan(
            section_of(mine, description),
            list_pieces(named_pieces(mine, description)),
            {r: section_of(decode_share(share), description) for r, share in told.peers.items()},
            published[0] if published else None,
        )
        self._plans.put(grant.plan, plan)
        return plan

    def _plan_all(self, encoded: list[bytes]) -> tuple[list[bytes], Published]:
        plan = plan_save([decode_description(data) for data in encoded])
        tensors = encode_tensors(plan.tensors)
        published = Published(
            tensors, plan.files, plan.per_rank, plan.bytes_held, plan.bytes_stored
        )
        shares = [share.encode() for share in plan.shares]
        told = [
            _Told(share, {rank: shares[rank] for rank in peers})
            for share, peers in zip(shares, self._peers, strict=True)
        ]
        return [msgspec.msgpack.encode(each) for each in told], published

    def _gather_values(self, grant: _Grant) -> None:
        def speak() -> bytes:
            return self._values.encode() if grant.send_values else b""

        def unite(encoded: list[bytes]) -> bytes:
            different = [(rank, data) for rank, data in enumerate(encoded) if data]
            self._objects = unite_values(different)
            return b""

        if grant.gather_values:
            exchange(self._group, "comparing plain values", speak, unite)
        elif self._group.rank == 0:
            unite([speak()])


def _refuse_unlike(requests: Sequence[_Request]) -> None:
    if len({request.terms for request in requests}) > 1:
        asked = [f"rank {rank}: {request.terms}" for rank, request in enumerate(requests)]
        raise MismatchError("ranks do not save the same checkpoint in the same way:", asked)
