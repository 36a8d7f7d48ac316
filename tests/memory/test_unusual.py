"""Saves in the background by scripts that do what few do: each is right, or says what is wrong."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

import shardwise as sw
from shardwise.kernel.errors import CheckpointExistsError, StoreError
from tests.memory.test_snapshots import shm
from tests.memory.test_sweep import forked
from tests.tools.agents import end_agents, signal_agents
from tests.tools.gang import Gang

__all__ = ["shm"]


def memory(shm: Path, **options: int | bool) -> sw.Memory:
    """In a directory of the test's own."""
    return sw.Memory(dir=str(shm), wait=10.0, when_full="wait", **options)  # type: ignore[arg-type]


def test_of_several_saves_of_a_step_the_last_one_stays(tmp_path: Path, shm: Path) -> None:
    with sw.Checkpointer(tmp_path / "root", save_every=2, memory=memory(shm)) as cp:
        for step in (1, 2, 3):
            for value in (1.0, 2.0):
                handle = cp.save(step, {"t": torch.full((9,), value)}, overwrite=True)
            assert handle is not None
            handle.result(20.0)
            target = {"t": torch.zeros(9)}
            assert cp.restore(target) == step
            assert bool((target["t"] == 2).all())
    assert sw.open(tmp_path / "root" / "step-00000002")["t"][0] == 2


def test_a_step_that_is_still_being_saved_is_not_saved_again_unasked(
    tmp_path: Path, shm: Path
) -> None:
    with sw.Checkpointer(tmp_path / "root", memory=memory(shm)) as cp:
        first = cp.save(1, {"t": 1})
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            cp.save(1, {"t": 2})
        assert first is not None
        first.result(20.0)
    assert sw.open(tmp_path / "root" / "step-00000001")["t"] == 1


@pytest.mark.parametrize("every", [1, 5])
def test_a_handle_says_what_has_become_of_a_save_after_all_is_closed(
    tmp_path: Path, shm: Path, every: int
) -> None:
    with sw.Checkpointer(tmp_path / "root", save_every=every, memory=memory(shm)) as cp:
        handles = [cp.save(step, {"t": step}) for step in (1, 2, 5)]
    assert not list(shm.glob("**/save.json"))  # the notes went with the memory
    assert not list(shm.glob("**/ended/*"))
    for step, handle in zip((1, 2, 5), handles, strict=True):
        assert handle is not None
        assert handle.done()
        handle.committed(1.0)
        handle.protected(1.0)
        assert handle.result(1.0).step == step


def test_memory_in_a_relative_directory_stays_where_it_was(
    tmp_path: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shm)
    (shm / "elsewhere").mkdir()
    with sw.Checkpointer("root", memory=sw.Memory(dir="memory", wait=10.0)) as cp:
        monkeypatch.chdir(shm / "elsewhere")
        handle = cp.save(1, {"t": 1})
        assert handle is not None
        handle.result(20.0)
    assert not list((shm / "elsewhere").iterdir())


def fork_while_copying(root: Path, shm: Path) -> None:
    """Fork a child that exits while a copy is under way in this process: it waits for a slot."""

    def child() -> None:
        signal.alarm(20)  # kills a child that waits for the copy
        atexit._run_exitfuncs()

    with sw.Checkpointer(root, memory=memory(shm, overlap=True, slots=1)) as cp:
        for step in (1, 2):  # then no slot is free
            handle = cp.save(step, {"t": torch.ones(9)})
            assert handle is not None
            handle.staged()
            if step == 1:
                handle.result(20.0)
                signal_agents(shm, signal.SIGSTOP)
        handle = cp.save(3, {"t": torch.ones(9)})
        assert handle is not None
        assert forked(child) == 0, "the child waits for a copy that it does not make"
        signal_agents(shm, signal.SIGCONT)
        handle.result(20.0)


def test_a_child_that_was_forked_ends_while_a_copy_is_under_way(
    gang: Gang, tmp_path: Path, shm: Path
) -> None:
    gang.run(fork_while_copying, tmp_path / "root", shm, world=1)


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_a_checkpointer_is_refused_in_a_forked_child_and_stays_the_parents(
    tmp_path: Path, shm: Path, is_in_memory: bool
) -> None:
    """A child of a fork has no thread that would copy anything, so that it waited for ever."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = {"model": model, "optimizer": optimizer}
    options = memory(shm, overlap=True) if is_in_memory else None
    checkpointer = sw.Checkpointer(
        tmp_path / "root", memory=options, save_on_signals=(signal.SIGTERM,)
    )
    handle = checkpointer.save(1, state)
    assert handle is not None

    def child() -> None:
        signal.alarm(30)
        for use in (
            lambda: checkpointer.save(2, state),
            lambda: checkpointer.restore(state),
            lambda: checkpointer.prepare(state),
            lambda: checkpointer.close(),
        ):
            with pytest.raises(sw.ShardwiseError, match="is a forked child"):
                use()
        optimizer.step()  # nobody copies the child's state
        with checkpointer:
            pass
        assert checkpointer.steps() in ([], [1])
        os.kill(os.getpid(), signal.SIGTERM)

    assert forked(child) == signal.SIGTERM
    if is_in_memory:
        assert sw.NodeAgent(shm).status().training
    handle.result(20.0)
    again = checkpointer.save(2, state)
    assert again is not None
    again.result(20.0)
    checkpointer.close()
    assert checkpointer.steps() == [1, 2]


def test_of_several_checkpointers_of_a_root_the_last_one_saves(tmp_path: Path, shm: Path) -> None:
    first = sw.Checkpointer(tmp_path / "root", memory=memory(shm))
    handle = first.save(1, {"t": 1})
    assert handle is not None
    handle.result(20.0)
    with sw.Checkpointer(tmp_path / "root", memory=memory(shm)) as second:
        assert second.restore({"t": 0}) == 1
        with pytest.raises(StoreError, match="another Checkpointer of the same root"):
            first.save(2, {"t": 2})
        first.close()
        handle = second.save(2, {"t": 2})
        assert handle is not None
        handle.result(20.0)
    assert second.steps() == [1, 2]
    assert not list(shm.glob("**/free/*"))


def test_steps_go_back_only_by_restoring(tmp_path: Path, shm: Path) -> None:
    root = tmp_path / "root"
    with sw.Checkpointer(root, save_every=1000, memory=memory(shm)) as cp:
        for step in (10, 20):
            handle = cp.save(step, {"t": step})
            assert handle is not None
            handle.result(20.0)
        with pytest.raises(sw.StateError, match="memory holds the newer step 20 of this run"):
            cp.save(11, {"t": 11})
    with sw.Checkpointer(root, save_every=1000, memory=memory(shm)) as cp:
        with pytest.raises(sw.StateError, match="memory holds the newer step 20"):
            cp.save(1, {"t": 1})
        state = {"t": 0}
        assert cp.restore(state, step=10) == 10
        handle = cp.save(11, {"t": 11})
        assert handle is not None
        handle.result(20.0)
        assert cp.restore(state) == 11
        assert state == {"t": 11}


def test_a_home_that_is_removed_under_a_run_is_told(tmp_path: Path, shm: Path) -> None:
    cp = sw.Checkpointer(tmp_path / "root", memory=memory(shm))
    handle = cp.save(1, {"t": 1})
    assert handle is not None
    handle.result(20.0)
    end_agents(shm)
    (home,) = shm.iterdir()
    shutil.rmtree(home)
    with pytest.raises(StoreError, match="was removed while it is in use"):
        cp.save(2, {"t": 2})
    cp.close(wait=False)


@pytest.mark.parametrize("sizes", [(0, 0, 7), (0, 7, 0, 9), (3, 70_000), (70_000, 0, 3)])
def test_a_rank_may_save_nothing_at_first_and_something_later(
    tmp_path: Path, shm: Path, sizes: tuple[int, ...]
) -> None:
    with sw.Checkpointer(tmp_path / "root", save_every=1, memory=memory(shm)) as cp:
        for step, n in enumerate(sizes):
            handle = cp.save(step, {"listed": [torch.full((n,), 1.0 + step)], "step": step})
            assert handle is not None
            handle.result(20.0)
            target = {"listed": [torch.zeros(n)], "step": -1}
            assert cp.restore(target) == step
            assert target["listed"][0].tolist() == [1.0 + step] * n  # type: ignore[index]


def save_unevenly(root: str, shm: str) -> None:
    """Save rows that rank 0 has at first, and both ranks later."""
    rank = torch.distributed.get_rank()
    memory = sw.Memory(dir=shm, wait=10.0, when_full="wait")
    with sw.Checkpointer(root, save_every=1, memory=memory) as cp:
        for step in range(4):
            held = [*range(6)] if step < 2 else [*range(3 * rank, 3 * rank + 3)]
            held = held if step >= 2 or rank == 0 else []
            parts = [
                (sw.Box((row, 0), (1, 50)), torch.full((1, 50), row + 10.0 * step)) for row in held
            ]
            handle = cp.save(step, {"t": sw.Shards((6, 50), torch.float32, parts)})
            assert handle is not None
            handle.result(30.0)
    for step in range(4):
        found = sw.open(root, step=step)["t"][...]
        assert found[:, 0].tolist() == [row + 10.0 * step for row in range(6)]


def test_one_rank_may_save_nothing_at_first(gang: Gang, tmp_path: Path, shm: Path) -> None:
    gang.run(save_unevenly, str(tmp_path / "root"), str(shm), world=2)


def test_snapshots_of_another_version_are_refused_and_kept(tmp_path: Path, shm: Path) -> None:
    """That version had one directory for all saves of a step."""
    with sw.Checkpointer(tmp_path / "root", save_every=100, memory=memory(shm)) as cp:
        handle = cp.save(1, {"t": torch.zeros(1)})
        assert handle is not None
        handle.result(20.0)
        cp.close(wait=False)
    (run,) = shm.glob("*/runs/*")
    (run / "step-00000001").mkdir()
    with pytest.raises(sw.StoreError, match=r"another version .*step-00000001.*agent clear --run"):
        sw.Checkpointer(tmp_path / "root", memory=memory(shm))
    sw.NodeAgent(shm).clear([run.name])
    assert not run.exists()
    with sw.Checkpointer(tmp_path / "root", memory=memory(shm)):
        pass
