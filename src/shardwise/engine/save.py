"""A save: planned by all ranks together, written by each rank, published by rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import msgspec

from shardwise.engine.compare import compare_ranks
from shardwise.engine.exchange import exchange, run_on_all
from shardwise.engine.files import write_data_file
from shardwise.engine.group import Group
from shardwise.engine.leftovers import collect_leftovers
from shardwise.engine.planning import PlannedSave, Save, plan_together
from shardwise.errors import CheckpointExistsError, LostRankError, StoreError
from shardwise.events import Recorder, size
from shardwise.manifest.manifest import FileEntry
from shardwise.manifest.names import MANIFEST, lock_file, new_save_id
from shardwise.plan.cache import PlanCache
from shardwise.store import BoundedStore, Store

LOCK_ATTEMPTS = 8  # a collector of leftovers may remove a new lock file before it is locked


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


def save_all(
    prepare: Callable[[], Save], group: Group, plans: PlanCache, recorder: Recorder
) -> SaveReport:
    """Save the local states of all ranks as one checkpoint; all ranks call this.

    Args:
        prepare: makes this rank's request; a failure on one rank is a failure on all.

    Raises:
        ShardwiseError: as `shardwise.save` says; on every rank, and nothing is published.
    """
    sent = group.bytes_sent
    with ExitStack() as cleanup:
        planned = plan_together(
            prepare,
            lambda save, _: _lock_place(save, cleanup),
            group,
            plans,
            recorder,
            check_room=lambda save, nbytes: refuse_if_full(save.store, nbytes),
        )
        if planned is None:
            raise RuntimeError("rank 0 gave this save no id")
        save = planned.save
        if save.options.check_replicas:
            with recorder.stage("check_replicas"):
                compare_ranks(planned.description, planned.fragments, group)
        entry = _write(planned, group, recorder)
        totals = _publish(planned, entry, group, recorder)
    return SaveReport(
        path=str(save.store),
        step=save.options.step,
        bytes_total=totals.bytes_stored,
        bytes_written=0 if entry is None else entry.size,
        bytes_deduplicated=totals.bytes_held - totals.bytes_stored,
        files=totals.files,
        plan_cached=planned.cached,
        bytes_communicated=group.bytes_sent - sent,
        seconds=recorder.seconds(),
    )


def _lock_place(save: Save, cleanup: ExitStack) -> str:
    """Return an id for a save to this place, with a lock that is held until `cleanup` closes."""
    refuse_existing(save)
    collect_leftovers(save.store)
    for _ in range(LOCK_ATTEMPTS):
        save_id = new_save_id()
        cleanup.callback(_discard_lock, save.store, save_id)
        if cleanup.enter_context(save.store.hold(lock_file(save_id), shared=False)):
            return save_id
    raise StoreError(
        f"{save.store}: cannot create a lock file after {LOCK_ATTEMPTS} attempts; check that the "
        "place is writable and that no other process removes files there"
    )


def _write(planned: PlannedSave, group: Group, recorder: Recorder) -> FileEntry | None:
    """Write this rank's file, wait for all ranks, and return the file's entry, if there is one.

    If any rank fails, all ranks remove their files: nothing can have been published.
    """
    store = planned.save.store

    def write() -> FileEntry | None:
        with recorder.stage("write"):
            source = planned.source()
            if source is None:
                return None
            crc = write_data_file(store, planned.key, source, planned.save.arena)
            return planned.entry(source, crc)

    try:
        return run_on_all(group, "writing a save", write)
    except LostRankError:
        raise
    except Exception:
        with suppress(OSError):
            store.delete(planned.key)
        raise


class _Totals(msgspec.Struct, array_like=True):
    bytes_stored: int
    bytes_held: int
    files: int


def _publish(
    planned: PlannedSave, entry: FileEntry | None, group: Group, recorder: Recorder
) -> _Totals:
    """Publish the manifest on rank 0: this commits the save.

    If this fails, or its outcome does not become known, the data files stay, since the manifest
    may exist. If it does not, the next save to this place removes them as leftovers.
    """

    def answer(said: list[bytes]) -> bytes:
        entries = [msgspec.msgpack.decode(each, type=FileEntry | None) for each in said]
        files = [each for each in entries if each is not None]
        with recorder.stage("publish"):
            _publish_manifest(planned, files)
        totals = planned.manifest_plan
        return msgspec.msgpack.encode(_Totals(totals.bytes_stored, totals.bytes_held, len(files)))

    reply = exchange(group, "publishing a save", lambda: msgspec.msgpack.encode(entry), answer)
    return msgspec.msgpack.decode(reply, type=_Totals)


def _publish_manifest(planned: PlannedSave, files: Sequence[FileEntry]) -> None:
    save, encoded = planned.save, planned.manifest(files)
    try:
        refuse_existing(save)
        save.store.publish(MANIFEST, encoded, replace=save.options.overwrite)
    except FileExistsError as error:
        for file in files:
            save.store.delete(file.name)
        raise _exists(save.store) from error
    if save.options.overwrite:
        collect_leftovers(save.store, own_lock=lock_file(planned.save_id))


def refuse_existing(save: Save) -> None:
    """Refuse to save to a place that has a checkpoint, unless `overwrite` is set.

    Raises:
        CheckpointExistsError: the place has a checkpoint.
    """
    if not save.options.overwrite and MANIFEST in save.store.list():
        raise _exists(save.store)


def refuse_if_full(store: Store, nbytes: int) -> None:
    """Refuse a save that does not fit into its storage, before anything is written.

    Raises:
        StoreError: fewer than `nbytes` bytes are free.
    """
    free = store.free_bytes() if isinstance(store, BoundedStore) else None
    if free is not None and free < nbytes:
        raise StoreError(
            f"{store}: no room for this save: its tensors need {nbytes:,} bytes, but only {free:,} "
            "are free; free some space or keep fewer checkpoints"
        )


def _exists(store: Store) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{store}: a committed checkpoint already exists; "
        "pass overwrite=True to replace it, or save elsewhere"
    )


def _discard_lock(store: Store, save_id: str) -> None:
    with suppress(OSError):
        store.delete(lock_file(save_id))
        if not store.list():
            store.remove()
