"""A save: agree, plan, write, publish. Nothing of it knows frameworks, or where the store is."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime, timezone

import msgspec

from shardwise.engine.agree import SharedValues, unite_values
from shardwise.engine.arena import Arena
from shardwise.engine.content import content_of
from shardwise.engine.describe import describe
from shardwise.engine.exchange import exchange
from shardwise.engine.group import Group
from shardwise.engine.leftovers import collect_leftovers
from shardwise.engine.options import SaveOptions
from shardwise.engine.replicas import check_replicas
from shardwise.engine.write import write_data_file
from shardwise.errors import (
    CheckpointExistsError,
    LostRankError,
    MismatchError,
    StoreError,
)
from shardwise.events import Recorder
from shardwise.manifest.manifest import (
    VERSION,
    FileEntry,
    Manifest,
    ObjectEntry,
    encode_manifest,
    encode_tensors,
)
from shardwise.manifest.names import MANIFEST, data_file, lock_file, new_save_id
from shardwise.plan.cache import PlanCache, Published
from shardwise.plan.description import decode_description
from shardwise.plan.save import Share, decode_share, plan_save
from shardwise.state.leaves import Holdings
from shardwise.store import Store

LOCK_ATTEMPTS = 8  # a lock is lost to a collector that comes between its making and its locking


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What one rank brings to a save."""

    held: Holdings
    store: Store
    arena: Arena
    options: SaveOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What a save did. Bytes and seconds are this rank's unless said otherwise.

    Attributes:
        path: where the checkpoint is.
        step: the step it belongs to, if one was given.
        bytes_total: tensor bytes of the whole checkpoint, every element once.
        bytes_written: bytes of this rank's file.
        bytes_deduplicated: replicas of all ranks that were not written again.
        files: data files of the whole checkpoint.
        plan_cached: whether the plan of an earlier save was used.
        bytes_communicated: bytes that this rank sent to others.
        seconds: by stage (describe, plan, write, publish), and their total.
    """

    path: str
    step: int | None
    bytes_total: int
    bytes_written: int
    bytes_deduplicated: int
    files: int
    plan_cached: bool
    bytes_communicated: int
    seconds: dict[str, float]


class _Request(msgspec.Struct, array_like=True):
    terms: str
    fingerprint: bytes
    cached: bool
    values: bytes


class _Grant(msgspec.Struct, array_like=True):
    save_id: str
    cached: bool
    send_values: bool
    gather_values: bool


class _Written(msgspec.Struct, array_like=True):
    entry: FileEntry | None


class _Totals(msgspec.Struct, array_like=True):
    bytes_total: int
    bytes_held: int
    files: int


def save_all(
    prepare: Callable[[], Save], group: Group, plans: PlanCache, recorder: Recorder
) -> SaveReport:
    """Save what all ranks hold as one checkpoint; called by all of them.

    Args:
        prepare: says what this rank brings; a failure of it is a failure on all ranks.

    Raises:
        ShardwiseError: as `shardwise.save` says; on every rank, and nothing is published.
    """
    sent = group.bytes_sent
    with ExitStack() as cleanup:
        save = _agree(prepare, group, plans, recorder, cleanup)
        with recorder.stage("plan"):
            save.plan()
        if save.options.check_replicas:
            with recorder.stage("check_replicas"):
                check_replicas(save.described, group)
        written = save.write()
        totals = save.publish()
    return SaveReport(
        path=str(save.store),
        step=save.options.step,
        bytes_total=totals.bytes_total,
        bytes_written=written,
        bytes_deduplicated=totals.bytes_held - totals.bytes_total,
        files=totals.files,
        plan_cached=save.cached,
        bytes_communicated=group.bytes_sent - sent,
        seconds=recorder.seconds(),
    )


def _agree(
    prepare: Callable[[], Save],
    group: Group,
    plans: PlanCache,
    recorder: Recorder,
    cleanup: ExitStack,
) -> _Save:
    """All ranks save the same to the same place, which rank 0 takes possession of."""
    saves: list[_Save] = []

    def ask() -> bytes:
        with recorder.stage("describe"):
            saves.append(_Save(prepare(), group, plans, recorder))
        with recorder.stage("plan"):
            return saves[0].request()

    answer = exchange(
        group, "agreeing on a save", ask, lambda asked: saves[0].grant_all(asked, cleanup)
    )
    saves[0].accept(answer)
    return saves[0]


class _Save:
    """One save on one rank, from the first exchange to the last."""

    def __init__(self, job: Save, group: Group, plans: PlanCache, recorder: Recorder) -> None:
        self.store = job.store
        self.options = job.options
        self._arena = job.arena
        self._held = job.held
        self._group = group
        self._plans = plans
        self._recorder = recorder
        self.described = describe(job.held.tensors, tuple(job.held.per_rank))
        self._values = SharedValues.of(job.held)
        self._encoded = self.described.description.encode()
        self._fingerprint = hashlib.blake2b(self._encoded, digest_size=16).digest()
        self._objects: tuple[ObjectEntry, ...] = ()
        self._published: Published | None = None
        self._share: Share | None = None
        self._files: tuple[FileEntry, ...] = ()
        self._grant = _Grant("", False, False, False)
        self.cached = False

    def request(self) -> bytes:
        """What this rank asks for."""
        options = self.options
        terms = f"step {options.step} to {self.store}"
        terms += " with overwrite=True" if options.overwrite else ""
        terms += " with check_replicas=True" if options.check_replicas else ""
        known = self._plans.get(self._fingerprint) is not None
        request = _Request(terms, self._fingerprint, known, self._values.digest())
        return msgspec.msgpack.encode(request)

    def grant_all(self, asked: Sequence[bytes], cleanup: ExitStack) -> list[bytes]:
        """Rank 0's answer to what all ask for."""
        requests = [msgspec.msgpack.decode(each, type=_Request) for each in asked]
        _refuse_unlike(requests)
        self._refuse_existing()
        collect_leftovers(self.store)
        save_id = self._lock(cleanup)
        cached = all(request.cached for request in requests)
        first_with = {request.values: i for i, request in reversed(list(enumerate(requests)))}
        speakers = set(first_with.values())
        return [
            msgspec.msgpack.encode(_Grant(save_id, cached, i in speakers, len(speakers) > 1))
            for i in range(len(requests))
        ]

    def accept(self, answer: bytes) -> None:
        """Take what was granted."""
        self._grant = msgspec.msgpack.decode(answer, type=_Grant)
        self.cached = self._grant.cached

    def _lock(self, cleanup: ExitStack) -> str:
        """An id for this save, whose lock is held until `cleanup` is closed."""
        for _ in range(LOCK_ATTEMPTS):
            save_id = new_save_id()
            cleanup.callback(self._discard_lock, save_id)
            if cleanup.enter_context(self.store.hold(lock_file(save_id), shared=False)):
                return save_id
        raise StoreError(f"{self.store}: no lock could be made; is it writable?")

    def plan(self) -> None:
        """Take the plan from the cache, or have rank 0 make one out of all descriptions."""
        self._gather_values()
        known = self._plans.get(self._fingerprint)
        if self.cached and known is not None:
            self._plans.hits += 1
            self._share, self._published = known
            return
        self._plans.misses += 1
        answer = exchange(self._group, "planning a save", lambda: self._encoded, self._plan_all)
        self._share = decode_share(answer)
        self._plans.put(self._fingerprint, self._share, self._published)

    def write(self) -> int:
        """Write this rank's file, and wait for all ranks'. Returns its size.

        If any rank fails, all remove what they wrote: nothing can have been published.
        """
        key = data_file(self._group.rank, self._grant.save_id)
        size = 0

        def speak() -> bytes:
            nonlocal size
            with self._recorder.stage("write"):
                entry = self._write(key)
            size = entry.size if entry else 0
            return msgspec.msgpack.encode(_Written(entry))

        def collect(written: list[bytes]) -> bytes:
            entries = [msgspec.msgpack.decode(each, type=_Written).entry for each in written]
            self._files = tuple(entry for entry in entries if entry is not None)
            return b""

        try:
            exchange(self._group, "writing a save", speak, collect)
        except LostRankError:
            raise
        except Exception:
            with suppress(OSError):
                self.store.delete(key)
            raise
        return size

    def publish(self) -> _Totals:
        """Rank 0 publishes the manifest; this is the commit.

        If it fails, or its outcome does not become known, the data files stay: the manifest may
        be there. If it is not, they are leftovers, which the next save here removes.
        """

        def answer(_: list[bytes]) -> bytes:
            with self._recorder.stage("publish"):
                return msgspec.msgpack.encode(self._publish())

        reply = exchange(self._group, "publishing a save", lambda: b"", answer)
        return msgspec.msgpack.decode(reply, type=_Totals)

    def _gather_values(self) -> None:
        def speak() -> bytes:
            return self._values.encode() if self._grant.send_values else b""

        def unite(encoded: list[bytes]) -> bytes:
            different = [(rank, data) for rank, data in enumerate(encoded) if data]
            self._objects = unite_values(different)
            return b""

        if self._grant.gather_values:
            exchange(self._group, "comparing plain values", speak, unite)
        elif self._group.rank == 0:
            unite([speak()])

    def _plan_all(self, encoded: list[bytes]) -> list[bytes]:
        plan = plan_save([decode_description(data) for data in encoded])
        tensors = encode_tensors(plan.tensors)
        self._published = Published(
            tensors, plan.files, plan.per_rank, plan.bytes_held, plan.bytes_stored
        )
        return [share.encode() for share in plan.shares]

    def _write(self, key: str) -> FileEntry | None:
        share = self._share
        if share is None or not (len(share.fragment) or self._held.per_rank):
            return None
        objects = msgspec.json.encode(self._held.per_rank) if self._held.per_rank else b""
        rank = self._group.rank
        metadata = {"shardwise": str(VERSION), "save_id": self._grant.save_id, "rank": str(rank)}
        content = content_of(share, self.described, objects, metadata)
        crc = write_data_file(self.store, key, content, self._arena)
        at = content.layout
        return FileEntry(key, rank, at.size, at.data_at, at.objects_at, at.checksums_at, crc)

    def _publish(self) -> _Totals:
        known, files = self._published, self._files
        if known is None:
            raise RuntimeError("rank 0 publishes what it has not planned")
        manifest = Manifest(
            save_id=self._grant.save_id,
            step=self.options.step,
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            world_size=self._group.size,
            metrics={
                name: value if math.isfinite(value) else None
                for name, value in self.options.metrics.items()
            },
            per_rank=known.per_rank,
            files=files,
            objects=self._objects,
            tensors=(),
        )
        encoded = encode_manifest(manifest, known.tensors)
        try:
            self._refuse_existing()
            self.store.publish(MANIFEST, encoded, replace=self.options.overwrite)
        except FileExistsError as error:
            for file in files:
                self.store.delete(file.name)
            raise self._exists() from error
        if self.options.overwrite:
            collect_leftovers(self.store, own_lock=lock_file(self._grant.save_id))
        return _Totals(known.bytes_stored, known.bytes_held, len(files))

    def _refuse_existing(self) -> None:
        if not self.options.overwrite and MANIFEST in self.store.list():
            raise self._exists()

    def _exists(self) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"{self.store} holds a committed checkpoint already; "
            "pass overwrite=True to replace it, or save elsewhere"
        )

    def _discard_lock(self, save_id: str) -> None:
        with suppress(OSError):
            self.store.delete(lock_file(save_id))
            if not self.store.list():
                self.store.remove()


def _refuse_unlike(requests: Sequence[_Request]) -> None:
    if len({request.terms for request in requests}) > 1:
        asked = [f"rank {rank}: {request.terms}" for rank, request in enumerate(requests)]
        raise MismatchError("ranks do not save the same checkpoint in the same way:", asked)
