"""`Mirroring`: compares a root with its mirror, then copies and removes checkpoints."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from shardwise.engine.commit import remove_leftovers
from shardwise.errors import CorruptionError, ShardwiseError, describe_error
from shardwise.manifest.names import step_directory, step_of_directory
from shardwise.retention import (
    CheckpointInfo,
    Keep,
    remove_checkpoint,
    remove_checkpoints,
)
from shardwise.store import Store, open_store
from shardwise.tiers.copy_file import Throttle
from shardwise.tiers.copying import copy_checkpoint
from shardwise.tiers.decide import SavedSteps, TierPlan, decide_tiers
from shardwise.tiers.options import Mirror
from shardwise.tiers.record import MirroredStep, MirrorRecord
from shardwise.tiers.tier import REREAD_PERIOD, Tier

LOCK = "mirroring.lock"
log = logging.getLogger("shardwise.mirror")


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
        self._root, self._mirror = root, open_store(mirror.place)
        self._keep, self._mirror_keep = keep, mirror.keep
        self._clock = clock
        self._throttle = Throttle(mirror.budget)
        self._root_tier = Tier(root, others_write=True)
        self._mirror_tier = Tier(self._mirror, others_write=False)
        self._stopping = threading.Event()
        self._cleaned_at: float | None = None
        self._logged_failure = ""
        self._written_record: MirrorRecord | None = None
        self.record = MirrorRecord(place=str(self._mirror))

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
        with self._root.lock(LOCK) as held:
            if not held:
                with suppress(ShardwiseError, OSError):  # another process copies to the mirror
                    self.record = MirrorRecord.read(self._root) or self.record
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
            saved_steps = saved()
            plan, failure = self._make_plan(saved_steps)
            is_reachable = not failure
            failure = failure or self._remove_from_mirror(plan)
            self._remove_from_root(plan, saved_steps.newest)
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

    def _make_plan(self, saved_steps: SavedSteps) -> tuple[TierPlan, str]:
        """Return what to do; and why the mirror cannot be listed, or "".

        If the mirror cannot be listed, use the last list that could be read: remove only
        checkpoints in it from the root.
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
        return decide_tiers(root, mirror, saved_steps, self._keep, self._mirror_keep), failure

    def _copy(self, step: int) -> None:
        start = time.monotonic()
        name = step_directory(step)
        manifest, nbytes = copy_checkpoint(
            self._root.at(name), self._mirror.at(name), self._throttle, self._raise_if_stopped
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
                if remove_checkpoint(self._mirror.at(step_directory(step))):
                    self._mirror_tier.forget(step)
            except OSError as error:
                return f"cannot remove step {step} from the mirror: {describe_error(error)}"
        return ""

    def _remove_leftovers(self) -> None:
        """Remove the files of removed checkpoints and of killed processes from the mirror.

        The files of a copy that will be continued stay.
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
                self.record.write(self._root)
                self._written_record = self.record
            except OSError as error:
                log.warning("cannot write the state of the mirror to %s: %s", self._root, error)
