"""The saves that a rank has begun, until they are over: waited for, and told of where they fail."""

from __future__ import annotations

from dataclasses import replace

from shardwise.memory import records
from shardwise.memory.node.home import write_record
from shardwise.memory.records import Done
from shardwise.memory.trainer.handle import Stages


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
