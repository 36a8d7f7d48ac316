"""The status of a node: what it stores, and how far each snapshot has come."""

from __future__ import annotations

import os
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import StoreError
from shardwise.memory import records
from shardwise.memory.agent.tensor_protection import TensorsStatus, tensors_of
from shardwise.memory.files import read_record
from shardwise.memory.home import ROOT, Home, Place, Run
from shardwise.memory.observe import RecordCache, read_snapshots
from shardwise.memory.options import Tls
from shardwise.memory.rank_locks import has_trainers, is_training
from shardwise.memory.records import AgentInfo, Protect
from shardwise.memory.redundancy.placement import Protection
from shardwise.memory.remote.client import AgentClient
from shardwise.memory.spawn import running_agent
from shardwise.memory.view import SnapshotView

STAGES = ("commit", "protect", "persist")
NO_ANSWER = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """How far a stage of a snapshot has come.

    Attributes:
        state: "done", "under way", "failed", or "" if it was not requested.
        seconds: from staging until the stage ended, or until now.
        failure: why it failed.
    """

    state: str = ""
    seconds: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStatus:
    """A snapshot on this node.

    Attributes:
        bytes: bytes of this node's files.
        bytes_for_others: bytes of copies and parity that this node stores for others.
        age: seconds since this node staged it; None if it stores no files of its own.
        protected_by: the nodes that store copies or parity for this one.
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
class Behind:
    """How far a stage lags behind the newest staged snapshot.

    Attributes:
        step: the newest step in memory for which the stage succeeded; None if there is none.
        steps, seconds: the training that a failure would cost now, if the stage protects against
            it.
    """

    step: int | None
    steps: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run on this node. A slot is a file that holds a rank's share, or is free.

    Attributes:
        tensors: the protection of the requested tensors; None if none were requested.
    """

    run: str
    slots_used: int
    slots_free: int
    bytes_free: int
    behind: dict[str, Behind]
    snapshots: list[SnapshotStatus]
    tensors: TensorsStatus | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A node and its agent.

    Attributes:
        alive: whether an agent runs.
        answers: whether it answers; None if none runs, or it requires TLS and none was given.
        agent_bytes: the agent's own memory; None if it is unknown.
        training: whether a training runs on this node.
        bytes, bytes_left: bytes stored, and bytes free in the file system.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """What a node stores for a run.

    Attributes:
        run: the run's id.
        root: the root of the run's checkpoints; None if it is unknown.
        bytes: bytes of all files, free slots included.
        steps: the steps of its snapshots, ascending.
        persisted: the newest of these steps that is in storage too; None if none is.
        training: whether a trainer of the run is alive on the node.
    """

    run: str
    root: str | None
    bytes: int
    steps: list[int]
    persisted: int | None
    training: bool


def kept_run(run: Run) -> KeptRun:
    """Return what a node stores for a run."""
    root: str | None = None
    with suppress(StoreError):
        root = read_record(run.path / ROOT, str)
    snapshots = read_snapshots(run, cache=RecordCache(logs=False))
    return KeptRun(
        run=run.name,
        root=root,
        bytes=sum(map(_size, run.path.rglob("*"))),
        steps=[each.step for each in snapshots],
        persisted=max((each.step for each in snapshots if each.is_done("persist")), default=None),
        training=has_trainers(run),
    )


def status_of(home: Home, tls: Tls | None = None, tensors: str | None = None) -> NodeStatus:
    """Return the status of a node, without asking other nodes.

    Args:
        tensors: a pattern of tensor names, for example "model.*": report their protection too.

    Raises:
        ShardwiseError: tensors were requested, and their snapshot is damaged.
    """
    info = running_agent(home)
    known = info or read_record(home.info, AgentInfo)
    room = os.statvfs(home.path)
    return NodeStatus(
        node=known.node if known else None,
        url=known.url if known else None,
        domain=known.domain if known else "",
        process=info.process if info else None,
        alive=home.has_agent(),
        answers=_answers(info, tls) if info else None,
        agent_bytes=_memory_of(info.process) if info else None,
        training=is_training(home),
        directory=str(home),
        bytes=sum(_size(path) for path in home.path.rglob("*") if path.is_file()),
        bytes_left=room.f_bavail * room.f_frsize,
        runs=[_run(home.run(name), known.node if known else "", tensors) for name in home.runs()],
    )


def _run(run: Run, node: str, tensors: str | None) -> RunStatus:
    now = time.time()
    views = read_snapshots(run, cache=RecordCache(logs=False))
    snapshots = [_snapshot(each, node, now) for each in views]
    free = [_size(path) for path in run.free.glob("*.slot")]
    return RunStatus(
        run=run.name,
        slots_used=sum(len(save.staged) for each in views for save in each.saves.values()),
        slots_free=len(free),
        bytes_free=sum(free),
        behind={stage: _behind(snapshots, stage) for stage in STAGES},
        snapshots=snapshots,
        tensors=None if tensors is None else tensors_of(run, tensors),
    )


def _snapshot(view: SnapshotView, node: str, now: float) -> SnapshotStatus:
    own = {each.file.name for save in view.saves.values() for each in save.staged}
    data = {n: _size(view.place.path / n) for n in view.names if n.endswith(records.DATA_SUFFIXES)}
    return SnapshotStatus(
        step=view.step,
        bytes=sum(size for name, size in data.items() if name in own),
        bytes_for_others=sum(size for name, size in data.items() if name not in own),
        age=None if view.staged_at is None else max(0.0, now - view.staged_at),
        protected_by=_protectors(view.place, node),
        commit=_stage(view, "commit", now),
        protect=_stage(view, "protect", now),
        persist=_stage(view, "persist", now),
    )


def _stage(view: SnapshotView, stage: str, now: float) -> StageStatus:
    """Return the state of a stage; if the step has several saves, prefer one that has ended."""
    ended = [s.stages[stage] for s in view.saves.values() if s.state(stage).has_ended]
    if not ended:
        wanted = any(stage in save.open_stages for save in view.saves.values())
        since = None if view.staged_at is None else max(0.0, now - view.staged_at)
        return StageStatus(state="under way", seconds=since) if wanted else StageStatus()
    last = ended[-1]
    known = view.staged_at is not None and last.ended_at is not None
    return StageStatus(
        state=last.state.value,
        seconds=max(0.0, (last.ended_at or 0.0) - (view.staged_at or 0.0)) if known else None,
        failure=last.outcome.failure if last.outcome else "",
    )


def _behind(snapshots: list[SnapshotStatus], stage: str) -> Behind:
    done = [each for each in snapshots if getattr(each, stage).state == "done"]
    own = [each for each in snapshots if each.age is not None]
    if not done or not own:
        return Behind(step=done[-1].step if done else None, steps=None, seconds=None)
    newest, last = own[-1], done[-1]
    seconds = None if newest.age is None or last.age is None else max(0.0, last.age - newest.age)
    return Behind(step=last.step, steps=max(0, newest.step - last.step), seconds=seconds)


def _protectors(place: Place, node: str) -> list[str]:
    """Return the nodes that store something for a node, once protection is complete."""
    found: set[str] = set()
    for save_id in records.requested_saves("protect", place.list_names(".json")):
        with suppress(StoreError):
            request = read_record(place.path / records.request_record("protect", save_id), Protect)
            found |= _protecting(request.protection, node) if request is not None else set()
    return sorted(found)


def _protecting(protection: Protection, node: str) -> set[str]:
    found: set[str] = set()
    for group in protection.groups:
        ring = [member.node for member in group.members]
        if node in ring:
            at = ring.index(node) + 1
            following = ring[at:] + ring[: at - 1]
            found |= set(following if group.parity else following[: group.copies])
    return found


def _answers(info: AgentInfo, tls: Tls | None) -> bool | None:
    if info.url.startswith("https:") and tls is None:
        return None
    context = None if tls is None else tls.for_client()
    client = AgentClient(info, connect_timeout=NO_ANSWER, read_timeout=NO_ANSWER, tls=context)
    with closing(client), suppress(StoreError):
        client.health()
        return True
    return False


def _memory_of(process: int) -> int | None:
    """Return a process's private memory, without mapped snapshots."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    said = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(said[0]) * 1024 if said else None


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
