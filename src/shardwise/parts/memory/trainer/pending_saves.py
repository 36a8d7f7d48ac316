"""Saves that agents complete: waits for their stages, and their failures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.errors import StoreError
from shardwise.kernel.events import Event
from shardwise.parts.memory import records
from shardwise.parts.memory.home import PERSIST_MARKER, Home, SnapshotDirectory
from shardwise.parts.memory.options import Memory
from shardwise.parts.memory.records import SaveState, StageOutcome
from shardwise.parts.memory.remote.lost_agents import AgentWatch
from shardwise.parts.memory.states import RecordCache, read_state
from shardwise.parts.memory.times import NOTICE_PERIOD, POLL_PAUSE, RETRY_PERIOD
from shardwise.parts.memory.trainer.copying import CopyProgress
from shardwise.parts.memory.trainer.node_watch import NodeWatch

MOST_ENDED = 64
log = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A save that agents complete, stage by stage.

    If a save is for memory only, its failure does not end the training: the next snapshot replaces
    the failed snapshot.

    Attributes:
        home: the directories of this node, whose agent learns what becomes of the save.
        options: the user's options.
        rank: this rank.
        place: the snapshot on this node.
        stages: the stages to wait for, in order.
        logs_failures: whether this rank logs the failure of a snapshot that is for memory only.
        deletes_older: whether this rank waits until older checkpoints are deleted from storage,
            which happens after the last stage. True only on rank 0.
        copying: the copy of this rank's part.
        watch: notices that other nodes are lost.
        nbytes: the size of this rank's file; 0 if it has none.
    """

    home: Home
    options: Memory
    rank: int
    place: SnapshotDirectory
    stages: tuple[str, ...]
    logs_failures: bool
    deletes_older: bool = False
    copying: CopyProgress | None = None
    watch: NodeWatch | None = None
    nbytes: int = 0
    _outcomes: dict[str, StageOutcome] = field(default_factory=dict)
    _records: RecordCache = field(default_factory=RecordCache)

    @property
    def save_id(self) -> str:
        """The id of the save."""
        return self.place.save_id

    @property
    def is_durable(self) -> bool:
        """Whether the save will be persisted."""
        return self.stages[-1] == "persist"

    @property
    def staging_failure(self) -> str:
        """Why this rank could not stage its part; "" if it could, or is still copying."""
        return "" if self.copying is None else self.copying.failure

    @property
    def _all_stages(self) -> tuple[str, ...]:
        return (*self.stages, records.REMOVE_OLD) if self.deletes_older else self.stages

    def check_no_stage_failed(self) -> bool:
        """Return whether no stage has failed so far.

        Raises:
            StoreError: a stage of a durable save failed; says which, and why.
        """
        return self._log_or_raise(lambda: [self.outcome(stage) for stage in self._all_stages])

    def wait_until_ended(self) -> bool:
        """Wait until all stages have ended, and return whether none failed.

        Raises:
            StoreError: as for `check_no_stage_failed`.
        """
        return self._log_or_raise(lambda: [self.wait_for(stage, None) for stage in self.stages])

    def wait_for_retention(self) -> None:
        """Wait until older checkpoints are deleted from storage.

        If the deletion fails, `check_no_stage_failed` raises.

        Raises:
            StoreError: the agent of this node is gone, or does not answer.
        """
        if self.deletes_older:
            try:
                self.wait_for(records.REMOVE_OLD, None)
            except StoreError:
                if records.REMOVE_OLD not in self._outcomes:
                    raise

    def _log_or_raise(self, work: Callable[[], object]) -> bool:
        try:
            work()
        except StoreError as error:
            if self.is_durable:
                raise
            if self.logs_failures:
                log.warning("a snapshot in memory failed; the training continues: %s", error)
            return False
        return True

    def has_ended(self) -> bool:
        """Return whether all stages have ended, or one has failed."""
        try:
            return None not in [self.outcome(stage) for stage in self.stages]
        except StoreError:
            return True

    def events(self) -> tuple[Event, ...]:
        """Return the stages that have ended: this node's part of them, if its record still exists.

        The first one is the copy, if it went on in the background. The wall clocks of the agent and
        of this process are the same.
        """
        now = time.perf_counter() - time.time()
        found: list[Event] = []
        copying = self.copying
        if copying is not None and copying.is_background and copying.ended:
            found.append(Event("copy", copying.began, copying.ended - copying.began))
        for stage in self.stages:
            outcome = self._state.parts.get(stage) or self._outcomes.get(stage)
            if outcome is not None:
                start = outcome.ended_at + now - outcome.seconds
                found.append(Event(stage, start, outcome.seconds, outcome.bytes))
        return tuple(found)

    def has_succeeded(self) -> bool:
        """Return whether all stages have succeeded."""
        try:
            return all(self.outcome(stage) is not None for stage in self._all_stages)
        except StoreError:
            return False

    def is_persisted(self) -> bool:
        """Return whether the checkpoint is durable, also if it was for memory only at first."""
        with suppress(StoreError):
            return self.outcome("persist") is not None
        return False

    def outcome(self, stage: str) -> StageOutcome | None:
        """Return the outcome of a stage, or None if it has not ended.

        Raises:
            StoreError: the stage failed.
        """
        done = self._outcomes.get(stage) or self._state.outcomes.get(stage)
        if done is None and self._is_obsolete(stage):
            done = self._state.outcomes.get(stage) or StageOutcome(ended_at=time.time())
        if done is not None:
            self._outcomes[stage] = done  # kept, because the record is deleted with the run
        failure = self.staging_failure if done is None else done.failure
        if failure:
            raise StoreError(f"{self._describe_failure(stage)}: {failure}")
        return done

    def _describe_failure(self, stage: str) -> str:
        return f"step {self.place.step}: the stage {stage!r} of {self.place.path} failed"

    @property
    def _state(self) -> SaveState:
        return read_state(self.place, self._records)

    def _is_obsolete(self, stage: str) -> bool:
        """Return whether a stage has not ended, and never will, but need not."""
        if stage == "protect":  # a newer snapshot replaced this one, and is protected instead
            return self._is_replaced()
        # The agent writes the task before the outcome, and removes it when it has removed old
        # checkpoints. A restore withdraws it.
        is_asked = self.place.run.task_path.exists()
        return stage == records.REMOVE_OLD and self.is_persisted() and not is_asked

    def _is_replaced(self) -> bool:
        """Return whether the snapshot was committed and is no longer in memory."""
        commit = self._outcomes.get("commit") or self._state.outcomes.get("commit")
        was_committed = commit is not None and not commit.failure
        return was_committed and not self.place.is_committed()

    def wait_for(self, stage: str, timeout: float | None) -> StageOutcome:
        """Wait until a stage has ended, and return its outcome.

        Raises:
            StoreError: the stage failed; a newer snapshot replaced this one; the agent of this
                node or of the leader is gone or does not answer; or the leader's agent never
                received the save.
            LostRankError: a node was lost before the save was committed.
            TimeoutError: `timeout` seconds have passed.
        """
        watch = AgentWatch(self.home, self.options, self.rank, self.place)
        deadline = Deadline(timeout)
        notice = Deadline(NOTICE_PERIOD)
        check_nodes = None if self.watch is None else self.watch.make_throttled_check()
        for _ in deadline.attempts(pause=POLL_PAUSE):
            done = self.outcome(stage)
            if done is not None:
                return done
            # This raises if the commit failed: then no later stage ends.
            if self.outcome("commit") is None and check_nodes is not None:
                check_nodes()
            is_removing = stage == records.REMOVE_OLD and self.is_persisted()
            if self._is_replaced() and not is_removing and self.outcome(stage) is None:
                raise StoreError(
                    f"{self._describe_failure(stage)}: a newer snapshot replaced this one; use the "
                    "handle of the newer save"
                )
            if notice.has_passed():
                why = self.why_retrying(stage)
                if why:
                    log.warning("step %d: %s has %s", self.place.step, stage, why)
                notice = Deadline(RETRY_PERIOD if why else NOTICE_PERIOD)
            try:
                watch.check(None if timeout is None else deadline.seconds_left())
            except StoreError as error:
                raise StoreError(f"{self._describe_failure(stage)}: {error}") from error
        retrying = self.why_retrying(stage)
        raise TimeoutError(
            f"step {self.place.step}: the stage {stage!r} of {self.place.path} has not ended in "
            f"{timeout:g} s: {f'it has {retrying}' if retrying else 'it continues'}; wait again, "
            "with a longer timeout"
        )

    def why_retrying(self, stage: str) -> str:
        """Return why the agent of this node tries a stage again, or "" if it does not."""
        retry = self._state.retries.get(stage)
        return "" if retry is None else retry.describe(time.time())


class PendingSaves:
    """A rank's saves in progress, and failed saves with an error to raise; oldest first."""

    def __init__(self) -> None:
        self._saves: list[PendingSave] = []
        self._told: set[str] = set()
        self._ended: dict[str, tuple[Event, ...]] = {}
        self._noted: set[str] = set()

    def add(self, save: PendingSave) -> None:
        """Add a save, and forget the saves that have succeeded."""
        self.note_ended()
        self._saves = [
            *(each for each in self._saves if not each.has_succeeded() or self._is_new(each)),
            save,
        ]
        self._told &= {each.save_id for each in self._saves}
        self._noted &= {each.save_id for each in self._saves}

    def note_ended(self) -> None:
        """Keep the stages of the saves that have ended, for `take_ended`."""
        for save in self._saves:
            if save.save_id not in self._noted and save.has_ended():
                self._noted.add(save.save_id)
                self._ended[save.save_id] = save.events()
        while len(self._ended) > MOST_ENDED:
            self._ended.pop(next(iter(self._ended)))

    def take_ended(self) -> dict[str, tuple[Event, ...]]:
        """Return the stages of the saves that ended since the last call, by id."""
        self.note_ended()
        ended, self._ended = self._ended, {}
        return ended

    def take_saved(self) -> list[int]:
        """Return the steps that became durable since the last call."""
        new = list(filter(self._is_new, self._saves))
        self._told |= {each.save_id for each in new}
        return [each.place.step for each in new]

    def _is_new(self, save: PendingSave) -> bool:
        """Return whether a save is durable, and `take_saved` did not return it yet."""
        return save.save_id not in self._told and save.is_durable and save.is_persisted()

    def raise_failure(self) -> None:
        """Raise the first failure that was not raised yet.

        Failures to stage on this rank are not included: `Staging.raise_failure` raises them.

        Raises:
            StoreError: a durable save failed. The message says why.
        """
        self._saves = [save for save in self._saves if not save.staging_failure]
        for save in list(self._saves):
            succeeds = False
            try:
                succeeds = save.check_no_stage_failed()
            finally:
                if not succeeds:
                    self._saves.remove(save)

    def wait_until_ended(self, *, step: int | None = None, durable: bool = False) -> None:
        """Wait until the saves have ended.

        Args:
            step: wait only for saves of this step.
            durable: wait only for saves that will be persisted.

        Raises:
            StoreError: as for `raise_failure`; or the agent is gone.
        """
        for save in self._saves:
            matches = step in (None, save.place.step) and (save.is_durable or not durable)
            if matches and not save.staging_failure:
                save.wait_until_ended()

    def wait_for_retention(self) -> None:
        """Wait until the replaced checkpoints are deleted. `raise_failure` raises failures.

        Raises:
            StoreError: the agent is gone.
        """
        for save in self._saves:
            if not save.staging_failure:
                save.wait_for_retention()

    def is_last_durable(self) -> bool:
        """Return whether the last save will be persisted."""
        return bool(self._saves) and self._saves[-1].is_durable

    def is_last_of_step(self, step: int) -> bool:
        """Return whether the last save is of this step, so that `persist_last` can persist it."""
        return bool(self._saves) and self._saves[-1].place.step == step

    def persist_last(self, *, deletes_older: bool) -> None:
        """Wait until the last save is committed, and request that it be persisted.

        Args:
            deletes_older: whether to wait until older checkpoints are deleted afterwards.

        Raises:
            StoreError: the save was not committed, or was freed.
        """
        last = self._saves[-1]
        last.wait_for("commit", None)
        try:
            (last.place.path / PERSIST_MARKER).touch()
        except FileNotFoundError as error:
            raise StoreError(
                f"step {last.place.step} cannot be persisted: {last.place.path} was freed; save "
                "the step again"
            ) from error
        self._saves[-1] = replace(last, stages=records.STAGES, deletes_older=deletes_older)
        self._noted.discard(last.save_id)
