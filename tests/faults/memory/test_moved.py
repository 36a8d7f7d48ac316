"""Ranks that move to other nodes leave no memory behind; those that come back find theirs."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.breadth import mostly_long
from tests.faults.memory.deaths import die
from tests.faults.memory.scenario import Cluster, Went, begin, go_on, steps_in, train
from tests.tools.agents import agents_below, end_agents, lose, until
from tests.tools.gang import Gang

STEPS = 3


def train_and_end(cluster: Cluster) -> None:
    """Two ranks train for so many steps, and their processes end."""
    with Gang(2) as gang:
        gang.run(go_on, cluster, STEPS, world=2)


def train_and_die(cluster: Cluster) -> None:
    """Two ranks are killed at their last step, so that the one before it is persisted."""
    with Gang(2) as gang:
        gang.run_outcomes(
            go_on, cluster, STEPS, world=2, fault=die, at=STEPS, victims=(0, 1), results=False
        )


def restore_and_list_unanswered(cluster: Cluster) -> tuple[Went, list[str]]:
    """Restore, and return the nodes that did not answer."""
    cp = cluster.open()
    went = begin(cp, cluster.columns, "rows")[2]
    assert cp.last_restore is not None
    cp.close(wait=False)
    return went, list(cp.last_restore.unanswered)


def save_protected(cluster: Cluster) -> None:
    """Save steps in memory, the last one protected, and leave without a word."""
    cp = cluster.open()
    values, state, _ = begin(cp, cluster.columns, "rows")
    for step in range(1, STEPS + 1):
        train(values, step)
        state["step"] = step
        handle = cp.save(step, state)
    assert handle is not None
    handle.protected(20.0)
    cp.close(wait=False)


def slots(shm: Path) -> set[tuple[str, int]]:
    """On which node which ranks have memory, free or in use, also for others."""
    free = shm.glob("*/*/runs/*/free/r*-*")
    used = shm.glob("*/*/runs/*/step-*/rank-*.json")
    found = [(path, path.name[5:10]) for path in free] + [(path, path.stem[5:]) for path in used]
    return {(path.relative_to(shm).parts[0], int(rank)) for path, rank in found}


def free(shm: Path) -> dict[str, int]:
    """The free slots, as files."""
    return {each.name: each.stat().st_ino for each in shm.glob("*/*/runs/*/free/r*-*")}


@pytest.mark.parametrize("options", mostly_long([{}, {"copies": 1}], [{"copies": 1}]))
def test_ranks_that_swap_their_nodes_leave_nothing_behind(
    gang: Gang, root: Path, shm: Path, options: dict[str, int]
) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=2, node_of=(0, 1), every=1, options=options)
    train_and_end(cluster)
    went = gang.run(go_on, replace(cluster, node_of=(1, 0)), 3 * STEPS, world=2)
    assert {each.step for each in went} == {STEPS}
    until(lambda: slots(shm) == {("node1", 0), ("node0", 1)})


def test_a_world_that_shrinks_gives_memory_back_when_it_opens(
    gang: Gang, root: Path, shm: Path
) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=1, every=1)
    train_and_end(cluster)
    until(lambda: any(name.startswith("rank-00001") for name in free(shm)))
    gang.run(go_on, cluster, STEPS, world=1)
    assert not any(name.startswith("rank-00001") for name in free(shm))
    gang.run(go_on, cluster, 3 * STEPS, world=1)
    until(lambda: slots(shm) == {("node0", 0)})


def test_ranks_that_come_back_find_their_memory(gang: Gang, root: Path, shm: Path) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=2, every=1)
    train_and_end(cluster)
    time.sleep(1.5)  # the agent looks around while nobody lives here
    before = free(shm)
    assert {name[:10] for name in before} == {"rank-00000", "rank-00001"}
    gang.run(go_on, cluster, STEPS, world=2)
    assert before.items() <= free(shm).items()


def test_ranks_that_moved_are_not_missed_where_they_were(gang: Gang, root: Path, shm: Path) -> None:
    """What was saved when they were lost is persisted, and nothing after it."""
    cluster = Cluster(root=root, shm=shm, nodes=2, node_of=(0, 1))
    train_and_die(cluster)
    until(lambda: steps_in(root)[-1:] == [STEPS - 1])
    gang.run(go_on, replace(cluster, node_of=(1, 0)), 2 * STEPS, world=2)
    time.sleep(1.2)  # the agents look around once more
    # The step before is persisted too if it was the newest when the ranks were lost.
    assert steps_in(root) in ([STEPS - 1], [STEPS - 2, STEPS - 1])


@pytest.mark.long
def test_ranks_that_come_back_find_what_others_saved_meanwhile(
    gang: Gang, root: Path, shm: Path
) -> None:
    """On nodes whose snapshots name none of those that hold the newest.

    Their agents have not yet written to the root that they took part again.
    """
    everyone = Cluster(root=root, shm=shm, node_of=(0, 1, 2, 3), options={"copies": 1})
    here, there = replace(everyone, node_of=(1, 3)), replace(everyone, node_of=(0, 2))
    gang.run(go_on, everyone, STEPS, world=4)
    last = STEPS
    for cluster in (here, there, here):
        went = gang.run(go_on, cluster, last + 2 * STEPS, world=2)
        assert {(each.step, each.source) for each in went} == {(last, "memory")}
        last += 2 * STEPS
        for entry in root.glob("nodes/*.json"):
            content = json.loads(entry.read_bytes())
            entry.write_text(json.dumps(content | {"epoch": 0}), encoding="utf-8")
        (root / "nodes" / "newest").unlink(missing_ok=True)


def test_nodes_that_know_none_of_the_idle_ones_find_them(gang: Gang, root: Path, shm: Path) -> None:
    """One is new, and one has lost its memory; what both nodes held is whole on the idle one."""
    cluster = Cluster(root=root, shm=shm, nodes=2, options={"copies": 1})
    gang.run(save_protected, cluster, world=2)
    until(lambda: len(list(root.glob("nodes/*.json"))) == 2)
    lose(cluster.directory(0))
    went = gang.run(go_on, replace(cluster, node_of=(2, 0)), STEPS, world=2)
    assert {(each.step, each.source) for each in went} == {(STEPS, "memory")}


def test_a_node_that_does_not_answer_is_named(gang: Gang, root: Path, shm: Path) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=2, every=2)
    gang.run(go_on, cluster, 3, world=2)
    silent = next(agent["node"] for agent in agents_below(cluster.directory(1)))
    end_agents(cluster.directory(1))
    ((went, unanswered),) = gang.run(restore_and_list_unanswered, cluster, world=1)
    assert (went.step, went.source, unanswered) == (2, "storage", [silent])
