"""Snapshots of a run: the ranks stage them, and the agents complete them."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace

from shardwise.divergence.comparison import ReplicaComparison
from shardwise.engine.group import Group
from shardwise.engine.planning import (
    Offer,
    PlannedSave,
    SaveRequest,
    describe_save,
    refuse_if_full,
)
from shardwise.engine.rounds import Round
from shardwise.engine.save import SaveReport, check_replicas
from shardwise.errors import StoreError
from shardwise.events import Recorder
from shardwise.manifest.names import data_file
from shardwise.memory.agent.mirrors import set_mirror_task
from shardwise.memory.agent.protect import find_protection_gaps
from shardwise.memory.home import Run, SnapshotDirectory
from shardwise.memory.lineage import Lineage, resume_from
from shardwise.memory.options import Memory
from shardwise.memory.rank_liveness import RankLock, forget_lost_ranks
from shardwise.memory.reclaim import (
    delete_free_slots,
    discard_superseded,
    refuse_older_step,
    remove_other_runs,
)
from shardwise.memory.records import AgentInfo, PendingManifest, StorageTask
from shardwise.memory.remote.agent_watch import SaveAgents
from shardwise.memory.spawn import ensure_agent
from shardwise.memory.trainer.agents import AgentSupervisor, choose_interface, join_run
from shardwise.memory.trainer.node_watch import NodeWatch
from shardwise.memory.trainer.recovery import FoundSnapshots, find_snapshots
from shardwise.memory.trainer.rings import join_ring
from shardwise.memory.trainer.save_handle import PendingSave, PendingSaves, SaveHandle
from shardwise.memory.trainer.staging import SnapshotPart, Staging
from shardwise.plan.save import PlanCache
from shardwise.retention import committed_steps
from shardwise.store import Store
from shardwise.tiers.watch import MirrorWatch

log = logging.getLogger("shardwise")


class Snapshots:
    """The snapshots of a run in the memory of its nodes. All ranks create it together.

    Args:
        root: the store of the persisted checkpoints, which identifies the run.
        options: the user's options.
        group: the ranks.
        comparison: compares the replicas of the ranks.
        mirror: follows the mirror of the root; None if the root has none.

    Attributes:
        root: as above.
        skipped: the number of snapshots that were skipped because no slot was free.
        home, run: the directories of this node and of the run on it.
        membership: the nodes of the run, and the lineage of the run.
        node: the name of this rank's node.
        is_first_of_node: whether this rank is the first of its node.
        tls: certificates for connections between the nodes of the run.
    """

    def __init__(
        self,
        root: Store,
        options: Memory,
        group: Group,
        comparison: ReplicaComparison,
        mirror: MirrorWatch | None = None,
    ) -> None:
        self.root = root
        self._options = options = choose_interface(options, group)
        self._group = group
        self._comparison, self._mirror = comparison, mirror
        self._pending, self.skipped = PendingSaves(), 0
        self.home, self.membership = join_run(root, options, group)
        self.run: Run = self.home.run(self.membership.lineage.run)
        node_of = self.membership.node_of
        self.node = node_of[group.rank]
        self.is_first_of_node = node_of.index(self.node) == group.rank
        self.tls = options.tls
        with Round(group, "taking the locks of ranks"):
            self._rank_lock = RankLock(self.run, group.rank)
        # Before it saves one of these steps, this rank looks for a checkpoint of the step in the
        # root. None: before each save.
        self._steps_to_look_for: frozenset[int] | None = None
        with Round(group, "reclaiming memory"):
            self._reclaim()
        self._staging = Staging(
            self.home,
            self.run,
            group.rank,
            options,
            nodes=len(set(node_of)),
            ranks_here=node_of.count(self.node),
            watch=NodeWatch(self.membership, group),
        )
        self._supervisor = AgentSupervisor(self.home, options) if self.is_first_of_node else None
        if group.rank == 0:
            self._warn_of_gaps()

    def _warn_of_gaps(self) -> None:
        options = self._options
        protection = {"copies": options.copies, "parity": options.parity, "group": options.group}
        for gap in find_protection_gaps(self.membership.nodes, **protection):
            warnings.warn(f"snapshots in memory: {gap}", RuntimeWarning, stacklevel=4)

    def _reclaim(self) -> None:
        """Delete from this node the data of runs and ranks that have moved elsewhere."""
        if self._group.rank == 0 and self.root.traits.lock_expiry > 0.0:
            # Training must not wait for an object store. The agent looks again when it publishes.
            self._steps_to_look_for = frozenset(committed_steps(self.root))
        if self.is_first_of_node:
            forget_lost_ranks(self.run)
            remove_other_runs(self.home, self.run, str(self.root))
            self.run.record_nodes(self.membership.nodes)
            node_of = self.membership.node_of
            delete_free_slots(self.run, lambda rank: node_of[rank : rank + 1] == [self.node])

    def save(
        self,
        make_save: Callable[[], SaveRequest],
        storage: StorageTask,
        plan_cache: PlanCache,
        recorder: Recorder,
        *,
        durable: bool,
    ) -> SaveHandle | None:
        """Stage a snapshot for the agents, and return its handle; None if it was skipped.

        Args:
            make_save: returns this rank's save; its store is the place of the step in storage.
            storage: the root, and what to do there after the save.
            plan_cache: plans of earlier saves.
            recorder: measures the stages.
            durable: whether to persist the snapshot.

        Raises:
            ShardwiseError: on all ranks: the save is refused, or an earlier one has failed.
        """
        self.fence()
        bytes_sent_before = self._group.bytes_sent

        with Round(self._group, "agreeing on a save") as all_ranks:
            info = self._check_before_save()
            save = make_save()
            has_slot = self._prepare_slot(save.options.step or 0, durable=durable)
            place = str(save.store) if durable else f"memory, for {save.store}"
            root = self.root if durable else None
            with recorder.stage("describe"):
                described = describe_save(replace(save, place=place, space_of=root))
            offer = described.offer(plan_cache, self._group, self._comparison)
            messages = all_ranks.all_gather((offer, has_slot, info), tuple[Offer, bool, AgentInfo])
        offers = [offer for offer, _, _ in messages]
        self._comparison.conclude([each.sample for each in offers], self._group, recorder)
        self.membership.nodes = list({info.node: info for _, _, info in messages}.values())
        if self._options.when_full == "skip" and not all(slot for _, slot, _ in messages):
            self.skipped += 1
            return None
        planned = described.plan(offers, self._group, plan_cache, recorder)
        if durable:
            with Round(self._group, "looking for an earlier save", rank0_only=True):
                if self._group.rank == 0:
                    planned.request.refuse_existing(self._steps_to_look_for)
                    refuse_if_full(planned.request.space_of, planned.plan.bytes_stored)
        if planned.request.options.check_replicas:
            check_replicas(planned, self._group)
        planned = planned.with_sample(self._comparison)
        return self._stage(planned, storage, recorder, bytes_sent_before, durable=durable)

    def _prepare_slot(self, step: int, *, durable: bool) -> bool:
        """Return whether this rank has a slot for a snapshot of a step, or waits for one."""
        refuse_older_step(self.run, step, self.membership.lineage, self.root)
        self._pending.wait_until_ended(step=step)  # this save replaces one of the same step
        return not self._staging.is_prepared or durable or self._staging.has_free()

    def _check_before_save(self) -> AgentInfo:
        """Raise earlier failures, and return this node's agent, which is started if necessary."""
        self._rank_lock.raise_if_replaced()
        self._raise_failures()
        if self._supervisor is not None:
            self._supervisor.check()
        return ensure_agent(self.home, self._options)

    def prepare(
        self, make_save: Callable[[], SaveRequest], plan_cache: PlanCache, recorder: Recorder
    ) -> int:
        """Allocate the slots of all ranks, and return the bytes allocated for this rank.

        Raises:
            ShardwiseError: on all ranks: the memory of a node is too small. The message says how
                much is needed.
        """
        group = self._group

        with Round(group, "describing a save") as all_ranks:
            described = describe_save(replace(make_save(), space_of=None))
            offers = all_ranks.all_gather(described.offer(plan_cache, group), Offer)
        planned = described.plan(offers, group, plan_cache, recorder)
        source, ring, _ = join_ring(planned, self._options, self.membership, group)
        compared = self._comparison.most_bytes(planned.plan)
        with Round(group, "allocating slots"), recorder.stage("allocate"):
            return self._staging.prepare(source, ring, compared)

    def find_snapshots(self, step: int | None) -> FoundSnapshots:
        """Yield the newest snapshot in memory, as `recovery.find_snapshots` does."""
        return find_snapshots(self, self._group, step)

    def request_mirroring(self, task: StorageTask) -> None:
        """Have the agent of this node mirror the root."""
        try:
            set_mirror_task(self.run, task)
        except OSError as error:
            log.error("the agent of this node cannot mirror %s yet: %s", self.root, error)
        self.home.wake()

    def fence(self) -> None:
        """Wait for the copy in progress, so that the state may change."""
        self._staging.fence()

    def resume_from(self, step: int | None) -> None:
        """Discard the snapshots newer than the step that the run resumes from.

        All ranks call this together. Unreachable nodes and nodes without trainers may keep newer
        snapshots. So the root records which steps are superseded.
        """
        with Round(self._group, "discarding newer snapshots"):
            self._discard(step)
        lineage = self.membership.lineage
        with Round(self._group, "recording a resumption", rank0_only=True) as all_ranks:
            if self._group.rank == 0:
                lineage = resume_from(self.root, self.run.name, step)
            self.membership.lineage = all_ranks.broadcast(lineage, Lineage)

    def _discard(self, step: int | None) -> None:
        if self.is_first_of_node:
            membership, slots = self.membership, self._options.slots
            discard_superseded(self.run, step, membership.lineage, membership.node_of, slots)

    def close(self, *, wait: bool, failed: bool) -> None:
        """Release the slots.

        Args:
            wait: wait until all saves have ended, and then delete the memory of the run if its
                newest snapshot is in storage. If False, the agents continue alone.
            failed: whether this trainer counts as lost.

        Raises:
            StoreError: a save failed.
        """
        try:
            if wait:
                self._finish()
            self.fence()
            if not failed:
                self._rank_lock.release()
        finally:
            self._rank_lock.release_as_lost()
            self._staging.close()
            if self._supervisor is not None:
                self._supervisor.stop()

    def _finish(self) -> None:
        """Wait until all saves have ended. All ranks call this together."""
        with Round(self._group, "ending snapshots"):
            self.fence()
            self._raise_failures()  # now: others would wait for a snapshot that lacks a part
        with Round(self._group, "waiting for saves") as all_ranks:
            self._pending.wait_until_ended()
            self._pending.wait_for_retention()
            own = (
                self._rank_lock.is_replaced(),
                bool(self.run.steps()),
                self._pending.is_last_durable(),
            )
            states = all_ranks.all_gather(own, tuple[bool, bool, bool])
        is_replaced, has_steps, is_durable = zip(*states, strict=True)
        if not any(is_replaced) and (all(is_durable) or not any(has_steps)):
            self._delete_all()
        with Round(self._group, "deleting old checkpoints"):
            self._raise_failures()

    @property
    def _agents(self) -> SaveAgents:
        leading_node = self.membership.node_of[0]
        leader = next(each for each in self.membership.nodes if each.node == leading_node)
        other_leader = None if leading_node == self.node else leader
        return SaveAgents(self.home, other_leader, self._options.tls, self._options.wait)

    def wait_until_durable(self) -> None:
        """Wait until durable saves have ended. A rank may call this alone.

        Raises:
            StoreError: a save failed, or the agent is gone.
        """
        self._staging.raise_failure()
        self._pending.wait_until_ended(durable=True)

    def persist(self, step: int, *, removes_old: bool) -> bool:
        """Request that the last snapshot be persisted, if it is of this step.

        All ranks call this together. `close` waits until the snapshot is persisted.

        Args:
            step: the step of the snapshot.
            removes_old: whether older checkpoints are deleted afterwards.

        Returns:
            Whether the last snapshot is of this step.
        """
        leads = self._group.rank == 0
        with Round(self._group, "looking for the last snapshot") as all_ranks:
            self.fence()
            are_last = all_ranks.all_gather(self._pending.is_last_of_step(step), bool)
        if not all(are_last):
            return False
        with Round(self._group, "persisting the last snapshot"):
            self._pending.persist_last(deletes_older=leads and removes_old, leads=leads)
            self.home.wake()
        return True

    def take_saved(self) -> list[int]:
        """Return the steps that became durable since the last call. One rank may call this."""
        return self._pending.take_saved()

    def take_failure(self) -> StoreError | None:
        """Return a failure in the background that was not raised or returned yet, if any."""
        try:
            self._raise_failures()
        except StoreError as error:
            return error
        return None

    def _delete_all(self) -> None:
        """Delete everything of the run from memory. All ranks call this together."""
        with Round(self._group, "deleting snapshots"):
            self._discard(None)
        with Round(self._group, "deleting slots"):
            self._staging.remove()
        if self.is_first_of_node:
            shutil.rmtree(self.run.path, ignore_errors=True)

    def _raise_failures(self) -> None:
        self._staging.raise_failure()
        self._pending.raise_failure()

    def _stage(
        self,
        planned: PlannedSave,
        storage: StorageTask,
        recorder: Recorder,
        bytes_sent_before: int,
        *,
        durable: bool,
    ) -> SaveHandle:
        """Stage a planned save. Failures here reach the other ranks at the next save."""
        options = planned.request.options
        place = SnapshotDirectory(self.run, options.step or 0)
        stages = ("commit", "protect", "persist") if durable else ("commit", "protect")
        is_first = self._group.rank == 0
        source, ring, rings = join_ring(planned, self._options, self.membership, self._group)
        manifest = None
        if planned.plan.rank == 0:
            manifest = self._make_pending_manifest(planned, storage, rings, durable=durable)
        part = SnapshotPart(
            place=place,
            planned=planned,
            source=source,
            ring=ring,
            pending=manifest,
            stages=stages,
            epoch=self.membership.lineage.epoch,
        )
        with recorder.stage("stage"):
            copying = self._staging.begin(part)
        pending = PendingSave(
            self._agents,
            place,
            planned.save_id,
            stages,
            logs_failures=is_first,
            deletes_older=is_first and durable and storage.is_needed,
            copying=copying,
            watch=self._staging.watch,
        )
        self._pending.add(pending)
        report = SaveReport(
            path=str(planned.request.store if durable else place.path),
            step=options.step,
            bytes_total=0,
            bytes_written=0 if source is None else source.entry.size,
            bytes_deduplicated=0,
            files=0,
            plan_cached=planned.cached,
            bytes_communicated=self._group.bytes_sent - bytes_sent_before,
            seconds=recorder.seconds(),
        )
        return SaveHandle(report, pending, self._mirror)

    def _make_pending_manifest(
        self, planned: PlannedSave, storage: StorageTask, rings: list[list[str]], *, durable: bool
    ) -> PendingManifest:
        """Return what the agents need to complete a save."""
        plan, options, memory = planned.plan, planned.request.options, self._options
        node_of = self.membership.node_of
        return PendingManifest(
            save_id=planned.save_id,
            step=options.step or 0,
            manifest=planned.manifest(()).decode(),
            files=[(data_file(r, planned.save_id), node_of[r]) for r in plan.writers.tolist()],
            nodes=self.membership.nodes,
            leader=node_of[0],
            epoch=self.membership.lineage.epoch,
            rings=rings,
            storage=storage,
            durable=durable,
            rescue=memory.rescue,
            overwrite=options.overwrite,
            copies=memory.copies,
            parity=memory.parity,
            group=memory.group,
            wait=memory.wait,
            budget=memory.max_bytes_per_second,
            bytes_held=plan.bytes_held,
            bytes_total=plan.bytes_stored,
        )
