"""Leads a save through its stages: the work of the agent on the node of rank 0.

The leader has the pending manifest. It calls the nodes that take part in a stage, combines their
replies with its own part, and records the outcome on its node, where the nodes below it ask for it
(`actions.py`). A stage that fails has an outcome too. If storage does not answer, the action
raises, and the agent tries it again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec

from shardwise.kernel.deadline import Deadline
from shardwise.kernel.engine.root import Root
from shardwise.kernel.errors import StoreError, StoreUnavailableError
from shardwise.kernel.manifest.manifest import FileEntry, complete_manifest
from shardwise.kernel.store import Store
from shardwise.parts.lineage import RootClaim, read_lineage
from shardwise.parts.memory.agent.actions import (
    Follower,
    agents_of,
    require_pending,
    try_stage,
)
from shardwise.parts.memory.agent.root_tasks import set_root_task
from shardwise.parts.memory.decide import Action
from shardwise.parts.memory.files import write_record
from shardwise.parts.memory.home import SnapshotDirectory
from shardwise.parts.memory.records import REMOVE_OLD, PendingManifest, StageOutcome
from shardwise.parts.memory.redundancy.placement import plan_protection
from shardwise.parts.memory.remote.assembled import AssembledStore
from shardwise.parts.memory.remote.calls import StageCall
from shardwise.parts.memory.remote.search import Search, list_own_files
from shardwise.parts.memory.replies import Replies
from shardwise.parts.memory.states import read_state
from shardwise.parts.memory.times import SHORT_PATIENCE
from shardwise.parts.tiers.copying import FileCopier

log = logging.getLogger("shardwise.agent")
READ_THREADS = 2
MOST_FAILURES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Leader:
    """Performs the actions of the node that leads a save.

    Attributes:
        follower: performs the part of this node, and calls other nodes.
    """

    follower: Follower

    def perform(self, action: Action) -> None:
        """Do the work of a stage (commit, protect or persist), and record its outcome.

        After a rescue, another node than the node of rank 0 can persist.
        """
        place, stage, follower = action.place, action.kind, self.follower

        def work() -> int:
            save = _LeaderSave(place, require_pending(place), follower)
            follower.states.tell()  # the nodes below need the pending manifest
            stages: dict[str, Callable[[], int]] = {
                "commit": save.commit,
                "protect": save.protect,
                "persist": save.persist,
            }
            return stages[stage]()

        done = try_stage(follower.states, place, stage, follower.node, work)
        follower.states.end(place, {stage: done})


@dataclass(frozen=True, slots=True)
class _LeaderSave:
    """A save that this node leads. Each method does the work of a stage, and returns its bytes."""

    place: SnapshotDirectory
    pending: PendingManifest
    follower: Follower

    def commit(self) -> int:
        """Collect the entries of all files, and write the manifest to this node."""
        replies = self._call("commit")
        entries_of = replies.file_entries(self.pending)
        if replies.failures or len(entries_of) < len(self.pending.files):
            raise StoreError(_describe_failures(replies))
        entries = [entries_of[name] for name, _ in self.pending.files]
        manifest = complete_manifest(self.pending.manifest.encode(), entries)
        write_record(self.place.manifest_path, manifest)
        return sum(each.size for each in entries)

    def protect(self) -> int:
        """Have all nodes make the requested copies or parity."""
        if not (self.pending.copies or self.pending.parity):
            return 0
        replies = self._call("protect")
        if replies.failures or len(replies.nodes) < len(self.pending.nodes):
            raise StoreError(_describe_failures(replies))
        return int(replies.nbytes.sum())

    def persist(self) -> int:
        """Have all nodes copy their files to storage, and publish the manifest there."""
        save_id, overwrite = self.pending.save_id, self.pending.overwrite
        names = [name for name, _ in self.pending.files]
        with self.follower.stores.open(self.pending.storage.root) as root:
            directory = Root(root).at(self.place.step)
            with directory.lock_for_publishing(save_id, names, overwrite=overwrite) as is_published:
                copied = 0 if is_published else self._copy_files(directory.store)
                manifest, _ = self.place.read_manifest()
                if not is_published:
                    directory.check_readable(manifest)
                    self._refuse_replaced()
                    self._refuse_superseded(root)
                directory.commit(save_id, manifest, names, overwrite=overwrite)
        storage, states = self.pending.storage, self.follower.states
        if storage.is_needed:
            with states.lock:
                set_root_task(self.place.run, storage)
            if storage.mirror is not None:  # whoever copies also removes, when it has copied
                states.end(self.place, {REMOVE_OLD: StageOutcome(ended_at=time.time())})
        return copied

    def _refuse_replaced(self) -> None:
        """Raise if a later save of the step is committed, as it may be in storage already."""
        own, place = (self.pending.epoch, self.pending.saved_at), self.place
        for other in place.run.snapshots():
            if other.step == place.step and other.is_committed():
                pending = other.read_pending()
                if pending is not None and (pending.epoch, pending.saved_at) > own:
                    raise StoreError(
                        f"step {place.step} was saved again meanwhile: save {other.save_id} has "
                        f"replaced save {place.save_id}; wait for the newer save instead"
                    )

    def _call(self, stage: str) -> Replies:
        """Have all nodes that take part in a stage do their part; return the combined replies."""
        wait = self.pending.wait
        if read_state(self.place).rescue:
            wait = min(wait, SHORT_PATIENCE)
        call = StageCall(self.pending, stage, self.follower.node, wait)
        return self.follower.fulfil(self.place, call)

    def _refuse_superseded(self, root: Store) -> None:
        """Raise if the run was resumed from an older step while this snapshot was persisted, or if
        another job has taken the root over without resuming this run. Claim the root if the trainer
        has not done so."""
        step = self.place.step
        try:
            lineage = read_lineage(root)
        except StoreUnavailableError:
            raise
        except StoreError as error:
            log.warning("cannot tell whether step %d is superseded: %s", step, error)
            return
        if lineage is None or lineage.run != self.place.run.name:
            return
        if lineage.epoch == self.pending.epoch:
            RootClaim.take_for(root, lineage, self.pending.owner, self.pending.previous_owner)
        if lineage.supersedes(step, self.pending.epoch):
            raise StoreError(
                f"step {step} is not persisted to {root}: meanwhile, run {lineage.run} was resumed "
                "from an older step; it will save this step again. If another job has restored it, "
                "stop this job; if the other job only reads, let it use sw.load or memory=None"
            )

    def _copy_files(self, store: Store) -> int:
        """Have each node copy its files to storage, then copy the files that are still missing."""
        replies = self._call("persist")
        if replies.failures:
            raise StoreError(_describe_failures(replies))
        copied = replies.names_of_nodes(self.pending)
        nbytes = int(replies.nbytes.sum())
        commit = self.place.wait_until(
            lambda: read_state(self.place).outcomes.get("commit"),
            "the outcome of the commit",
            Deadline(self.pending.wait),
        )
        if commit.failure:
            raise StoreError(
                f"step {self.place.step} cannot be persisted, because its commit failed: "
                f"{commit.failure}; save the step again"
            )
        # If an earlier attempt lost its lock in an outage, its files may have been removed.
        stored = set(store.list())
        names = [
            name for name, node in self.pending.files if node not in copied or name not in stored
        ]
        if names:
            log.warning("%d files are copied for their nodes: %s", len(names), replies.lost)
            nbytes += self._copy_files_of_lost_nodes(names, store)
        return nbytes

    def _copy_files_of_lost_nodes(self, names: Collection[str], store: Store) -> int:
        """Copy files to storage from their copies or parity on other nodes; return the bytes.

        Raises:
            StoreError: no reachable nodes have the files; says which and why.
            CorruptionError: the bytes differ from those that were committed.
        """
        run, step = self.place.run, self.place.step
        node, tls = self.follower.node, self.follower.tls
        _, manifest = self.place.read_manifest()
        entries = [entry for entry in manifest.files if entry.name in names]
        holders = self._find_holders(names, manifest.files)
        infos = {info.node: info for info in agents_of(self.pending, run) if info.node in holders}
        own = msgspec.structs.replace(list_own_files(run, node), known_nodes=[])
        search = Search(run, node, [own], infos, tls, only=names)
        search.ask(follows=False)
        locations = search.choose_snapshot(step)
        if locations.step is None:
            reasons = "; ".join(reason for _, reason in locations.skipped)
            raise StoreError(
                f"step {step}: the files of nodes that do not answer cannot be persisted: "
                f"{reasons}; save a newer step. If the training has ended, the snapshot stays in "
                "the memory of its nodes for a day: resume or end their agents, start the training "
                f"again, and after restore(), save({step}, state, force=True) persists it"
            )
        copier = FileCopier(self.pending.budget)
        with closing(AssembledStore(locations, run, node, tls, threads=READ_THREADS)) as source:
            for entry in entries:
                copier.copy(source, entry, store)
        return sum(entry.size for entry in entries)

    def _find_holders(self, names: Collection[str], files: Sequence[FileEntry]) -> set[str]:
        """Return the nodes that may have files: their own nodes, and those that protect them."""
        holders = {node for name, node in self.pending.files if name in names}
        for group in plan_protection(self.pending, files).groups:
            if any(name in names for member in group.members for name, _ in member.files):
                holders |= {member.node for member in group.members}
        return holders


def _describe_failures(replies: Replies) -> str:
    """Return which nodes did not do their part of a stage, and why."""
    reasons = [f"node {node}: {failure}" for node, failure in replies.failures.items()]
    reasons += replies.lost.values()
    shown = "; ".join(reasons[:MOST_FAILURES_SHOWN])
    more = len(reasons) - MOST_FAILURES_SHOWN
    return f"{shown}; and {more} more" if more > 0 else shown or "some nodes did not reply"
