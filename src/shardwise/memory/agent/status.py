"""What a node keeps, and how far each snapshot has come, as the files in its home tell."""

from __future__ import annotations

import os
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import StoreError
from shardwise.memory import records
from shardwise.memory.agent.keeper import is_attended
from shardwise.memory.agent.tensors import TensorsStatus, tensors_of
from shardwise.memory.home import Home, Place, Run, read_record
from shardwise.memory.records import AgentInfo, Done, Protect, Staged
from shardwise.memory.redundancy.placement import Protection
from shardwise.memory.remote.client import AgentClient
from shardwise.memory.spawn import running_agent
from shardwise.memory.tls import Tls

STAGES = ("commit", "protect", "persist")
NO_ANSWER = 5.0
_DATA = (".safetensors", ".bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """How far a stage of a snapshot has come.

    Attributes:
        state: "done", "under way", "failed", or "" if it is not asked for.
        seconds: from when the snapshot was staged until the stage ended, or until now.
        failure: what it failed with.
    """

    state: str = ""
    seconds: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStatus:
    """A snapshot on this node.

    Attributes:
        bytes: of this node's files.
        bytes_for_others: of copies and parity that this node keeps for others.
        age: seconds since this node staged it; None if it keeps nothing of its own.
        protected_by: nodes that keep something for this one.
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
    """How far a stage is behind the newest snapshot that was staged.

    Attributes:
        step: the newest for which the stage has ended well; None if there is none in memory.
        steps, seconds: what would be lost if all that the stage protects from happened now.
    """

    step: int | None
    steps: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run on this node. Slots are files that hold a rank's share, or wait to.

    Attributes:
        tensors: how those that were asked for are protected; None if none were.
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
    """A node, and its agent.

    Attributes:
        alive: whether an agent lives there.
        answers: whether it answers; None if it lives not, or speaks TLS and none was given.
        agent_bytes: memory of the agent's own; None if that cannot be told from here.
        training: whether training runs beside it.
        bytes, bytes_left: of all that is kept; and what the file system still has.
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


def status_of(home: Home, tls: Tls | None = None, tensors: str | None = None) -> NodeStatus:
    """All that can be told of a node, without asking other nodes.

    Args:
        tensors: a pattern of the names of those that are to be told of, such as "model.*".

    Raises:
        ShardwiseError: tensors were asked for, and what tells of them is damaged.
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
        training=is_attended(home),
        directory=str(home),
        bytes=sum(_size(path) for path in home.path.rglob("*") if path.is_file()),
        bytes_left=room.f_bavail * room.f_frsize,
        runs=[_run(home.run(name), known.node if known else "", tensors) for name in home.runs()],
    )


def _run(run: Run, node: str, tensors: str | None) -> RunStatus:
    now = time.time()
    snapshots = [_snapshot(Place(run, step), node, now) for step in run.steps()]
    free = [_size(path) for path in run.free.glob("*.slot")]
    used = sum(len(_staged(Place(run, step))) for step in run.steps())
    return RunStatus(
        run=run.name,
        slots_used=used,
        slots_free=len(free),
        bytes_free=sum(free),
        behind={stage: _behind(snapshots, stage) for stage in STAGES},
        snapshots=snapshots,
        tensors=None if tensors is None else tensors_of(run, tensors),
    )


def _snapshot(place: Place, node: str, now: float) -> SnapshotStatus:
    staged = _staged(place)
    own = {each.file.name for each in staged.values()}
    times = [_modified(place.path / name) for name in staged]
    at = max((each for each in times if each is not None), default=None)
    wanted = {stage for each in staged.values() for stage in each.stages}
    kept = {name: _size(place.path / name) for name in place.named("")}
    data = {name: size for name, size in kept.items() if _is_data(name)}
    stages = {stage: _stage(place, stage, stage in wanted, at, now) for stage in STAGES}
    return SnapshotStatus(
        step=place.step,
        bytes=sum(size for name, size in data.items() if name in own),
        bytes_for_others=sum(size for name, size in data.items() if name not in own),
        age=None if at is None else max(0.0, now - at),
        protected_by=_protectors(place, node),
        **stages,
    )


def _stage(
    place: Place, stage: str, is_wanted: bool, staged_at: float | None, now: float
) -> StageStatus:
    ended: Done | None = None
    ended_at: float | None = None
    for name in place.named(".json"):
        if name.startswith(f"{stage}-all-"):
            with suppress(StoreError):
                ended = read_record(place.path / name, Done)
            ended_at = _modified(place.path / name)
    if ended is None and not is_wanted:
        return StageStatus()
    until = now if ended is None else ended_at
    seconds = None if staged_at is None or until is None else max(0.0, until - staged_at)
    if ended is None:
        return StageStatus(state="under way", seconds=seconds)
    state = "failed" if ended.failure else "done"
    return StageStatus(state=state, seconds=seconds, failure=ended.failure)


def _behind(snapshots: list[SnapshotStatus], stage: str) -> Behind:
    done = [each for each in snapshots if getattr(each, stage).state == "done"]
    own = [each for each in snapshots if each.age is not None]
    if not done or not own:
        return Behind(step=done[-1].step if done else None, steps=None, seconds=None)
    newest, last = own[-1], done[-1]
    seconds = None if newest.age is None or last.age is None else max(0.0, last.age - newest.age)
    return Behind(step=last.step, steps=max(0, newest.step - last.step), seconds=seconds)


def _protectors(place: Place, node: str) -> list[str]:
    """The nodes that keep something for a node, once all that was asked for is made."""
    found: set[str] = set()
    for save_id in records.requested("protect", place.named(".json")):
        with suppress(StoreError):
            wish = read_record(place.path / records.request("protect", save_id), Protect)
            found |= _protecting(wish.protection, node) if wish is not None else set()
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


def _staged(place: Place) -> dict[str, Staged]:
    """The records of this node's own files, by their names; those that are damaged are left out."""
    found = {}
    for name in place.named(".staged.json"):
        with suppress(StoreError):
            staged = read_record(place.path / name, Staged)
            if staged is not None:
                found[name] = staged
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
    """Memory that is a process's own: what it maps of snapshots is not counted."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return None
    said = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(said[0]) * 1024 if said else None


def _is_data(name: str) -> bool:
    return name.endswith(_DATA)


def _size(path: Path) -> int:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _modified(path: Path) -> float | None:
    with suppress(FileNotFoundError):
        return path.stat().st_mtime
    return None
