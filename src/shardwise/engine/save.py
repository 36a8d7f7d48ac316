"""Save on all ranks: plan the save together, write a file on each rank, publish on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from shardwise.boxes import Box
from shardwise.engine.commit import check_readable, commit_save, lock_save, remove_leftovers
from shardwise.engine.group import Group, TimedGroup
from shardwise.engine.planning import PlannedSave, SaveRequest, plan_together
from shardwise.engine.replica_watch import ReplicaWatch
from shardwise.engine.rounds import Round, Values, combine_values, values_of
from shardwise.engine.shared_structures import digest_of
from shardwise.engine.write_file import FileSource, write_data_file
from shardwise.errors import MismatchError, StoreError, storage_errors
from shardwise.events import OperationRecord, Recorder, format_bytes, format_count
from shardwise.manifest.checksums import crc32
from shardwise.manifest.data_files import FileEntry, FileTable
from shardwise.manifest.manifest import MANIFEST
from shardwise.plan.save import PlanCache
from shardwise.state.local_state import view_for_numpy
from shardwise.store import Store, abort_uploads, count_retries

LOCK_ATTEMPTS = 8  # another process may remove a new lock file before this one has locked it
_REPLICAS_DIFFER = (
    "replicas of tensors differ; make them equal before saving (for example, broadcast them from "
    "rank 0), or save without check_replicas"
)
MOST_DIFFERING = 16
"""Of how many sets of ranks with different replicas an error lists the boxes."""


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
        seconds: the duration of each stage (describe, plan, check_replicas, compare_replicas,
            write, publish), and `total`.
        record: the events of the stages, and the waits for other ranks.
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


def save_all(
    prepare: Callable[[], SaveRequest],
    group: Group,
    plan_cache: PlanCache,
    recorder: Recorder,
    watch: ReplicaWatch | None = None,
) -> SaveReport:
    """Save the local states of all ranks as one checkpoint. All ranks call this function together.

    Args:
        prepare: makes this rank's request. A failure on one rank is raised on all ranks.
        group: the ranks.
        plan_cache: plans of earlier saves, which this save reads and updates.
        recorder: gets an event for each stage.
        watch: compares a part of the replicas at each save; None: no comparison.

    Raises:
        ShardwiseError: as for `shardwise.save`, on every rank. Nothing is published.
    """
    group = TimedGroup(group, recorder)
    sent_before = group.bytes_sent
    with ExitStack() as cleanup:
        lock = partial(prepare_place, cleanup=cleanup)
        planned = plan_together(prepare, group, plan_cache, recorder, watch, lock)
        request, plan = planned.request, planned.plan
        recorder.save_id = planned.save_id
        if request.check_replicas:
            with recorder.stage("check_replicas"):
                check_replicas(planned, group)
        if watch is not None:
            planned.choose_sample(watch)
        written = _write_and_publish(planned, group, recorder)
    return SaveReport(
        path=str(request.store),
        step=request.step,
        bytes_total=plan.bytes_stored,
        bytes_written=written,
        bytes_deduplicated=plan.bytes_held - plan.bytes_stored,
        files=len(plan.writers),
        plan_cached=planned.cached,
        bytes_communicated=group.bytes_sent - sent_before,
        seconds=recorder.seconds(),
        record=recorder.record(),
    )


def check_replicas(planned: PlannedSave, group: Group) -> None:
    """Compare the boxes that several ranks hold. Every rank takes the checksums of all of them.

    First, ranks compare a digest for each set of ranks that hold the same boxes, because equal
    digests become one on their way to rank 0. Only if some differ, they compare single boxes.

    Raises:
        MismatchError: boxes differ; the same error on all ranks, which lists such boxes.
    """
    plan, fragments = planned.plan, planned.fragments
    with Round(group, "comparing replicas") as all_ranks:
        _check_own_copies(planned)
        checksums = {
            each.set_id: [_checksum(fragments[i].data) for i in each.fragment.tolist()]
            for each in plan.replicas
        }
        digests = {
            str(set_id): digest_of(np.array(listed, "<u4").tobytes()).hex()
            for set_id, listed in checksums.items()
        }
        own = values_of(group.number, digests)
        count, differing = all_ranks.all_reduce(
            own, Values, combine_values, _find_differing, tuple[int, list[int]]
        )
    if not count:
        return
    names, tensors = plan.description.structure.names, plan.description.tensor
    with Round(group, "locating replicas that differ") as all_ranks:
        boxes = {
            f"{names[tensors[i]]}{fragments[i].box}": f"checksum {checksum:08x}"
            for each in plan.replicas
            if each.set_id in differing
            for i, checksum in zip(each.fragment.tolist(), checksums[each.set_id], strict=True)
        }
        rest = count - len(differing)
        all_ranks.require_equal_values(
            boxes,
            _REPLICAS_DIFFER
            + (f". Boxes of {rest} more sets of ranks differ, too" if rest else "")
            + ":",
        )


def _check_own_copies(planned: PlannedSave) -> None:
    """Compare the boxes that this rank holds several times, for example in `sw.Shards`."""
    description, fragments = planned.plan.description, planned.fragments
    first_copy: dict[tuple[int, Box], int] = {}
    problems = []
    for i, tensor in enumerate(description.tensor.tolist()):
        first = first_copy.setdefault((tensor, fragments[i].box), i)
        if first != i and _checksum(fragments[first].data) != _checksum(fragments[i].data):
            name = f"{description.structure.names[tensor]}{fragments[i].box}"
            problems.append(f"{name}: this rank holds two copies, which differ")
    if problems:
        raise MismatchError(_REPLICAS_DIFFER + ":", problems)


def _find_differing(digests: Values) -> tuple[int, list[int]]:
    """Return how many sets of ranks have different digests, and the first of these sets."""
    differing = sorted(int(set_id) for set_id, found in digests.items() if len(found) > 1)
    return len(differing), differing[:MOST_DIFFERING]


def _checksum(data: torch.Tensor) -> int:
    array = view_for_numpy(data.cpu()).numpy()
    return crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def prepare_place(request: SaveRequest, cleanup: ExitStack) -> None:
    """Lock the place of a save until `cleanup` closes.

    Raises:
        CheckpointExistsError: the place has a checkpoint, and `overwrite` is not set; or another
            job saves to the root of the place.
        StoreError: the place cannot be locked.
    """
    store = request.store
    with storage_errors(store):
        request.check_place()
        request.claim_root()
        remove_leftovers(store)
        abort_uploads(store)
        cleanup.callback(_remove_if_empty, store)
        is_locked = cleanup.enter_context(lock_save(store, request.save_id, range(LOCK_ATTEMPTS)))
    if not is_locked:
        raise StoreError(
            f"{store}: cannot create a lock file after {LOCK_ATTEMPTS} attempts; check that the "
            "place is writable and that no other process removes files there"
        )


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
            manifest, overwrite = planned.manifest(table), request.overwrite
            if not planned.cached:
                check_readable(manifest, request.store)
            if request.claim is not None:
                request.claim.require()
            commit_save(request.store, planned.save_id, manifest, table.names, overwrite=overwrite)
            stage.bytes, stage.file = len(manifest), MANIFEST
            stage.retries = count_retries(request.store) - retries

    all_ranks = Round(group, "writing a save")
    try:
        with all_ranks:
            if planned.sample is not None:
                with recorder.stage("compare_replicas", planned.sample.nbytes):
                    planned.sample.checksum_state()
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


def _remove_if_empty(store: Store) -> None:
    with suppress(OSError):
        if not store.list():
            store.delete("")
