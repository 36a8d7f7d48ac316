"""`Mirroring`: compares a root with its mirror, copies what the mirror lacks, and removes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from shardwise.engine.copy_file import Throttle
from shardwise.engine.leftovers import remove_leftovers
from shardwise.errors import CorruptionError, ShardwiseError, describe_error
from shardwise.manifest.manifest import Manifest
from shardwise.manifest.names import made_by_save, step_directory, step_of_directory
from shardwise.retention import (
    Keep,
    committed_steps,
    info_of_manifest,
    remove_checkpoint,
    remove_files_of_removed,
)
from shardwise.store import Store
from shardwise.tiers.copying import copy_checkpoint, saved_manifest
from shardwise.tiers.decide import StoredCheckpoint, TierPlan, Tiers, decide_tiers
from shardwise.tiers.record import (
    MirroredStep,
    MirrorRecord,
    read_mirror_record,
    write_mirror_record,
)

LOCK = "mirroring.lock"
REREAD_PERIOD = 600.0
log = logging.getLogger("shardwise.mirror")


class Stopped(Exception):  # noqa: N818
    """The copying was asked to stop."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The retention rules of both tiers, and the limit for copying in bytes per second."""

    keep: Keep
    mirror_keep: Keep
    budget: int | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """What a trainer knows about its root.

    Attributes:
        newest: the step that was saved last; None if this run has not saved yet.
        damaged: steps in the root that are known to be damaged.
    """

    newest: int | None = None
    damaged: frozenset[int] = frozenset()


class Mirroring:
    """Keeps a mirror of a root. One process at a time does this for a root; the others wait.

    Args:
        root: the root.
        mirror: the mirror.
        rules: the retention rules.
        clock: seconds since 1970.

    Attributes:
        record: the state of the mirror, as in the root's `mirror.json`.
    """

    def __init__(
        self,
        root: Store,
        mirror: Store,
        rules: Rules,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root = root
        self._mirror = mirror
        self._rules = rules
        self._clock = clock
        self._throttle = Throttle(rules.budget)
        self._root_tier = _Tier(root, others_write=True)
        self._mirror_tier = _Tier(mirror, others_write=False)
        self._copied: dict[int, set[str]] = {}
        self._stopping = threading.Event()
        self._cleaned_at: float | None = None
        self._logged = ""
        self._written: MirrorRecord | None = None
        self.record = MirrorRecord(place=str(mirror))

    def stop(self) -> None:
        """Make `catch_up` return soon, between two chunks."""
        self._stopping.set()

    def catch_up(self, saved: Callable[[], Saved]) -> bool:
        """Copy all checkpoints that the mirror lacks, and remove what the rules drop.

        A checkpoint that is saved meanwhile is copied next.

        Args:
            saved: returns what the trainer knows; called again after each copy.

        Returns:
            Whether the mirror has everything that it should have.
        """
        with self._root.hold(LOCK, shared=False) as held:
            if not held:
                self._read_record_of_other()
                return False
            try:
                return self._catch_up(saved)
            except Stopped:
                return False
            except (ShardwiseError, OSError) as error:
                self._note(plan=None, failures={}, failure=describe_error(error))
                return False

    def _read_record_of_other(self) -> None:
        """Read the record of the process that copies to the mirror instead of this one."""
        with suppress(ShardwiseError, OSError):
            self.record = read_mirror_record(self._root) or self.record

    def _catch_up(self, saved: Callable[[], Saved]) -> bool:
        failures: dict[int, str] = {}
        while True:
            known = saved()
            plan, failure = self._plan(known)
            is_reachable = not failure
            failure = failure or self._remove_from_mirror(plan)
            self._remove_from_root(plan, known.newest)
            self._note(plan, failures, failure)
            step = next((each for each in plan.copy if each not in failures), None)
            if step is None or not is_reachable:
                return not plan.copy and not failure
            try:
                self._copy(step)
            except CorruptionError as error:
                failures[step] = f"it is damaged: {error}"
            except OSError as error:
                failures[step] = describe_error(error)
                self._root_tier.forget(step)

    def _plan(self, known: Saved) -> tuple[TierPlan, str]:
        """Return what to do, and why the mirror cannot be listed, or "".

        If the mirror cannot be listed, only checkpoints are removed from the root that the mirror
        had when it was listed last.
        """
        failure = ""
        root = self._root_tier.read()
        try:
            mirror = self._mirror_tier.read()
            if self._cleaned_at is None or time.monotonic() - self._cleaned_at > REREAD_PERIOD:
                self._cleaned_at = time.monotonic()
                self._remove_leftovers()
        except OSError as error:
            failure, mirror = describe_error(error), self._mirror_tier.known
        tiers = Tiers(root=root, mirror=mirror, newest=known.newest, damaged=known.damaged)
        plan = decide_tiers(tiers, self._rules.keep, self._rules.mirror_keep)
        return plan, failure

    def _copy(self, step: int) -> None:
        start = time.monotonic()
        name = step_directory(step)
        copied = self._copied.setdefault(step, set())
        manifest, nbytes = copy_checkpoint(
            self._root.at(name), self._mirror.at(name), self._throttle, copied, self._refuse_stopped
        )
        del self._copied[step]
        seconds = time.monotonic() - start
        stored = _stored(manifest)
        self._root_tier.known[step] = stored
        self._mirror_tier.known[step] = stored
        mirrored = MirroredStep(manifest.save_id, nbytes, seconds)
        steps = {**self.record.steps, step: mirrored}
        self.record = msgspec.structs.replace(self.record, steps=steps)
        log.info("%s: step %d is in the mirror %s", self._root, step, self._mirror)

    def _refuse_stopped(self) -> None:
        if self._stopping.is_set():
            raise Stopped

    def _remove_from_root(self, plan: TierPlan, newest: int | None) -> None:
        grace = self._root.reading_grace > 0.0
        before = list(self._root_tier.known)
        for step in plan.remove_from_root:
            if remove_checkpoint(self._root.at(step_directory(step)), at_once=not grace):
                self._root_tier.forget(step)
        if grace and plan.remove_from_root and newest is not None:
            remove_files_of_removed(self._root, newest, before)

    def _remove_from_mirror(self, plan: TierPlan) -> str:
        """Remove checkpoints from the mirror; return why that failed, or ""."""
        at_once = not self._mirror.reading_grace
        for step in plan.remove_from_mirror:
            self._refuse_stopped()
            try:
                if remove_checkpoint(self._mirror.at(step_directory(step)), at_once=at_once):
                    self._mirror_tier.forget(step)
            except OSError as error:
                return f"cannot remove step {step} from the mirror: {describe_error(error)}"
        return ""

    def _remove_leftovers(self) -> None:
        """Remove the files of removed checkpoints and of killed processes from the mirror.

        A copy that is to be continued stays.
        """
        root, mirror = self._root_tier.known, self._mirror_tier.known
        for name in self._mirror.list():
            step = step_of_directory(name)
            if step is None:
                continue
            is_continued = step in root and root[step] != mirror.get(step)
            is_clean = step in mirror and step not in self._mirror_tier.with_leftovers
            if not is_continued and not is_clean:
                with suppress(OSError):  # the mirror may refuse to delete
                    remove_leftovers(self._mirror.at(name))

    def _note(self, plan: TierPlan | None, failures: dict[int, str], failure: str) -> None:
        """Update the record in the root, and log new failures."""
        mirror = self._mirror_tier.known
        steps = {
            step: self.record.steps[step]
            if self.record.has(step, each.save_id)
            else MirroredStep(each.save_id)
            for step, each in sorted(mirror.items())
        }
        is_failing = bool(failures or failure)
        since = (self.record.failing_since or self._clock()) if is_failing else None
        self.record = MirrorRecord(
            place=str(self._mirror),
            steps=steps,
            waiting=self.record.waiting if plan is None else plan.copy,
            pinned=self.record.pinned if plan is None else plan.pinned,
            failures=failures,
            failure=failure,
            failing_since=since,
        )
        why = self.record.why_failing()
        if why and why != self._logged:
            log.error(
                "the mirror %s of %s fails, and is tried again (it lacks %d checkpoints): %s",
                *(self._mirror, self._root, len(self.record.waiting), why),
            )
        elif self._logged and not why:
            log.warning("the mirror %s of %s can be used again", self._mirror, self._root)
        self._logged = why
        if self.record != self._written:
            try:
                write_mirror_record(self._root, self.record)
                self._written = self.record
            except OSError as error:
                log.warning("cannot write the state of the mirror to %s: %s", self._root, error)


class _Tier:
    """What a tier has. A manifest is read again if its directory has changed, and after a while.

    Args:
        store: the tier.
        others_write: whether other processes save to this tier, so that directories change.
        clock: a monotonic clock, in seconds.

    Attributes:
        known: the checkpoints with intact manifests, by step.
        with_leftovers: the steps of `known` that also have files of other saves.
    """

    def __init__(
        self, store: Store, *, others_write: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._others_write = others_write
        self._clock = clock
        self._read_at = clock()
        self._names: dict[int, list[str]] = {}
        self.known: dict[int, StoredCheckpoint] = {}
        self.with_leftovers: set[int] = set()

    def read(self) -> dict[int, StoredCheckpoint]:
        """List the tier, and return its checkpoints."""
        if self._clock() - self._read_at > REREAD_PERIOD:
            self.known, self._names, self._read_at = {}, {}, self._clock()
        found = {}
        for step in committed_steps(self._store):
            stored = self._describe(step)
            if stored is not None:
                found[step] = stored
        self.known = found
        self._names = {step: each for step, each in self._names.items() if step in found}
        return found

    def forget(self, step: int) -> None:
        """Read a step again next time."""
        self.known.pop(step, None)

    def _describe(self, step: int) -> StoredCheckpoint | None:
        """Return a checkpoint; None if its manifest is damaged, or if a file of it is missing.

        The names of data files contain the id of the save, so another save changes the names.
        """
        store = self._store.at(step_directory(step))
        if step in self.known and not self._others_write:
            return self.known[step]
        names = store.list()
        if step in self.known and self._names.get(step) == names:
            return self.known[step]
        manifest = saved_manifest(store)
        files = set() if manifest is None else {each.name for each in manifest.files}
        if manifest is None or files - set(names):
            return None
        if any(made_by_save(name) and name not in files for name in names):
            self.with_leftovers.add(step)
        self._names[step] = names
        return _stored(manifest)


def _stored(manifest: Manifest) -> StoredCheckpoint:
    return StoredCheckpoint(manifest.save_id, info_of_manifest(manifest))
