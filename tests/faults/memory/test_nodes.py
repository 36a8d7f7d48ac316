"""Nodes that are lost, replaced, or left out: from memory where that can be, or from storage."""

from __future__ import annotations

import importlib.util
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import shardwise as sw
from shardwise.kernel.store.store import Buffer
from shardwise.parts.memory.files import read_record
from shardwise.parts.memory.home import Run
from shardwise.parts.memory.rank_liveness import RankLock
from shardwise.parts.memory.records import AgentInfo
from shardwise.parts.memory.remote.snapshot_nodes import Nodes
from tests.breadth import mostly_long
from tests.faults.memory.scenario import Cluster, Went, assert_tidy, begin, go_on, strays, train
from tests.tools.agents import lose, signal_agents
from tests.tools.gang import Gang

needs_pyeclib = pytest.mark.skipif(
    importlib.util.find_spec("pyeclib") is None, reason="pyeclib is not installed"
)


def everywhere(went: list[Went]) -> tuple[int | None, str]:
    """The step and the source that all ranks agree on."""
    ((step, source),) = {(each.step, each.source) for each in went}
    return step, source


def test_a_node_is_replaced_and_the_ranks_are_permuted(gang: Gang, root: Path, shm: Path) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=3, options={"copies": 1})
    gang.run(go_on, cluster, 3, world=3)
    lose(shm / "node0")
    permuted = replace(cluster, node_of=(2, 0, 1))
    assert everywhere(gang.run(go_on, permuted, 7, world=3)) == (3, "memory")
    assert everywhere(gang.run(go_on, permuted, 8, world=3)) == (7, "memory")
    assert strays(shm) == []


def phases_of(cluster: Cluster) -> tuple[Went, dict[str, float]]:
    """Restore, and leave; how long each phase took."""
    with cluster.open() as cp:
        went = begin(cp, cluster.columns, "rows")[2]
        assert cp.last_restore is not None
        return went, cp.last_restore.seconds


def test_a_node_that_does_not_answer_is_not_waited_for_where_the_others_suffice(
    gang: Gang, root: Path, shm: Path
) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=2, options={"copies": 1})
    gang.run(go_on, cluster, 3, world=2)
    signal_agents(shm / "node1", signal.SIGSTOP)
    ((went, seconds),) = gang.run(phases_of, cluster, world=1)
    assert (went.step, went.source) == (3, "memory")
    assert seconds["asking"] < 8.0  # its silence would be borne for 10
    phases = ["asking", "choosing", "reading", "rebuilding"]
    assert sorted(seconds) == [*phases, "total"]
    assert sum(seconds[each] for each in phases) <= seconds["total"]


def test_worlds_grow_and_shrink(gang: Gang, root: Path, shm: Path) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=2)
    gang.run(go_on, cluster, 2, world=2)
    larger = replace(cluster, nodes=3)
    assert everywhere(gang.run(go_on, larger, 4, world=3)) == (2, "memory")
    went = gang.run(go_on, replace(cluster, nodes=1), 6, world=1, by="columns")
    assert everywhere(went) == (4, "memory")
    went = gang.run(go_on, replace(cluster, nodes=1), 6, world=4, by="columns")
    assert everywhere(went) == (6, "memory")
    assert strays(shm) == []


@needs_pyeclib
@pytest.mark.long
def test_two_nodes_of_a_group_are_made_up_for_by_two_parities(
    gang: Gang, root: Path, shm: Path
) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=4, every=2, options={"parity": 2})
    gang.run(go_on, cluster, 3, world=4)
    lose(shm / "node0")
    lose(shm / "node3")
    left = replace(cluster, node_of=(1, 2))
    assert everywhere(gang.run(go_on, left, 4, world=2, by="columns")) == (3, "memory")
    assert everywhere(gang.run(go_on, left, 4, world=2)) == (4, "memory")


def lose_at_read(cluster: Cluster, node: str, lost: int) -> None:
    """From now on on this rank: when something is read from a node, that is lost in the midst."""
    read_range = Nodes.read_range

    def losing(nodes: Nodes, of_node: str, name: str, offset: int, out: Buffer) -> None:
        read_range(nodes, of_node, name, offset, out)
        if of_node == node:
            with suppress(FileNotFoundError):  # the other rank was there before
                lose(cluster.directory(lost))
            out[:] = 0
            read_range(nodes, of_node, name, offset, out)

    Nodes.read_range = losing  # type: ignore[method-assign]


def go_on_while_losing(cluster: Cluster, node: str, lost: int, until: int) -> Went:
    """Restore, while a node is lost that something is read from; then go on."""
    read_range = Nodes.read_range
    lose_at_read(cluster, node, lost)
    try:
        return go_on(cluster, until, by="columns")
    finally:
        Nodes.read_range = read_range  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("protection", "expected"),
    mostly_long(
        [({"parity": 1}, (2, "storage")), ({"copies": 2}, (3, "memory"))],
        [({"parity": 1}, (2, "storage"))],
    ),
)
def test_a_second_loss_during_the_rebuild(
    gang: Gang,
    root: Path,
    shm: Path,
    protection: dict[str, int],
    expected: tuple[int, str],
) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=4, every=2, options=protection)
    gang.run(go_on, cluster, 3, world=4)
    (home,) = (shm / "node2").glob("shardwise-*")
    info = read_record(home / "agent.json", AgentInfo)
    assert info is not None
    name = info.node
    lose(shm / "node3")
    left = replace(cluster, node_of=(0, 1))
    went = gang.run(go_on_while_losing, left, name, 2, 4, world=2)
    assert everywhere(went) == expected
    if expected[1] == "storage":
        assert "cannot be read from any node" in went[0].skipped
    assert everywhere(gang.run(go_on, left, 4, world=2)) == (4, "memory")
    assert strays(shm) == []


def test_snapshots_of_an_older_run_of_the_same_name_are_fenced_off(
    gang: Gang, root: Path, shm: Path
) -> None:
    cluster = Cluster(root=root, shm=shm)
    gang.run(go_on, cluster, 5, world=2)
    (root / "run.json").unlink()
    (went, _) = gang.run(go_on, cluster, 2, world=2)
    assert went.step is None
    assert everywhere(gang.run(go_on, cluster, 3, world=2)) == (2, "memory")
    assert strays(shm) == []


def save_and_end(cluster: Cluster) -> None:
    """Go on by a step, and close well."""
    cp = cluster.open()
    values, state, went = begin(cp, cluster.columns, "rows")
    state["step"] = (went.step or 0) + 1
    train(values, state["step"])
    handle = cp.save(state["step"], state)
    assert handle is not None
    handle.result(30.0)
    cp.close()


def test_the_memory_of_an_older_run_is_given_back(gang: Gang, root: Path, shm: Path) -> None:
    def runs() -> set[str]:
        return {each.name for each in shm.glob("*/*/runs/*")}

    cluster = Cluster(root=root, shm=shm, nodes=2)
    gang.run(save_and_end, replace(cluster, root=root / "other"), world=2)
    others = runs()
    gang.run(save_and_end, cluster, world=2)
    assert len(runs()) == 2
    (root / "run.json").unlink()
    gang.run(save_and_end, cluster, world=2)
    assert runs() > others
    assert len(runs()) == 2


def test_the_memory_of_an_older_run_is_left_to_its_trainers(
    gang: Gang, root: Path, shm: Path
) -> None:
    cluster = Cluster(root=root, shm=shm)
    gang.run(save_and_end, cluster, world=2)
    (older,) = shm.glob("*/*/runs/*")
    trainer = RankLock(Run(older), 7)
    (root / "run.json").unlink()
    gang.run(save_and_end, cluster, world=2)
    assert list(older.glob("step-00000001-*/manifest.json"))
    trainer.release()
    gang.run(save_and_end, cluster, world=2)
    assert not older.exists()
    assert len(list(shm.glob("*/*/runs/*"))) == 1


def save_again(cluster: Cluster) -> None:
    """Save a step a second time, while the agent of one node is stopped."""
    cp = cluster.open()
    _, state, _ = begin(cp, cluster.columns, "rows")
    handle = cp.save(1, state)
    assert handle is not None
    handle.result(30.0)
    dist.barrier()
    if dist.get_rank() == 0:
        signal_agents(cluster.directory(2), signal.SIGSTOP)
    dist.barrier()
    handle = cp.save(1, state)
    time.sleep(2.0)
    dist.barrier()
    if dist.get_rank() == 0:
        signal_agents(cluster.directory(2), signal.SIGCONT)
    assert handle is not None
    handle.result(30.0)
    cp.close(wait=False)


def test_a_step_that_is_saved_again_is_not_tidied_away_before_it_is_committed(
    gang: Gang, root: Path, shm: Path
) -> None:
    cluster = Cluster(root=root, shm=shm, nodes=3, options={"wait": 4.0})
    gang.run(save_again, cluster, world=3)
    assert_tidy(shm, 3)


def save_steps(root: Path, shm: Path, first: int, last: int) -> None:
    """A rank alone restores and saves steps."""
    memory = sw.Memory(dir=str(shm), when_full="wait", wait=20.0)
    state = {"t": sw.PerRank(first - 1)}
    with sw.Checkpointer(root, save_every=1000, memory=memory, save_at_end=False) as cp:
        assert cp.restore(state) == (first - 1 or None)
        for step in range(first, last + 1):
            handle = cp.save(step, {"t": sw.PerRank(step)})
            assert handle is not None
            handle.result(20.0)


def test_what_others_left_behind_is_in_nobodys_way_and_goes(root: Path, shm: Path) -> None:
    save_steps(root, shm, 1, 1)
    (step,) = shm.glob("*/runs/*/step-00000001-*")
    (step.parent / f"step-00000002-{2:016x}").mkdir()
    for directory in (step, step.parent / f"step-00000002-{2:016x}"):
        for name in (".manifest.json.0badf00d", ".r00000-0123456789abcdef.safetensors"):
            (directory / name).write_bytes(b"left behind")
    save_steps(root, shm, 2, 5)
    assert_tidy(shm.parent, 1)
