"""A run for fault tests, on nodes that are directories of one machine.

Each step computes all values from those of the step before, in integers. A run that restores wrong
values, or repeats or skips a step, can therefore never match a run without faults again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.parts.memory.home import ABANDONED_MARKER, PERSIST_MARKER, RUN_RECORD
from shardwise.parts.memory.records import MOST_FAN_OUT
from shardwise.parts.memory.trainer import snapshots
from tests.tools.agents import until

ROWS, COLUMNS = 48, 1024
FACTOR = 6364136223846793005
WAIT = 8.0
SLOTS = 3  # per rank: two for committed snapshots, one to write

_SAVE = "[0-9a-f]{16}"
_DATA = rf"r\d{{5}}-{_SAVE}\.safetensors"
_HOME = re.compile(r"agent\.[a-z.]+|metrics\.token|node|[a-z]+\.lock|runs|roots")
_SLOT = re.compile(r"(rank-\d{5}|agent)-[0-9a-f]{8}")
_TRAINER = re.compile(r"[a-z]?\d+(\.lock)?")
_ENDED = re.compile(rf"{_SAVE}\.json")
_SNAPSHOT = re.compile(
    rf"(manifest|pending|save)\.json|rank-\d{{5}}\.json|{ABANDONED_MARKER}|{PERSIST_MARKER}|{_DATA}"
    rf"|parity-{_SAVE}(-\d+)+\.bin"
)

Act = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The directories and nodes of a run.

    Attributes:
        root: root of the run's checkpoints, a path or a URL.
        shm: directory of the nodes.
        nodes: number of nodes; each has an equal number of consecutive ranks.
        node_of: node of each rank, for other distributions.
        every: steps between saves to storage.
        columns: columns of the values.
        options: further options for `sw.Memory`.
        fan_out: the number of nodes that a node asks.
    """

    root: Path | str
    shm: Path
    nodes: int = 1
    node_of: tuple[int, ...] = ()
    every: int = 1000
    columns: int = COLUMNS
    options: dict[str, Any] = field(default_factory=dict)
    fan_out: int = MOST_FAN_OUT

    def node(self) -> int:
        """Return the node of this rank."""
        rank, world = dist.get_rank(), dist.get_world_size()
        return self.node_of[rank] if self.node_of else rank * self.nodes // world

    def directory(self, node: int) -> Path:
        """Return the directory of a node."""
        return self.shm / f"node{node}"

    def open(self, *, save_at_end: bool = False) -> sw.Checkpointer:
        """Open the run's Checkpointer on this rank."""
        directory = self.directory(self.node())
        directory.mkdir(exist_ok=True)
        given = {"dir": str(directory), "when_full": "wait", "wait": WAIT, **self.options}
        memory = sw.Memory(**given)
        snapshots.MOST_FAN_OUT = self.fan_out  # type: ignore[attr-defined]
        return sw.Checkpointer(
            self.root, save_every=self.every, memory=memory, save_at_end=save_at_end
        )


class Logged(logging.Handler):
    """A handler that collects the library's warnings in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._messages: list[str] = []
        logging.getLogger("shardwise").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a message."""
        self._messages.append(record.getMessage())

    def end(self) -> list[str]:
        """Stop collecting, and return all messages."""
        logging.getLogger("shardwise").removeHandler(self)
        return self._messages


@dataclass(frozen=True, slots=True)
class Went:
    """The restore of a rank: its step and source, and the newer steps that it skipped."""

    step: int | None
    source: str
    skipped: str


def reference(step: int, columns: int = COLUMNS) -> torch.Tensor:
    """Return the values of a run without faults at a step."""
    values = torch.arange(ROWS * columns, dtype=torch.int64).reshape(ROWS, columns)
    for each in range(1, step + 1):
        train(values, each)
    return values


def train(values: torch.Tensor, step: int) -> None:
    """Train a step."""
    values.mul_(FACTOR).add_(step)


def box_of(columns: int, by: str) -> sw.Box:
    """Return this rank's box: an equal part of the rows or of the columns."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if by == "rows":
        return sw.Box((ROWS // world * rank, 0), (ROWS // world, columns))
    return sw.Box((0, columns // world * rank), (ROWS, columns // world))


def begin(cp: sw.Checkpointer, columns: int, by: str) -> tuple[torch.Tensor, dict[str, Any], Went]:
    """Restore and compare all bytes; return this rank's values, its state and how it restored."""
    box = box_of(columns, by)
    values = reference(0, columns)[box.slices()].clone()
    state = {"t": sw.Shards((ROWS, columns), torch.int64, [(box, values)]), "step": 0}
    step = cp.restore(state)
    report = cp.last_restore
    assert torch.equal(values, reference(step or 0, columns)[box.slices()])
    assert state["step"] == (step or 0)
    if report is None:
        return values, state, Went(step, "", "")
    return values, state, Went(step, report.source, str(report.skipped))


def go_on(
    cluster: Cluster,
    until: int,
    *,
    by: str = "rows",
    fault: Act | None = None,
    at: int = 0,
    victims: Sequence[int] = (0,),
    results: bool = True,
) -> Went:
    """Restore, then train and save every step up to `until`; close without waiting.

    `fault` is called before the save of step `at`, on the ranks `victims`.
    """
    cp = cluster.open()
    values, state, went = begin(cp, cluster.columns, by)
    handles = []
    for step in range((went.step or 0) + 1, until + 1):
        train(values, step)
        state["step"] = step
        if fault is not None and step == at and dist.get_rank() in victims:
            fault()
        handles.append(cp.save(step, state))
    for handle in handles:
        assert handle is not None
        if results:
            handle.result(120.0)
    cp.close(wait=False)
    return went


def steps_in(root: Path) -> list[int]:
    """Return the steps that are committed in storage, after verifying each."""
    with sw.Checkpointer(root, memory=None) as cp:
        steps = cp.steps()
    for step in steps:
        sw.open(root / f"step-{step:08d}").verify()
    return steps


def strays(shm: Path) -> list[str]:
    """Return the unexpected files in the homes below a directory."""
    found = []
    for home in shm.glob("*/shardwise-*"):
        found += [path for path in home.iterdir() if not _HOME.fullmatch(path.name)]
        for run in (home / "runs").iterdir():
            for folder in run.iterdir():
                if folder.name == RUN_RECORD:
                    continue
                known = {"free": _SLOT, "ended": _ENDED, "trainers": _TRAINER}
                pattern = known.get(folder.name, _SNAPSHOT)
                try:
                    inside = list(folder.iterdir())
                except FileNotFoundError:  # the agent has just freed this snapshot
                    continue
                found += [path for path in inside if not pattern.fullmatch(path.name)]
                if pattern is _SNAPSHOT and not inside:
                    found.append(folder)
    return sorted(str(path.relative_to(shm)) for path in found)


def slots(shm: Path) -> dict[str, int]:
    """Return the number of slots of each rank on each node, free or in use."""
    counts: dict[str, int] = {}
    for home in shm.glob("*/shardwise-*"):
        free = [f"r{path.name[5:10]}" for path in home.glob("runs/*/free/rank-*")]
        parts = home.glob("runs/*/step-*/rank-*.json")
        used = [f"r{path.stem[5:]}" for path in parts if _data_of(path).exists()]
        for rank in (*free, *used):
            name = f"{home.parent.name}/{rank}"
            counts[name] = counts.get(name, 0) + 1
    return counts


def _data_of(part: Path) -> Path:
    save = part.parent.name.rpartition("-")[2]
    return part.with_name(f"r{part.stem[5:]}-{save}.safetensors")


def assert_tidy(shm: Path, ranks: int) -> None:
    """Check that, once agents are idle, no unexpected files remain and each rank has its slots."""
    with suppress(AssertionError):
        until(lambda: not strays(shm) and list(slots(shm).values()) == [SLOTS] * ranks)
    assert not (left := strays(shm)), left
    counts = slots(shm)
    assert list(counts.values()) == [SLOTS] * ranks, counts
