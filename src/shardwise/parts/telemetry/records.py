"""The telemetry of one operation: which stages each rank ran, when, and how long.

Example: a save of 16 ranks, each of which describes its state, plans and writes. The table has 16
rows. For each of the three stages, it has the columns start, duration, bytes and so on. Each rank
makes a table of one row, and `combine` makes one table of several. `encoding.py` turns a table into
a file.

All times in columns are integers, in microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from shardwise.kernel.boxes.box import IntArray

OPERATIONS = ("save", "snapshot", "restore")
STAGES_OF_AGENTS = ("commit", "protect", "persist")
ARRIVAL = "arrival"
"""The stage before all others: from the time when the first rank entered the operation until a rank
entered it. It is not recorded, but follows from `Telemetry.began`."""
LEAST_ARRIVAL = 50_000
"""Microseconds. If all ranks arrive within this time, there is nothing to show."""
MOST_RANKS = 2**20
NOT_RUN = -1
"""The start of a stage that a rank has not run, and the coordinate of a rank outside of a mesh."""

NameArray = npt.NDArray[np.bytes_]


@dataclass(frozen=True, slots=True)
class StageColumns:
    """One stage, as columns of n rows: a row for each rank of the table.

    Attributes:
        name: the name of the stage, such as `write`.
        start: microseconds since the start of the operation; `NOT_RUN` if the rank did not run it.
        duration: microseconds.
        bytes: the number of bytes that the stage processed; 0 if it does not count them.
        retries: how many requests to the storage were repeated.
        waited: the microseconds of the duration in which the rank waited for other ranks, or for
            its turn.
        file: the ASCII names of the files that the ranks wrote or read; empty where there is none.
    """

    name: str
    start: IntArray
    duration: IntArray
    bytes: IntArray
    retries: IntArray
    waited: IntArray
    file: NameArray

    @property
    def has_run(self) -> npt.NDArray[np.bool_]:
        """Which ranks have run the stage, `(n,)`."""
        return np.not_equal(self.start, NOT_RUN)

    @property
    def by_agents(self) -> bool:
        """Whether an agent runs the stage for all ranks of its host. Each has its numbers."""
        return self.name in STAGES_OF_AGENTS

    @property
    def self_seconds(self) -> npt.NDArray[np.float64]:
        """For each rank, the duration in seconds without waiting; NaN if it has not run, `(n,)`."""
        return np.where(self.has_run, np.maximum(self.duration - self.waited, 0) / 1e6, np.nan)

    @property
    def slowest(self) -> tuple[int, float]:
        """The row with the longest self time, and this time in seconds; 0.0 if no rank ran."""
        seconds = np.nan_to_num(self.self_seconds)
        return int(seconds.argmax()), float(seconds.max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """The telemetry of one operation, with n rows: one for each rank that sent its record.

    Attributes:
        operation: one of `OPERATIONS`.
        id: the id of the save. For a restore: a digest of the root, the step, and the number of
            this restore, so that all ranks have the same one.
        step: the step of the checkpoint; None if it has none.
        path: the path or URL of the checkpoint.
        started: the time of the start on rank 0, in ISO 8601, in UTC.
        seconds: the duration of the operation on the slowest rank.
        world_size: the number of ranks of the operation. There can be fewer rows.
        library: the version of shardwise.
        ranks: the ranks with a record, ascending, `(n,)`.
        hosts: the distinct names of hosts, sorted.
        host: for each row, the index of its host, `(n,)`.
        axes: the names of the axes of the mesh of ranks, such as `("pp", "dp", "tp")`; empty if
            they are not known.
        coordinates: the coordinates of each rank in the mesh, `(len(axes), n)`. `NOT_RUN` if the
            rank is in no mesh with this axis.
        clock: how far the rank's wall clock was ahead of that of rank 0, in microseconds, `(n,)`.
        began: when the rank entered the operation, in microseconds since its start, `(n,)`. The
            start is when the first rank entered.
        stages: the stages, in the order in which they first began.
        phases: seconds by phase, for a recovery.
    """

    operation: str
    id: str
    step: int | None
    path: str
    started: str
    seconds: float
    world_size: int
    library: str
    ranks: IntArray
    hosts: tuple[str, ...]
    host: IntArray
    axes: tuple[str, ...]
    coordinates: IntArray
    clock: IntArray
    began: IntArray
    stages: tuple[StageColumns, ...]
    phases: dict[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The bytes that all ranks moved, in the stage with the most bytes.

        Example: two ranks copy 8,000 bytes each to host memory, and then the agent of their host
        writes 16,000 bytes to storage. That is 16,000 bytes.
        """
        return max((self._sum(each, each.bytes) for each in self.stages), default=0)

    @property
    def retries(self) -> int:
        """How many requests to the storage were repeated, in all stages."""
        return sum(self._sum(each, each.retries) for each in self.stages)

    def _sum(self, stage: StageColumns, column: IntArray) -> int:
        """Return the sum of a column of a stage; of agents, that of one rank of each host."""
        rows = np.flatnonzero(stage.has_run)
        if stage.by_agents:
            rows = rows[np.unique(self.host[rows], return_index=True)[1]]
        return int(column[rows].sum(dtype=np.float64))  # integers could overflow

    def with_arrival(self, least: int = LEAST_ARRIVAL) -> Telemetry:
        """Return this table with the stage `ARRIVAL`, if the last rank came that late."""
        lateness = np.clip(self.began, 0, None)
        if int(lateness.max(initial=0)) < least or self.stage(ARRIVAL) is not None:
            return self
        zeros = np.zeros(len(lateness), np.int64)
        names = np.zeros(len(lateness), "S1")
        arrival = StageColumns(ARRIVAL, zeros, lateness, zeros, zeros, zeros, names)
        return replace(self, stages=(arrival, *self.stages))

    def stage(self, name: str) -> StageColumns | None:
        """Return a stage by its name; None if no rank has run it."""
        return next((each for each in self.stages if each.name == name), None)


def combine(tables: Sequence[Telemetry]) -> Telemetry:
    """Return one table with the rows of all tables, in any order; no two have the same rank.

    What is not a column comes from the table with the lowest rank. `seconds` and `phases` are the
    largest of all tables.
    """
    tables = sorted(tables, key=lambda each: int(each.ranks[0]))
    ranks = np.concatenate([each.ranks for each in tables])
    order = np.argsort(ranks, kind="stable")
    hosts = sorted({host for each in tables for host in each.hosts})
    host = [np.searchsorted(hosts, each.hosts)[each.host] for each in tables]
    axes = _combine_axes(tables)
    phases: dict[str, float] = {}
    for each in tables:
        for name, seconds in each.phases.items():
            phases[name] = max(seconds, phases.get(name, 0.0))
    return replace(
        tables[0],
        seconds=max(each.seconds for each in tables),
        ranks=ranks[order],
        hosts=tuple(hosts),
        host=np.concatenate(host)[order],
        axes=axes,
        coordinates=np.concatenate([_coordinates(each, axes) for each in tables], axis=1)[:, order],
        clock=np.concatenate([each.clock for each in tables])[order],
        began=np.concatenate([each.began for each in tables])[order],
        stages=_combine_stages(tables, order),
        phases=phases,
    )


def _combine_axes(tables: Sequence[Telemetry]) -> tuple[str, ...]:
    """Return the axes of all tables, by the lowest rank that has each: in the order of this rank.

    Pipeline stages may have different meshes.
    """
    first: dict[str, tuple[int, int]] = {}
    for each in tables:
        for position, axis in enumerate(each.axes):
            has_axis = each.coordinates[position] != NOT_RUN
            rank = int(each.ranks[has_axis].min(initial=MOST_RANKS))
            first[axis] = min(first.get(axis, (rank, position)), (rank, position))
    return tuple(sorted(first, key=lambda axis: first[axis]))


def _coordinates(table: Telemetry, axes: Sequence[str]) -> IntArray:
    found = np.full((len(axes), len(table.ranks)), NOT_RUN, np.int64)
    for name, column in zip(table.axes, table.coordinates, strict=True):
        found[axes.index(name)] = column
    return found


def _combine_stages(tables: Sequence[Telemetry], order: IntArray) -> tuple[StageColumns, ...]:
    names = dict.fromkeys(stage.name for each in tables for stage in each.stages)
    combined = []
    for name in names:
        parts = [each.stage(name) or _not_run(name, len(each.ranks)) for each in tables]
        combined.append(
            StageColumns(
                name,
                *(
                    np.concatenate([getattr(part, column) for part in parts])[order]
                    for column in ("start", "duration", "bytes", "retries", "waited", "file")
                ),
            )
        )
    return sort_stages(combined)


def _not_run(name: str, n: int) -> StageColumns:
    zeros = np.zeros(n, np.int64)
    return StageColumns(name, np.full(n, NOT_RUN), zeros, zeros, zeros, zeros, np.zeros(n, "S1"))


def sort_stages(stages: Iterable[StageColumns]) -> tuple[StageColumns, ...]:
    """Return stages in the order in which they first began; those that no rank ran come last."""

    def order(stage: StageColumns) -> tuple[float, str]:
        return float(np.where(stage.has_run, stage.start, np.inf).min()), stage.name

    return tuple(sorted(stages, key=order))
