"""The actions of an agent, as a pure function of what its node stores.

Each save goes through these stages; every arrow is an action of `decide`:

                    ranks copy          a node is lost, or the run has ended
                        │                               │ Rescue
                     staged                             ▼
                        │ Seal        ┌───────▶ persisting is requested ─┐
                        ▼             │ (or it was from the start)       │ Persist (leader)
                     sealed           │                                  ▼ Copy    (each node)
                        │ Commit      │                              persisted
                        ▼ (leader)    │                                  │ Retain: remove old
                    committed ────────┘                                  ▼         checkpoints
                        │ Protect (leader), Guard (each node)        retained
                        ▼
                    protected

A stage is NOT_ASKED, WAITING, RUNNING, DONE or FAILED (`view.State`); only RUNNING stages have an
action. The leader is the node of rank 0, which has the pending manifest. It requests the stages
from the other nodes by records, and writes the outcome of each stage to all nodes.

Memory is freed by mark and sweep. These snapshots of a run are kept:

    the newest committed · the newest protected · those with open stages (see `is_pinned`) ·
    as many more as the run has slots

Free removes all others that are older than the newest committed one.

A run without trainers on this node is freed when its root says that it was resumed from an older
step, when storage has all of it, or after a day. LookUpRoot reads the root; FreeRun removes a run
without snapshots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice

from shardwise.memory.home import Place, Run
from shardwise.memory.lineage import Lineage
from shardwise.memory.records import RETAIN
from shardwise.memory.view import NodeView, RunView, SaveView, SnapshotView, State

LOST = "a trainer was lost"
ENDED = "the run has ended"
REPLACED = "replaced by newer snapshots"
RESUMED = "the run was resumed from an older step"
UNATTENDED = "no trainer of the run has been on this node for a long time"


@dataclass(frozen=True, slots=True)
class OfSave:
    """An action on one save of a snapshot."""

    place: Place
    save_id: str


@dataclass(frozen=True, slots=True)
class Seal(OfSave):
    """Compute the checksums of files that this node's ranks staged."""

    files: tuple[str, ...]


class Commit(OfSave):
    """Collect the entries of all files, and write the manifest to all nodes."""


class Protect(OfSave):
    """Have all nodes make copies or parity."""


class Guard(OfSave):
    """Make this node's part of the copies or parity."""


class Persist(OfSave):
    """Have all nodes copy their files to storage, and publish the checkpoint."""


class Copy(OfSave):
    """Copy this node's files to storage."""


class Retain(OfSave):
    """Remove old checkpoints from storage."""


@dataclass(frozen=True, slots=True)
class Rescue(OfSave):
    """Have a save persisted that was for memory only."""

    why: str


@dataclass(frozen=True, slots=True)
class Free:
    """Free the memory of a snapshot.

    Attributes:
        saves: the saves of the step to free; all of the snapshot if empty.
    """

    place: Place
    why: str
    saves: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FreeRun:
    """Remove a run that has neither trainers nor snapshots."""

    run: Run


@dataclass(frozen=True, slots=True)
class LookUpRoot:
    """Read the root of a run without trainers.

    Attributes:
        stored: whether to read its newest step too.
    """

    run: Run
    stored: bool


Action = OfSave | Free | FreeRun | LookUpRoot


@dataclass(frozen=True, slots=True, kw_only=True)
class Periods:
    """How long an agent waits before it frees memory, in seconds.

    Attributes:
        look_up: between two looks at the root of a run without trainers.
        linger: until a run without trainers is freed, if storage has all of it.
        longest: until it is freed in any case.
        vacant: until a run without trainers and snapshots is removed.
    """

    look_up: float = 10.0
    linger: float = 1800.0
    longest: float = 86400.0
    vacant: float = 10.0


DEFAULT_PERIODS = Periods()
_WORK = {
    "commit": Commit,
    "protect": Protect,
    "guard": Guard,
    "persist": Persist,
    "copy": Copy,
    RETAIN: Retain,
}


def decide(node: NodeView, now: float, periods: Periods = DEFAULT_PERIODS) -> list[Action]:
    """Return the actions for a node, in the order in which to perform them.

    Args:
        now: the time on the observer's clock.
    """
    return [action for run in node.runs for action in decide_run(run, now, periods)]


def decide_run(run: RunView, now: float, periods: Periods = DEFAULT_PERIODS) -> list[Action]:
    """Return the actions for one run."""
    found: list[Action] = []
    for snapshot in run.snapshots:
        for save in snapshot.saves.values():
            found += _work_on(snapshot, save)
    if run.lost:
        found += _rescue(run, LOST)
    if run.unattended is not None:
        found += _free_unattended(run, now, periods)
    freed = {action.place for action in found if isinstance(action, Free)}
    found += (each for each in _free_replaced(run) if each.place not in freed)
    return found


def _work_on(snapshot: SnapshotView, save: SaveView) -> Iterator[Action]:
    """Yield the actions of this node for the stages of a save."""
    if save.state("seal") is State.RUNNING and not snapshot.is_abandoned:
        yield Seal(snapshot.place, save.save_id, save.unsealed)
    for stage, action in _WORK.items():
        if save.state(stage) is State.RUNNING and (stage == RETAIN or not snapshot.is_abandoned):
            yield action(snapshot.place, save.save_id)


def _rescue(run: RunView, why: str) -> Iterator[Action]:
    """Yield a rescue of the newest committed snapshot, unless it is persisted or must not be."""
    newest = run.newest_committed
    save = None if newest is None else newest.saves.get(newest.committed or "")
    if newest is None or save is None or save.pending is None or newest.is_abandoned:
        return
    wanted = save.pending.rescue and not save.pending.durable
    if wanted and save.state("rescue") is State.NOT_ASKED:
        yield Rescue(newest.place, save.save_id, why)


def _free_replaced(run: RunView) -> Iterator[Free]:
    """Free what the newest committed snapshot replaces, and replaced saves of the steps kept."""
    newest = run.newest_committed
    if newest is None:
        return
    kept = kept_steps(run)
    for each in run.snapshots:
        if each.step in kept:
            if old := _replaced_saves(each):
                yield Free(each.place, REPLACED, old)
        elif each.step < newest.step and not is_pinned(run, each) and not _only_retains(each):
            yield Free(each.place, REPLACED)


def kept_steps(run: RunView) -> set[int]:
    """Return the committed steps that stay in memory."""
    committed = [each for each in reversed(run.snapshots) if each.is_committed]
    if not committed:
        return set()
    newest = committed[0]
    asked = [staged.slots for save in newest.saves.values() for staged in save.staged]
    kept = {newest.step, *(each.step for each in committed if is_pinned(run, each))}
    kept |= set(islice((each.step for each in committed if each.is_done("protect")), 1))
    for each in committed:
        if len(kept) >= max(asked, default=2):
            break
        kept.add(each.step)
    return kept


def is_pinned(run: RunView, snapshot: SnapshotView) -> bool:
    """Return whether a snapshot has an open stage that no newer snapshot has reached.

    A save that the agent promised to persist is pinned until it is persisted, whatever newer saves
    reach; also one without data files, of which no rank has staged anything. Abandoned snapshots
    are
    not pinned.
    """
    if snapshot.is_abandoned:
        return False
    if any(save.is_promised for save in snapshot.saves.values()):
        return True
    newer = [each for each in run.snapshots if each.step > snapshot.step]
    wanted = {stage for save in snapshot.saves.values() for stage in save.wanted}
    return any(not any(each.has_ended(stage) for each in newer) for stage in wanted)


def _only_retains(snapshot: SnapshotView) -> bool:
    """Return whether only requests to remove old checkpoints from storage remain."""
    open_requests = {
        f"{RETAIN}-{save.save_id}.json"
        for save in snapshot.saves.values()
        if save.state(RETAIN).is_open
    }
    return bool(snapshot.names) and snapshot.names <= open_requests


def _replaced_saves(snapshot: SnapshotView) -> tuple[str, ...]:
    """Return the saves whose commit has ended, and that another save of the step has replaced."""
    staged = [save for save in snapshot.saves.values() if save.has_staged]
    if len(staged) < 2 or not snapshot.committed:
        return ()
    ended = [save.save_id for save in staged if save.state("commit").has_ended]
    return tuple(save_id for save_id in ended if save_id != snapshot.committed)


def _free_unattended(run: RunView, now: float, periods: Periods) -> Iterator[Action]:
    """Free the memory of a run that has no trainer on this node."""
    since, root = run.unattended or 0.0, run.root
    idle = now - since
    if not run.snapshots:
        if run.vacant is not None and now - run.vacant >= periods.vacant:
            yield FreeRun(run.run)
        return
    lingers = idle >= periods.linger
    if now - (since if root is None else root.looked) >= periods.look_up:
        yield LookUpRoot(run.run, lingers)
    lineage = None if root is None else root.lineage
    goes = idle >= periods.longest or (lingers and _is_in_storage(run))
    for each in run.snapshots:
        if lineage is not None and is_superseded(each, lineage):
            yield Free(each.place, RESUMED)
        elif goes:
            yield Free(each.place, UNATTENDED)
    if lingers and not goes and root is not None and root.reached and root.knows_stored:
        yield from _rescue(run, ENDED)


def _is_in_storage(run: RunView) -> bool:
    """Return whether storage has everything of a run that could be needed."""
    root, newest = run.root, run.newest_committed
    if root is None or not root.reached:
        return False
    if root.lineage is None or newest is None:
        return True
    return root.stored is not None and root.stored >= newest.step


def is_superseded(snapshot: SnapshotView, lineage: Lineage) -> bool:
    """Return whether the run was resumed from a step before this snapshot, after it was saved.

    False if the epoch of any of its saves is unknown, because the run may be resumed from that
    save.
    """
    branch = lineage.newest_before(snapshot.step)
    saves = [each for each in snapshot.saves.values() if _exists(snapshot, each)]
    if branch is None or not saves:
        return False
    return all(each.epoch is not None and each.epoch < branch.epoch for each in saves)


def _exists(snapshot: SnapshotView, save: SaveView) -> bool:
    return bool(save.staged) or save.pending is not None or save.save_id == snapshot.committed


def superseded_steps(
    run: RunView, step: int | None, lineage: Lineage, nodes: Collection[str], slots: int
) -> list[Place]:
    """Return what a node need not keep when the run is resumed from a step.

    These are newer snapshots; snapshots that the run abandoned before, while this node may have
    been
    away; and older unfinished ones, which would occupy slots while they wait for a lost node.

    Args:
        step: the step; None for the beginning.
        lineage: the lineage before this resumption.
        nodes: the nodes that the run is resumed on.
        slots: how many snapshots to keep.
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
    """Return whether a live node leads a save that must still be persisted."""
    return snapshot.is_committed and any(
        save.pending is not None
        and save.pending.durable
        and save.pending.leader in nodes
        and not save.state("persist").has_ended
        for save in snapshot.saves.values()
    )


def _is_finished(snapshot: SnapshotView) -> bool:
    """Return whether a snapshot is committed and has no open stages."""
    return snapshot.is_committed and not any(
        save.wanted
        or (save.state("copy") is not State.NOT_ASKED and not save.state("persist").has_ended)
        for save in snapshot.saves.values()
    )


def hopeless_steps(run: RunView, now: float, patience: float) -> list[Place]:
    """Return the steps that will never be committed, except the newest step.

    Their commit has failed; or they are for memory only, and nothing was staged for `patience`
    seconds.

    Args:
        now: the time in seconds since 1970.
    """
    found = []
    for each in run.snapshots[:-1]:
        saves = [save for save in each.saves.values() if save.has_staged]
        staged = [one for save in saves for one in save.staged]
        if each.is_committed or not staged:
            continue
        failed = all(save.state("commit") is State.FAILED for save in saves)
        durable = any("persist" in one.stages for one in staged)
        age = 0.0 if each.staged_at is None else now - each.staged_at
        if failed or (not durable and age > patience):
            found.append(each.place)
    return found
