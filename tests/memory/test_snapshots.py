"""Saves that are staged into memory: committed, persisted, retired and recovered, to the byte."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.breadth import mostly_long
from tests.tools.agents import end_agents, lose, signal_agents
from tests.tools.gang import Gang

ROWS, COLUMNS = 48, 1024


@pytest.fixture
def shm(tmp_path: Path) -> Iterator[Path]:
    """A directory for the homes of nodes, whose agents are ended afterwards."""
    directory = tmp_path / "shm"
    directory.mkdir()
    yield directory
    end_agents(directory)


def reference(step: int) -> torch.Tensor:
    """Values that tell where and when they belong."""
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + step


def rows(step: int, *, filled: bool = True) -> dict[str, Any]:
    """This rank's rows of a tensor, and values that all have."""
    rank, world = dist.get_rank(), dist.get_world_size()
    box = sw.Box((ROWS // world * rank, 0), (ROWS // world, COLUMNS))
    data = reference(step)[box.slices()].clone() if filled else torch.zeros(box.shape)
    shards = sw.Shards((ROWS, COLUMNS), torch.float32, [(box, data)])
    return {"t": shards, "step": step, "mine": sw.PerRank(rank)}


def columns() -> tuple[sw.Box, dict[str, Any]]:
    """This rank's columns, to be filled."""
    rank, world = dist.get_rank(), dist.get_world_size()
    box = sw.Box((0, COLUMNS // world * rank), (ROWS, COLUMNS // world))
    shards = sw.Shards((ROWS, COLUMNS), torch.float32, [(box, torch.zeros(box.shape))])
    return box, {"t": shards, "step": -1}


def memory_of(shm: str, nodes: int, **options: Any) -> sw.Memory:
    """This rank's memory, where so many nodes are simulated by directories."""
    directory = Path(shm) / f"node{dist.get_rank() * nodes // dist.get_world_size()}"
    directory.mkdir(exist_ok=True)
    return sw.Memory(dir=str(directory), when_full="wait", wait=10.0, **options)


def train(root: str, shm: str, nodes: int, steps: int, every: int, **options: Any) -> list[float]:
    """Save steps 1 to `steps`, and leave without a word; seconds that each save took."""
    took = []
    memory = memory_of(shm, nodes, **options)
    cp = sw.Checkpointer(root, save_every=every, memory=memory)
    handles = []
    for step in range(1, steps + 1):
        start = time.monotonic()
        handle = cp.save(step, rows(step))
        took.append(time.monotonic() - start)
        assert handle is not None
        handles.append(handle)
    for handle in handles:
        handle.result(40.0)
    cp.close(wait=False)
    return took


def recover(root: str, shm: str, nodes: int, **options: Any) -> tuple[int | None, str, str]:
    """Restore by columns; the step, where from, and what was skipped."""
    box, state = columns()
    with sw.Checkpointer(root, memory=memory_of(shm, nodes, **options)) as cp:
        step = cp.restore(state, strict=False)
        if step is None or cp.last_restore is None:
            return None, "", ""
        assert torch.equal(state["t"].fragments[0].data, reference(step)[box.slices()])
        assert state["step"] == step
        return step, cp.last_restore.source, str(cp.last_restore.skipped)


@pytest.fixture(scope="module")
def trained(gang: Gang, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The root and the nodes of a run of four ranks: step 5 in memory, steps 2 and 4 persisted."""
    root, shm = tmp_path_factory.mktemp("trained") / "root", tmp_path_factory.mktemp("shm")
    gang.run(train, str(root), str(shm), 2, 5, 2, world=4)
    yield root, shm
    end_agents(shm)


def test_the_newest_comes_from_memory_in_another_sharding(
    gang: Gang, trained: tuple[Path, Path]
) -> None:
    root, shm = trained
    assert {each.name for each in root.iterdir()} - {"nodes", "telemetry"} == {
        "run.json",
        "step-00000002",
        "step-00000004",
    }
    assert gang.run(recover, str(root), str(shm), 2, world=4)[0][:2] == (5, "memory")


def test_a_world_of_another_size_recovers_too(gang: Gang, trained: tuple[Path, Path]) -> None:
    root, shm = trained
    assert gang.run(recover, str(root), str(shm), 2, world=2)[0][:2] == (5, "memory")


def test_what_is_persisted_is_an_ordinary_checkpoint(trained: tuple[Path, Path]) -> None:
    root, _ = trained
    checkpoint = sw.open(root / "step-00000002")
    checkpoint.verify()
    assert torch.equal(checkpoint["t"][...], reference(2))  # type: ignore[index]
    assert len([*(root / "step-00000002").glob("r*"), *root.glob("step-00000002/m*")]) == 5


@pytest.mark.parametrize(
    ("lost", "protection"),
    mostly_long(
        [(lost, {what: 1}) for lost in (0, 2) for what in ("copies", "parity")],
        [],  # tests/memory/test_origins.py and tests/faults/memory/test_nodes.py lose nodes, too
    ),
)
def test_a_node_that_is_lost_is_made_up_for(
    gang: Gang, tmp_path: Path, shm: Path, protection: dict[str, int], lost: int
) -> None:
    root = str(tmp_path / "root")
    gang.run(train, root, str(shm), 4, 3, 100, world=4, **protection)
    lose(shm / f"node{lost}")
    assert gang.run(recover, root, str(shm), 4, world=4)[0][:2] == (3, "memory")


def test_agents_that_are_killed_are_followed_by_others(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    root = str(tmp_path / "root")
    gang.run(train, root, str(shm), 2, 3, 100, world=4)
    end_agents(shm)
    assert gang.run(recover, root, str(shm), 2, world=4)[0][:2] == (3, "memory")


def test_ranks_that_know_the_agent_do_not_wait_for_each_other(tmp_path: Path, shm: Path) -> None:
    memory = sw.Memory(dir=str(shm), when_full="wait")
    with sw.Checkpointer(tmp_path / "root", save_every=100, memory=memory) as cp:
        for step in (1, 2):
            handle = cp.save(step, {"step": step})
            assert handle is not None
            handle.result(20.0)
        (lock,) = shm.glob("**/start.lock")
        with lock.open("r+b") as file:  # as another rank that starts an agent
            fcntl.flock(file, fcntl.LOCK_EX)
            start = time.monotonic()
            assert cp.save(3, {"step": 3}) is not None
            assert time.monotonic() - start < 20.0


def test_a_run_that_is_begun_anew_takes_nothing_of_the_one_before(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    root = tmp_path / "root"
    gang.run(train, str(root), str(shm), 1, 3, 100, world=2)
    (root / "run.json").unlink()
    assert gang.run(recover, str(root), str(shm), 1, world=2)[0] == (None, "", "")


def flip(path: Path, at: int) -> None:
    """One bit of a file, the other way."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_bit_that_flips_in_memory_is_found_and_the_one_before_is_taken(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    root = str(tmp_path / "root")
    gang.run(train, root, str(shm), 1, 3, 100, world=2)
    (victim,) = shm.glob("**/step-00000003-*/r00001-*.safetensors")
    flip(victim, 5000)
    step, source, skipped = gang.run(recover, root, str(shm), 1, world=2)[0]
    assert (step, source) == (2, "memory")
    assert victim.name in skipped


def close_properly(root: str, shm: str) -> None:
    with sw.Checkpointer(root, memory=memory_of(shm, 1)) as cp:
        for step in (1, 2):
            cp.save(step, rows(step))


def test_a_run_that_ends_well_gives_its_memory_back(gang: Gang, tmp_path: Path, shm: Path) -> None:
    gang.run(close_properly, str(tmp_path / "root"), str(shm), world=2)
    assert sw.open(tmp_path / "root" / "step-00000002").step == 2
    assert not list(shm.glob("**/free/*"))
    assert not list(shm.glob("**/*.safetensors"))


def fail_to_persist(root: str, shm: str) -> list[str]:
    """Persisting fails in the background: result says so, and so does the next save."""
    said = []
    cp = sw.Checkpointer(root, memory=memory_of(shm, 1))
    if dist.get_rank() == 0:
        signal_agents(Path(shm), signal.SIGSTOP)
    dist.barrier()
    handle = cp.save(1, rows(1))
    assert handle is not None
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(root) / "step-00000001").write_text("in the way")
        signal_agents(Path(shm), signal.SIGCONT)
    handle.committed(40.0)
    with pytest.raises(sw.StoreError) as caught:
        handle.result(40.0)
    said.append(str(caught.value))
    try:
        cp.save(2, rows(2))
    except sw.ShardwiseError as error:
        said.append(str(error))
    cp.close(wait=False)
    return said


def test_what_fails_in_the_background_is_told_on_all_ranks(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    root = tmp_path / "root"
    for said in gang.run(fail_to_persist, str(root), str(shm), world=2):
        assert len(said) == 2
        assert all("persist" in each for each in said)


def fail_while_copying(root: str, shm: str) -> str:
    """On rank 1, a link lies in the way of the copy; what the end of the run says."""
    memory = replace(memory_of(shm, 2), wait=1.0)
    cp = sw.Checkpointer(root, memory=memory)
    if dist.get_rank() == 1:
        (run,) = Path(memory.dir).glob("*/runs/*")
        (run / "free").symlink_to("nowhere")
    cp.save(1, rows(1))
    with pytest.raises((sw.ShardwiseError, RuntimeError)) as caught:
        cp.close()
    return str(caught.value)


def test_a_copy_that_fails_on_one_rank_ends_the_run_on_all(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    for said in gang.run(fail_while_copying, str(tmp_path / "root"), str(shm), world=2):
        assert "staging step 1: [Errno 17] File exists" in said


def die_while_copying(root: str, shm: str) -> None:
    """Two saves go well; in the third one rank is killed in the middle of its copy."""
    cp = sw.Checkpointer(root, memory=memory_of(shm, 2))
    for step in (1, 2):
        handle = cp.save(step, rows(step))
        assert handle is not None
        handle.result(40.0)

    state = rows(3)
    if dist.get_rank() == 1:  # a read after the first two pages kills the process
        (fragment,) = state["t"].fragments
        path = Path(shm) / "values"
        path.write_bytes(fragment.data.numpy().tobytes())
        torn = torch.from_file(str(path), shared=True, size=fragment.data.numel())
        os.truncate(path, 2 * mmap.PAGESIZE)
        part = (fragment.box, torn.view(fragment.box.shape))
        state["t"] = sw.Shards((ROWS, COLUMNS), torch.float32, [part])
    cp.save(3, state)
    cp.save(4, rows(4))


def test_a_torn_copy_is_never_committed_nor_persisted(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    root = tmp_path / "root"
    outcomes = gang.run_outcomes(die_while_copying, str(root), str(shm), world=2, timeout=60.0)
    assert [outcome.kind for outcome in outcomes] == ["error", "died"]
    step, source, skipped = gang.run(recover, str(root), str(shm), 2, world=2)[0]
    assert (step, source) == (2, "memory")
    assert "not committed" in skipped
    with sw.Checkpointer(root, memory=None) as cp:
        assert cp.steps() == [1, 2]


def change_between_saves(root: str, shm: str) -> None:
    """Tensors are allocated anew, re-shaped, tied and untied, and grow: each save has them so."""
    first = torch.arange(10.0)
    states: list[dict[str, torch.Tensor]] = [
        {"a": first, "b": torch.ones(3)},
        {"a": first.clone() + 1, "b": torch.ones(3)},
        {"a": torch.zeros(4, 5), "b": torch.ones(0)},
        {"a": first, "b": first},
        {"a": first.clone(), "b": first.clone() + 2, "c": torch.ones(1 << 21)},
    ]
    with sw.Checkpointer(root, memory=memory_of(shm, 1)) as cp:
        for step, state in enumerate(states, start=1):
            cp.save(step, dict(state))
            target = {name: torch.empty_like(each) for name, each in state.items()}
            if step == 4:
                target["b"] = target["a"]
            assert cp.restore(target) == step
            assert cp.last_restore is not None
            assert cp.last_restore.source == "memory"
            assert all(torch.equal(target[name], each) for name, each in state.items())


def test_what_changes_between_saves_is_saved_as_it_is(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    gang.run(change_between_saves, str(tmp_path / "root"), str(shm), world=1)


def step_while_copying(root: str, shm: str) -> tuple[list[str], bool]:
    """Step an optimizer while a copy waits for memory: what ends in which order; what is saved."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    model(torch.ones(1, 8)).sum().backward()
    state = {"model": model, "optimizer": [optimizer]}
    ended: list[str] = []

    def free_memory() -> None:
        ended.append("memory")
        signal_agents(Path(shm), signal.SIGCONT)

    with sw.Checkpointer(root, memory=memory_of(shm, 1, slots=1, overlap=True)) as cp:
        cp.prepare(state)
        for step in (1, 2):  # then no slot is free
            handle = cp.save(step, state)
            assert handle is not None
            handle.staged()
            if step == 1:
                handle.result(40.0)
                signal_agents(Path(shm), signal.SIGSTOP)
        handle = cp.save(3, state)
        ended.append("save")
        threading.Timer(0.2, free_memory).start()
        optimizer.step()
        ended.append("step")
        assert handle is not None
        handle.staged(0.0)
        handle.result(40.0)
    assert not torch.equal(model.weight, before)
    stored = sw.open(f"{root}/step-00000003")["model.weight"][...]  # type: ignore[index]
    return ended, torch.equal(stored, before)


def test_a_step_waits_for_the_copy_that_it_would_tear(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    found = gang.run(step_while_copying, str(tmp_path / "root"), str(shm), world=1)
    assert found == [(["save", "memory", "step"], True)]


def test_homes_are_private(tmp_path: Path, shm: Path) -> None:
    sw.Checkpointer(tmp_path / "root", memory=sw.Memory(dir=str(shm))).close()
    end_agents(shm)
    (home,) = shm.iterdir()
    assert home.stat().st_mode & 0o777 == 0o700
    (tmp_path / "elsewhere").mkdir()
    home.rename(tmp_path / "moved")
    home.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(sw.StoreError, match="is a link"):
        sw.Checkpointer(tmp_path / "root", memory=sw.Memory(dir=str(shm)))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_ranks_of_a_host_of_which_some_have_the_files_in_memory_and_some_not(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    root = str(tmp_path / "root")
    gang.run(train, root, str(shm), 2, 2, 100, world=2, copies=1)
    lose(shm / "node1")
    found = gang.run(recover, root, str(shm), 2, world=2, timeout=60.0)
    assert [each[:2] for each in found] == [(2, "memory")] * 2


def train_and_lose(root: str, shm: str, nodes: int, lost: int, *, node: bool) -> None:
    """Protected snapshots in memory only; then a trainer is killed, alone or with its node. If the
    node goes with it, the others end without a word soon after."""
    cp = sw.Checkpointer(root, save_every=100, memory=memory_of(shm, nodes, copies=1))
    for step in (1, 2, 3):
        handle = cp.save(step, rows(step))
        assert handle is not None
        handle.protected(40.0)
    dist.barrier()  # the other nodes are told, too, before the one that tells them is lost
    if dist.get_rank() == lost:
        if node:
            lose(Path(shm) / f"node{lost}")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0 if node else 0.5)
    if node:
        os.kill(os.getpid(), signal.SIGKILL)
    cp.close(wait=False)


def assert_rescued(root: Path, seconds: float) -> None:
    """Step 3, and no other, is persisted in time."""
    deadline = time.monotonic() + seconds
    while not (root / "step-00000003" / "manifest.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    checkpoint = sw.open(root / "step-00000003")
    checkpoint.verify()
    assert torch.equal(checkpoint["t"][...], reference(3))  # type: ignore[index]
    assert not (root / "step-00000002").exists()


@pytest.mark.parametrize("victim", mostly_long([0, 1], [0]))
def test_what_is_in_memory_is_persisted_when_a_trainer_is_lost(
    gang: Gang, tmp_path: Path, shm: Path, victim: int
) -> None:
    root = tmp_path / "root"
    gang.run_outcomes(
        train_and_lose, str(root), str(shm), 2, victim, node=False, world=2, timeout=60.0
    )
    assert_rescued(root, 60.0)
    end_agents(shm)
    for node in (0, 1):
        lose(shm / f"node{node}")
    assert gang.run(recover, str(root), str(shm), 2, world=2)[0][:2] == (3, "storage")


@pytest.mark.parametrize("lost", mostly_long([0, 1], [1]))
def test_what_is_in_memory_is_persisted_when_a_node_is_lost(
    gang: Gang, tmp_path: Path, shm: Path, lost: int
) -> None:
    """By whichever node is left, with the files of the other from their copies."""
    root = tmp_path / "root"
    gang.run_outcomes(
        train_and_lose, str(root), str(shm), 3, lost, node=True, world=3, timeout=60.0
    )
    assert_rescued(root, 60.0)


def look_only(root: str, shm: str) -> list[int]:
    """The steps of a root, by a Checkpointer that saves nothing."""
    with sw.Checkpointer(root, memory=memory_of(shm, 2)) as cp:
        return cp.steps()


def test_looking_leaves_nothing_behind(gang: Gang, tmp_path: Path, shm: Path) -> None:
    assert gang.run(look_only, str(tmp_path / "root"), str(shm), world=2) == [[], []]
    assert not list(shm.glob("*/*/runs/*"))
