"""Frozen values that describe what a node stores: runs, snapshots, and stages of saves.

    observe.py (read)  →  decide.py (pure)  →  agent/actions.py, reclaim.py (act)

Agents, recovery, reclamation and `shardwise agent status` use these values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from shardwise.kernel.manifest.manifest import MANIFEST
from shardwise.parts.lineage import Lineage
from shardwise.parts.memory.home import ABANDONED_MARKER, PERSIST_MARKER, Run, SnapshotDirectory
from shardwise.parts.memory.records import AgentInfo, PendingManifest, RankPart, SaveState


class StageState(Enum):
    """The state of a stage of a save, as one node sees it."""

    NOT_REQUESTED = "not requested"
    WAITING = "waiting"  # for another stage, for a rank of this node, or for another node
    RUNNING = "running"  # this node has work to do
    DONE = "done"
    FAILED = "failed"

    @property
    def has_ended(self) -> bool:
        """Whether the stage is done or has failed."""
        return self in (StageState.DONE, StageState.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotView:
    """A save of a step, as one node sees it.

    Attributes:
        names: the names of all files.
        parts: the records of this node's ranks.
        unsealed: the staged data files that have no checksums yet.
        pending: the pending manifest, or the copy of it. Here, its field `manifest` is empty.
        leads: whether this node leads the save.
        is_unreadable: whether the record of a rank of this node is damaged.
        is_copying: whether a live rank of this node copies its part into memory, and the commit has
            not ended.
        state: how far the save is.
        stages: the stages by name. "seal" computes the checksums of this node's files. The others
            are the stages of all nodes; `on_this_node(stage)` is this node's part of a stage, if
            another node has requested it. For a save that was for memory only, "rescue" is done as
            soon as an agent has requested to persist the save.
        staged_at: the time when a rank of this node last staged a file, in seconds since 1970; None
            if no rank has staged a file.
        seconds_staged: the seconds since then.
    """

    place: SnapshotDirectory
    names: frozenset[str] = frozenset()
    parts: tuple[RankPart, ...] = ()
    unsealed: tuple[str, ...] = ()
    pending: PendingManifest | None = None
    leads: bool = False
    is_unreadable: bool = False
    is_copying: bool = False
    state: SaveState = field(default_factory=SaveState)
    stages: Mapping[str, StageState]
    staged_at: float | None = None
    seconds_staged: float = 0.0

    @property
    def step(self) -> int:
        """The snapshot's step."""
        return self.place.step

    @property
    def age_key(self) -> tuple[int, float, float]:
        """A key that sorts older snapshots first. Without records, a save has just begun."""
        saved_at = math.inf if self.pending is None else self.pending.saved_at
        return self.step, math.inf if self.epoch is None else self.epoch, saved_at

    @property
    def staged(self) -> list[RankPart]:
        """The parts whose data files are in memory."""
        return [each for each in self.parts if each.file and each.file.name in self.names]

    @property
    def epoch(self) -> int | None:
        """The epoch of the run at the save; None if no record contains the epoch."""
        if self.pending is not None:
            return self.pending.epoch
        return next((each.epoch for each in self.parts), None)

    @property
    def is_abandoned(self) -> bool:
        """Whether the snapshot is marked as abandoned."""
        return ABANDONED_MARKER in self.names

    @property
    def is_committed(self) -> bool:
        """Whether the snapshot has a manifest."""
        return MANIFEST in self.names

    def state_of(self, stage: str) -> StageState:
        """Return the state of a stage."""
        return self.stages.get(stage, StageState.NOT_REQUESTED)

    @property
    def above(self) -> list[AgentInfo]:
        """The agents above this node in the tree of the save, as its ranks know them."""
        return next((part.above for part in self.parts if part.above), [])

    @property
    def open_stages(self) -> frozenset[str]:
        """The stages that have not ended, of the ranks of this node that do not copy any more.

        A save that is persisted although no rank has requested it, by a rescue, is open too.
        """
        staged = self.staged
        parts = [each for each in self.parts if not each.file or each.failure or each in staged]
        requested = {stage for each in parts for stage in each.stages}
        if PERSIST_MARKER in self.names or self.state_of("persist") is StageState.RUNNING:
            requested.add("persist")
        return frozenset(stage for stage in requested if not self.state_of(stage).has_ended)

    @property
    def is_durable(self) -> bool:
        """Whether ranks wait until storage has the save."""
        is_pending = self.pending is not None and self.pending.durable
        is_requested = any("persist" in part.stages for part in self.parts)
        return is_pending or is_requested or PERSIST_MARKER in self.names

    @property
    def must_be_persisted(self) -> bool:
        """Whether this node must persist the save, even if newer saves are persisted already."""
        return self.leads and self.is_durable and "persist" in self.open_stages


def on_this_node(stage: str) -> str:
    """Return the name of this node's part of a stage."""
    return f"{stage} on this node"


@dataclass(frozen=True, slots=True, kw_only=True)
class RootView:
    """The content of a run's root when the agent last read the root.

    Attributes:
        read_at: the time, on the observer's clock, when the agent read the root.
        is_reachable: whether the root could be read.
        lineage: the lineage of the run; None if the root was removed, or belongs to another run.
        newest_step: the newest step in the root; None if the root has no step.
        has_read_steps: whether the agent looked for the newest step.
    """

    read_at: float
    is_reachable: bool = False
    lineage: Lineage | None = None
    newest_step: int | None = None
    has_read_steps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run on this node.

    Attributes:
        snapshots: the snapshots, oldest first.
        lost_ranks: the ranks that died on this node without ending normally.
        unattended_since: the time, on the observer's clock, since which the run has had no trainer
            on this node; None if it has a trainer.
        root: the root as it was last read; None if the run has trainers on this node.
        task_changed_at: the time when the agent's task in the root was written, in nanoseconds
            since 1970; None if there is no task.
        has_freed: whether a snapshot was freed, but not all of its files.
    """

    run: Run
    snapshots: tuple[SnapshotView, ...] = ()
    lost_ranks: tuple[int, ...] = ()
    unattended_since: float | None = None
    root: RootView | None = None
    task_changed_at: int | None = None
    has_freed: bool = False

    @property
    def newest_committed(self) -> SnapshotView | None:
        """The newest committed snapshot."""
        return next((each for each in reversed(self.snapshots) if each.is_committed), None)
