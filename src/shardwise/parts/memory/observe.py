"""Reads the directories and records of a node into the values of `view.py`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from shardwise.kernel.errors import FormatError, StoreError
from shardwise.kernel.manifest.manifest import decode_manifest
from shardwise.parts.memory import records
from shardwise.parts.memory.files import decode_record, read_record
from shardwise.parts.memory.home import OUTCOMES_DIRECTORY, Home, Run, SnapshotDirectory
from shardwise.parts.memory.node_tree import tree_of_run
from shardwise.parts.memory.rank_liveness import copying_ranks, has_trainers, lost_ranks
from shardwise.parts.memory.records import (
    PendingManifest,
    Retry,
    StagedFile,
    StageOutcome,
    SubtreeReply,
)
from shardwise.parts.memory.view import (
    RootView,
    RunView,
    SaveView,
    SnapshotView,
    Stage,
    StageState,
    tell,
)

T = TypeVar("T")


def _decode_save_id(data: bytes, record_type: type[str], label: object) -> str:
    """Return the save id of a manifest.

    Raises:
        StoreError: the manifest is damaged.
    """
    try:
        return decode_manifest(data).save_id
    except FormatError as error:
        raise StoreError(f"{label} is damaged: {error}") from error


class RecordCache:
    """Reads each record once, and again only after the file was replaced.

    A replaced file has another inode, modification time or size.

    Args:
        logs: whether to log damaged records. A node logs each of them once.
    """

    def __init__(self, *, logs: bool = True) -> None:
        self.logs = logs
        self._records: dict[tuple[Path, type], tuple[tuple[int, int, int], object]] = {}
        self._used: set[tuple[Path, type]] = set()

    def read(
        self,
        path: Path,
        record_type: type[T],
        decode: Callable[[bytes, type[T], object], T] = decode_record,
    ) -> tuple[T | StoreError, float] | None:
        """Return a record, or the error if it is damaged; and its modification time in seconds.

        Return None if the file does not exist. The field `manifest` of a `PendingManifest` is
        emptied, because its text can be large.

        Args:
            decode: decodes the file, like `decode_record`.
        """
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return None
        key, version = (path, record_type), (status.st_ino, status.st_mtime_ns, status.st_size)
        self._used.add(key)
        known = self._records.get(key)
        if known is None or known[0] != version:
            try:
                record: T | StoreError | None = read_record(path, record_type, decode)
            except StoreError as error:
                record = error
            if record is None:
                return None
            if isinstance(record, PendingManifest):
                record = msgspec.structs.replace(record, manifest="")
            known = self._records[key] = version, record
        return known[1], status.st_mtime  # type: ignore[return-value]

    def read_save_id(self, manifest: Path) -> str | None:
        """Return the save id of a manifest; "" if it is damaged, None if it does not exist."""
        found = self.read(manifest, str, _decode_save_id)
        if found is None:
            return None
        return "" if isinstance(found[0], StoreError) else found[0]

    def forget_unused(self) -> None:
        """Remove records that were not read since the last call from the cache."""
        self._records = {key: each for key, each in self._records.items() if key in self._used}
        self._used = set()


class Observer:
    """Reads the state of a node. Threads may share it.

    Args:
        home: the home of the node.
        node: the node's name; "" if the views are not used to decide actions.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self, home: Home, node: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._home = home
        self._node = node
        self.clock = clock
        self._lock = threading.Lock()
        self._cache = RecordCache()
        self._unattended_since: dict[str, float] = {}
        self._roots: dict[str, RootView] = {}

    def runs(self) -> list[Run]:
        """Return the runs of the node. Forget other runs, and records that were not read again."""
        with self._lock:
            runs = list(dict.fromkeys((*self._home.runs(), *self._home.mirrored_runs())))
            self._cache.forget_unused()
            names = {run.name for run in runs}
            for known in (self._unattended_since, self._roots):
                for name in known.keys() - names:
                    del known[name]
            return runs

    def run(self, run: Run) -> RunView:
        """Read one run."""
        with self._lock:
            now = self.clock()
            is_attended = has_trainers(run)
            snapshots = read_snapshots(run, self._node, self._cache)
            unattended = self._unattended_since
            if is_attended:
                unattended.pop(run.name, None)
                self._roots.pop(run.name, None)
            return RunView(
                run=run,
                snapshots=snapshots,
                lost_ranks=tuple(lost_ranks(run)),
                unattended_since=None if is_attended else unattended.setdefault(run.name, now),
                root=self._roots.get(run.name),
                mirror_changed_at=_changed_at(run.mirror_task_path),
            )

    def set_root(self, run: Run, root: RootView) -> None:
        """Store what the root of a run contains, for the next views."""
        with self._lock:
            self._roots[run.name] = root


def _changed_at(path: Path) -> int | None:
    with suppress(FileNotFoundError):
        return path.lstat().st_mtime_ns
    return None


def read_run_view(run: Run, cache: RecordCache | None = None) -> RunView:
    """Read the snapshots of a run. Whether its trainers are alive is left out.

    Args:
        cache: a cache for this run alone, if it is read repeatedly.
    """
    cache = cache or RecordCache()
    snapshots = read_snapshots(run, "", cache)
    cache.forget_unused()
    return RunView(run=run, snapshots=snapshots)


def read_snapshots(
    run: Run, node: str = "", cache: RecordCache | None = None
) -> tuple[SnapshotView, ...]:
    """Read the snapshots of a run, oldest first."""
    cache = cache or RecordCache()
    return tuple(read_snapshot(place, node, cache) for place in run.snapshots())


def read_snapshot(
    place: SnapshotDirectory, node: str = "", cache: RecordCache | None = None
) -> SnapshotView:
    """Read one snapshot.

    The order matters: list the files first, then read the manifest. Otherwise a save that is
    committed in between would look as if another save had replaced it.

    Args:
        node: the name of this node. It leads the saves whose pending manifest names it.
    """
    names = frozenset(place.list_names(""))
    return _SnapshotReader(place, node, cache or RecordCache(), names).read_snapshot()


def read_outcome(place: SnapshotDirectory, stage: str, save_id: str) -> StageOutcome | None:
    """Return the outcome of a stage; None if the stage has not ended.

    The record remains after the snapshot was freed. This reads no other record, so that polling is
    cheap. A damaged record counts as a failure.
    """
    name = records.save_record(stage, save_id, "all")
    try:
        outcome = read_record(place.path / name, StageOutcome)
        return outcome or read_record(place.run.path / OUTCOMES_DIRECTORY / name, StageOutcome)
    except StoreError as error:
        place.log_damage(name, error)
        return _damaged_outcome(stage, save_id, error)


def read_stage_of_node(
    place: SnapshotDirectory, stage: str, save_id: str
) -> tuple[StageOutcome | None, float | None]:
    """Return how a stage ended on this node, or else for the cluster.

    Returns:
        The outcome, and when it was recorded, in seconds since 1970; None and None if there is no
        record any more.
    """
    done, every = (place.path / records.save_record(stage, save_id, k) for k in ("done", "all"))
    with suppress(OSError):
        reply = read_record(done, SubtreeReply)
        if reply is not None and reply.own is not None:
            return reply.own, reply.own_ended_at
    with suppress(OSError):
        if outcome := read_record(every, StageOutcome):
            return outcome, every.stat().st_mtime
    return None, None


def why_retrying(place: SnapshotDirectory, stage: str, save_id: str) -> str:
    """Return why the agent of this node tries a stage again, or "" if it does not."""
    with suppress(StoreError):
        retry = read_record(place.path / records.save_record(stage, save_id, "retry"), Retry)
        return "" if retry is None else retry.describe(time.time())
    return ""


def _damaged_outcome(stage: str, save_id: str, error: StoreError) -> StageOutcome:
    failure = f"the record of the outcome is damaged: {error}"
    return StageOutcome(save_id=save_id, stage=stage, failure=failure)


@dataclass(frozen=True, slots=True)
class _SnapshotReader:
    """Reads one snapshot. `names` are the names of its files."""

    place: SnapshotDirectory
    node: str
    cache: RecordCache
    names: frozenset[str]

    def read_snapshot(self) -> SnapshotView:
        ids = {records.save_id_in_name(name) for name in self.names} - {""}
        committed_save = self.cache.read_save_id(self.place.manifest_path)
        ids |= {committed_save} if committed_save else set()
        staged = (name for name in self.names if name.endswith(records.STAGED_SUFFIX))
        times = map(self._modified_at, staged)
        return SnapshotView(
            place=self.place,
            names=self.names,
            saves={each: self._read_save(each) for each in sorted(ids)},
            committed_save=committed_save,
            staged_at=max((each for each in times if each is not None), default=None),
        )

    def _read_save(self, save_id: str) -> SaveView:
        staged_names = [
            name
            for name in sorted(self.names)
            if name.endswith(records.STAGED_SUFFIX) and records.save_id_in_name(name) == save_id
        ]
        found = (self._read(name, StagedFile) for name in staged_names)
        staged = tuple(each for each in found if each and each.file.name in self.names)
        files = map(records.data_file_of, staged_names)
        unsealed = tuple(name for name in files if self._is_unsealed(name))
        own = self._read_pending(records.save_record("pending", save_id))
        pending = own or self._read_pending(records.save_record("pending", save_id, "copy"))
        epoch = next((each.epoch for each in staged), None) if pending is None else pending.epoch
        return SaveView(
            save_id=save_id,
            staged=staged,
            unsealed=unsealed,
            has_staged=bool(staged_names),
            pending=pending,
            has_pending_manifest=own is not None,
            epoch=epoch,
            stages={
                **self._read_cluster_stages(save_id, staged, pending, own),
                "seal": Stage(self._seal_state(save_id, staged, unsealed)),
                "collect": Stage(self._state_on_this_node("commit", save_id)),
                "protect_others": Stage(self._state_on_this_node("protect", save_id)),
                "copy": Stage(self._state_on_this_node("persist", save_id)),
                "rescue": Stage(self._rescue_state(save_id)),
                **{
                    tell(stage): Stage(self._tell_state(stage, save_id, pending))
                    for stage in records.TOLD_STAGES
                },
            },
        )

    def _has(self, stage: str, save_id: str, kind: records.RecordKind = "") -> bool:
        return records.save_record(stage, save_id, kind) in self.names

    def _is_unsealed(self, data_file: str) -> bool:
        """Return whether a data file exists, and still has to be sealed."""
        answers = (records.file_record(data_file, kind) for kind in ("entry", "failed"))
        return data_file in self.names and not any(each in self.names for each in answers)

    def _read_cluster_stages(
        self,
        save_id: str,
        staged: tuple[StagedFile, ...],
        pending: PendingManifest | None,
        own: PendingManifest | None,
    ) -> dict[str, Stage]:
        """Return the stages that have an outcome for the cluster, or will have one.

        Args:
            pending: the pending manifest, or the copy of that of another node.
            own: the pending manifest, if this node has it itself.
        """
        requested = {stage for each in staged for stage in each.stages}
        outcomes = {stage: self._read_ended_stage(stage, save_id) for stage in records.STAGES}
        commit, is_rescue = outcomes["commit"], self._has("rescue", save_id)
        leads = own is not None and own.leader == self.node
        is_committed = commit is not None and commit.state is StageState.DONE
        persists = is_rescue if own is None else leads and (own.durable or is_rescue)
        running = {
            "commit": leads and not self._is_copying(save_id),
            "protect": leads and is_committed,
            "persist": pending is not None and persists,
            records.REMOVE_OLD: self._has(records.REMOVE_OLD, save_id),
        }
        waiting = requested | ({"commit", "protect"} if pending is not None else set())
        waiting |= {"persist"} if is_rescue else set()
        if self._has("pending", save_id) and own is None:
            # It is damaged. Only this node has the record, so only this node can end the stages.
            running |= dict.fromkeys(("commit", *requested), True)

        def state_of(stage: str) -> StageState:
            if running[stage]:
                return StageState.RUNNING
            return StageState.WAITING if stage in waiting else StageState.NOT_REQUESTED

        return {stage: outcomes[stage] or Stage(state_of(stage)) for stage in running}

    def _seal_state(
        self, save_id: str, staged: tuple[StagedFile, ...], unsealed: tuple[str, ...]
    ) -> StageState:
        if not unsealed:
            return StageState.DONE if staged else StageState.NOT_REQUESTED
        return StageState.WAITING if self._is_copying(save_id) else StageState.RUNNING

    def _state_on_this_node(self, stage: str, save_id: str) -> StageState:
        """Return the state of the part of a stage that a leader requested from this node."""
        if not self._has(stage, save_id):
            return StageState.NOT_REQUESTED
        return StageState.DONE if self._has(stage, save_id, "done") else StageState.RUNNING

    def _tell_state(self, stage: str, save_id: str, pending: PendingManifest | None) -> StageState:
        """Return RUNNING if other nodes have to be told how a stage ended."""
        if pending is None or not self._has(stage, save_id, "all"):
            return StageState.NOT_REQUESTED
        if self._has(stage, save_id, "told"):
            return StageState.DONE
        has_children = bool(tree_of_run(pending).children(self.node))
        return StageState.RUNNING if has_children else StageState.NOT_REQUESTED

    def _rescue_state(self, save_id: str) -> StageState:
        """Return DONE if the rescue was requested, from this node or by this node."""
        is_done = any(self._has(each, save_id) for each in ("rescue", "called"))
        is_done = is_done or self._has("persist", save_id, "all")
        return StageState.DONE if is_done else StageState.NOT_REQUESTED

    def _is_copying(self, save_id: str) -> bool:
        """Return whether a live rank of this node is still copying data, before the commit ends."""
        if self._has("commit", save_id, "all"):
            return False
        return any(copying_ranks(self.place, save_id, self.names).values())

    def _read_ended_stage(self, stage: str, save_id: str) -> Stage | None:
        """Return a stage if it has ended, otherwise None."""
        name = records.save_record(stage, save_id, "all")
        if name not in self.names:
            return None
        found = self.cache.read(self.place.path / name, StageOutcome)
        if found is None:
            return None
        outcome, ended_at = found
        if isinstance(outcome, StoreError):
            self._log_damage(name, outcome)
            outcome = _damaged_outcome(stage, save_id, outcome)
        return Stage(StageState.FAILED if outcome.failure else StageState.DONE, outcome, ended_at)

    def _read_pending(self, name: str) -> PendingManifest | None:
        return self._read(name, PendingManifest) if name in self.names else None

    def _read(self, name: str, record_type: type[T]) -> T | None:
        found = self.cache.read(self.place.path / name, record_type)
        if found is None:
            return None
        record, _ = found
        if isinstance(record, StoreError):
            self._log_damage(name, record)
            return None
        return record

    def _log_damage(self, name: str, error: StoreError) -> None:
        if self.cache.logs:
            self.place.log_damage(name, error)

    def _modified_at(self, name: str) -> float | None:
        with suppress(FileNotFoundError):
            return (self.place.path / name).lstat().st_mtime
        return None
