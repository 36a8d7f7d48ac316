"""The saves of a rank that are in progress: wait for them, and raise their failures."""

from __future__ import annotations

from dataclasses import replace

from shardwise.memory import records
from shardwise.memory.files import write_record
from shardwise.memory.records import StageOutcome
from shardwise.memory.trainer.save_handle import PendingSave


class PendingSaves:
    """A rank's saves in progress, and failed saves with an error to raise; oldest first."""

    def __init__(self) -> None:
        self._saves: list[PendingSave] = []
        self._told: set[str] = set()

    def add(self, save: PendingSave) -> None:
        """Add a save, and forget the saves that have succeeded."""
        self._saves = [
            *(each for each in self._saves if not each.has_succeeded() or self._is_new(each)),
            save,
        ]
        self._told &= {each.save_id for each in self._saves}

    def take_saved(self) -> list[int]:
        """Return the steps that became durable since the last call."""
        new = list(filter(self._is_new, self._saves))
        self._told |= {each.save_id for each in new}
        return [each.place.step for each in new]

    def _is_new(self, save: PendingSave) -> bool:
        """Return whether a save is durable, and `take_saved` did not return it yet."""
        return save.save_id not in self._told and save.is_persisted()

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

    def persist_last(self, *, deletes_older: bool, leads: bool) -> None:
        """Wait until the last save is committed, and request that it be persisted.

        Args:
            deletes_older: whether to delete older checkpoints afterwards.
            leads: whether this rank's node leads the save. If it does, this rank asks its agent.

        Raises:
            StoreError: the save was not committed.
        """
        last = self._saves[-1]
        last.wait_for("commit", None)
        if leads:
            record = records.save_record("rescue", last.save_id)
            write_record(
                last.place.path / record, StageOutcome(save_id=last.save_id, stage="rescue")
            )
        stages = ("commit", "protect", "persist")
        self._saves[-1] = replace(last, stages=stages, deletes_older=deletes_older)
