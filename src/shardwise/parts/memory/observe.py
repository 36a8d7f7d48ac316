"""Reads the directories and records of a node into the values of `view.py`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from shardwise.kernel.errors import StoreError
from shardwise.parts.memory import records
from shardwise.parts.memory.home import PERSIST_MARKER, Home, Run, SnapshotDirectory
from shardwise.parts.memory.rank_liveness import has_trainers, is_rank_alive, lost_ranks
from shardwise.parts.memory.records import PENDING, PendingManifest, RankPart, SaveState
from shardwise.parts.memory.states import RecordCache, read_state
from shardwise.parts.memory.view import (
    RootView,
    RunView,
    SnapshotView,
    StageState,
    on_this_node,
)

T = TypeVar("T")
Requested = Callable[[SnapshotDirectory], Collection[str]]
"""Returns the stages of a save that other nodes have requested from this node."""


class Observer:
    """Reads the state of a node. Threads may share it.

    Args:
        home: the home of the node.
        node: the node's name; "" if the views are not used to decide actions.
        clock: a monotonic clock, in seconds.
        requested: the requests of other nodes, if this is the observer of an agent.
    """

    def __init__(
        self,
        home: Home,
        node: str = "",
        clock: Callable[[], float] = time.monotonic,
        requested: Requested = lambda place: (),
    ) -> None:
        self._home = home
        self._node = node
        self.clock = clock
        self._requested = requested
        self._lock = threading.Lock()
        self._cache = RecordCache()
        self._unattended_since: dict[str, float] = {}
        self._roots: dict[str, RootView] = {}

    def runs(self) -> list[Run]:
        """Return the runs of the node. Forget other runs, and records that were not read again."""
        with self._lock:
            runs = list(dict.fromkeys((*self._home.runs(), *self._home.runs_with_tasks())))
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
            places = run.snapshots(abandoned=True)
            snapshots = read_snapshots(places, self._node, self._cache, self._requested)
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
                task_changed_at=_changed_at(run.task_path),
                has_freed=bool(run.freed_directories()),
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
    snapshots = read_snapshots(run.snapshots(), "", cache)
    cache.forget_unused()
    return RunView(run=run, snapshots=snapshots)


def read_snapshots(
    places: Iterable[SnapshotDirectory],
    node: str = "",
    cache: RecordCache | None = None,
    requested: Requested = lambda place: (),
) -> tuple[SnapshotView, ...]:
    """Read snapshots of a run, oldest first."""
    cache = cache or RecordCache()
    found = (read_snapshot(place, node, cache, requested(place)) for place in places)
    return tuple(sorted(found, key=lambda each: each.age_key))


def read_snapshot(
    place: SnapshotDirectory,
    node: str = "",
    cache: RecordCache | None = None,
    requested: Collection[str] = (),
) -> SnapshotView:
    """Read one snapshot.

    Args:
        node: the name of this node.
        requested: the stages that other nodes have requested from this node.
    """
    names = frozenset(place.list_names())
    reader = _SnapshotReader(place, node, cache or RecordCache(), names, requested)
    return reader.read_snapshot()


def copying_ranks(
    place: SnapshotDirectory, parts: Iterable[RankPart], names: Collection[str]
) -> dict[int, bool]:
    """Return the ranks that have not staged their file yet, and whether each of them is alive.

    Args:
        parts: the records of the ranks of this node.
        names: the names of the files of the snapshot, listed before.
    """
    files = [part.file for part in parts if part.file is not None and not part.failure]
    copying = [file for file in files if file.name not in names]
    # Look for the process first: if the rank then ends, it has already renamed its file.
    alive = {file: is_rank_alive(place.run, file.rank) for file in copying}
    return {
        file.rank: is_alive
        for file, is_alive in alive.items()
        if is_alive or not place.has(file.name)
    }


@dataclass(frozen=True, slots=True)
class _SnapshotReader:
    """Reads one snapshot. `names` are the names of its files."""

    place: SnapshotDirectory
    node: str
    cache: RecordCache
    names: frozenset[str]
    requested: Collection[str]

    def read_snapshot(self) -> SnapshotView:
        ranks = sorted(records.rank_in_name(n) for n in self.names if records.is_rank_record(n))
        found = (self._read(records.rank_record(rank), RankPart) for rank in ranks)
        parts = [part for part in found if part is not None]
        pending = self._read(PENDING, PendingManifest)
        state = read_state(self.place, self.cache)
        files = [part.file.name for part in parts if part.file is not None]
        staged = [name for name in files if name in self.names]
        times = [self._modified_at(name) for name in staged]
        unsealed = tuple(name for name in staged if name not in state.entries)
        leads = self._leads(pending, parts)
        is_copying = any(copying_ranks(self.place, parts, self.names).values())
        if "commit" in state.outcomes:
            is_copying = False
        seal = StageState.DONE if staged else StageState.NOT_REQUESTED
        if unsealed:
            seal = StageState.WAITING if is_copying else StageState.RUNNING
        called = state.rescue or state.rescue_sent or "persist" in state.outcomes
        staged_at = max((each for each in times if each is not None), default=None)
        return SnapshotView(
            place=self.place,
            names=self.names,
            parts=tuple(parts),
            unsealed=unsealed,
            pending=pending,
            leads=leads,
            is_unreadable=len(parts) < len(ranks),
            is_copying=is_copying,
            state=state,
            stages={
                **self._stages(parts, pending, state, leads=leads, is_copying=is_copying),
                **{on_this_node(stage): StageState.RUNNING for stage in self.requested},
                "seal": seal,
                "rescue": StageState.DONE if called else StageState.NOT_REQUESTED,
            },
            staged_at=staged_at,
            seconds_staged=0.0 if staged_at is None else time.time() - staged_at,
        )

    def _leads(self, pending: PendingManifest | None, parts: Sequence[RankPart]) -> bool:
        """Return whether this node leads the save, also if its pending manifest is damaged."""
        if pending is not None:
            return pending.leader == self.node
        return PENDING in self.names and not any(part.above for part in parts)

    def _stages(
        self,
        parts: Sequence[RankPart],
        pending: PendingManifest | None,
        state: SaveState,
        *,
        leads: bool,
        is_copying: bool,
    ) -> dict[str, StageState]:
        """Return the stages of all nodes."""
        requested = {stage for each in parts for stage in each.stages}
        is_last = PERSIST_MARKER in self.names
        durable = is_last or (pending is not None and pending.durable)
        waiting = requested | ({"persist"} if is_last else set())
        waiting |= {"commit", "protect"} if pending is not None else set()
        commit = state.outcomes.get("commit")
        is_committed = commit is not None and not commit.failure
        if pending is None and leads:  # it is damaged, so this node ends the stages
            running = {"commit", *requested}
        else:
            running = {"commit"} if leads and not is_copying else set()
            running |= {"protect"} if leads and is_committed else set()
            running |= {"persist"} if (leads and durable) or (pending and state.rescue) else set()

        def state_of(stage: str) -> StageState:
            outcome = state.outcomes.get(stage)
            if outcome is not None:
                return StageState.FAILED if outcome.failure else StageState.DONE
            if stage in running:
                return StageState.RUNNING
            if stage in waiting and commit is not None and commit.failure:
                return StageState.FAILED  # it never begins
            return StageState.WAITING if stage in waiting else StageState.NOT_REQUESTED

        return {stage: state_of(stage) for stage in (*records.STAGES, records.REMOVE_OLD)}

    def _read(self, name: str, record_type: type[T]) -> T | None:
        found = self.cache.read(self.place.path / name, record_type) if name in self.names else None
        if isinstance(found, StoreError):
            self.place.log_damage(name, found)
            return None
        return found

    def _modified_at(self, name: str) -> float | None:
        with suppress(FileNotFoundError):
            return (self.place.path / name).lstat().st_mtime
        return None
