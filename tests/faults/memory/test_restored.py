"""What is restored after a failure: the table in docs/guide.md, row by row."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from tests.faults.memory.scenario import Cluster, Went, begin, steps_in, train
from tests.tools.agents import end_agents, lose
from tests.tools.gang import Gang

NOT_GIVEN = {
    name: value
    for name, value in asdict(sw.Memory(snapshot_every=0, slots=1)).items()
    if name != "dir"
}
SNAPSHOTS = {"snapshot_every": 2, "rescue": False}
SAVED, SNAPSHOT = 10, 14
FROM_MEMORY, FROM_STORAGE = Went(SNAPSHOT, "memory", "()"), Went(SAVED, "storage", "()")


def train_and_end_early(cluster: Cluster) -> None:
    """Train to the snapshot, wait until the agents have done their work, and end."""
    checkpointer = cluster.open()
    values, state, _ = begin(checkpointer, cluster.columns, "rows")
    for step in range(1, SNAPSHOT + 1):
        train(values, step)
        state["step"] = step
        handle = checkpointer.save(step, state)
        if handle is not None:
            handle.result(20.0)
    checkpointer.close(wait=False)


def resume(cluster: Cluster) -> Went:
    """Restore, and end without a save."""
    checkpointer = cluster.open()
    went = begin(checkpointer, cluster.columns, "rows")[2]
    checkpointer.close(wait=False)
    return Went(went.step, went.source, "()")


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "after_deaths", "after_a_lost_node"),
    [
        (NOT_GIVEN, Went(SAVED, "memory", "()"), FROM_STORAGE),
        (SNAPSHOTS, FROM_MEMORY, FROM_STORAGE),
        ({**SNAPSHOTS, "copies": 1}, FROM_MEMORY, FROM_MEMORY),
    ],
)
def test_after_each_failure_the_step_in_the_table_is_restored(
    gang: Gang,
    root: Path,
    shm: Path,
    options: dict[str, Any],
    after_deaths: Went,
    after_a_lost_node: Went,
) -> None:
    """Two nodes save step 10 to the root, and take a snapshot of step 14."""
    cluster = Cluster(root=root, shm=shm, nodes=2, every=SAVED, options=options)
    gang.run(train_and_end_early, cluster, world=2)
    end_agents(shm)
    assert gang.run(resume, cluster, world=2) == [after_deaths] * 2
    lose(cluster.directory(1))
    assert gang.run(resume, cluster, world=2) == [after_a_lost_node] * 2
    for node in range(2):
        lose(cluster.directory(node))
    assert gang.run(resume, cluster, world=2) == [FROM_STORAGE] * 2
    shutil.rmtree(root)
    assert gang.run(resume, cluster, world=2) == [Went(None, "", "()")] * 2


def save_and_end_before_it_is_persisted(cluster: Cluster) -> None:
    """Save step 10 and wait until it is in the root; save step 20, and end when it is committed."""
    checkpointer = cluster.open()
    values, state, _ = begin(checkpointer, cluster.columns, "rows")
    for step in range(1, 2 * SAVED + 1):
        train(values, step)
        state["step"] = step
        handle = checkpointer.save(step, state)
        if handle is not None:
            handle.committed(20.0) if step > SAVED else handle.result(20.0)
    checkpointer.close(wait=False)


@pytest.mark.long
@pytest.mark.parametrize("loses_node", [False, True])
def test_a_save_that_is_not_in_the_root_yet_survives_deaths_but_no_lost_node(
    gang: Gang, root: Path, shm: Path, loses_node: bool
) -> None:
    """The agents write to the root so slowly that step 20 takes seconds."""
    options = {**NOT_GIVEN, "max_bytes_per_second": 2 << 20}
    cluster = Cluster(root=root, shm=shm, nodes=2, every=SAVED, columns=1 << 16, options=options)
    gang.run(save_and_end_before_it_is_persisted, cluster, world=2)
    end_agents(shm)
    assert steps_in(root) == [SAVED]
    expected = Went(2 * SAVED, "memory", "()")
    if loses_node:
        lose(cluster.directory(1))
        expected = FROM_STORAGE
    assert gang.run(resume, cluster, world=2) == [expected] * 2
