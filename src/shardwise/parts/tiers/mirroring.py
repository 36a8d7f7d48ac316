"""Keep a mirror like its root: compare both, then copy and remove checkpoints.

`Mirroring` does this once, and `MirrorWorker` does it again and again in a thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import msgspec

from shardwise.kernel.engine.root import CheckpointInfo, Root
from shardwise.kernel.errors import CorruptionError, ShardwiseError, describe_error
from shardwise.kernel.store import Store, open_store
from shardwise.parts.retention import Keep, remove_checkpoints
from shardwise.parts.tiers.copying import FileCopier, copy_checkpoint
from shardwise.parts.tiers.decide import SavedSteps, TierPlan, decide_tiers
from shardwise.parts.tiers.options import Mirror, StorageTask
from shardwise.parts.tiers.record import MirroredStep, MirrorRecord

LOCK = "mirroring.lock"
# All in seconds.
REREAD_PERIOD = 600.0
CHECK_PERIOD = 60.0
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
log = logging.getLogger("shardwise.mirror")


class Tier:
    """The checkpoints of a tier.

    A manifest is read again if its directory has changed, and after `REREAD_PERIOD` seconds.

    Args:
        root: the tier.
        others_write: whether other processes save to this tier, so that directories change.

    Attributes:
        known: the checkpoints with intact manifests and all files, by step.
        with_leftovers: the steps of `known` that also have files of other saves.
    """

    def __init__(self, root: Root, *, others_write: bool) -> None:
        self._root = root
        self._others_write = others_write
        self._read_at = time.monotonic()
        self._names: dict[int, list[str]] = {}
        self.known: dict[int, CheckpointInfo] = {}
        self.with_leftovers: set[int] = set()

    def read(self) -> dict[int, CheckpointInfo]:
        """List the tier, and return its checkpoints."""
        if time.monotonic() - self._read_at > REREAD_PERIOD:
            self.known, self._names, self._read_at = {}, {}, time.monotonic()
        found = {step: self._read_checkpoint(step) for step in self._root.steps()}
        self.known = {step: each for step, each in found.items() if each is not None}
        self._names = {step: each for step, each in self._names.items() if step in self.known}
        return self.known

    def forget(self, step: int) -> None:
        """Read a step again next time."""
        self.known.pop(step, None)

    def _read_checkpoint(self, step: int) -> CheckpointInfo | None:
        """Return a checkpoint; None if its manifest is damaged, or if a file of it is missing.

        The names of data files contain the id of the save, so another save changes the names.
        """
        directory = self._root.at(step)
        if step in self.known and not self._others_write:
            return self.known[step]
        names = directory.store.list()
        if step in self.known and self._names.get(step) == names:
            return self.known[step]
        state, manifest, _ = directory.examine(names)
        if state != "committed" or manifest is None:
            return None
        if directory.leftovers(names, manifest):
            self.with_leftovers.add(step)
        self._names[step] = names
        return CheckpointInfo.of(manifest)


class MirroringStopped(Exception):  # noqa: N818
    """The copying was asked to stop."""


class Mirroring:
    """Keeps a mirror of a root up to date. Only one process at a time does this for a root.

    Args:
        root: the root.
        keep: the retention rules of the root.
        mirror: the mirror and its options.
        clock: seconds since 1970.

    Attributes:
        record: the state of the mirror, as in the root's `mirror.json`.
    """

    def __init__(
        self,
        root: Store,
        keep: Keep,
        mirror: Mirror,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._root, self._mirror = Root(root), Root(open_store(mirror.place))
        self._keep, self._mirror_keep = keep, mirror.keep
        self._clock = clock
        self._copier = FileCopier(mirror.max_bytes_per_second)
        self._root_tier = Tier(self._root, others_write=True)
        self._mirror_tier = Tier(self._mirror, others_write=False)
        self._stopping = threading.Event()
        self._cleaned_at: float | None = None
        self._logged_failure = ""
        self._written_record: MirrorRecord | None = None
        self.record = MirrorRecord(place=str(self._mirror))

    @classmethod
    def of_task(cls, task: StorageTask) -> Mirroring | None:
        """Return the mirroring of a task; None if its root has no mirror.

        Raises:
            OSError, ValueError: the root or the mirror cannot be opened.
        """
        if task.mirror is None:
            return None
        return cls(open_store(task.root), task.rules, task.mirror.options())

    def stop(self) -> None:
        """Make `catch_up` return soon, between two chunks."""
        self._stopping.set()

    def catch_up(self, saved: Callable[[], SavedSteps]) -> bool:
        """Copy missing checkpoints to the mirror, and remove old checkpoints.

        A checkpoint that is saved meanwhile is copied next.

        Args:
            saved: returns what the trainer knows; called again after each copy.

        Returns:
            Whether the mirror has everything that it should have.
        """
        with self._root.store.lock(LOCK) as held:
            if not held:
                with suppress(ShardwiseError, OSError):  # another process copies to the mirror
                    self.record = MirrorRecord.read(self._root.store) or self.record
                return False
            try:
                return self._catch_up(saved)
            except MirroringStopped:
                return False
            except (ShardwiseError, OSError) as error:
                self._update_record(plan=None, failures={}, failure=describe_error(error))
                return False

    def _catch_up(self, saved: Callable[[], SavedSteps]) -> bool:
        failures: dict[int, str] = {}
        while True:
            newest, damaged = saved()
            plan, failure = self._make_plan(newest, damaged)
            is_reachable = not failure
            failure = failure or self._remove_from_mirror(plan)
            self._remove_from_root(plan, newest)
            self._update_record(plan, failures, failure)
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

    def _make_plan(self, newest: int | None, damaged: Collection[int]) -> tuple[TierPlan, str]:
        """Return what to do; and why the mirror cannot be listed, or "".

        If the mirror cannot be listed, plan with the last list that was read. A checkpoint is then
        removed from the root only if that list has it.
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
        plan = decide_tiers(root, mirror, self._keep, self._mirror_keep, newest, damaged)
        return plan, failure

    def _copy(self, step: int) -> None:
        start = time.monotonic()
        manifest, nbytes = copy_checkpoint(
            self._root.at(step), self._mirror.at(step), self._copier, self._raise_if_stopped
        )
        seconds = time.monotonic() - start
        self._root_tier.known[step] = self._mirror_tier.known[step] = CheckpointInfo.of(manifest)
        mirrored = MirroredStep(manifest.save_id, nbytes, seconds)
        steps = {**self.record.steps, step: mirrored}
        self.record = msgspec.structs.replace(self.record, steps=steps)
        log.info("%s: step %d is in the mirror %s", self._root, step, self._mirror)

    def _raise_if_stopped(self) -> None:
        if self._stopping.is_set():
            raise MirroringStopped

    def _remove_from_root(self, plan: TierPlan, newest: int | None) -> None:
        if not plan.remove_from_root or newest is None:
            return
        committed = list(self._root_tier.known)
        for step in remove_checkpoints(self._root, plan.remove_from_root, newest, committed):
            self._root_tier.forget(step)

    def _remove_from_mirror(self, plan: TierPlan) -> str:
        """Remove checkpoints from the mirror; return why that failed, or ""."""
        for step in plan.remove_from_mirror:
            self._raise_if_stopped()
            try:
                if self._mirror.at(step).remove():
                    self._mirror_tier.forget(step)
            except OSError as error:
                return f"cannot remove step {step} from the mirror: {describe_error(error)}"
        return ""

    def _remove_leftovers(self) -> None:
        """Remove the files of removed checkpoints and of killed processes from the mirror.

        The files of a copy that will be continued stay.
        """
        root, mirror = self._root_tier.known, self._mirror_tier.known
        for step in self._mirror.listed_steps():
            is_continued = step in root and root[step] != mirror.get(step)
            is_clean = step in mirror and step not in self._mirror_tier.with_leftovers
            if not is_continued and not is_clean:
                with suppress(OSError):  # the mirror may refuse to delete
                    self._mirror.at(step).remove_leftovers()

    def _update_record(self, plan: TierPlan | None, failures: dict[int, str], failure: str) -> None:
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
        if why and why != self._logged_failure:
            log.error(
                "the mirror %s of %s fails, and is tried again (it lacks %d checkpoints): %s",
                *(self._mirror, self._root, len(self.record.waiting), why),
            )
        elif self._logged_failure and not why:
            log.warning("the mirror %s of %s can be used again", self._mirror, self._root)
        self._logged_failure = why
        if self.record != self._written_record:
            try:
                self.record.write(self._root.store)
                self._written_record = self.record
            except OSError as error:
                log.warning("cannot write the state of the mirror to %s: %s", self._root, error)


class MirrorWorker:
    """Keeps a mirror of a root up to date in a thread.

    Args:
        root, keep, mirror: as for `Mirroring`.
        wall_clock: seconds since 1970.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        root: Store,
        keep: Keep,
        mirror: Mirror,
        *,
        wall_clock: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mirroring = Mirroring(root, keep, mirror, wall_clock)
        self._clock = clock
        self._changed = threading.Condition()
        self._saved: SavedSteps = None, ()
        self._due_at = clock()
        self._failures = 0
        self._has_unseen_steps = True
        self._is_attempting = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._work, name="shardwise-mirror", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def set_saved(self, newest: int | None, damaged: Collection[int] = ()) -> None:
        """Report what was saved to the root, as for `decide_tiers`; the thread copies it soon."""
        with self._changed:
            self._saved = newest, frozenset(damaged)
            self._has_unseen_steps = True
            if not self._failures:
                self._due_at = self._clock()
            self._changed.notify_all()

    def attempt(self) -> bool:
        """Bring the mirror up to date; return whether that succeeded. The thread calls this."""
        with self._changed:
            self._has_unseen_steps, self._is_attempting = False, True
        try:
            is_current = self.mirroring.catch_up(lambda: self._saved)
        except Exception:
            log.exception("mirroring failed; trying again")
            is_current = False
        with self._changed:
            self._failures = 0 if is_current else self._failures + 1
            delay = min(FIRST_DELAY * 2.0 ** (self._failures - 1), LONGEST_DELAY)
            wait = delay if self._failures else 0.0 if self._has_unseen_steps else CHECK_PERIOD
            self._due_at = self._clock() + wait
            self._is_attempting = False
            self._changed.notify_all()
        return is_current

    def wait_until_seen(self, timeout: float) -> None:
        """Wait until an attempt that began after the last `set_saved` has ended, or one failed.

        Only such an attempt removes the checkpoints that the last save made superfluous.
        """

        def is_over() -> bool:
            is_busy = self._has_unseen_steps or self._is_attempting
            return bool(self._failures) or not is_busy

        with self._changed:
            self._changed.wait_for(is_over, timeout)

    def stop(self, timeout: float) -> bool:
        """Stop the thread between two chunks; return whether it ended within the timeout."""
        self.mirroring.stop()
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while self._wait():
            self.attempt()

    def _wait(self) -> bool:
        """Wait until an attempt is due; return False if the thread stops."""
        with self._changed:
            while not self._is_stopping and (left := self._due_at - self._clock()) > 0:
                self._changed.wait(left)
            return not self._is_stopping
