"""Decides what the agent of a node does next: commit, protect, persist or free its snapshots.

The decision is a pure function of what the node stores.

A save passes these stages. The arrows are the actions that complete them:

    staged --seal--> sealed --commit--> committed --+--protect--> protected
                                                    |
                                                    +--persist--> persisted --retain--> retained

To stage, the ranks copy their state to host memory. Each node seals its files. The leader commits:
it has each node `collect` the checksums of its files. To protect, it has each node perform
`protect_others`; to persist, `copy`. Then it removes old checkpoints from storage (`retain`).
Protecting and persisting run at the same time. `copy` begins before all this, while the ranks still
stage: it writes to storage what is staged. The manifest follows the commit. RESCUE requests that a
save for memory only is persisted, after a trainer was lost or the run has ended.

A stage is NOT_REQUESTED, WAITING, RUNNING, DONE or FAILED (`view.StageState`). Only RUNNING stages
have an action. The leader is the agent on the node of rank 0. Requests are records, which travel
along a tree of nodes (`node_tree.py`): a node that has a request passes it on to the nodes below
it, and combines their replies with its own. In the same way, each node tells the nodes below it how
a stage has ended (`tell commit`, and so on).

A run always keeps the newest committed snapshot, the newest protected snapshot, and the snapshots
with open stages (see `is_pinned`). If these are fewer than its slots, the run also keeps the next
newest snapshots, until there is one snapshot for each slot. FREE removes all other snapshots that
are older than the newest committed snapshot.

The snapshots of a run without trainers on this node are freed in three cases: the run's root says
that the run was resumed from an older step, the newest snapshot is in storage too, or a day has
passed. LOOK_UP_ROOT reads the root. FREE_RUN removes a run without snapshots.

MIRROR copies new checkpoints of a run's root to its mirror.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

from shardwise.parts.memory.home import Run, SnapshotDirectory
from shardwise.parts.memory.lineage import Lineage
from shardwise.parts.memory.records import DATA_SUFFIXES, REMOVE_OLD, TOLD_STAGES, save_record
from shardwise.parts.memory.view import RunView, SaveView, SnapshotView, StageState, tell

TRAINER_LOST = "a trainer was lost"
RUN_ENDED = "the run has ended"
REPLACED = "replaced by newer snapshots"
RUN_RESUMED = "the run was resumed from an older step"
NOTHING_TO_RESTORE = "it has neither data nor a pending manifest"
NO_TRAINER = "no trainer of the run has been on this node for a long time"

FREE, RESCUE = "free", "rescue"
FREE_RUN, LOOK_UP_ROOT, MIRROR = "free run", "look up root", "mirror"


@dataclass(frozen=True, slots=True)
class Action:
    """An action on a snapshot.

    Attributes:
        kind: one of the `STAGES_WITH_WORK`, RESCUE, or FREE.
        place: the snapshot.
        save_id: the save; "" to free saves or the whole snapshot.
        why: the reason to rescue or free, for the log.
        names: the files to seal; or the ids of the saves to free, if not the whole snapshot.
    """

    kind: str
    place: SnapshotDirectory
    save_id: str = ""
    why: str = ""
    names: tuple[str, ...] = ()

    @property
    def run(self) -> Run:
        """The run of the snapshot."""
        return self.place.run


@dataclass(frozen=True, slots=True)
class RunAction:
    """An action on a run: MIRROR, or, if the run has no trainers, FREE_RUN or LOOK_UP_ROOT.

    Attributes:
        kind: the kind of action.
        run: the run.
        reads_steps: whether to find the newest step in the root as well.
        task: the time when the task to mirror was written. If this time has changed, the task is
            new, and the agent mirrors at once.
    """

    kind: str
    run: Run
    reads_steps: bool = False
    task: int = 0


AnyAction = Action | RunAction


# All in seconds without trainers of the run on this node, unless noted otherwise.
BETWEEN_LOOKUPS = 10.0  # between two reads of the root
UNTIL_FREED_IF_STORED = 1800.0  # the snapshots are freed if storage has the newest snapshot
UNTIL_FREED = 86400.0  # the snapshots are freed in any case
UNTIL_REMOVED = 10.0  # a run without snapshots is removed, and a snapshot without data is freed
STAGES_WITH_WORK = (
    "seal",
    "collect",
    "commit",
    *map(tell, TOLD_STAGES),
    "protect",
    "protect_others",
    "persist",
    "copy",
    REMOVE_OLD,
)
"""The stages on which a node has work to do, as it seals, leads a save, or fulfils requests."""


def decide_run(run: RunView, now: float) -> list[AnyAction]:
    """Return the actions for one run, in the order in which to perform them.

    Args:
        now: the time on the observer's clock, in seconds.
    """
    actions: list[AnyAction] = []
    for snapshot in run.snapshots:
        for save in snapshot.saves.values():
            actions += _advance_stages(snapshot, save)
    if run.mirror_changed_at is not None:
        actions.append(RunAction(MIRROR, run.run, task=run.mirror_changed_at))
    if run.lost_ranks:
        actions += _rescue_newest(run, TRAINER_LOST)
    if run.unattended_since is not None:
        actions += _free_unattended(run, run.unattended_since, now)
    freed = {each.place for each in actions if isinstance(each, Action) and each.kind == FREE}
    actions += (each for each in _free_replaced(run) if each.place not in freed)
    return actions


def _advance_stages(snapshot: SnapshotView, save: SaveView) -> Iterator[Action]:
    """Yield the actions for the stages of a save on which this node has work to do."""
    for stage in STAGES_WITH_WORK:
        if save.state_of(stage) is StageState.RUNNING and (
            stage == REMOVE_OLD or not snapshot.is_abandoned
        ):
            names = save.unsealed if stage == "seal" else ()
            yield Action(stage, snapshot.place, save.save_id, names=names)


def _rescue_newest(run: RunView, why: str) -> Iterator[Action]:
    """Yield a Rescue of the newest committed snapshot, if the options of its save allow rescues.

    Yield nothing if the save is persisted anyway, or if its rescue was requested before.
    """
    newest = run.newest_committed
    if newest is None or newest.is_abandoned:
        return
    save = newest.saves.get(newest.committed_save or "")
    if save is None or save.pending is None:
        return
    is_wanted = save.pending.rescue and not save.pending.durable
    if is_wanted and save.state_of("rescue") is StageState.NOT_REQUESTED:
        yield Action(RESCUE, newest.place, save.save_id, why)


def _free_replaced(run: RunView) -> Iterator[Action]:
    """Yield actions that free snapshots and saves that newer ones have replaced."""
    newest = run.newest_committed
    if newest is None:
        return
    kept = kept_steps(run)
    for each in run.snapshots:
        if each.step in kept:
            if replaced := _replaced_saves(each):
                yield Action(FREE, each.place, why=REPLACED, names=replaced)
        elif each.step < newest.step and not is_pinned(run, each) and not _only_removes_old(each):
            yield Action(FREE, each.place, why=REPLACED)


def kept_steps(run: RunView) -> set[int]:
    """Return the committed steps that stay in memory."""
    committed = [each for each in reversed(run.snapshots) if each.is_committed]
    if not committed:
        return set()
    newest = committed[0]
    limits = [each.snapshots_to_keep for save in newest.saves.values() for each in save.staged]
    kept = {newest.step, *(each.step for each in committed if is_pinned(run, each))}
    kept |= set(islice((each.step for each in committed if each.is_done("protect")), 1))
    for each in committed:
        if len(kept) >= max(limits, default=2):
            break
        kept.add(each.step)
    return kept


def is_pinned(run: RunView, snapshot: SnapshotView) -> bool:
    """Return whether a snapshot must stay in memory because a stage has not ended.

    A stage that has not ended keeps its snapshot in memory. It does so until the same stage has
    ended for a newer snapshot: then nobody needs the older one. If this node
    leads a save, it keeps the snapshot until the save is persisted. It does so even if newer saves
    are persisted before, and even if the save has no data files. While this node tells others how a
    stage has ended, it keeps the snapshot too. Abandoned snapshots are not pinned.
    """
    if snapshot.is_abandoned:
        return False
    if any(save.must_be_persisted or save.is_being_told for save in snapshot.saves.values()):
        return True
    newer = [each for each in run.snapshots if each.step > snapshot.step]
    open_stages = {stage for save in snapshot.saves.values() for stage in save.open_stages}
    return any(not any(each.has_ended(stage) for each in newer) for stage in open_stages)


def _only_removes_old(snapshot: SnapshotView) -> bool:
    """Return whether the snapshot consists only of requests to remove old checkpoints."""
    open_requests = {
        save_record(REMOVE_OLD, save.save_id)
        for save in snapshot.saves.values()
        if save.state_of(REMOVE_OLD).is_open
    }
    return bool(snapshot.names) and snapshot.names <= open_requests


def _replaced_saves(snapshot: SnapshotView) -> tuple[str, ...]:
    """Return the ids of saves that another, committed save of the step has replaced.

    Saves are not included while their commit has not ended.
    """
    staged = [save for save in snapshot.saves.values() if save.has_staged]
    if len(staged) < 2 or not snapshot.committed_save:
        return ()
    ended = [save.save_id for save in staged if save.state_of("commit").has_ended]
    return tuple(save_id for save_id in ended if save_id != snapshot.committed_save)


def _free_unattended(run: RunView, unattended_since: float, now: float) -> Iterator[AnyAction]:
    """Yield actions that free the memory of a run without trainers on this node."""
    if not run.snapshots:
        if now - unattended_since >= UNTIL_REMOVED:
            yield RunAction(FREE_RUN, run.run)
        return
    root, seconds = run.root, now - unattended_since
    may_free_stored = seconds >= UNTIL_FREED_IF_STORED
    last_lookup = unattended_since if root is None else root.read_at
    if now - last_lookup >= BETWEEN_LOOKUPS:
        yield RunAction(LOOK_UP_ROOT, run.run, may_free_stored)
    frees_all = seconds >= UNTIL_FREED or (may_free_stored and _is_in_storage(run))
    lineage = None if root is None else root.lineage
    for each in run.snapshots:
        if lineage is not None and is_superseded(each, lineage):
            yield Action(FREE, each.place, why=RUN_RESUMED)
        elif frees_all:
            yield Action(FREE, each.place, why=NO_TRAINER)
        elif seconds >= UNTIL_REMOVED and not _is_of_use(each):
            yield Action(FREE, each.place, why=NOTHING_TO_RESTORE)
    has_read_steps = root is not None and root.is_reachable and root.has_read_steps
    if may_free_stored and not frees_all and has_read_steps:
        yield from _rescue_newest(run, RUN_ENDED)


def _is_of_use(snapshot: SnapshotView) -> bool:
    """Return whether this node has data of a snapshot, or work to do for it.

    Other nodes can write records here, also after the run has ended. Records alone are of no use.
    """
    return any(name.endswith(DATA_SUFFIXES) for name in snapshot.names) or any(
        save.pending is not None or save.state_of(REMOVE_OLD).is_open
        for save in snapshot.saves.values()
    )


def _is_in_storage(run: RunView) -> bool:
    """Return whether storage makes the run's snapshots on this node unnecessary for a restore."""
    root, newest = run.root, run.newest_committed
    if root is None or not root.is_reachable:
        return False
    if root.lineage is None or newest is None:
        return True
    return root.newest_step is not None and root.newest_step >= newest.step


def is_superseded(snapshot: SnapshotView, lineage: Lineage) -> bool:
    """Return whether the run was resumed from an older step after this snapshot was saved.

    The epochs of its saves show this (see `lineage.py`). If an epoch is unknown, return False.
    """
    epochs = [each.epoch for each in snapshot.saves.values() if _is_in_memory(snapshot, each)]
    return bool(epochs) and all(
        epoch is not None and lineage.supersedes(snapshot.step, epoch) for epoch in epochs
    )


def _is_in_memory(snapshot: SnapshotView, save: SaveView) -> bool:
    return bool(save.staged) or save.pending is not None or save.save_id == snapshot.committed_save


def find_superseded(
    run: RunView, step: int | None, lineage: Lineage, nodes: Collection[str], slots: int
) -> list[SnapshotDirectory]:
    """Return the snapshots that a node can free when the run is resumed from a step.

    The node can free three kinds of snapshots: snapshots of newer steps; snapshots that a
    resumption superseded while this node was away (see `lineage.py`); and older unfinished
    snapshots, which would occupy slots while they wait for a lost node.

    Args:
        step: the step; None for the beginning.
        lineage: the lineage before this resumption.
        nodes: the nodes that the run is resumed on.
        slots: the number of snapshots to keep.
    """
    valid = [
        each
        for each in reversed(run.snapshots)
        if step is not None and each.step <= step and not is_superseded(each, lineage)
    ]
    kept = [each for each in valid if each.step == step or _is_being_persisted(each, nodes)]
    finished = [each for each in valid if each not in kept and _is_finished(each)]
    kept += finished[: max(0, slots - len(kept))]
    steps = {each.step for each in kept}
    return [each.place for each in run.snapshots if each.step not in steps]


def _is_being_persisted(snapshot: SnapshotView, nodes: Collection[str]) -> bool:
    """Return whether one of `nodes` leads a save that must still be persisted."""
    return snapshot.is_committed and any(
        save.pending is not None
        and save.pending.durable
        and save.pending.leader in nodes
        and not save.state_of("persist").has_ended
        for save in snapshot.saves.values()
    )


def _is_finished(snapshot: SnapshotView) -> bool:
    """Return whether a snapshot is committed, and no stage is open."""
    saves = snapshot.saves.values()
    is_copied = any(
        save.state_of("copy") is not StageState.NOT_REQUESTED
        and not save.state_of("persist").has_ended
        for save in saves
    )
    return snapshot.is_committed and not is_copied and not any(save.open_stages for save in saves)


def find_uncommittable(run: RunView, now: float, patience: float) -> list[SnapshotDirectory]:
    """Return the snapshots that will never be committed, except the newest snapshot.

    A snapshot will never be committed if its commit has failed. There is a second case, for
    snapshots that need not be persisted: this node has staged files of it, but the last of them
    more than `patience` seconds ago, and still there is no commit.

    Args:
        now: the time in seconds since 1970.
    """
    found = []
    for each in run.snapshots[:-1]:
        saves = [save for save in each.saves.values() if save.has_staged]
        staged = [record for save in saves for record in save.staged]
        if each.is_committed or not staged:
            continue
        has_failed = all(save.state_of("commit") is StageState.FAILED for save in saves)
        is_durable = any("persist" in record.stages for record in staged)
        age = 0.0 if each.staged_at is None else now - each.staged_at
        if has_failed or (not is_durable and age > patience):
            found.append(each.place)
    return found
