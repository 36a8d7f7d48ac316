"""A save: planned together, written, published. Nothing of it knows frameworks, or the storage."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec

from shardwise.engine.buffers import Arena
from shardwise.engine.compare import check_replicas
from shardwise.engine.exchange import exchange
from shardwise.engine.files import write_data_file
from shardwise.engine.group import Group
from shardwise.engine.leftovers import collect_leftovers
from shardwise.engine.options import SaveOptions
from shardwise.engine.planning import Planned, Wish, plan_together
from shardwise.errors import CheckpointExistsError, LostRankError, StoreError
from shardwise.events import Recorder, size
from shardwise.manifest.manifest import FileEntry
from shardwise.manifest.names import MANIFEST, lock_file, new_save_id
from shardwise.plan.cache import PlanCache
from shardwise.state.leaves import LocalState
from shardwise.store import BoundedStore, Store

LOCK_ATTEMPTS = 8  # a lock is lost to a collector that comes between its making and its locking


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """What one rank brings to a save."""

    held: LocalState
    store: Store
    staging_bytes: int
    options: SaveOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """The result of a save. Bytes and seconds are those of this rank unless noted.

    Attributes:
        path: the path of the checkpoint.
        step: the step of the checkpoint, if you gave one.
        bytes_total: the tensor bytes of the whole checkpoint, each element counted once.
        bytes_written: the size of this rank's file.
        bytes_deduplicated: bytes of replicas, on all ranks, that were not written again.
        files: the number of data files of the whole checkpoint.
        plan_cached: whether the plan of an earlier save was reused.
        bytes_communicated: bytes that this rank sent to other ranks.
        seconds: the time of each stage (describe, plan, write, publish), and `total`.
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

    def __str__(self) -> str:
        step = "" if self.step is None else f" step {self.step}"
        files = f"{self.files} file{'' if self.files == 1 else 's'}"
        return (
            f"saved{step} to {self.path}: {size(self.bytes_total)} in {files}, of which this rank "
            f"wrote {size(self.bytes_written)}, in {self.seconds['total']:.2f} s"
        )


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
    brought: list[Save] = []
    arenas: list[Arena] = []

    def wish() -> Wish:
        brought.append(prepare())
        job = brought[0]
        arenas.append(Arena(job.staging_bytes))
        return Wish(held=job.held, options=job.options, place=str(job.store))

    with ExitStack() as cleanup:

        def admit(_: list[bytes]) -> str:
            return _take_possession(brought[0], cleanup)

        def check_room(nbytes: int) -> None:
            refuse_if_full(brought[0].store, nbytes)

        planned = plan_together(wish, admit, group, plans, recorder, check_room=check_room)
        if planned is None:
            raise RuntimeError("a save was neither admitted nor refused")
        save = _Save(brought[0], arenas[0], planned, group, recorder)
        if brought[0].options.check_replicas:
            with recorder.stage("check_replicas"):
                check_replicas(planned.described, group)
        written = save.write()
        totals = save.publish()
    return SaveReport(
        path=str(brought[0].store),
        step=brought[0].options.step,
        bytes_total=totals.bytes_total,
        bytes_written=written,
        bytes_deduplicated=totals.bytes_held - totals.bytes_total,
        files=totals.files,
        plan_cached=planned.cached,
        bytes_communicated=group.bytes_sent - sent,
        seconds=recorder.seconds(),
    )


def _take_possession(job: Save, cleanup: ExitStack) -> str:
    """An id for a save to this place, whose lock is held until `cleanup` is closed."""
    refuse_existing(job)
    collect_leftovers(job.store)
    for _ in range(LOCK_ATTEMPTS):
        save_id = new_save_id()
        cleanup.callback(_discard_lock, job.store, save_id)
        if cleanup.enter_context(job.store.hold(lock_file(save_id), shared=False)):
            return save_id
    raise StoreError(f"{job.store}: no lock could be made; is it writable?")


class _Save:
    """One planned save on one rank."""

    def __init__(
        self, job: Save, arena: Arena, planned: Planned, group: Group, recorder: Recorder
    ) -> None:
        self._job = job
        self._arena = arena
        self._planned = planned
        self._group = group
        self._recorder = recorder
        self._files: tuple[FileEntry, ...] = ()

    def write(self) -> int:
        """Write this rank's file, and wait for all ranks'. Returns its size.

        If any rank fails, all remove what they wrote: nothing can have been published.
        """
        size = 0

        def speak() -> bytes:
            nonlocal size
            with self._recorder.stage("write"):
                entry = self._write()
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
                self._job.store.delete(self._planned.key)
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

    def _write(self) -> FileEntry | None:
        planned = self._planned
        content = planned.content()
        if content is None:
            return None
        crc = write_data_file(self._job.store, planned.key, content, self._arena)
        return planned.entry(content, crc)

    def _publish(self) -> _Totals:
        job, template = self._job, self._planned.template
        if template is None:
            raise RuntimeError("rank 0 publishes what it has not planned")
        encoded = template.encode(self._files)
        try:
            refuse_existing(job)
            job.store.publish(MANIFEST, encoded, replace=job.options.overwrite)
        except FileExistsError as error:
            for file in self._files:
                job.store.delete(file.name)
            raise _exists(job.store) from error
        if job.options.overwrite:
            collect_leftovers(job.store, own_lock=lock_file(self._planned.save_id))
        published = template.published
        return _Totals(published.bytes_stored, published.bytes_held, len(self._files))


def refuse_existing(job: Save) -> None:
    """Refuse to save where there is a checkpoint that is not to be replaced.

    Raises:
        CheckpointExistsError: there is one.
    """
    if not job.options.overwrite and MANIFEST in job.store.list():
        raise _exists(job.store)


def refuse_if_full(store: Store, nbytes: int) -> None:
    """Refuse a save whose storage has no room for it, before anything is written.

    Raises:
        StoreError: it has less room than the tensors take.
    """
    free = store.free_bytes() if isinstance(store, BoundedStore) else None
    if free is not None and free < nbytes:
        raise StoreError(
            f"{store}: no room for this save: its tensors take {nbytes:,} bytes, and {free:,} are "
            "free; free some space, or keep fewer checkpoints"
        )


def _exists(store: Store) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{store} holds a committed checkpoint already; "
        "pass overwrite=True to replace it, or save elsewhere"
    )


def _discard_lock(store: Store, save_id: str) -> None:
    with suppress(OSError):
        store.delete(lock_file(save_id))
        if not store.list():
            store.remove()
