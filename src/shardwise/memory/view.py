"""What a node stores, as frozen values: how far each save has come, and what it still needs.

    observe.py (read)  →  decide.py (pure)  →  agent/actions.py, reclaim.py (act)

Agents, handles of saves, recovery, reclamation and `shardwise agent status` all use these values.
Nothing else derives the state of a stage from the names of records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from shardwise.memory.home import ABANDONED, Place, Run
from shardwise.memory.lineage import Lineage
from shardwise.memory.records import Done, PendingManifest, Staged


class State(Enum):
    """How far a stage of a save has come, as one node sees it."""

    NOT_ASKED = "not asked"
    WAITING = "waiting"  # for another stage, for a rank of this node, or for another node
    RUNNING = "running"  # this node has work to do
    DONE = "done"
    FAILED = "failed"

    @property
    def is_open(self) -> bool:
        """Whether the stage was asked for and has not ended."""
        return self in (State.WAITING, State.RUNNING)

    @property
    def has_ended(self) -> bool:
        """Whether the stage has ended, well or not."""
        return self in (State.DONE, State.FAILED)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a save.

    Attributes:
        outcome: how it ended for all nodes; None unless the whole cluster has ended it.
        at: when the outcome was written here, in seconds since 1970.
    """

    state: State
    outcome: Done | None = None
    at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveView:
    """One save of a step, as this node sees it.

    Attributes:
        staged: the data files of this node's ranks that are in place.
        unsealed: the names of those files that have no checksums yet.
        has_staged: whether a rank of this node has recorded a file, in place or not.
        pending: the pending manifest, or the followers' copy of it, without the text of the
            manifest.
        leads: whether this node has the pending manifest itself.
        epoch: the epoch of the run at the save; None if no record contains it.
        stages: the stages by name. `copy` and `guard` are this node's parts in persisting and
            protecting; `rescue` is persisting a save that was for memory only.
    """

    save_id: str
    staged: tuple[Staged, ...]
    unsealed: tuple[str, ...]
    has_staged: bool
    pending: PendingManifest | None
    leads: bool
    epoch: int | None
    stages: Mapping[str, Stage]

    def state(self, stage: str) -> State:
        """Return the state of a stage."""
        return self.stages[stage].state

    @property
    def wanted(self) -> frozenset[str]:
        """The stages that the ranks of this node asked for and that have not ended."""
        asked = {stage for each in self.staged for stage in each.stages}
        return frozenset(stage for stage in asked if not self.state(stage).has_ended)

    @property
    def is_promised(self) -> bool:
        """Whether this node leads the save and must persist it, whatever newer saves reach."""
        durable = self.leads and self.pending is not None and self.pending.durable
        is_open = self.state("persist") is State.RUNNING or "persist" in self.wanted
        return durable and is_open


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotView:
    """All saves of a step on this node.

    Attributes:
        names: the names of all files.
        committed: the save that the manifest belongs to; "" if the manifest is damaged, None
            without
            one.
        staged_at: when a rank last recorded a file, in seconds since 1970; None if none has.
    """

    place: Place
    names: frozenset[str]
    saves: Mapping[str, SaveView]
    committed: str | None
    staged_at: float | None

    @property
    def step(self) -> int:
        """The snapshot's step."""
        return self.place.step

    @property
    def is_abandoned(self) -> bool:
        """Whether the snapshot is marked as abandoned."""
        return ABANDONED in self.names

    @property
    def is_committed(self) -> bool:
        """Whether the snapshot has a manifest."""
        return self.committed is not None

    def has_ended(self, stage: str) -> bool:
        """Return whether a stage has ended for any save of the step."""
        return any(save.state(stage).has_ended for save in self.saves.values())

    def is_done(self, stage: str) -> bool:
        """Return whether a stage has ended well for any save of the step."""
        return any(save.state(stage) is State.DONE for save in self.saves.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class RootView:
    """What the root of a run contained when it was last read.

    Attributes:
        looked: when it was read, by the observer's clock.
        reached: whether it could be read.
        lineage: the lineage of the run; None if the root is gone, or belongs to another run now.
        stored: its newest step; None if it has none.
        knows_stored: whether `stored` was read.
    """

    looked: float
    reached: bool = False
    lineage: Lineage | None = None
    stored: int | None = None
    knows_stored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run on this node.

    Attributes:
        snapshots: the snapshots by step, ascending.
        lost: ranks of this node that died without ending normally.
        unattended: since when no trainer is on this node, by the observer's clock; None if one is.
        vacant: since when it has neither trainers nor snapshots; None if it has either.
        root: the last look at its root, if no trainer is on this node.
    """

    run: Run
    snapshots: tuple[SnapshotView, ...] = ()
    lost: tuple[int, ...] = ()
    unattended: float | None = None
    vacant: float | None = None
    root: RootView | None = None

    @property
    def newest_committed(self) -> SnapshotView | None:
        """The newest snapshot with a manifest."""
        return next((each for each in reversed(self.snapshots) if each.is_committed), None)


@dataclass(frozen=True, slots=True)
class NodeView:
    """Everything on a node.

    Attributes:
        node: the node's name.
    """

    node: str
    runs: tuple[RunView, ...]
