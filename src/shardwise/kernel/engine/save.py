"""Save on all ranks: plan the save together, write a file on each rank, publish on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from shardwise.kernel.engine.checkpoint_directory import CheckpointDirectory
from shardwise.kernel.engine.group import Group, TimedGroup
from shardwise.kernel.engine.planning import Destination, PlannedSave, SaveRequest, plan_together
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.engine.write_file import FileSource, write_data_file
from shardwise.kernel.errors import StoreError, storage_errors
from shardwise.kernel.events import OperationRecord, Recorder, format_bytes, format_count
from shardwise.kernel.manifest.data_files import FileEntry, FileTable
from shardwise.kernel.manifest.manifest import MANIFEST
from shardwise.kernel.plan.save import PlanCache
from shardwise.kernel.plugins import load_built_in
from shardwise.kernel.store import abort_uploads, count_retries

_Storage = TypeVar("_Storage", bound="Storage")
LOCK_ATTEMPTS = 8  # another process may remove a new lock file before this one has locked it


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """The result of a save. Bytes and seconds refer to this rank, unless noted otherwise.

    Attributes:
        path: the path of the checkpoint.
        step: the step of the checkpoint; None if it has none.
        bytes_total: the tensor bytes of the whole checkpoint, with each element counted once.
        bytes_written: the size of this rank's file.
        bytes_deduplicated: the bytes of replicas on all ranks that were not written again.
        files: the number of data files of the whole checkpoint.
        plan_cached: whether the plan of an earlier save was reused.
        bytes_communicated: the bytes that this rank sent to other ranks.
        seconds: the duration of each stage (describe, plan, check_replicas, write,
            publish), and `total`.
        record: the events of the stages, and the waits for other ranks.
        why_bound: why the tensors were looked for in all objects of the state; "" if a
            `Checkpointer` knew them from its last save.
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
    record: OperationRecord = field(default_factory=OperationRecord)
    why_bound: str = ""

    def __repr__(self) -> str:
        return (
            f"<SaveReport of step {self.step}: {format_bytes(self.bytes_total)} "
            f"in {self.seconds['total']:.2f} s>"
        )

    def __str__(self) -> str:
        step = "" if self.step is None else f" step {self.step}"
        files = format_count(self.files, "file")
        return (
            f"saved{step} to {self.path}: {format_bytes(self.bytes_total)} in {files}; this rank "
            f"wrote {format_bytes(self.bytes_written)} with headers, in "
            f"{self.seconds['total']:.2f} s"
        )


def save_together(
    make_request: Callable[[], SaveRequest],
    destination: Destination,
    group: Group,
    plan_cache: PlanCache,
    recorder: Recorder,
) -> SaveReport:
    """Save the states of all ranks as one checkpoint. All ranks call this function together.

    Args:
        make_request: makes this rank's request. A failure on one rank is raised on all ranks.
        destination: where the save goes.
        group: the ranks.
        plan_cache: plans of earlier saves, which this save reads and updates.
        recorder: gets an event for each stage.

    Raises:
        ShardwiseError: as for `shardwise.save`, on every rank. Nothing is published.
    """
    group = TimedGroup(group, recorder)
    planned = plan_together(make_request, destination, group, plan_cache, recorder)
    return complete_save(planned, destination, group, recorder, _check_replicas)


def complete_save(
    planned: PlannedSave,
    destination: Destination,
    group: TimedGroup,
    recorder: Recorder,
    check: Callable[[PlannedSave, Group], object],
) -> SaveReport:
    """Compare replicas, if a rank has asked for it, then move the bytes. A collective.

    Args:
        planned: the result of `plan_together`.
        destination, group, recorder: as for `save_together`.
        check: compares the replicas.

    Raises:
        ShardwiseError: as for `shardwise.save`, on every rank. Nothing is published.
    """
    recorder.axes, recorder.save_id = dict(planned.axes), planned.save_id
    if planned.checks_replicas:
        with recorder.stage("check_replicas"):
            check(planned, group)
    path, written = destination.move(planned, group, recorder)
    plan = planned.plan
    return SaveReport(
        path=path,
        step=planned.request.step,
        bytes_total=plan.bytes_stored,
        bytes_written=written,
        bytes_deduplicated=plan.bytes_held - plan.bytes_stored,
        files=len(plan.writers),
        plan_cached=planned.cached,
        why_bound=planned.request.state.why_bound,
        bytes_communicated=group.bytes_sent_here,
        seconds=recorder.seconds(),
        record=recorder.record(),
    )


def _check_replicas(planned: PlannedSave, group: Group) -> None:
    load_built_in("shardwise.checks", "replicas")(planned, group)  # few saves need it


def prepare_place(request: SaveRequest, cleanup: ExitStack) -> None:
    """Lock the place of a save until `cleanup` closes.

    Raises:
        CheckpointExistsError: the place has a checkpoint, and `overwrite` is not set; or another
            job saves to the root of the place.
        StoreError: the place cannot be locked.
    """
    store, directory = request.store, CheckpointDirectory(request.store)
    with storage_errors(store):
        request.check_place()
        request.claim_root()
        directory.remove_leftovers()
        abort_uploads(store)
        cleanup.callback(directory.try_to_delete)
        is_locked = cleanup.enter_context(directory.lock(request.save_id, range(LOCK_ATTEMPTS)))
    if not is_locked:
        raise StoreError(
            f"{store}: cannot create a lock file after {LOCK_ATTEMPTS} attempts; check that the "
            "place is writable and that no other process removes files there"
        )


class Storage:
    """A store as the destination of one save. It is a context manager, which releases the place."""

    def __init__(self) -> None:
        self._cleanup = ExitStack()

    def __enter__(self: _Storage) -> _Storage:
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def offer(self, request: SaveRequest) -> bytes:
        """Return nothing: a store has no conditions."""
        return b""

    def lock(self, request: SaveRequest) -> None:
        """Lock the place of the save; see `prepare_place`."""
        prepare_place(request, self._cleanup)

    def move(self, planned: PlannedSave, group: Group, recorder: Recorder) -> tuple[str, int]:
        """Write this rank's file, and publish the checkpoint; see `Destination.move`."""
        return str(planned.request.store), _write_and_publish(planned, group, recorder)


def _write_and_publish(planned: PlannedSave, group: Group, recorder: Recorder) -> int:
    """Write this rank's file. When all ranks have written theirs, rank 0 publishes the manifest.

    If any rank cannot write, all ranks remove their files, because no manifest can exist. If a rank
    is lost, or the publication fails, the files stay, because the manifest may exist. If it does
    not, the next save to this place removes them.

    Returns:
        The size of this rank's file.
    """
    request = planned.request
    source: FileSource | None = None
    own: FileEntry | None = None
    is_written = False

    def publish(files: _Files) -> None:
        with recorder.stage("publish") as stage, storage_errors(request.store):
            retries = count_retries(request.store)
            table = _table_of(files, planned.save_id)
            manifest, directory = planned.manifest(table), CheckpointDirectory(request.store)
            if not planned.cached:
                directory.check_readable(manifest)
            if request.claim is not None:
                request.claim.require()
            directory.commit(planned.save_id, manifest, table.names, overwrite=request.overwrite)
            stage.bytes, stage.file = len(manifest), MANIFEST
            stage.retries = count_retries(request.store) - retries

    all_ranks = Round(group, "writing a save")
    try:
        with all_ranks:
            with recorder.stage("write") as stage, storage_errors(request.store):
                source, retries = planned.source(), count_retries(request.store)
                if source is not None:
                    own = write_data_file(request.store, source, request.arena)
                    stage.bytes, stage.file = own.size, own.name
                stage.retries = count_retries(request.store) - retries
            is_written = True
            entry = {} if own is None else _entry_of(own)
            all_ranks.all_reduce(entry, _Files, _unite_files, publish, type(None))
    except Exception:
        if source is not None and (all_ranks.failed or not is_written):
            with suppress(OSError):
                request.store.delete(source.entry.name)
        raise
    return own.size if own else 0


_Files = dict[bytes, bytes]
"""Data files: by the sizes of their parts, as four little-endian int64, the rank and the CRC-32 of
the checksums of each file, as two uint32."""


def _entry_of(file: FileEntry) -> _Files:
    sizes = np.array([file.size, file.data_at, file.objects_at, file.checksums_at], "<i8")
    return {sizes.tobytes(): np.array([file.rank, file.checksums_crc32], "<u4").tobytes()}


def _unite_files(messages: Sequence[_Files]) -> _Files:
    parts: dict[bytes, list[bytes]] = {}
    for message in messages:
        for sizes, files in message.items():
            parts.setdefault(sizes, []).append(files)
    return {sizes: b"".join(files) for sizes, files in parts.items()}


def _table_of(files: _Files, save_id: str) -> FileTable:
    tables = [np.zeros((0, 6), np.int64)]
    for sizes, data in files.items():
        rows = np.frombuffer(data, "<u4").reshape(-1, 2).astype(np.int64)
        repeated = np.tile(np.frombuffer(sizes, "<i8"), (len(rows), 1))
        tables.append(np.hstack([rows[:, :1], repeated, rows[:, 1:]]))
    numbers = np.concatenate(tables)
    return FileTable(save_id, numbers[np.argsort(numbers[:, 0])])
