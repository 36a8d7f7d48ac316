"""The status of a node, as `shardwise agent status` shows it: its agent, runs and snapshots."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.kernel.errors import StoreError
from shardwise.kernel.store import open_store
from shardwise.parts.memory.agent.root_tasks import mirror_tasks
from shardwise.parts.memory.files import read_record
from shardwise.parts.memory.home import Home, Run
from shardwise.parts.memory.observe import read_snapshots
from shardwise.parts.memory.options import Tls
from shardwise.parts.memory.pool import RANK, Pool
from shardwise.parts.memory.rank_liveness import has_trainers, is_training
from shardwise.parts.memory.records import STAGES, AgentInfo, is_data
from shardwise.parts.memory.redundancy.placement import groups_of_node, plan_protection
from shardwise.parts.memory.remote.lost_agents import why_no_answer
from shardwise.parts.memory.spawn import running_agent
from shardwise.parts.memory.times import ANSWER_TIMEOUT
from shardwise.parts.memory.view import SnapshotView
from shardwise.parts.tiers.record import MirrorRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """The status of a stage of a snapshot.

    Attributes:
        state: "done", "under way" or "failed"; "" if the stage was not requested.
        seconds: from staging until the stage ended, or until now; None if unknown.
        failure: the reason why the stage failed; or why the last attempt failed, if the agent
            retries.
    """

    state: str = ""
    seconds: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStatus:
    """A snapshot on this node.

    Attributes:
        bytes: bytes that the ranks of this node staged.
        bytes_for_others: bytes of copies and parity that this node stores for others.
        age: seconds since a rank of this node last staged a file; None if no rank has staged one.
        protect: not requested if neither copies nor parity of this node's files exist elsewhere.
        protected_by: the nodes that store, or will store, copies or parity for this node.
    """

    step: int
    bytes: int
    bytes_for_others: int
    age: float | None
    commit: StageStatus
    protect: StageStatus
    persist: StageStatus
    protected_by: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLag:
    """How far a stage lags behind the newest staged snapshot.

    If the training must now resume from what this stage has completed, it loses the steps and
    seconds of the lag.

    Attributes:
        step: the newest step in memory for which the stage succeeded; None without such a step.
        steps: the lag in steps; None if unknown.
        seconds: the lag in seconds; None if unknown.
    """

    step: int | None
    steps: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run on this node.

    Attributes:
        run: the id of the run.
        root: the root of the run's checkpoints; None if it is unknown.
        training: whether a trainer of the run is alive on the node.
        bytes: the bytes of all files, free slots included.
        slots_used: the number of slots that are part of a snapshot.
        slots_free: the number of free slots.
        bytes_free: the bytes of the free slots.
        lag: how far each stage lags behind the newest staged snapshot.
        snapshots: the snapshots, by ascending step.
    """

    run: str
    root: str | None
    training: bool
    bytes: int
    slots_used: int
    slots_free: int
    bytes_free: int
    lag: dict[str, StageLag]
    snapshots: list[SnapshotStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorStatus:
    """A root that the agent of this node mirrors.

    Attributes:
        run: the id of the run.
        root, mirror: the places.
        newest: the newest step that the mirror has; None if it has none.
        waiting: the steps to copy, newest first.
        pinned: steps that stay in the root only until they are copied.
        failing: for how many seconds the mirror has failed; None if it does not fail.
        failure: why the mirror fails.
    """

    run: str
    root: str
    mirror: str
    newest: int | None
    waiting: list[int]
    pinned: list[int]
    failing: float | None
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node and its agent.

    Attributes:
        node: the name of the node; None if it never had an agent.
        url: the address of the agent; None if the node never had an agent.
        domain: the failure domain of the node; "" for the node itself.
        process: the process id of the agent; None if no agent runs.
        alive: whether an agent runs.
        answers: whether the agent answers; None if no agent runs, or it requires TLS and no
            certificates were given.
        agent_bytes: the memory of the agent without snapshots; None if unknown.
        training: whether a training runs on this node.
        directory: the directory of the node's snapshots.
        bytes: the bytes that the node stores.
        bytes_left: the free bytes of the file system.
        runs: the runs on this node.
        mirrors: the mirrors that the agent keeps up to date.
    """

    node: str | None
    url: str | None
    domain: str
    process: int | None
    alive: bool
    answers: bool | None
    agent_bytes: int | None
    training: bool
    directory: str
    bytes: int
    bytes_left: int
    runs: list[RunStatus]
    mirrors: list[MirrorStatus]


def read_runs(home: Home) -> list[RunStatus]:
    """Return the status of the runs that have snapshots on a node."""
    info = _last_agent(home)
    return [_run_status(run, info.node if info else "") for run in home.runs()]


def _last_agent(home: Home) -> AgentInfo | None:
    """Return the agent that runs on a node, or ran there last; None if it is unknown."""
    with suppress(StoreError):
        return read_record(home.info_path, AgentInfo)
    return None


def read_status(home: Home, tls: Tls | None = None) -> NodeStatus:
    """Return the status of a node, without asking other nodes."""
    info = running_agent(home)
    last_info = info or _last_agent(home)
    file_system = os.statvfs(home.path)
    return NodeStatus(
        node=last_info.node if last_info else None,
        url=last_info.url if last_info else None,
        domain=last_info.domain if last_info else "",
        process=info.process if info else None,
        alive=home.has_agent(),
        answers=_does_answer(info, tls) if info else None,
        agent_bytes=memory_of(info.process) if info else None,
        training=is_training(home),
        directory=str(home),
        bytes=sum(_file_size(path) for path in home.path.rglob("*") if path.is_file()),
        bytes_left=file_system.f_bavail * file_system.f_frsize,
        runs=read_runs(home),
        mirrors=list(read_mirrors(home)),
    )


def read_mirrors(home: Home) -> Iterator[MirrorStatus]:
    """Yield the status of the mirrors that the agent of a node keeps up to date."""
    for run, task in mirror_tasks(home).items():
        record = None
        failure = "the agent has not copied anything yet"
        try:
            record = MirrorRecord.read(open_store(task.root))
        except OSError as error:
            failure = f"the state of the mirror is unknown: {error}"
        since = None if record is None else record.failing_since
        yield MirrorStatus(
            run=run.name,
            root=task.root,
            mirror=task.mirror.place if task.mirror else "",
            newest=None if record is None else max(record.steps, default=None),
            waiting=[] if record is None else list(record.waiting),
            pinned=[] if record is None else list(record.pinned),
            failing=_seconds_between(since, time.time()),
            failure=failure if record is None else record.why_failing(),
        )


def _run_status(run: Run, node: str) -> RunStatus:
    now = time.time()
    views = read_snapshots(run.snapshots())
    snapshots = [_snapshot_status(each, node, now) for each in views]
    free = Pool(run.free_directory).files(RANK)
    return RunStatus(
        run=run.name,
        root=run.root(),
        training=has_trainers(run),
        bytes=sum(map(_file_size, run.path.rglob("*"))),
        slots_used=sum(len(each.staged) for each in views),
        slots_free=len(free),
        bytes_free=sum(nbytes for nbytes, _ in free),
        lag={stage: _lag_of_stage(snapshots, stage) for stage in STAGES},
        snapshots=snapshots,
    )


def _snapshot_status(view: SnapshotView, node: str, now: float) -> SnapshotStatus:
    own = {each.file.name for each in view.staged if each.file is not None}
    data = {name: _file_size(view.place.path / name) for name in filter(is_data, view.names)}
    protectors = _protectors(view, node)
    protect = _stage_status(view, "protect", now)
    if protect.state == "done" and not protectors:  # the run has neither copies nor parity
        protect = StageStatus()
    return SnapshotStatus(
        step=view.step,
        bytes=sum(size for name, size in data.items() if name in own),
        bytes_for_others=sum(size for name, size in data.items() if name not in own),
        age=_seconds_between(view.staged_at, now),
        protected_by=protectors,
        commit=_stage_status(view, "commit", now),
        protect=protect,
        persist=_stage_status(view, "persist", now),
    )


def _stage_status(view: SnapshotView, stage: str, now: float) -> StageStatus:
    """Return the status of a stage."""
    state, outcome = view.state_of(stage), view.state.outcomes.get(stage)
    if not state.has_ended:
        if stage not in view.open_stages:
            return StageStatus()
        seconds, retry = _seconds_between(view.staged_at, now), view.state.retries.get(stage)
        failure = "" if retry is None else retry.describe(now)
        return StageStatus(state="under way", seconds=seconds, failure=failure)
    if outcome is None:  # it never began, because the commit failed
        return StageStatus()
    return StageStatus(
        state=state.value,
        seconds=_seconds_between(view.staged_at, outcome.ended_at),
        failure=outcome.failure,
    )


def _seconds_between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)


def _lag_of_stage(snapshots: list[SnapshotStatus], stage: str) -> StageLag:
    done = [each for each in snapshots if getattr(each, stage).state == "done"]
    own = [each for each in snapshots if each.age is not None]
    if not done or not own:
        return StageLag(step=done[-1].step if done else None, steps=None, seconds=None)
    newest, last = own[-1], done[-1]
    return StageLag(
        step=last.step,
        steps=max(0, newest.step - last.step),
        seconds=_seconds_between(newest.age, last.age),
    )


def _protectors(view: SnapshotView, node: str) -> list[str]:
    """Return the nodes that protect the files of a node in a snapshot, or will protect them."""
    found: set[str] = set()
    if view.pending is not None:
        with suppress(FileNotFoundError, StoreError, ValueError):
            files = view.place.read_manifest()[1].files
            for group, index in groups_of_node(plan_protection(view.pending, files), node):
                following = group.members[index + 1 :] + group.members[:index]
                protecting = following if group.parity else following[: group.copies]
                found |= {member.node for member in protecting}
    return sorted(found)


def _does_answer(info: AgentInfo, tls: Tls | None) -> bool | None:
    if info.url.startswith("https:") and tls is None:
        return None
    return not why_no_answer(info, tls, ANSWER_TIMEOUT)


def memory_of(process: int) -> int | None:
    """Return the private memory of a process in bytes, without mapped snapshots."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    kibibytes = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(kibibytes[0]) * 1024 if kibibytes else None


def _file_size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.lstat().st_size
    return 0
