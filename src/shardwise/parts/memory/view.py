"""Frozen values that describe what a node stores: runs, snapshots, saves, and stages of saves.

    observe.py (read)  →  decide.py (pure)  →  agent/actions.py, reclaim.py (act)

Agents, handles of saves, recovery, reclamation and `shardwise agent status` use these values. No
other code derives the state of a stage from the names of records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec

from shardwise.kernel.decoding import prepare_decoding
from shardwise.kernel.manifest.manifest import Count
from shardwise.parts.memory.home import ABANDONED_MARKER, Run, SnapshotDirectory
from shardwise.parts.memory.lineage import Lineage
from shardwise.parts.memory.records import (
    TOLD_STAGES,
    PendingManifest,
    Seconds,
    StagedFile,
    StageOutcome,
)


def tell(stage: str) -> str:
    """Return the name of the stage in which a node tells others how a stage has ended."""
    return f"tell {stage}"


class StageState(Enum):
    """The state of a stage of a save, as one node sees it."""

    NOT_REQUESTED = "not requested"
    WAITING = "waiting"  # for another stage, for a rank of this node, or for another node
    RUNNING = "running"  # this node has work to do
    DONE = "done"
    FAILED = "failed"

    @property
    def is_open(self) -> bool:
        """Whether the stage was requested and has not ended."""
        return self in (StageState.WAITING, StageState.RUNNING)

    @property
    def has_ended(self) -> bool:
        """Whether the stage is done or has failed."""
        return self in (StageState.DONE, StageState.FAILED)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a save.

    Attributes:
        outcome: the result for the cluster; None until the stage has ended on all nodes.
        ended_at: the time when this node received the outcome, in seconds since 1970.
    """

    state: StageState
    outcome: StageOutcome | None = None
    ended_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveView:
    """One save of a step, as this node sees it.

    Attributes:
        staged: the records of the data files of this node's ranks. The files exist.
        unsealed: the names of the data files that have no checksums yet.
        has_staged: whether a rank of this node has written a `StagedFile` record. The data file may
            not exist yet.
        pending: the pending manifest on the leading node, a copy of it on other nodes. Here, its
            field `manifest` is empty.
        has_pending_manifest: whether this node has the pending manifest itself, because it leads
            the save.
        epoch: the epoch of the run at the save; None if no record contains the epoch.
        stages: the stages by name. `collect`, `protect_others` and `copy` are the parts of
            committing, protecting and persisting of this node and of the nodes below it in the
            tree. `tell("commit")` and so on tell the nodes below it how a stage has ended. For a
            save that was for memory only, `rescue` is done as soon as an agent has requested to
            persist the save.
    """

    save_id: str
    staged: tuple[StagedFile, ...]
    unsealed: tuple[str, ...]
    has_staged: bool
    pending: PendingManifest | None
    has_pending_manifest: bool
    epoch: int | None
    stages: Mapping[str, Stage]

    def state_of(self, stage: str) -> StageState:
        """Return the state of a stage."""
        return self.stages[stage].state

    @property
    def open_stages(self) -> frozenset[str]:
        """The stages that the ranks of this node requested and that have not ended."""
        requested = {stage for each in self.staged for stage in each.stages}
        return frozenset(stage for stage in requested if not self.state_of(stage).has_ended)

    @property
    def is_being_told(self) -> bool:
        """Whether this node tells other nodes how a stage has ended."""
        return any(self.state_of(tell(stage)) is StageState.RUNNING for stage in TOLD_STAGES)

    @property
    def must_be_persisted(self) -> bool:
        """Whether this node must persist the save, even if newer saves are persisted already."""
        durable = self.has_pending_manifest and self.pending is not None and self.pending.durable
        is_open = self.state_of("persist") is StageState.RUNNING or "persist" in self.open_stages
        return durable and is_open


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotView:
    """All saves of a step on this node.

    Attributes:
        names: the names of all files.
        saves: for each save id, the save.
        committed_save: the id of the save in the manifest; None if there is no manifest, "" if the
            manifest is damaged.
        staged_at: the time when a rank of this node last staged a file, in seconds since 1970; None
            if no rank has staged a file.
    """

    place: SnapshotDirectory
    names: frozenset[str]
    saves: Mapping[str, SaveView]
    committed_save: str | None
    staged_at: float | None

    @property
    def step(self) -> int:
        """The snapshot's step."""
        return self.place.step

    @property
    def is_abandoned(self) -> bool:
        """Whether the snapshot is marked as abandoned."""
        return ABANDONED_MARKER in self.names

    @property
    def is_committed(self) -> bool:
        """Whether the snapshot has a manifest."""
        return self.committed_save is not None

    def has_ended(self, stage: str) -> bool:
        """Return whether a stage has ended for any save of the step."""
        return any(save.state_of(stage).has_ended for save in self.saves.values())

    def is_done(self, stage: str) -> bool:
        """Return whether a stage is done for any save of the step."""
        return any(save.state_of(stage) is StageState.DONE for save in self.saves.values())


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
        snapshots: the snapshots, by ascending step.
        lost_ranks: the ranks that died on this node without ending normally.
        unattended_since: the time, on the observer's clock, since which the run has had no trainer
            on this node; None if it has a trainer.
        root: the root as it was last read; None if the run has trainers on this node.
        mirror_changed_at: the time when the task to mirror the root was written, in nanoseconds
            since 1970; None if there is no task.
    """

    run: Run
    snapshots: tuple[SnapshotView, ...] = ()
    lost_ranks: tuple[int, ...] = ()
    unattended_since: float | None = None
    root: RootView | None = None
    mirror_changed_at: int | None = None

    @property
    def newest_committed(self) -> SnapshotView | None:
        """The newest committed snapshot."""
        return next((each for each in reversed(self.snapshots) if each.is_committed), None)


@prepare_decoding
class Failing(msgspec.Struct, frozen=True):
    """A save or run on which an agent has failed to work, again and again.

    Attributes:
        run: the id of the run.
        step: the step of the save; None if the agent cannot observe the run at all.
        seconds: the time since the first failure.
        failure: the last failure.
    """

    run: str
    step: Count | None
    seconds: Seconds
    failure: str
