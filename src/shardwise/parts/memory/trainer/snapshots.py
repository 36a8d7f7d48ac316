"""Snapshots of a run: the ranks stage them, and the agents complete them."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from shardwise.kernel.engine.group import Group
from shardwise.kernel.engine.planning import PlannedSave
from shardwise.kernel.engine.rounds import Round
from shardwise.kernel.engine.write_file import FileSource
from shardwise.kernel.errors import ShardwiseError, StoreError, describe_error
from shardwise.kernel.events import Event, Watcher
from shardwise.kernel.store import Store
from shardwise.parts.lineage import Lineage, resume_from
from shardwise.parts.memory.agent.protect import find_protection_gaps
from shardwise.parts.memory.agent.root_tasks import set_root_task
from shardwise.parts.memory.home import Run, SnapshotDirectory
from shardwise.parts.memory.node_tree import tree_of_nodes
from shardwise.parts.memory.options import Memory
from shardwise.parts.memory.pool import Pool
from shardwise.parts.memory.progress import make_watcher
from shardwise.parts.memory.rank_liveness import RankLock, forget_lost_ranks
from shardwise.parts.memory.reclaim import (
    discard_superseded,
    forget_copies,
    refuse_older_step,
    remove_other_runs,
    remove_run,
)
from shardwise.parts.memory.records import MOST_FAN_OUT, STAGES, AgentInfo, PendingManifest
from shardwise.parts.memory.spawn import ensure_agent, running_agent
from shardwise.parts.memory.times import SHORT_PATIENCE
from shardwise.parts.memory.trainer.agents import AgentSupervisor, choose_interface, join_run
from shardwise.parts.memory.trainer.node_watch import NodeWatch
from shardwise.parts.memory.trainer.pending_saves import PendingSave, PendingSaves
from shardwise.parts.memory.trainer.recovery import FoundSnapshots, find_snapshots
from shardwise.parts.memory.trainer.rings import HeldTable, Ring, join_ring
from shardwise.parts.memory.trainer.staging import SnapshotPart, Staging
from shardwise.parts.tiers.options import StorageTask

log = logging.getLogger("shardwise")


class Snapshots:
    """The snapshots of a run in the memory of its nodes. All ranks create it together.

    A save calls `offer` and `accept` when the ranks agree on it, and `stage` once it is planned.

    Args:
        root: the store of the persisted checkpoints, which identifies the run.
        options: the user's options.
        group: the ranks.

    Attributes:
        root: as above.
        home, run: the directories of this node and of the run on it.
        membership: the nodes of the run, and the lineage of the run.
        node: the name of this rank's node.
        is_first_of_node: whether this rank is the first of its node.
        tls: certificates for connections between the nodes of the run.
    """

    def __init__(self, root: Store, options: Memory, group: Group) -> None:
        self.root = root
        self._options = options = choose_interface(options, group)
        self._group = group
        self._pending = PendingSaves()
        self._agent: AgentInfo | None = None  # of this node, at the last save
        self._held = HeldTable()
        self._saved_at = 0.0  # when the last save was, on rank 0
        self.home, self.membership = join_run(root, options, group)
        self.run: Run = self.home.run(self.membership.lineage.run)
        node_of = self.membership.node_of
        self.node = node_of[group.rank]
        self.is_first_of_node = node_of.index(self.node) == group.rank
        self.tls = options.tls
        with Round(group, "taking the locks of ranks"):
            self.run.refuse_other_version()
            self._rank_lock = RankLock(self.run, group.rank)
            if not self._rank_lock.has_taken_over:
                forget_copies(self.run, group.rank)
        with Round(group, "reclaiming memory"):
            if self.is_first_of_node:
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
            warnings.warn(f"snapshots in memory: {gap}", RuntimeWarning, stacklevel=6)

    def _reclaim(self) -> None:
        """Delete from this node the data of runs and ranks that have moved elsewhere."""
        forget_lost_ranks(self.run)
        self.run.record_info(str(self.root), self.membership.nodes)
        remove_other_runs(self.home, self.run, str(self.root))
        nodes = enumerate(self.membership.node_of)
        ranks = [rank for rank, node in nodes if node == self.node]
        Pool(self.run.free_directory).shrink(ranks, None)

    def offer(self, step: int, *, durable: bool) -> bytes:
        """Return what this rank tells the others before a save of a step; `accept` takes it.

        The node's agent is started if necessary.

        Raises:
            ShardwiseError: memory holds a newer step, or an earlier save has failed.
        """
        self._rank_lock.raise_if_replaced()
        self._raise_failures()
        if self._supervisor is not None:
            self._supervisor.check()
        info = running_agent(self.home)
        if info is None or info != self._agent:
            # This waits for the other ranks of the node, so only a new agent is worth it.
            info = self._agent = ensure_agent(self.home, self._options)
        refuse_older_step(self.run, step, self.membership.lineage, self.root)
        self._pending.wait_until_ended(step=step)  # this save replaces one of the same step
        has_slot = not self._staging.is_prepared or durable or self._staging.has_free()
        is_known = info in self.membership.nodes
        return msgspec.json.encode((has_slot, None if is_known else info))

    def accept(self, offers: Sequence[bytes]) -> bool:
        """Return whether all ranks have a slot for the snapshot, or wait for one.

        Args:
            offers: the different results of `offer` on all ranks, in the same order on all ranks.
        """
        found = [msgspec.json.decode(each, type=tuple[bool, AgentInfo | None]) for each in offers]
        nodes = {info.node: info for info in self.membership.nodes}
        nodes |= {info.node: info for _, info in found if info is not None}
        self.membership.nodes = list(nodes.values())
        return self._options.when_full == "wait" or all(has_slot for has_slot, _ in found)

    def allocate(self, planned: PlannedSave) -> int:
        """Allocate the slots of all ranks, and return the bytes allocated for this rank.

        Args:
            planned: a save like those to come.

        Raises:
            ShardwiseError: on all ranks: the memory of a node is too small. The message says how
                much is needed.
        """
        source, ring, _ = self._join_ring(planned)
        with Round(self._group, "allocating slots"):
            return self._staging.prepare(source, ring)

    def _join_ring(
        self, planned: PlannedSave
    ) -> tuple[FileSource | None, Ring | None, list[list[str]]]:
        return join_ring(planned, self._options, self.membership, self._group, self._held)

    def make_watcher(self, operation: str, step: int | None) -> Watcher | None:
        """Return what shows the agent the stages of an operation while they run."""
        return make_watcher(self._rank_lock, operation, step)

    def find_snapshots(self, step: int | None) -> FoundSnapshots:
        """Find snapshots in memory, newest first; see `recovery.find_snapshots`."""
        return find_snapshots(self, self._group, step)

    def request_mirroring(self, task: StorageTask) -> None:
        """Have the agent of this node mirror the root."""
        try:
            set_root_task(self.run, task)
        except OSError as error:
            log.error("the agent of this node cannot mirror %s yet: %s", self.root, error)
        self.home.wake()

    def fence(self) -> None:
        """Wait for the copy in progress, so that the state may change."""
        self._staging.fence()

    def resume_from(
        self, step: int | None, owner: str | None, finds_later: Callable[[], bool] | None
    ) -> bool:
        """Discard the snapshots newer than the step that the run resumes from.

        All ranks call this together. Unreachable nodes and nodes without trainers may keep newer
        snapshots. So the root records which steps are superseded. Once all nodes have discarded
        theirs, no agent persists a newer snapshot, and rank 0 calls `finds_later`. Return its
        result. `lineage.resume_from` says what `owner` is.
        """

        def record(_: bool) -> tuple[Lineage, bool, str]:
            lineage = resume_from(self.root, self.run.name, step, owner)
            try:
                return lineage, finds_later is not None and finds_later(), ""
            except (ShardwiseError, OSError) as error:  # all ranks must know the lineage
                return lineage, False, describe_error(error)

        with Round(self._group, "discarding newer snapshots") as all_ranks:
            self._discard(step)
            self.membership.lineage, found, failure = all_ranks.all_reduce(
                True, bool, all, record, tuple[Lineage, bool, str]
            )
        if failure:
            raise StoreError(f"cannot look for newer steps in {self.root}: {failure}; try again")
        return found

    @property
    def epoch(self) -> int | None:
        """The epoch of the run."""
        return self.membership.lineage.epoch

    def _discard(self, step: int | None) -> None:
        if self.is_first_of_node:
            membership, slots = self.membership, self._options.slots
            discard_superseded(
                self.home, self.run, step, membership.lineage, membership.node_of, slots
            )

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
            # Agents wait for a copy only while its rank holds its lock.
            self._staging.wait_for_copy(SHORT_PATIENCE if failed else self._options.wait)
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
            # Raise here: after the next round, others would wait for a snapshot that lacks a part.
            self._raise_failures()
        with Round(self._group, "waiting for saves") as all_ranks:
            self._pending.wait_until_ended()
            self._pending.note_ended()  # the records are deleted with the run
            self._pending.wait_for_retention()
            own = (
                self._rank_lock.is_replaced(),
                bool(self.run.snapshots()),
                not self._pending.is_last_durable(),
            )
            is_replaced, has_steps, is_pending = all_ranks.all_reduce(
                own,
                tuple[bool, bool, bool],
                _any_of_each,
            )
        if not is_replaced and not (is_pending and has_steps):
            self._delete_all()
        with Round(self._group, "deleting old checkpoints"):
            self._raise_failures()

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
        with Round(self._group, "looking for the last snapshot") as all_ranks:
            self.fence()
            is_last = self._pending.is_last_of_step(step)
            is_last = all_ranks.all_reduce(is_last, bool, all)
        if not is_last:
            return False
        with Round(self._group, "persisting the last snapshot"):
            self._pending.persist_last(deletes_older=removes_old and self._group.rank == 0)
            self.home.wake()
        return True

    def take_saved(self) -> list[int]:
        """Return the steps that became durable since the last call. One rank may call this."""
        return self._pending.take_saved()

    def take_ended(self) -> dict[str, tuple[Event, ...]]:
        """Return the stages of agents, for the saves that ended since the last call, by id.

        One rank may call this.
        """
        return self._pending.take_ended()

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
        if self.is_first_of_node:
            remove_run(self.home, self.run)

    def _raise_failures(self) -> None:
        self._staging.raise_failure()
        self._pending.raise_failure()

    def stage(self, planned: PlannedSave, storage: StorageTask, *, durable: bool) -> PendingSave:
        """Stage a planned save for the agents. The next save raises failures on all ranks.

        Args:
            planned: the save.
            storage: the root, and what to do there after the save.
            durable: whether to persist the snapshot.
        """
        place = SnapshotDirectory(self.run, planned.request.step or 0, planned.save_id)
        stages = STAGES if durable else STAGES[:2]
        is_first = self._group.rank == 0
        source, ring, rings = self._join_ring(planned)
        manifest = None
        if is_first:
            manifest = self._make_pending_manifest(planned, storage, rings, durable=durable)
        part = SnapshotPart(
            place=place,
            planned=planned,
            source=source,
            ring=ring,
            pending=manifest,
            stages=stages,
            epoch=self.membership.lineage.epoch,
            above=self._agents_above(),
        )
        pending = PendingSave(
            self.home,
            self._options,
            self._group.rank,
            place,
            stages,
            logs_failures=is_first,
            deletes_older=is_first and durable and storage.is_needed,
            copying=self._staging.begin(part),
            watch=self._staging.watch,
            nbytes=0 if source is None else source.entry.size,
        )
        self._pending.add(pending)
        return pending

    def _agents_above(self) -> list[AgentInfo]:
        """Return the agents above this node in the tree of the run, the nearest first."""
        info_of = {info.node: info for info in self.membership.nodes}
        tree = tree_of_nodes(self.membership.node_of[0], info_of, MOST_FAN_OUT)
        return [info_of[node] for node in tree.above(self.node)]

    def _make_pending_manifest(
        self, planned: PlannedSave, storage: StorageTask, rings: list[list[str]], *, durable: bool
    ) -> Callable[[], PendingManifest]:
        """Return a function that returns what the agents need to complete a save."""
        request, memory = planned.request, self._options
        node_of = self.membership.node_of
        owner, previous_owner = "", None
        if request.claim is not None:
            owner, previous_owner = request.claim.for_agents(force=request.takes_root)
        self._saved_at = max(time.time(), self._saved_at + 1e-3)  # also if the clock is set back
        make = partial(
            PendingManifest,
            save_id=planned.save_id,
            step=request.step or 0,
            nodes=self.membership.nodes,
            leader=node_of[0],
            epoch=self.membership.lineage.epoch,
            saved_at=self._saved_at,
            owner=owner,
            previous_owner=previous_owner,
            rings=rings,
            fan_out=MOST_FAN_OUT,
            storage=storage,
            durable=durable,
            rescue=memory.rescue,
            overwrite=request.overwrite,
            copies=memory.copies,
            parity=memory.parity,
            group=memory.group,
            wait=memory.wait,
            budget=memory.max_bytes_per_second,
        )
        return lambda: make(
            manifest=planned.manifest(()).decode(),
            files=[(name, node_of[rank]) for rank, name in planned.file_names.items()],
        )


def _any_of_each(states: Sequence[tuple[bool, bool, bool]]) -> tuple[bool, bool, bool]:
    """Return for each position whether any of the values there is true."""
    first, second, third = zip(*states, strict=True)
    return any(first), any(second), any(third)
