"""A run that goes back never again meets what it left behind on nodes that were idle meanwhile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardwise as sw
from tests.breadth import mostly_long
from tests.faults.memory.scenario import ROWS, Cluster, box_of, strays
from tests.tools.agents import end_agents, until
from tests.tools.gang import Gang

COLUMNS = 256


def go(cluster: Cluster, back_to: int | None, last: int, mark: int) -> tuple[int | None, int, str]:
    """Restore a step, or the newest; save until a step values that this branch is known by; leave
    without a word. What was restored: its step, its value, and why nothing newer."""
    cp = cluster.open()
    box = box_of(COLUMNS, "rows")
    values = torch.full((box.shape[0], COLUMNS), -1)
    state = {"t": sw.Shards((ROWS, COLUMNS), torch.int64, [(box, values)])}
    step = cp.restore(state, step="newest" if back_to is None else back_to)
    assert torch.equal(values, values[0, 0].expand_as(values))
    found = int(values[0, 0])
    report = cp.last_restore
    for each in range((step or 0) + 1, last + 1):
        values.fill_(100 * mark + each)
        handle = cp.save(each, state)
        assert handle is not None
        handle.result(20.0)
    cp.close(wait=False)
    return step, found, "" if report is None else str(report.skipped)


@pytest.mark.parametrize(
    ("saved", "node_of"),
    mostly_long(
        [(saved, node_of) for saved in (0, 1) for node_of in ((0, 1), (1, 0))],
        [(0, (1, 0))],
    ),
)
def test_what_an_idle_node_has_of_an_abandoned_branch_is_not_taken(
    gang: Gang, root: Path, shm: Path, saved: int, node_of: tuple[int, int]
) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=2, options={"copies": 1, "rescue": False})
    gang.run(go, cluster, None, 4, 1, world=2)
    (went,) = gang.run(go, replace(cluster, node_of=(0,)), 3, 3 + saved, 2, world=1)
    assert went[:2] == (3, 103)
    assert list(shm.glob("node1/*/runs/*/step-00000004-*/manifest.json"))
    for step, value, why in gang.run(go, replace(cluster, node_of=node_of), None, 6, 3, world=2):
        assert (step, value) == ((4, 204) if saved else (3, 103))
        if not saved:
            assert "superseded: the run resumed from step 3" in why
    until(lambda: not strays(shm))


def test_nothing_is_taken_of_what_lay_on_idle_nodes_when_the_run_began_anew(
    gang: Gang, root: Path, shm: Path
) -> None:
    """Its agents were gone when it looked for snapshots, and found none."""
    cluster = Cluster(root=root, shm=shm, nodes=2, options={"copies": 1, "rescue": False})
    gang.run(go, replace(cluster, node_of=(0,)), None, 4, 1, world=1)
    end_agents(shm)
    (went,) = gang.run(go, replace(cluster, node_of=(1,)), None, 2, 2, world=1)
    assert went[0] is None
    for step, value, why in gang.run(go, cluster, None, 2, 3, world=2):
        assert (step, value) == (2, 202)
        assert "superseded: the run started anew" in why
