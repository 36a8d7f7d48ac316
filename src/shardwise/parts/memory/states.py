"""The state of each save on a node: read by everybody, written by the node's agent alone."""

from __future__ import annotations

import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from shardwise.kernel.errors import StoreError
from shardwise.parts.memory.files import read_record, regular_files, write_record
from shardwise.parts.memory.home import ENDED_DIRECTORY, Run, SnapshotDirectory
from shardwise.parts.memory.records import (
    PENDING,
    REMOVE_OLD,
    STAGES,
    Failing,
    Outcomes,
    PendingManifest,
    Retry,
    SaveState,
    StageOutcome,
)
from shardwise.parts.memory.times import SHORT_PATIENCE

_ENDED = re.compile(r"([0-9a-f]{16})\.json")
T = TypeVar("T")


class RecordCache:
    """Reads each record once, and again only after the file was replaced.

    A replaced file has another inode, modification time or size.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[Path, type], tuple[tuple[int, int, int], object]] = {}
        self._used: set[tuple[Path, type]] = set()

    def read(self, path: Path, record_type: type[T]) -> T | StoreError | None:
        """Return a record, or the error if it is damaged; None if the file does not exist.

        The field `manifest` of a `PendingManifest` is emptied, because its text can be large.
        """
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        key, version = (path, record_type), (status.st_ino, status.st_mtime_ns, status.st_size)
        self._used.add(key)
        known = self._records.get(key)
        if known is None or known[0] != version:
            try:
                record: T | StoreError | None = read_record(path, record_type)
            except StoreError as error:
                record = error
            if record is None:
                return None
            if isinstance(record, PendingManifest):
                record = msgspec.structs.replace(record, manifest="")
            known = self._records[key] = version, record
        return known[1]  # type: ignore[return-value]

    def forget_unused(self) -> None:
        """Remove records that were not read since the last call from the cache."""
        self._records = {key: each for key, each in self._records.items() if key in self._used}
        self._used = set()


def read_state(place: SnapshotDirectory, cache: RecordCache | None = None) -> SaveState:
    """Return the state of a save, also after its snapshot was freed.

    If the record is damaged, all stages have failed.
    """
    found = (cache or RecordCache()).read(place.state_path(), SaveState)
    if not isinstance(found, StoreError):
        return found or SaveState()
    failed = StageOutcome(failure=f"the state of the save is lost: {found}")
    return SaveState(outcomes=dict.fromkeys((*STAGES, REMOVE_OLD), failed))


def places_with_states(run: Run) -> list[SnapshotDirectory]:
    """Return the snapshots of a run, and the last ones that were freed; these have step 0."""
    # First: a snapshot that is freed meanwhile is in both lists.
    snapshots = run.snapshots(abandoned=True)
    names = regular_files(run.path / ENDED_DIRECTORY)
    ended = [SnapshotDirectory(run, 0, match[1]) for match in map(_ENDED.fullmatch, names) if match]
    return [*ended, *snapshots]


class SaveStates:
    """Changes the states of the saves on this node. The threads of an agent share it.

    Attributes:
        lock: held while a state is changed, and while a snapshot leaves its directory.
        version: a number that is different after each change, also by the next agent.
        heard_at: by run, the time on a monotonic clock when this node last heard of the node that
            leads its saves; nothing if it waits for nothing.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.version = secrets.randbits(40)
        self.heard_at: dict[str, float] = {}

    def silence(self, run: Run) -> float:
        """Return for how many seconds this node has not heard of the node that leads the saves."""
        now = time.monotonic()
        return max(0.0, now - self.heard_at.get(run.name, now))

    def list_silent(self) -> list[Failing]:
        """Return the runs of whose leading node this node has not heard for long."""
        now, why = time.monotonic(), "the node that leads the save does not answer"
        heard_at = dict(self.heard_at)
        return [
            Failing(run, None, now - at, why)
            for run, at in heard_at.items()
            if now - at > SHORT_PATIENCE
        ]

    def change(self, place: SnapshotDirectory, change: Callable[[SaveState], SaveState]) -> None:
        """Change the state of a save.

        Raises:
            FileNotFoundError: this node has no record of the save any more.
        """
        with self.lock:
            before = read_state(place)
            after = change(before)
            if after != before:
                write_record(place.state_path(), after)
                self.version += 1

    def tell(self) -> None:
        """Have the nodes below this one ask again, because there is something new."""
        with self.lock:
            self.version += 1

    def end_part(self, place: SnapshotDirectory, stage: str, done: StageOutcome) -> None:
        """Record how a stage ended on this node."""

        def change(state: SaveState) -> SaveState:
            parts = {**state.parts, stage: done}
            return msgspec.structs.replace(state, parts=parts, retries=_without(state, stage))

        self.change(place, change)

    def end(self, place: SnapshotDirectory, done: Mapping[str, StageOutcome]) -> None:
        """Record how stages ended on all nodes."""

        def change(state: SaveState) -> SaveState:
            outcomes = {**state.outcomes, **done}
            return msgspec.structs.replace(state, outcomes=outcomes, retries=_without(state, *done))

        self.change(place, change)

    def fail_commit(self, place: SnapshotDirectory, why: str) -> bool:
        """Record that a commit has failed, unless it has ended; return whether it has failed."""
        failed = StageOutcome(failure=why, ended_at=time.time())

        def change(state: SaveState) -> SaveState:
            return msgspec.structs.replace(state, outcomes={"commit": failed, **state.outcomes})

        self.change(place, change)
        return bool(read_state(place).outcomes["commit"].failure)

    def read_outcomes(self, run: Run) -> Outcomes:
        """Return the outcomes of the saves in memory, and of the last saves that were freed."""
        with self.lock:  # no snapshot leaves its directory meanwhile
            places = places_with_states(run)
            saves = {each.save_id: read_state(each).outcomes for each in places}
            return Outcomes(self.version, 0.0, saves)

    def retry(
        self, place: SnapshotDirectory, stage: str, failure: str, longest_outage: float
    ) -> bool:
        """Record why a stage is tried again; return False if the attempts took too long."""
        now = time.time()
        earlier = read_state(place).retries.get(stage)
        since = now if earlier is None else earlier.since
        if now - since > longest_outage:
            return False
        attempts = 1 if earlier is None else earlier.attempts + 1
        retry = Retry(failure=failure, since=since, attempts=attempts)
        self.change(
            place,
            lambda state: msgspec.structs.replace(state, retries={**state.retries, stage: retry}),
        )
        return True


def request_rescue(states: SaveStates, place: SnapshotDirectory, node: str) -> None:
    """Record that a node requests to persist a snapshot, because a trainer was lost.

    Raises:
        OSError: this node does not have the snapshot.
    """
    if not place.has(PENDING):
        raise FileNotFoundError(f"{place.path} has no pending manifest")
    states.change(place, lambda state: msgspec.structs.replace(state, rescue=node or "unknown"))


def _without(state: SaveState, *stages: str) -> dict[str, Retry]:
    return {each: retry for each, retry in state.retries.items() if each not in stages}
