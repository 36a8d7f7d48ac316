"""A save that was begun: how far it has come, as the records on this node say."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from shardwise.engine.save import SaveReport
from shardwise.errors import StoreError
from shardwise.memory import records
from shardwise.memory.home import Place, read_record, write_record
from shardwise.memory.node.retire import ENDED
from shardwise.memory.records import Done
from shardwise.memory.remote.watch import Agents, Vigil
from shardwise.memory.trainer.copying import Copying

POLL = (0.001, 0.05)
log = logging.getLogger("shardwise")


@dataclass(frozen=True, slots=True)
class Stages:
    """What a save goes through, in the words of its records, and where those are looked for.

    What fails of one that is for memory only is no reason to end a training: the next takes its
    place.

    Attributes:
        told_here: it is this rank that logs such a failure.
        retains: older checkpoints are to go from storage after the last stage; rank 0 waits for
            that, on whose node they do.
        copying: this rank's part on its way into memory.
    """

    agents: Agents
    place: Place
    save_id: str
    stages: tuple[str, ...]
    told_here: bool
    retains: bool = False
    copying: Copying | None = None
    _known: dict[str, Done] = field(default_factory=dict)

    @property
    def is_durable(self) -> bool:
        """Whether it is to be persisted in any case."""
        return self.stages[-1] == "persist"

    @property
    def _with_last(self) -> tuple[str, ...]:
        return (*self.stages, records.RETAIN) if self.retains else self.stages

    def check(self) -> bool:
        """Whether no stage has failed.

        Raises:
            StoreError: one has, of a save that is to be persisted; says which, and why.
        """
        return self._bear(lambda: [self.ended(stage) for stage in self._with_last])

    def settle(self) -> bool:
        """Wait until all stages have ended; whether none has failed.

        Raises:
            StoreError: as for `check`.
        """
        return self._bear(lambda: self.wait_all(None))

    def await_removal(self) -> None:
        """Wait until older checkpoints are gone from storage; `check` raises if they cannot go.

        Raises:
            StoreError: the agent of this node is gone, or does not answer.
        """
        if self.retains:
            try:
                self.wait(records.RETAIN, None)
            except StoreError:
                if records.RETAIN not in self._known:
                    raise

    def _bear(self, look: Callable[[], object]) -> bool:
        try:
            look()
        except StoreError as error:
            if self.is_durable:
                raise
            if self.told_here:
                log.warning("a snapshot in memory is lost, and the training goes on: %s", error)
            return False
        return True

    def is_over(self) -> bool:
        """Whether all has ended well. What has failed is still to be raised."""
        try:
            return all(self.ended(stage) is not None for stage in self._with_last)
        except StoreError:
            return False

    def wait_all(self, timeout: float | None) -> Done:
        """Wait until all stages have ended; how the last one has.

        Raises:
            StoreError: one has failed.
            TimeoutError: `timeout` seconds have passed.
        """
        return [self.wait(stage, timeout) for stage in self.stages][-1]

    def ended(self, stage: str) -> Done | None:
        """How a stage has ended, if it has.

        Raises:
            StoreError: it has failed; or nothing can come of it, as the agent is gone.
        """
        done = self._known.get(stage) or self._look_up(stage)
        if done is None and stage in ("protect", records.RETAIN) and self._is_replaced():
            # Its memory has gone to newer ones meanwhile, which also do what was left of this.
            done = self._look_up(stage) or Done(save_id=self.save_id, stage=stage)
        if done is not None:
            self._known[stage] = done  # its record goes with the memory of the run
        failure = self.staging_failure if done is None else done.failure
        if failure:
            raise StoreError(f"step {self.place.step}: {stage}: {failure}")
        return done

    @property
    def staging_failure(self) -> str:
        """Why this rank could not stage its part; "" if it could, or still may."""
        return "" if self.copying is None else self.copying.failure

    def _look_up(self, stage: str) -> Done | None:
        name = records.outcome(stage, self.save_id)
        done = read_record(self.place.path / name, Done)
        return done or read_record(self.place.run.path / ENDED / name, Done)

    def _is_replaced(self) -> bool:
        """Whether it was committed, and is not in memory any more."""
        commit = self._known.get("commit") or self._look_up("commit")
        return commit is not None and not any(self.save_id in each for each in self.place.named(""))

    def wait(self, stage: str, timeout: float | None) -> Done:
        """Wait until a stage has ended.

        Raises:
            StoreError: it has failed; newer ones have taken its place; the agent of this node is
                gone, or that or the one that leads does not answer; or the one that leads was not
                given the save.
            TimeoutError: `timeout` seconds have passed.
        """
        start = time.monotonic()
        vigil = Vigil(self.agents, self.place, self.save_id)
        pause = POLL[0]
        while (done := self.ended(stage)) is None:
            self.ended("commit")
            if self._is_replaced() and self.ended(stage) is None:
                raise StoreError(
                    f"step {self.place.step}: {stage}: newer snapshots have taken its place"
                )
            now = time.monotonic()
            if timeout is not None and now - start > timeout:
                raise TimeoutError(
                    f"step {self.place.step}: {stage} has not ended in {timeout:g} s"
                )
            try:
                vigil.look(None if timeout is None else start + timeout - now)
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
        """What is still to come, now that it is waited for."""
        if self._copying is not None:
            self._copying.hurry()
        return self._stages


class Begun:
    """Those that are not over, or of whose failure nobody was told, in their order."""

    def __init__(self) -> None:
        self._stages: list[Stages] = []

    def add(self, stages: Stages) -> None:
        """One more."""
        self._stages = [*(each for each in self._stages if not each.is_over()), stages]

    def raise_failure(self) -> None:
        """Tell of one that has failed, once; the others stay. Of what could not be staged here,
        `Staging.check` has told.

        Raises:
            StoreError: one that is to be persisted has failed; says why.
        """
        self._stages = [each for each in self._stages if not each.staging_failure]
        for each in list(self._stages):
            is_well = False
            try:
                is_well = each.check()
            finally:
                if not is_well:
                    self._stages.remove(each)

    def settle(self, *, step: int | None = None, durable: bool = False) -> None:
        """Wait until they are over.

        Args:
            step: those of this step only.
            durable: those that are to be persisted only.

        Raises:
            StoreError: as for `raise_failure`; or the agent is gone.
        """
        for each in self._stages:
            is_meant = step in (None, each.place.step) and (each.is_durable or not durable)
            if is_meant and not each.staging_failure:
                each.settle()

    def await_removal(self) -> None:
        """Wait until the checkpoints that they replace are gone; `raise_failure` tells if not.

        Raises:
            StoreError: the agent is gone.
        """
        for each in self._stages:
            if not each.staging_failure:
                each.await_removal()

    def ends_durable(self) -> bool:
        """Whether the last one is to be persisted."""
        return bool(self._stages) and self._stages[-1].is_durable

    def has_last(self, step: int) -> bool:
        """Whether the last one is of this step, and can still be persisted."""
        return bool(self._stages) and self._stages[-1].place.step == step

    def persist_last(self, *, retains: bool, leads: bool) -> None:
        """Have the last one persisted, once it is committed.

        Args:
            retains: older checkpoints are to be removed after it.
            leads: this rank's node leads the save, and asks its agent.

        Raises:
            StoreError: it was not committed.
        """
        last = self._stages[-1]
        last.wait("commit", None)
        if leads:
            record = records.request("rescue", last.save_id)
            write_record(last.place.path / record, Done(save_id=last.save_id, stage="rescue"))
        stages = ("commit", "protect", "persist")
        self._stages[-1] = replace(last, stages=stages, retains=retains)
