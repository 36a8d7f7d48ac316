"""Reads what a node stores into the values of `view.py`."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from shardwise.errors import StoreError
from shardwise.manifest.names import MANIFEST
from shardwise.memory import records
from shardwise.memory.home import ENDED, Home, Place, Run, read_record
from shardwise.memory.ranks import has_trainers, is_present, lost_trainers
from shardwise.memory.records import Done, PendingManifest, Staged, rank_of
from shardwise.memory.view import (
    NodeView,
    RootView,
    RunView,
    SaveView,
    SnapshotView,
    Stage,
    State,
)

T = TypeVar("T")
_SAVE = re.compile(r"-([0-9a-f]{16})[.]")


class RecordCache:
    """Reads each version of a record once: a file that was replaced has another inode or time.

    Args:
        logs: whether to log damaged records, each once on a node.
    """

    def __init__(self, *, logs: bool = True) -> None:
        self.logs = logs
        self._known: dict[tuple[Path, object], tuple[tuple[int, int, int], object]] = {}
        self._used: set[tuple[Path, object]] = set()

    def read(self, path: Path, read: Callable[[Path], T]) -> tuple[T, float] | None:
        """Return the result of `read` for a file, and when the file was written; None without a
        file."""
        try:
            found = os.stat(path)
        except FileNotFoundError:
            return None
        key, version = (path, read), (found.st_ino, found.st_mtime_ns, found.st_size)
        self._used.add(key)
        known = self._known.get(key)
        if known is None or known[0] != version:
            try:
                known = self._known[key] = version, read(path)
            except FileNotFoundError:
                return None
        return known[1], found.st_mtime  # type: ignore[return-value]

    def forget_unused(self) -> None:
        """Forget records that were not read since the last call."""
        self._known = {key: each for key, each in self._known.items() if key in self._used}
        self._used = set()


class Observer:
    """Reads the state of a node. Threads may share it.

    Args:
        home: the home of the node.
        node: the node's name; "" if the caller decides no actions.
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
        self._unattended: dict[str, float] = {}
        self._vacant: dict[str, float] = {}
        self._roots: dict[str, RootView] = {}

    def node(self) -> NodeView:
        """Read the whole node."""
        with self._lock:
            view = NodeView(self._node, tuple(self._run(run) for run in self._runs()))
            self._cache.forget_unused()
            names = {each.run.name for each in view.runs}
            for known in (self._unattended, self._vacant, self._roots):
                for name in known.keys() - names:
                    del known[name]
            return view

    def run(self, run: Run) -> RunView:
        """Read one run."""
        with self._lock:
            return self._run(run)

    def set_root(self, run: Run, root: RootView) -> None:
        """Store the result of a look at the root of a run."""
        with self._lock:
            self._roots[run.name] = root

    def _runs(self) -> Iterator[Run]:
        for name in self._home.runs():
            with suppress(StoreError):  # not a run
                yield self._home.run(name)

    def _run(self, run: Run) -> RunView:
        now = self.clock()
        attended = has_trainers(run)
        snapshots = read_snapshots(run, self._node, self._cache)
        if attended:
            self._unattended.pop(run.name, None)
            self._roots.pop(run.name, None)
        if attended or snapshots:
            self._vacant.pop(run.name, None)
        return RunView(
            run=run,
            snapshots=snapshots,
            lost=tuple(lost_trainers(run)),
            unattended=None if attended else self._unattended.setdefault(run.name, now),
            vacant=None if attended or snapshots else self._vacant.setdefault(run.name, now),
            root=self._roots.get(run.name),
        )


def view_run(run: Run, cache: RecordCache | None = None) -> RunView:
    """Read the snapshots of a run without the liveness of its trainers.

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
    return tuple(read_snapshot(Place(run, step), node, cache) for step in run.steps())


def read_snapshot(place: Place, node: str = "", cache: RecordCache | None = None) -> SnapshotView:
    """Read one snapshot.

    The names of the outcomes are listed before the manifest is read. So if a save is committed in
    between, its manifest is already seen, and the save does not look replaced by another one.

    Args:
        node: the name of this node, which determines the saves that it leads.
    """
    reader = _Reader(place, node, cache or RecordCache())
    return reader.snapshot()


def ended(place: Place, stage: str, save_id: str) -> Done | None:
    """Return how a stage of a save has ended; None if it has not. Works after the snapshot was
    freed.

    It reads only the outcome, so that polling is cheap.
    """
    done = place.ended(stage, save_id)
    if done is None:
        with suppress(StoreError):
            return read_record(place.run.path / ENDED / records.outcome(stage, save_id), Done)
    return done


class _SaveId(msgspec.Struct):
    """The save id of a manifest."""

    save_id: str


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one snapshot."""

    place: Place
    node: str
    cache: RecordCache
    names: frozenset[str] = field(default_factory=frozenset)

    def snapshot(self) -> SnapshotView:
        names = frozenset(self.place.named(""))
        seen = _Reader(self.place, self.node, self.cache, names)
        ids = {found[1] for name in names if (found := _SAVE.search(name)) is not None}
        manifest = seen.cache.read(self.place.path / MANIFEST, _read_save_id)
        committed = None if manifest is None else manifest[0]
        ids |= {committed} if committed else set()
        times = [seen._time(name) for name in names if name.endswith(records.STAGED)]
        return SnapshotView(
            place=self.place,
            names=names,
            saves={each: seen.save(each) for each in sorted(ids)},
            committed=committed,
            staged_at=max((each for each in times if each is not None), default=None),
        )

    def save(self, save_id: str) -> SaveView:
        own = [
            n for n in self.names if n.endswith(records.STAGED) and records.save_of(n) == save_id
        ]
        found = (self._read(name, Staged) for name in sorted(own))
        staged = tuple(each for each in found if each and each.file.name in self.names)
        files = [each.file.name for each in staged]
        unsealed = tuple(name for name in files if records.entry(name) not in self.names)
        has_pending = records.pending(save_id) in self.names
        pending = self._pending(records.pending(save_id)) or self._pending(
            records.pending_copy(save_id)
        )
        leads = has_pending and pending is not None
        epoch = next((each.epoch for each in staged), None) if pending is None else pending.epoch
        asked = {stage for each in staged for stage in each.stages}
        stages = {stage: self._outcome(stage, save_id) for stage in records.STAGES}
        open_stages = {
            "commit": self._commit(save_id, pending, asked, leads),
            "protect": self._protect(pending, asked, leads, stages["commit"]),
            "persist": self._persist(save_id, pending, asked, leads),
            records.RETAIN: self._requested(records.RETAIN, save_id),
        }
        ended = {name: each for name, each in stages.items() if each is not None}
        return SaveView(
            save_id=save_id,
            staged=staged,
            unsealed=unsealed,
            has_staged=bool(own),
            pending=pending,
            leads=leads,
            epoch=epoch,
            stages={
                **{name: Stage(state) for name, state in open_stages.items()},
                **ended,
                "seal": Stage(self._seal(save_id, staged, unsealed)),
                "guard": Stage(self._part("protect", save_id)),
                "copy": Stage(self._part("persist", save_id)),
                "rescue": Stage(self._rescue(save_id)),
            },
        )

    def _leading(self, pending: PendingManifest | None, leads: bool) -> bool:
        return leads and pending is not None and pending.leader == self.node

    def _commit(
        self, save_id: str, pending: PendingManifest | None, asked: set[str], leads: bool
    ) -> State:
        if self._leading(pending, leads):
            return State.RUNNING
        return State.WAITING if "commit" in asked or pending else State.NOT_ASKED

    def _protect(
        self,
        pending: PendingManifest | None,
        asked: set[str],
        leads: bool,
        commit: Stage | None,
    ) -> State:
        if commit is not None and commit.state is State.DONE and self._leading(pending, leads):
            return State.RUNNING
        return State.WAITING if "protect" in asked or pending else State.NOT_ASKED

    def _persist(
        self, save_id: str, pending: PendingManifest | None, asked: set[str], leads: bool
    ) -> State:
        called = records.request("rescue", save_id) in self.names
        if self._leading(pending, leads) and pending is not None and (pending.durable or called):
            return State.RUNNING
        if called and pending is not None and not leads:
            return State.RUNNING
        return State.WAITING if "persist" in asked or called else State.NOT_ASKED

    def _seal(self, save_id: str, staged: tuple[Staged, ...], unsealed: tuple[str, ...]) -> State:
        if not unsealed:
            return State.DONE if staged else State.NOT_ASKED
        return State.WAITING if self._is_copied(save_id) else State.RUNNING

    def _part(self, stage: str, save_id: str) -> State:
        """Return the state of what a leader requests from this node alone."""
        if records.request(stage, save_id) not in self.names:
            return State.NOT_ASKED
        if records.done(stage, save_id) in self.names:
            return State.DONE
        waits = stage == "persist" and self._is_copied(save_id)
        return State.WAITING if waits else State.RUNNING

    def _requested(self, stage: str, save_id: str) -> State:
        named = records.request(stage, save_id) in self.names
        return State.RUNNING if named else State.NOT_ASKED

    def _rescue(self, save_id: str) -> State:
        """Return whether the rescue was requested, on this node or from the leader."""
        called = [records.request(each, save_id) for each in ("rescue", "called")]
        called.append(records.outcome("persist", save_id))
        return State.DONE if any(name in self.names for name in called) else State.NOT_ASKED

    def _is_copied(self, save_id: str) -> bool:
        """Return whether a rank of this node is still copying a file of the save into memory.

        A rank that is lost, or that has not finished when the commit has failed, does not count.
        """
        if records.outcome("commit", save_id) in self.names:
            return False
        marks = [n for n in records.being_copied(self.names) if records.save_of(n) == save_id]
        return any(is_present(self.place.run, rank_of(mark)) for mark in marks)

    def _outcome(self, stage: str, save_id: str) -> Stage | None:
        name = records.outcome(stage, save_id)
        if name not in self.names:
            return None
        found = self.cache.read(self.place.path / name, _read_outcome)
        if found is None:
            return None
        done, at = found
        if isinstance(done, StoreError):
            self._log_damage(name, done)
            done = Done(
                save_id=save_id,
                stage=stage,
                failure=f"the record of the outcome is damaged: {done}",
            )
        return Stage(State.FAILED if done.failure else State.DONE, done, at)

    def _pending(self, name: str) -> PendingManifest | None:
        return self._read(name, PendingManifest) if name in self.names else None

    def _read(self, name: str, kind: type[T]) -> T | None:
        read = _READ[kind]
        found = self.cache.read(self.place.path / name, read)
        if found is None:
            return None
        if isinstance(found[0], StoreError):
            self._log_damage(name, found[0])
            return None
        return cast("T", found[0])

    def _log_damage(self, name: str, error: StoreError) -> None:
        if self.cache.logs:
            self.place.log_damage(name, error)

    def _time(self, name: str) -> float | None:
        with suppress(FileNotFoundError):
            return (self.place.path / name).stat().st_mtime
        return None


def _read_save_id(path: Path) -> str:
    """Return the save id of a manifest; "" if it is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_SaveId).save_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _read_outcome(path: Path) -> Done | StoreError:
    return _or_error(path, Done)


def _read_staged(path: Path) -> Staged | StoreError:
    return _or_error(path, Staged)


def _read_pending(path: Path) -> PendingManifest | StoreError:
    """Read a pending manifest without the text of the manifest, which can be large."""
    found = _or_error(path, PendingManifest)
    return found if isinstance(found, StoreError) else msgspec.structs.replace(found, manifest="")


def _or_error(path: Path, kind: type[T]) -> T | StoreError:
    try:
        found = read_record(path, kind)
    except StoreError as error:
        return error
    if found is None:
        raise FileNotFoundError(path)
    return found


_READ: Mapping[type, Callable[[Path], object]] = {
    Staged: _read_staged,
    PendingManifest: _read_pending,
}
