"""`SaveHandle`: what a user asks of a save that may still be in progress."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.kernel.engine.save import SaveReport
from shardwise.kernel.errors import StoreError
from shardwise.parts.tiers.mirror_watch import MirrorWatch

if TYPE_CHECKING:
    from shardwise.parts.memory.trainer.pending_saves import PendingSave


class SaveHandle:
    """A save that may still be in progress. `Checkpointer.save` returns it.

    A save goes through these stages: staged (copied to host memory), committed (complete on all
    nodes), protected (copies or parity made) and persisted (durable in the root).

    If storage fails at a save with `on_failure="warn"`, and a snapshot was taken instead, `result`
    and `mirrored` raise, while `committed` and `protected` wait for the snapshot.

    Args:
        report: the report of the work so far.
        pending: the stages to come; None if the save is durable.
        mirror: waits for the mirror of the root; None if the root has no mirror.

    Attributes:
        report: the report of the work so far.
        failure: why storage failed at the save, so that only a snapshot was taken; usually "".
    """

    def __init__(
        self,
        report: SaveReport,
        pending: PendingSave | None = None,
        mirror: MirrorWatch | None = None,
    ) -> None:
        self.report = report
        self._pending = pending
        self._mirror = mirror
        self.failure = ""

    def __repr__(self) -> str:
        return f"<SaveHandle of step {self.report.step}>"

    @property
    def durable(self) -> bool:
        """Whether the checkpoint has become durable in the root; this does not wait.

        It stays True if the rules of `keep` remove the checkpoint later. A snapshot for memory only
        becomes durable if it is persisted after all: at the end of the run, or by a rescue.
        """
        return self._pending is None or self._pending.is_persisted()

    def done(self) -> bool:
        """Return whether the save has ended.

        A save ends when the checkpoint is durable, when a snapshot for memory only is protected, or
        when a stage fails. `result` then returns or raises at once.
        """
        return self._pending is None or bool(self.failure) or self._pending.has_ended()

    def why_retrying(self) -> str:
        """Return why this node's agent tries again to write the checkpoint; "" if it does not.

        For example, the storage does not answer. The snapshot stays in memory meanwhile.
        """
        return "" if self._pending is None else self._pending.why_retrying("persist")

    def staged(self, timeout: float | None = None) -> None:
        """Wait until the state is copied. After that you may change it.

        Returns at once unless `Memory(overlap=True)` is set.

        Raises:
            StoreError: the copy failed.
            TimeoutError: `timeout` seconds have passed.
        """
        copying = None if self._pending is None else self._pending.copying
        if copying is None:
            return
        if not copying.wait(timeout):
            raise TimeoutError(
                f"step {self.report.step}: copying the state to host memory has not ended in "
                f"{timeout:g} s; the copy continues, so do not change the state yet: call staged() "
                "again"
            )
        if copying.failure:
            raise StoreError(copying.failure)

    def committed(self, timeout: float | None = None) -> None:
        """Wait until the snapshot is complete on all nodes, so that `restore` can load it.

        Raises:
            StoreError: the save failed; the message names the stage and the reason.
            TimeoutError: `timeout` seconds have passed.
        """
        if (pending := self._hurry_copy()) is not None:
            pending.wait_for("commit", timeout)

    def protected(self, timeout: float | None = None) -> None:
        """Wait until the snapshot has its copies or parity on other nodes.

        Raises:
            StoreError, TimeoutError: as for `committed`.
        """
        if (pending := self._hurry_copy()) is not None:
            pending.wait_for("protect", timeout)

    def result(self, timeout: float | None = None) -> SaveReport:
        """Wait until the checkpoint is durable; if it is for memory only, until it is protected.

        A save is for memory only if its step is not due in the root. `durable` says whether the
        checkpoint is in the root.

        Raises:
            StoreError, TimeoutError: as for `committed`. `timeout` applies to each stage.
            StoreError: the step was due in the root, but storage failed, so only a snapshot of it
                was taken.
        """
        if (pending := self._hurry_copy()) is None:
            return self.report
        if self.failure and not self.durable:
            raise StoreError(
                f"step {self.report.step} is not durable, because storage failed at the save: "
                f"{self.failure}. Only memory has a snapshot of the step, for which committed() "
                "and protected() wait"
            )
        seconds = {stage: pending.wait_for(stage, timeout).seconds for stage in pending.stages}
        return replace(self.report, seconds=self.report.seconds | seconds)

    def mirrored(self, timeout: float | None = None) -> None:
        """Wait until the mirror of the root has the checkpoint, too.

        Raises:
            StoreError: the save failed; it is for memory only; there is no mirror; or, without
                `timeout`, the mirror has failed for ten minutes.
            TimeoutError: `timeout` seconds have passed. The message says why the mirror fails.
        """
        is_for_root = self._pending is None or self._pending.is_durable or bool(self.failure)
        if self._mirror is None or not (is_for_root or self.durable):
            why = (
                "the Checkpointer has no mirror="
                if self._mirror is None
                else "this save is for memory only"
            )
            raise StoreError(f"step {self.report.step} is not mirrored: {why}")
        self.result(timeout)
        self._mirror.wait(self.report.step or 0, timeout)

    def _hurry_copy(self) -> PendingSave | None:
        """Let the copy continue at full speed, because a caller waits; return the pending save."""
        if self._pending is not None and self._pending.copying is not None:
            self._pending.copying.hurry()
        return self._pending
