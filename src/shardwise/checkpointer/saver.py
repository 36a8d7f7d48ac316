"""How a run saves to storage; `memory_saver.py` stages in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from shardwise.checkpointer.handle import SaveHandle
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.planning import PlannedSave, SaveRequest
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.engine.save import SaveReport, Storage
from shardwise.kernel.errors import StoreError
from shardwise.kernel.events import Event, Recorder, Watcher
from shardwise.kernel.plan.save import PlanCache
from shardwise.kernel.store import Store
from shardwise.parts.tiers.mirror_watch import MirrorWatch
from shardwise.parts.tiers.options import StorageTask

if TYPE_CHECKING:
    from shardwise.parts.memory.trainer.recovery import FoundSnapshots


class ToStorage(Storage):
    """The root, as the destination of one save; then checkpoints that the rules drop are removed.

    Args:
        root: the store of the checkpoints.
        storage: the rules.
        saved: gets the step of the save.
        mirror: follows the mirror of the root; None if the root has none.
    """

    def __init__(
        self, root: Store, storage: StorageTask, saved: list[int], mirror: MirrorWatch | None
    ) -> None:
        super().__init__()
        self._root, self._task, self._saved, self._mirror = root, storage, saved, mirror

    def accepts(self, notes: Sequence[bytes]) -> bool:
        """Return True: storage has no slots."""
        return True

    def move(self, planned: PlannedSave, group: Group, recorder: Recorder) -> tuple[str, int]:
        """Write and publish the checkpoint, and remove old ones; see `Destination.move`."""
        moved = super().move(planned, group, recorder)
        self._saved.append(planned.request.step or 0)
        if self._task.mirror is None:  # otherwise, the thread that copies also removes
            with Round(group, "removing old checkpoints", rank0_only=True):
                if group.rank == 0:
                    self._task.remove_old(self._root)
        return moved

    def handle(self, report: SaveReport) -> SaveHandle:
        """Return what the user gets of the save."""
        return SaveHandle(report, mirror=self._mirror)


class Saver:
    """Saves steps to storage. A save is durable when `save` returns.

    `memory_saver.SnapshotSaver` overrides all methods. All ranks call them together, except as
    noted. Without agents, only `destination` and `take_saved` have something to do.

    Args:
        root: the store of the checkpoints.
        group: the ranks.
        mirror: follows the mirror of the root; None if the root has none.

    Attributes:
        has_agents: whether agents go on with saves in the background.
    """

    has_agents = False

    def __init__(self, root: Store, group: Group, mirror: MirrorWatch | None) -> None:
        self._root, self._group = root, group
        self._mirror = mirror
        self._saved: list[int] = []

    def destination(self, storage: StorageTask, *, durable: bool) -> AbstractContextManager[Any]:
        """Return where the next save goes. One rank may call this.

        Args:
            storage: the root, and what to do there after the save.
            durable: whether the save goes to the root, rather than to memory alone.
        """
        return ToStorage(self._root, storage, self._saved, self._mirror)

    def take_saved(self) -> list[int]:
        """Return the steps that became durable since the last call. One rank may call this."""
        saved = [*self._saved]
        self._saved.clear()
        return saved

    def prepare(
        self, make_request: Callable[[], SaveRequest], plan_cache: PlanCache, recorder: Recorder
    ) -> int:
        """Allocate the memory of saves, and return the bytes for this rank."""
        return 0

    def request_mirroring(self, task: StorageTask) -> None:
        """Have the agent of this node mirror the root. One rank may call this."""

    def fence(self) -> None:
        """Wait for the copy in progress, so that the state may change. One rank may call this."""

    def persist(self, step: int, *, removes_old: bool) -> bool:
        """Have the last save persisted, if it is of this step; return whether it is."""
        return False

    def make_watcher(self, operation: str, step: int | None) -> Watcher | None:
        """Return a watcher that tells the agent the current stage; None without agents."""
        return None

    def take_ended(self) -> dict[str, tuple[Event, ...]]:
        """Return the stages of agents, for the saves that ended since the last call, by id."""
        return {}

    def take_failure(self) -> StoreError | None:
        """Return a failure in the background that was not raised or returned yet, if any."""
        return None

    def wait_until_durable(self) -> None:
        """Wait until durable saves have ended. One rank may call this."""

    def find_snapshots(self, step: int | None) -> FoundSnapshots:
        """Yield the newest snapshot in memory; if it was damaged, an older snapshot, and so on."""
        yield from ()

    def resume_from(
        self, step: int | None, owner: str | None, finds_later: Callable[[], bool] | None
    ) -> bool:
        """Discard what is newer than the step that the run continues from.

        Args:
            step: the step; None for the beginning.
            owner: as for `lineage.resume_from`.
            finds_later: returns, on rank 0, whether storage has a newer step nevertheless, which
                agents may have written until now; None not to look.

        Returns:
            The result of `finds_later`, on all ranks.
        """
        return False

    @property
    def epoch(self) -> int | None:
        """The epoch of the run; None without agents."""
        return None

    def close(self, *, wait: bool, failed: bool) -> None:
        """Release everything; wait until all saves have ended, if `wait` is True."""
