"""How a run saves to the memory of its nodes, from where agents write to storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext

from shardwise.checkpointer.handle import SaveHandle
from shardwise.checkpointer.saver import Saver
from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.planning import PlannedSave, SaveRequest, plan_together
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.engine.save import SaveReport
from shardwise.kernel.events import Recorder
from shardwise.kernel.plan.save import PlanCache
from shardwise.kernel.store import Store
from shardwise.parts.memory.options import Memory
from shardwise.parts.memory.trainer.pending_saves import PendingSave
from shardwise.parts.memory.trainer.snapshots import Snapshots
from shardwise.parts.tiers.mirror_watch import MirrorWatch
from shardwise.parts.tiers.options import StorageTask


class ToMemory:
    """Slots in the memory of the nodes, as the destination of one save.

    Args:
        snapshots: stages the save.
        storage: the root, and what to do there after the save.
        durable: whether agents write the checkpoint to the root.
        steps_to_look_for: look only for earlier checkpoints of these steps. None: look for any, and
            claim the root.
        mirror: follows the mirror of the root; None if the root has none.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        storage: StorageTask,
        *,
        durable: bool,
        steps_to_look_for: Collection[int] | None,
        mirror: MirrorWatch | None,
    ) -> None:
        self._snapshots, self._task, self._durable = snapshots, storage, durable
        self._steps_to_look_for, self._mirror = steps_to_look_for, mirror
        self._pending: PendingSave | None = None

    def offer(self, request: SaveRequest) -> bytes:
        """Return whether this rank has a slot, and the agent of its node; see `Snapshots.offer`."""
        request.needs_room = self._durable
        if not self._durable:
            request.place = f"memory, for {request.store}"
        return self._snapshots.offer(request.step or 0, durable=self._durable)

    def lock(self, request: SaveRequest) -> None:
        """Claim the root, unless that would make the training wait for an object store."""
        if self._steps_to_look_for is None:
            request.claim_root()

    def accepts(self, notes: Sequence[bytes]) -> bool:
        """Return whether all ranks have a slot, or wait for one."""
        return self._snapshots.accept(notes)

    def move(self, planned: PlannedSave, group: Group, recorder: Recorder) -> tuple[str, int]:
        """Copy this rank's part into a slot, or begin to; see `Destination.move`."""
        request = planned.request
        if self._durable:
            with Round(group, "looking for an earlier save", rank0_only=True):
                if group.rank == 0:
                    request.check_place(self._steps_to_look_for)
        with recorder.stage("copy") as stage:
            pending = self._snapshots.stage(planned, self._task, durable=self._durable)
            stage.bytes = pending.nbytes
        self._pending = pending
        return str(request.store if self._durable else pending.place.path), pending.nbytes

    def handle(self, report: SaveReport) -> SaveHandle:
        """Return what the user gets of the save."""
        return SaveHandle(report, self._pending, self._mirror)


class SnapshotSaver(Snapshots, Saver):
    """Saves to memory, from where agents write to storage.

    Args:
        root, group, mirror: as for `Saver`.
        options: the options for memory.
        steps: the committed steps of the root.
    """

    has_agents = True

    def __init__(
        self,
        root: Store,
        options: Memory,
        group: Group,
        mirror: MirrorWatch | None,
        steps: Collection[int],
    ) -> None:
        super().__init__(root, options, group)
        self._mirror = mirror
        # Training must not wait for an object store. The agent looks again when it publishes, and
        # claims the root.
        self._steps_to_look_for = steps if root.traits.lock_expiry > 0.0 else None

    def destination(
        self, storage: StorageTask, *, durable: bool
    ) -> AbstractContextManager[ToMemory]:
        """Return where the next save goes, after the copy in progress."""
        self.fence()
        looked_for, mirror = self._steps_to_look_for, self._mirror
        return nullcontext(
            ToMemory(self, storage, durable=durable, steps_to_look_for=looked_for, mirror=mirror)
        )

    def prepare(
        self, make_request: Callable[[], SaveRequest], plan_cache: PlanCache, recorder: Recorder
    ) -> int:
        """Allocate the slots of all ranks, and return the bytes allocated for this rank."""
        planned = plan_together(make_request, None, self._group, plan_cache, recorder)
        with recorder.stage("allocate"):
            return self.allocate(planned)
