"""Handles of saves in progress: waiting for their stages, and reporting failures."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shardwise.engine.save import SaveReport
from shardwise.errors import StoreError
from shardwise.memory import records
from shardwise.memory.files import write_record
from shardwise.memory.home import Place
from shardwise.memory.observe import read_outcome
from shardwise.memory.records import Done
from shardwise.memory.remote.watch import Agents, AgentWatch
from shardwise.memory.trainer.copying import Copying

POLL = (0.001, 0.05)
log = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a save, and where their outcomes are recorded.

    A failure of a snapshot that is for memory only does not end the training: the next snapshot
    replaces it.

    Attributes:
        agents: the agents that complete the save.
        place: the snapshot on this node.
        stages: the stages to wait for.
        logs_failures: whether this rank logs such a failure.
        retains: whether older checkpoints are deleted from storage after the last stage. Rank 0
            waits for that.
        copying: the copy of this rank's part.
    """

    agents: Agents
    place: Place
    save_id: str
    stages: tuple[str, ...]
    logs_failures: bool
    retains: bool = False
    copying: Copying | None = None
    _known: dict[str, Done] = field(default_factory=dict)

    @property
    def is_durable(self) -> bool:
        """Whether the save will be persisted."""
        return self.stages[-1] == "persist"

    @property
    def _with_last(self) -> tuple[str, ...]:
        return (*self.stages, records.RETAIN) if self.retains else self.stages

    def check(self) -> bool:
        """Return whether no stage has failed so far.

        Raises:
            StoreError: a stage of a durable save failed; says which, and why.
        """
        return self._log_or_raise(lambda: [self.ended(stage) for stage in self._with_last])

    def wait_until_ended(self) -> bool:
        """Wait until all stages have ended, and return whether none failed.

        Raises:
            StoreError: as for `check`.
        """
        return self._log_or_raise(lambda: self.wait_all(None))

    def await_removal(self) -> None:
        """Wait until older checkpoints are deleted from storage. If that fails, `check` raises.

        Raises:
            StoreError: the agent of this node is gone, or does not answer.
        """
        if self.retains:
            try:
                self.wait(records.RETAIN, None)
            except StoreError:
                if records.RETAIN not in self._known:
                    raise

    def _log_or_raise(self, look: Callable[[], object]) -> bool:
        try:
            look()
        except StoreError as error:
            if self.is_durable:
                raise
            if self.logs_failures:
                log.warning("a snapshot in memory failed; the training continues: %s", error)
            return False
        return True

    def has_succeeded(self) -> bool:
        """Whether all stages have succeeded."""
        try:
            return all(self.ended(stage) is not None for stage in self._with_last)
        except StoreError:
            return False

    def wait_all(self, timeout: float | None) -> Done:
        """Wait until all stages have ended, and return the outcome of the last one.

        Raises:
            StoreError: a stage failed.
            TimeoutError: `timeout` seconds have passed.
        """
        return [self.wait(stage, timeout) for stage in self.stages][-1]

    def ended(self, stage: str) -> Done | None:
        """Return the outcome of a stage, or None if it has not ended.

        Raises:
            StoreError: the stage failed.
        """
        done = self._known.get(stage) or self._look_up(stage)
        if done is None and stage in ("protect", records.RETAIN) and self._is_replaced():
            # A newer snapshot replaced it, and was protected and retained instead.
            done = self._look_up(stage) or Done(save_id=self.save_id, stage=stage)
        if done is not None:
            self._known[stage] = done  # the record is deleted with the memory of the run
        failure = self.staging_failure if done is None else done.failure
        if failure:
            raise StoreError(f"step {self.place.step}: {stage}: {failure}")
        return done

    @property
    def staging_failure(self) -> str:
        """Why this rank could not stage its part; "" if it could, or is still copying."""
        return "" if self.copying is None else self.copying.failure

    def _look_up(self, stage: str) -> Done | None:
        return read_outcome(self.place, stage, self.save_id)

    def _is_replaced(self) -> bool:
        """Whether the snapshot was committed and is no longer in memory."""
        commit = self._known.get("commit") or self._look_up("commit")
        return commit is not None and not any(
            self.save_id in each for each in self.place.list_names("")
        )

    def wait(self, stage: str, timeout: float | None) -> Done:
        """Wait until a stage has ended.

        Raises:
            StoreError: the stage failed; a newer snapshot superseded the save; the agent of this
                node or of the leader is gone or does not answer; or the leader's agent never
                received the save.
            TimeoutError: `timeout` seconds have passed.
        """
        start = time.monotonic()
        watch = AgentWatch(self.agents, self.place, self.save_id)
        pause = POLL[0]
        while (done := self.ended(stage)) is None:
            self.ended("commit")
            if self._is_replaced() and self.ended(stage) is None:
                raise StoreError(f"step {self.place.step}: {stage}: superseded by a newer snapshot")
            now = time.monotonic()
            if timeout is not None and now - start > timeout:
                raise TimeoutError(
                    f"step {self.place.step}: {stage} has not ended in {timeout:g} s"
                )
            try:
                watch.look(None if timeout is None else start + timeout - now)
            except StoreError as error:
                raise StoreError(f"step {self.place.step}: {stage}: {error}") from error
            time.sleep(pause)
            pause = min(2 * pause, POLL[1])
        return done


class SaveHandle:
    """A save that may still be in progress. `Checkpointer.save` returns it.

    A save goes through these stages: staged (copied to host memory), committed (complete on all
    nodes), protected (copies or parity made) and persisted (durable in the root).

    Args:
        report: what the save did so far.
        stages: the stages to come; None if the save is durable.
        copying: the copy to host memory, if it may be in progress. Waiting for it speeds it up.
    """

    def __init__(
        self,
        report: SaveReport,
        stages: Stages | None = None,
        copying: Copying | None = None,
    ) -> None:
        self._report = report
        self._stages = stages
        self._copying = copying

    def done(self) -> bool:
        """Whether the save has ended: durable (or protected, if for memory only), or failed."""
        if self._stages is None:
            return True
        try:
            ended = {stage: self._stages.ended(stage) for stage in self._stages.stages}
        except StoreError:
            return True
        return None not in ended.values()

    def staged(self, timeout: float | None = None) -> None:
        """Wait until the state is copied. After that you may change it.

        Returns at once unless `Memory(overlap=True)` is set.

        Raises:
            StoreError: the copy failed.
            TimeoutError: `timeout` seconds have passed.
        """
        if self._copying is None:
            return
        if not self._copying.wait(timeout):
            raise TimeoutError(f"the state is not copied after {timeout:g} s")
        if self._copying.failure:
            raise StoreError(self._copying.failure)

    def committed(self, timeout: float | None = None) -> None:
        """Wait until the snapshot is complete on all nodes, so that `restore` can load it.

        Raises:
            StoreError: the save failed; the message names the stage and the reason.
            TimeoutError: `timeout` seconds have passed.
        """
        if (stages := self._hurried()) is not None:
            stages.wait("commit", timeout)

    def protected(self, timeout: float | None = None) -> None:
        """Wait until the snapshot has its copies or parity on other nodes.

        Raises:
            StoreError, TimeoutError: as for `committed`.
        """
        if (stages := self._hurried()) is not None:
            stages.wait("protect", timeout)

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is durable; if it is for memory only, until it is protected.

        Raises:
            StoreError, TimeoutError: as for `committed`.
        """
        if (stages := self._hurried()) is None:
            return self._report
        ended = {stage: stages.wait(stage, timeout) for stage in stages.stages}
        last = ended["commit"]
        seconds = self._report.seconds | {stage: each.seconds for stage, each in ended.items()}
        return replace(
            self._report,
            bytes_total=last.bytes_total,
            bytes_deduplicated=last.bytes_held - last.bytes_total,
            files=last.files,
            seconds=seconds,
        )

    def _hurried(self) -> Stages | None:
        """Return the stages to come, after speeding up the copy because somebody waits."""
        if self._copying is not None:
            self._copying.hurry()
        return self._stages


class PendingSaves:
    """The saves of a rank, in order, that have not ended or whose failure was not raised yet."""

    def __init__(self) -> None:
        self._stages: list[Stages] = []

    def add(self, stages: Stages) -> None:
        """Add a save, and forget those that have succeeded."""
        self._stages = [*(each for each in self._stages if not each.has_succeeded()), stages]

    def raise_failure(self) -> None:
        """Raise the first failure that was not raised yet.

        Failures to stage on this rank are not included: `Staging.check` raises them.

        Raises:
            StoreError: a durable save failed; says why.
        """
        self._stages = [each for each in self._stages if not each.staging_failure]
        for each in list(self._stages):
            succeeds = False
            try:
                succeeds = each.check()
            finally:
                if not succeeds:
                    self._stages.remove(each)

    def wait_until_ended(self, *, step: int | None = None, durable: bool = False) -> None:
        """Wait until the saves have ended.

        Args:
            step: only those of this step.
            durable: only those that will be persisted.

        Raises:
            StoreError: as for `raise_failure`; or the agent is gone.
        """
        for each in self._stages:
            matches = step in (None, each.place.step) and (each.is_durable or not durable)
            if matches and not each.staging_failure:
                each.wait_until_ended()

    def await_removal(self) -> None:
        """Wait until the replaced checkpoints are deleted. `raise_failure` raises failures.

        Raises:
            StoreError: the agent is gone.
        """
        for each in self._stages:
            if not each.staging_failure:
                each.await_removal()

    def ends_durable(self) -> bool:
        """Whether the last save will be persisted."""
        return bool(self._stages) and self._stages[-1].is_durable

    def has_last(self, step: int) -> bool:
        """Whether the last save is of this step, and can still be persisted."""
        return bool(self._stages) and self._stages[-1].place.step == step

    def persist_last(self, *, retains: bool, leads: bool) -> None:
        """Wait until the last save is committed, and request that it be persisted.

        Args:
            retains: whether to delete older checkpoints afterwards.
            leads: whether this rank's node leads the save, so that this rank asks its agent.

        Raises:
            StoreError: the save was not committed.
        """
        last = self._stages[-1]
        last.wait("commit", None)
        if leads:
            record = records.request_record("rescue", last.save_id)
            write_record(last.place.path / record, Done(save_id=last.save_id, stage="rescue"))
        stages = ("commit", "protect", "persist")
        self._stages[-1] = replace(last, stages=stages, retains=retains)
