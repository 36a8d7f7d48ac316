"""Decides what the agent of a node does next: commit, protect, persist or free its snapshots.

The decision is a pure function of what the node stores.

A save passes these stages. The arrows are the actions that complete them:

    staged --seal--> sealed --commit--> committed --+--protect--> protected
                                                    |
                                                    +--persist--> persisted

To stage, the ranks copy their state to host memory. Each node seals its files. The leader, which is
the agent on the node of rank 0, leads the stages. It calls all nodes to do their part of a stage:
to commit, each node collects the checksums of its files; to protect, it makes the copies or parity
that it stores for others; to persist, it copies its files to storage. A node that is called calls
the nodes below it in a tree (`node_tree.py`), does its own part (`on_this_node(stage)`), and
replies for all of them. Protecting and persisting run at the same time. Persisting begins before
all this, while the ranks still stage: the nodes write to storage what is staged. The manifest
follows the commit. FOLLOW asks the nodes above how the stages of all nodes have ended. RESCUE
requests that a save for memory only is persisted, after a trainer was lost or the run has ended.

A stage is NOT_REQUESTED, WAITING, RUNNING, DONE or FAILED (`view.StageState`). Only RUNNING stages
have an action; and RESCUE, if nobody has requested it.

A run always keeps the newest committed snapshot, the newest protected snapshot, and the snapshots
with open stages (see `is_pinned`). If these are fewer than its slots, the run also keeps the next
newest snapshots, until there is one snapshot for each slot. FREE removes all other snapshots that
are older than the newest committed snapshot, those that can never be committed, and those that a
trainer has marked as abandoned.

The snapshots of a run without trainers on this node are freed in these cases: the run's root says
that the run was resumed from an older step; the newest snapshot is in storage too, or the root is
gone or belongs to another run; a restore cannot use what is left here; or a day has passed.
LOOK_UP_ROOT reads the root. FREE_RUN removes a run without snapshots.

ROOT_TASK copies new checkpoints of a run's root to its mirror, or removes old checkpoints.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from shardwise.parts.lineage import Lineage
from shardwise.parts.memory.home import Run, SnapshotDirectory
from shardwise.parts.memory.records import RESCUE, STAGES, AgentInfo, is_data
from shardwise.parts.memory.times import DAY, UNTIL_FREED_IF_STORED, UNTIL_UNFOLLOWED, UPKEEP_PERIOD
from shardwise.parts.memory.view import RunView, SnapshotView, StageState, on_this_node

TRAINER_LOST = "a trainer was lost"
RUN_ENDED = "the run has ended"
ABANDONED = "the run no longer needs it"
REPLACED = "replaced by newer snapshots"
UNCOMMITTABLE = "its commit takes too long, and a newer snapshot needs its memory"
RUN_RESUMED = "the run was resumed from an older step"
NOTHING_TO_RESTORE = "it has neither data nor a pending manifest"
NO_TRAINER = "no trainer of the run has been on this node for a long time"

FREE = "free"
FREE_RUN, LOOK_UP_ROOT, ROOT_TASK = "free run", "look up root", "root task"
FOLLOW, FINISH_FREEING = "follow", "finish freeing"


@dataclass(frozen=True, slots=True)
class Action:
    """An action on a snapshot.

    Attributes:
        kind: one of the `STAGES_WITH_WORK`, RESCUE, or FREE.
        place: the snapshot.
        why: the reason to rescue or free, for the log.
        names: the files to seal.
    """

    kind: str
    place: SnapshotDirectory
    why: str = ""
    names: tuple[str, ...] = ()

    @property
    def run(self) -> Run:
        """The run of the snapshot."""
        return self.place.run


@dataclass(frozen=True, slots=True)
class RunAction:
    """An action on a run.

    Attributes:
        kind: FOLLOW, FINISH_FREEING or ROOT_TASK; or, if the run has no trainers, FREE_RUN or
            LOOK_UP_ROOT.
        run: the run.
        reads_steps: whether to find the newest step in the root as well.
        task: the time when the task in the root was written. If this time has changed, the task is
            new, and the agent works on it at once.
        newest: the newest snapshot to follow. With a new one, the agent begins at once.
    """

    kind: str
    run: Run
    reads_steps: bool = False
    task: int = 0
    newest: str = ""


AnyAction = Action | RunAction


STAGES_WITH_WORK = ("seal", *STAGES, *map(on_this_node, STAGES))
"""The stages on which a node has work to do, as it seals, leads a save, or is called by others."""


def decide_run(run: RunView, now: float) -> list[AnyAction]:
    """Return the actions for one run, in the order in which to perform them.

    Args:
        now: the time on the observer's clock, in seconds.
    """
    abandoned = [each for each in run.snapshots if each.is_abandoned]
    actions: list[AnyAction] = [Action(FREE, each.place, why=ABANDONED) for each in abandoned]
    run = replace(run, snapshots=tuple(each for each in run.snapshots if each not in abandoned))
    actions += (
        Action(stage, each.place, names=each.unsealed if stage == "seal" else ())
        for each in run.snapshots
        for stage in STAGES_WITH_WORK
        if each.state_of(stage) is StageState.RUNNING
    )
    followed = [each.place.name for each in run.snapshots if follows(each)]
    is_attended = run.unattended_since is None or now - run.unattended_since < UNTIL_UNFOLLOWED
    if followed and is_attended and agents_above(run.snapshots):
        actions.append(RunAction(FOLLOW, run.run, newest=followed[-1]))
    if run.has_freed:
        actions.append(RunAction(FINISH_FREEING, run.run))
    if run.task_changed_at is not None:
        actions.append(RunAction(ROOT_TASK, run.run, task=run.task_changed_at))
    if run.lost_ranks:
        actions += _rescue_newest(run, TRAINER_LOST)
    if run.unattended_since is not None:
        actions += _free_unattended(run, run.unattended_since, now)
    freed = {each.place for each in actions if isinstance(each, Action) and each.kind == FREE}
    actions += (each for each in _free_replaced(run) if each.place not in freed)
    return actions


def follows(snapshot: SnapshotView) -> bool:
    """Return whether this node waits for the outcome of a stage that other nodes know first."""
    is_unclear = snapshot.is_unreadable and not snapshot.state_of("commit").has_ended
    waits = snapshot.is_copying or StageState.WAITING in map(
        snapshot.state_of, snapshot.open_stages
    )
    is_open = is_unclear or (waits and bool(snapshot.above))
    return is_open and not snapshot.leads


def agents_above(snapshots: Sequence[SnapshotView]) -> list[AgentInfo]:
    """Return the agents above this node in the tree of the run, as the newest snapshot says."""
    return next((each.above for each in reversed(snapshots) if each.above), [])


def _rescue_newest(run: RunView, why: str) -> Iterator[Action]:
    """Yield a Rescue of the newest committed snapshot, if the options of its save allow rescues.

    Yield nothing if the save is persisted anyway, or if its rescue was requested before.
    """
    newest = run.newest_committed
    if newest is None:
        return
    pending = newest.pending
    is_wanted = pending is not None and pending.rescue and not newest.is_durable
    if is_wanted and newest.state_of("rescue") is StageState.NOT_REQUESTED:
        yield Action(RESCUE, newest.place, why)


def _free_replaced(run: RunView) -> Iterator[Action]:
    """Yield actions that free the snapshots that newer ones have replaced, or will replace."""
    newest, kept = run.newest_committed, kept_snapshots(run)
    for each in run.snapshots:
        is_older = newest is not None and each.age_key < newest.age_key
        if is_older and each.place not in kept and not is_pinned(run, each):
            yield Action(FREE, each.place, why=REPLACED)
        elif is_uncommittable(run, each):
            yield Action(FREE, each.place, why=UNCOMMITTABLE)


def is_uncommittable(run: RunView, snapshot: SnapshotView) -> bool:
    """Return whether a snapshot will never be committed, and newer ones need its memory.

    If its commit has failed, it stays until all ranks of this node have begun a newer save. Before,
    a rank may still copy.

    A commit that takes too long counts as failed: it has not ended although the newest snapshot was
    staged long ago. The newest snapshot itself goes only if all slots are in use, and all ranks
    have begun a newer save, so that they wait for its slot. A snapshot that must be persisted may
    take any time.
    """
    if snapshot.is_committed or snapshot.must_be_persisted:
        return False
    newer = [each for each in run.snapshots if each.age_key > snapshot.age_key]
    is_begun = any(len(each.parts) >= len(snapshot.parts) for each in newer)
    if snapshot.state_of("commit") is StageState.FAILED:
        return is_begun
    staged = [each for each in run.snapshots if each.staged]
    if snapshot not in staged or snapshot.is_durable:
        return False
    part = snapshot.staged[0]
    is_needed = staged[-1] != snapshot or (is_begun and len(staged) > part.snapshots_to_keep)
    return is_needed and staged[-1].seconds_staged > 2 * part.wait + 1


def kept_snapshots(run: RunView) -> set[SnapshotDirectory]:
    """Return the committed snapshots that stay in memory.

    A later save of a step replaces an earlier one, which stays only if it is pinned, or if it is
    the newest protected snapshot.
    """
    committed = [each for each in reversed(run.snapshots) if each.is_committed]
    if not committed:
        return set()
    newest = committed[0]
    of_steps = {each.step: each for each in reversed(committed)}
    candidates = [of_steps[step] for step in sorted(of_steps, reverse=True)]
    limits = [part.snapshots_to_keep for part in newest.parts]
    kept = {newest.place, *(each.place for each in committed if is_pinned(run, each))}
    protected = (each for each in committed if each.state_of("protect") is StageState.DONE)
    kept |= {each.place for each in islice(protected, 1)}
    for each in candidates:
        if len(kept) >= max(limits, default=2):
            break
        kept.add(each.place)
    return kept


def is_pinned(run: RunView, snapshot: SnapshotView) -> bool:
    """Return whether a snapshot must stay in memory because a stage has not ended.

    A stage that has not ended keeps its snapshot in memory. It does so until the same stage has
    ended for a newer snapshot: then nobody needs the older one. If this node leads a save, it keeps
    the snapshot until the save is persisted. It does so even if newer saves are persisted before,
    and even if the save has no data files.
    """
    if snapshot.must_be_persisted:
        return True
    newer = [each for each in run.snapshots if each.age_key > snapshot.age_key]
    return any(
        not any(each.state_of(stage).has_ended for each in newer) for stage in snapshot.open_stages
    )


def _free_unattended(run: RunView, unattended_since: float, now: float) -> Iterator[AnyAction]:
    """Yield actions that free the memory of a run without trainers on this node."""
    if not run.snapshots:
        if now - unattended_since >= UPKEEP_PERIOD:
            yield RunAction(FREE_RUN, run.run)
        return
    root, seconds = run.root, now - unattended_since
    may_free_stored = seconds >= UNTIL_FREED_IF_STORED
    last_lookup = unattended_since if root is None else root.read_at
    if now - last_lookup >= UPKEEP_PERIOD:
        yield RunAction(LOOK_UP_ROOT, run.run, may_free_stored)
    frees_all = seconds >= DAY or (may_free_stored and _is_in_storage(run))
    lineage = None if root is None else root.lineage
    for each in run.snapshots:
        if lineage is not None and is_superseded(each, lineage):
            yield Action(FREE, each.place, why=RUN_RESUMED)
        elif frees_all:
            yield Action(FREE, each.place, why=NO_TRAINER)
        elif seconds >= UPKEEP_PERIOD and not _is_of_use(each):
            yield Action(FREE, each.place, why=NOTHING_TO_RESTORE)
    has_read_steps = root is not None and root.is_reachable and root.has_read_steps
    if may_free_stored and not frees_all and has_read_steps:
        yield from _rescue_newest(run, RUN_ENDED)


def _is_of_use(snapshot: SnapshotView) -> bool:
    """Return whether this node has data of a snapshot, or work to do for it.

    Other nodes can call this node, also after the run has ended. Records alone are of no use.
    """
    has_work = any(state is StageState.RUNNING for state in snapshot.stages.values())
    has_data = any(map(is_data, snapshot.names))
    return has_work or has_data or snapshot.leads


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

    The epoch of the save shows this (see `lineage.py`). If it is unknown, return False.
    """
    epoch = snapshot.epoch
    return epoch is not None and lineage.supersedes(snapshot.step, epoch)


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
    of_step = [each for each in valid if each.step == step]
    # Without a manifest, another node may have it, and this node a part of the snapshot.
    of_step = [each for each in of_step if each.is_committed] or of_step
    kept = [each for each in valid if each in of_step or _is_being_persisted(each, nodes)]
    finished = [each for each in valid if each not in kept and _is_finished(each)]
    kept += finished[: max(0, slots - len(kept))]
    places = {each.place for each in kept}
    return [each.place for each in run.snapshots if each.place not in places]


def _is_being_persisted(snapshot: SnapshotView, nodes: Collection[str]) -> bool:
    """Return whether one of `nodes` leads a save that must still be persisted."""
    pending = snapshot.pending
    return (
        snapshot.is_committed
        and pending is not None
        and snapshot.is_durable
        and pending.leader in nodes
        and not snapshot.state_of("persist").has_ended
    )


def _is_finished(snapshot: SnapshotView) -> bool:
    """Return whether a snapshot is committed, and no stage is open."""
    return snapshot.is_committed and not snapshot.open_stages
