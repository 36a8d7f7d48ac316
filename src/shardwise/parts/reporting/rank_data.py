"""The data of one operation for the page: a row for each rank, in packed columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.kernel.boxes.box import IntArray
from shardwise.parts.reporting.columns import Column, Packer
from shardwise.parts.reporting.stragglers import Straggler
from shardwise.parts.telemetry.records import NOT_RUN, StageColumns, Telemetry

MOST_STAGES = 24
NAMED = 2
"""The most groups of stragglers that the map of a stage names."""
RANKS_OF_JUMP = 8
MOST_JUMPS = 200
"""The most stragglers that the timeline can jump to."""


def rank_data(telemetry: Telemetry, stragglers: Sequence[Straggler]) -> dict[str, Any]:
    """Return the rows of all ranks for the page, including ranks that sent no record.

    If far more ranks are missing than there are records, only those with a record get a row.
    """
    n, world = len(telemetry.ranks), telemetry.world_size
    ranks = np.arange(world) if world <= 4 * n + 1000 else telemetry.ranks
    row = np.full(len(ranks), -1)
    row[np.searchsorted(ranks, telemetry.ranks)] = np.arange(n)
    present = row >= 0
    packer, shown = Packer(), _longest(telemetry.stages)
    document = {
        "operation": telemetry.operation,
        "step": telemetry.step,
        "seconds": telemetry.seconds,
        "world": world,
        "hosts": telemetry.hosts,
        "axes": telemetry.axes,
        "present": as_json(packer.add(present.astype(np.int64))),
        "rank": [as_json(each) for each in packer.add_exact(ranks)],
        "host": [as_json(each) for each in packer.add_exact(_hosts(telemetry, row))],
        "coordinates": [
            [
                as_json(each)
                for each in packer.add_exact(_coordinates(telemetry, column, ranks, row))
            ]
            for column in telemetry.coordinates
        ],
        "stages": [_stage(stage, row, packer, stragglers) for stage in shown],
        "left_out": len(telemetry.stages) - len(shown),
        "jumps": [
            [each.stage, rank] for each in stragglers for rank in each.group.ranks[:RANKS_OF_JUMP]
        ][:MOST_JUMPS],
    }
    return {**document, "packed": packer.text()}


def _longest(stages: Sequence[StageColumns]) -> list[StageColumns]:
    """Return the stages that took longest, in the order in which they ran."""
    longest = sorted(stages, key=lambda each: -int(each.duration.max(initial=0)))[:MOST_STAGES]
    kept = {each.name for each in longest}
    return [each for each in stages if each.name in kept][:MOST_STAGES]


def _stage(
    stage: StageColumns, row: IntArray, packer: Packer, stragglers: Sequence[Straggler]
) -> dict[str, Any]:
    ran: npt.NDArray[np.bool_] = (row >= 0) & stage.has_run[row]
    names = ("start", "duration", "waited", "bytes", "retries")
    columns = {name: as_json(packer.add(getattr(stage, name)[row], ran)) for name in names}
    slow = [each.who for each in stragglers if each.stage == stage.name]
    more = f" and {len(slow) - NAMED} more" if len(slow) > NAMED else ""
    return {"name": stage.name, "slow": ", ".join(slow[:NAMED]) + more, **columns}


def _coordinates(
    telemetry: Telemetry, column: IntArray, ranks: IntArray, row: IntArray
) -> IntArray:
    """Return the coordinate of each row in one axis of the mesh, including missing ranks.

    Meshes usually number their ranks: the coordinate is `rank // stride % size`. If all known ranks
    agree with this, so do the missing ones. Otherwise, theirs is -1.
    """
    stride = int(telemetry.ranks[column == 1].min(initial=telemetry.world_size))
    size = int(column.max()) + 1
    rule = ranks // stride % max(size, 1)
    follows = (column == telemetry.ranks // stride % max(size, 1)).all()
    found: IntArray = np.where(row >= 0, column[row], rule if follows else NOT_RUN)
    return found


def _hosts(telemetry: Telemetry, row: IntArray) -> IntArray:
    """Return the host of each row. A missing rank gets the host of its neighbours, or -1."""
    host = np.where(row >= 0, telemetry.host[row], -1)
    known = np.flatnonzero(row >= 0)
    at = np.arange(len(row))
    before = known[np.maximum(np.searchsorted(known, at, side="right") - 1, 0)]
    after = known[np.minimum(np.searchsorted(known, at), len(known) - 1)]
    # Hosts often have equally many consecutive ranks.
    block = at // int(np.bincount(telemetry.host).max())
    guess = np.where(block == block[after], host[after], -1)
    guess = np.where((block == block[before]) | (host[before] == host[after]), host[before], guess)
    found: IntArray = np.where(row >= 0, host, guess)
    return found


def as_json(column: Column) -> list[Any]:
    """Return a column as the page reads it."""
    return [column.at, column.length, column.scale, column.first]
