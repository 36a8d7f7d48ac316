"""Save on all ranks: plan the save together, write a file on each rank, publish on rank 0."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
import torch

from shardwise.boxes import Box
from shardwise.engine.commit import commit_save, lock_save, remove_leftovers
from shardwise.engine.group import Group
from shardwise.engine.planning import PlannedSave, SaveRequest, plan_together
from shardwise.engine.replica_watch import ReplicaWatch
from shardwise.engine.rounds import Round, concatenate
from shardwise.engine.write_file import write_data_file
from shardwise.errors import LostRankError, MismatchError, StoreError
from shardwise.events import Recorder, format_bytes, format_count
from shardwise.manifest.checksums import crc32
from shardwise.manifest.manifest import FileEntry
from shardwise.plan.save import PlanCache
from shardwise.state.local_state import view_for_numpy
from shardwise.store import Store, abort_uploads

LOCK_ATTEMPTS = 8  # another process may remove a new lock file before this one has locked it
_Row = tuple[int, str, tuple[int, ...], tuple[int, ...], int]
"""A rank, and the tensor name, offset, shape and checksum of a box that it holds."""


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
    sent_before = group.bytes_sent
    planned = plan_together(prepare, group, plan_cache, recorder, watch)
    request, plan = planned.request, planned.plan
    with ExitStack() as lock:
        with Round(group, "locking the place of a save", rank0_only=True):
            if group.rank == 0:
                prepare_place(request, planned.save_id, plan.bytes_stored, lock)
        if request.check_replicas:
            with recorder.stage("check_replicas"):
                check_replicas(planned, group)
        if watch is not None:
            planned.choose_sample(watch)
        written, files = _write(planned, group, recorder)
        # If the publication fails or its outcome is unknown, the data files stay, because the
        # manifest may exist. If the manifest does not exist, the next save here removes the files.
        with Round(group, "publishing a save", rank0_only=True):
            if group.rank == 0:
                with recorder.stage("publish"):
                    names, manifest = [each.name for each in files], planned.manifest(files)
                    overwrite = request.overwrite
                    commit_save(
                        request.store, planned.save_id, manifest, names, overwrite=overwrite
                    )
    return SaveReport(
        path=str(request.store),
        step=request.step,
        bytes_total=plan.bytes_stored,
        bytes_written=written,
        bytes_deduplicated=plan.bytes_held - plan.bytes_stored,
        files=len(files),
        plan_cached=planned.cached,
        bytes_communicated=group.bytes_sent - sent_before,
        seconds=recorder.seconds(),
    )


def check_replicas(planned: PlannedSave, group: Group) -> None:
    """Compare the boxes that several ranks hold. Every rank takes the checksums of all its boxes.

    Raises:
        MismatchError: boxes differ; the same error on all ranks, which lists all such boxes.
    """
    with Round(group, "comparing replicas") as all_ranks:
        description = planned.plan.description
        names, fragments = description.structure.names, planned.fragments
        rows: list[_Row] = [
            (
                group.rank,
                names[tensor],
                fragment.box.offset,
                fragment.box.shape,
                _checksum(fragment.data),
            )
            for tensor, fragment in zip(description.tensor.tolist(), fragments, strict=True)
        ]
        all_ranks.all_reduce(
            rows,
            list[_Row],
            concatenate,
            _compare_checksums,
            type(None),
        )


def _checksum(data: torch.Tensor) -> int:
    array = view_for_numpy(data.cpu()).numpy()
    return crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _compare_checksums(rows: list[_Row]) -> None:
    first_seen: dict[tuple[str, Box], tuple[int, int]] = {}
    problems = []
    for rank, name, offset, shape, checksum in sorted(rows, key=itemgetter(0)):
        box = Box(offset, shape)
        first_rank, first_checksum = first_seen.setdefault((name, box), (rank, checksum))
        if first_checksum != checksum:
            problems.append(f"{name}{box}: rank {first_rank} and rank {rank} differ")
    if problems:
        raise MismatchError(
            "tensors that several ranks hold differ; make them equal before saving (for example, "
            "broadcast them from rank 0), or save without check_replicas:",
            problems,
        )


def prepare_place(request: SaveRequest, save_id: str, nbytes: int, cleanup: ExitStack) -> None:
    """Lock the place of a save until `cleanup` closes.

    Raises:
        CheckpointExistsError: the place has a checkpoint, and `overwrite` is not set.
        StoreError, OSError: the place has fewer than `nbytes` bytes free, or cannot be locked.
    """
    store = request.store
    request.check_place(nbytes)
    remove_leftovers(store)
    abort_uploads(store)
    cleanup.callback(_remove_if_empty, store)
    if not cleanup.enter_context(lock_save(store, save_id, range(LOCK_ATTEMPTS))):
        raise StoreError(
            f"{store}: cannot create a lock file after {LOCK_ATTEMPTS} attempts; check that the "
            "place is writable and that no other process removes files there"
        )


def _write(planned: PlannedSave, group: Group, recorder: Recorder) -> tuple[int, list[FileEntry]]:
    """Write this rank's file, and wait until all ranks have written theirs.

    If any rank fails, all ranks remove their files, because no manifest can exist yet. If a rank is
    lost, the next save to this place removes them.

    Returns:
        The size of this rank's file, and the entries of the files of all ranks.
    """
    store = planned.request.store
    source = own = None
    try:
        with Round(group, "writing a save") as all_ranks:
            if planned.sample is not None:
                with recorder.stage("compare_replicas", planned.sample.nbytes):
                    planned.sample.checksum_state()
            with recorder.stage("write"):
                source = planned.source()
                if source is not None:
                    own = write_data_file(store, source, planned.request.arena)
            entries = all_ranks.all_gather(own, FileEntry | None)
    except LostRankError:
        raise
    except Exception:
        if source is not None:
            with suppress(OSError):
                store.delete(source.entry.name)
        raise
    return own.size if own else 0, [entry for entry in entries if entry is not None]


def _remove_if_empty(store: Store) -> None:
    with suppress(OSError):
        if not store.list():
            store.delete("")
