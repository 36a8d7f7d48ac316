"""How a run saves: `DirectSaver` writes to storage, `SnapshotSaver` stages in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection

from shardwise.checkpointer.handle import SaveHandle
from shardwise.checkpointer.replica_checks import ReplicaChecks
from shardwise.engine.group import Group, TimedGroup
from shardwise.engine.planning import SaveRequest, plan_together
from shardwise.engine.rounds import Round
from shardwise.engine.save import SaveReport, save_all
from shardwise.errors import StoreError
from shardwise.events import Event, Recorder, Watcher
from shardwise.memory.options import Memory
from shardwise.memory.trainer.recovery import FoundSnapshots
from shardwise.memory.trainer.snapshots import Snapshots
from shardwise.plan.save import PlanCache
from shardwise.store import Store
from shardwise.tiers.mirror_watch import MirrorWatch
from shardwise.tiers.options import StorageTask


class DirectSaver:
    """Saves to storage. A save is durable when `save` returns.

    `SnapshotSaver` has the same methods. All ranks call them together, except as noted. Without
    agents, only `save` and `take_saved` have something to do.

    Args:
        root: the store of the checkpoints.
        group: the ranks.
        checks: compares the replicas of the ranks.
        mirror: follows the mirror of the root; None if the root has none.

    Attributes:
        request_mirroring: has the agent of this node mirror the root; None without agents.
    """

    request_mirroring: Callable[[StorageTask], None] | None = None

    def __init__(
        self,
        root: Store,
        group: Group,
        checks: ReplicaChecks,
        mirror: MirrorWatch | None,
    ) -> None:
        self._root, self._group = root, group
        self._checks, self._mirror = checks, mirror
        self._saved: list[int] = []

    def save(
        self,
        make_save: Callable[[], SaveRequest],
        storage: StorageTask,
        plan_cache: PlanCache,
        recorder: Recorder,
        *,
        durable: bool,
    ) -> SaveHandle | None:
        """Save a step, then remove the checkpoints that the rules drop."""
        report = save_all(make_save, self._group, plan_cache, recorder, self._checks.check)
        self._saved.append(report.step or 0)
        if storage.mirror is None:  # otherwise, the thread that copies also removes
            with Round(self._group, "removing old checkpoints", rank0_only=True):
                if self._group.rank == 0:
                    storage.remove_old(self._root)
        return SaveHandle(report, mirror=self._mirror)

    def prepare(
        self, make_save: Callable[[], SaveRequest], plan_cache: PlanCache, recorder: Recorder
    ) -> int:
        """Allocate the memory of saves, and return the bytes for this rank."""
        return 0

    def fence(self) -> None:
        """Wait for the copy in progress, so that the state may change. One rank may call this."""

    def persist(self, step: int, *, removes_old: bool) -> bool:
        """Have the last save persisted, if it is of this step; return whether it is."""
        return False

    def take_saved(self) -> list[int]:
        """Return the steps that became durable since the last call. One rank may call this."""
        saved, self._saved = self._saved, []
        return saved

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

    def resume_from(self, step: int | None, owner: str | None = None) -> None:
        """Discard what is newer than the step that the run continues from."""

    @property
    def epoch(self) -> int | None:
        """The epoch of the run; None without agents."""
        return None

    def close(self, *, wait: bool, failed: bool) -> None:
        """Release everything; wait until all saves have ended, if `wait` is True."""


class SnapshotSaver(Snapshots):
    """Saves to memory, from where agents write to storage.

    Args:
        root, group, checks, mirror: as for `DirectSaver`.
        options: the options for memory.
        steps: the committed steps of the root.
    """

    def __init__(
        self,
        root: Store,
        options: Memory,
        group: Group,
        checks: ReplicaChecks,
        mirror: MirrorWatch | None,
        steps: Collection[int],
    ) -> None:
        super().__init__(root, options, group)
        self._checks, self._mirror = checks, mirror
        # Training must not wait for an object store. The agent looks again when it publishes, and
        # claims the root.
        self._steps_to_look_for = steps if root.traits.lock_expiry > 0.0 else None

    def save(
        self,
        make_save: Callable[[], SaveRequest],
        storage: StorageTask,
        plan_cache: PlanCache,
        recorder: Recorder,
        *,
        durable: bool,
    ) -> SaveHandle | None:
        """Stage a snapshot for the agents, and return its handle; None if no slot was free."""
        self.fence()
        group, sent_before = TimedGroup(self._group, recorder), self._group.bytes_sent

        def prepare() -> SaveRequest:
            save = make_save()
            save.note = self.offer(save.step or 0, durable=durable)
            save.needs_room = durable
            if not durable:
                save.place = f"memory, for {save.store}"
            return save

        claim = SaveRequest.claim_root if self._steps_to_look_for is None else None
        planned = plan_together(prepare, group, plan_cache, recorder, claim)
        if not self.accept(planned.notes):
            return None
        request, plan = planned.request, planned.plan
        recorder.save_id = planned.save_id
        if durable:
            with Round(group, "looking for an earlier save", rank0_only=True):
                if group.rank == 0:
                    request.check_place(self._steps_to_look_for)
        if planned.checks_replicas:
            with recorder.stage("check_replicas"):
                self._checks.check(planned, group)
        with recorder.stage("copy") as stage:
            pending = self.stage(planned, storage, durable=durable)
            stage.bytes = pending.nbytes
        report = SaveReport(
            path=str(request.store if durable else pending.place.path),
            step=request.step,
            bytes_total=plan.bytes_stored,
            bytes_written=pending.nbytes,
            bytes_deduplicated=plan.bytes_held - plan.bytes_stored,
            files=len(plan.writers),
            plan_cached=planned.cached,
            bytes_communicated=group.bytes_sent - sent_before,
            seconds=recorder.seconds(),
            record=recorder.record(),
        )
        return SaveHandle(report, pending, self._mirror)

    def prepare(
        self, make_save: Callable[[], SaveRequest], plan_cache: PlanCache, recorder: Recorder
    ) -> int:
        """Allocate the slots of all ranks, and return the bytes allocated for this rank."""

        def prepare() -> SaveRequest:
            save = make_save()
            save.needs_room = False
            return save

        planned = plan_together(prepare, self._group, plan_cache, recorder)
        with recorder.stage("allocate"):
            return self.allocate(planned)


Saver = DirectSaver | SnapshotSaver
"""What saves the steps of a run."""
