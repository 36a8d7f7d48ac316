"""Snapshots of a state that the last save knew: what the training may do during a copy."""

from __future__ import annotations

import gc
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.breadth import mostly_long
from tests.memory.test_snapshots import shm
from tests.tools.agents import signal_agents

__all__ = ["shm"]

State = dict[str, Any]
SIZE = 300


def memory(shm: Path) -> sw.Memory:
    return sw.Memory(dir=str(shm), when_full="wait", wait=10.0, slots=1, overlap=True)


def make_state() -> State:
    return {
        "model": nn.Linear(SIZE, SIZE),
        "ema": {"a": torch.randn(SIZE, SIZE), "part": torch.randn(2 * SIZE)[SIZE:]},
        "values": [torch.randn(SIZE)],
    }


def tensors_of(state: State) -> dict[str, torch.Tensor]:
    model = state["model"]
    return {
        "model.weight": model.weight,
        "model.bias": model.bias,
        "ema.a": state["ema"]["a"],
        "ema.part": state["ema"]["part"],
        "values.0": state["values"][0],
    }


def other_data(state: State) -> None:
    for tensor in tensors_of(state).values():
        tensor.data = torch.zeros_like(tensor)


def other_storage(state: State) -> None:
    for tensor in tensors_of(state).values():
        tensor.set_(torch.zeros_like(tensor))


def shared_memory(state: State) -> None:
    for tensor in tensors_of(state).values():
        tensor.share_memory_()


def swapped(state: State) -> None:
    torch.utils.swap_tensors(state["ema"]["a"], torch.zeros(3))
    torch.utils.swap_tensors(state["model"].weight, nn.Parameter(torch.zeros(3)))


CHANGES: dict[str, Callable[[State], object]] = {
    "other data": other_data,
    "another storage": other_storage,
    "shared memory": shared_memory,
    "swapped tensors": swapped,
    "no state": lambda state: state.clear(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_memory_of_tensors_may_change_during_a_copy(
    name: str, tmp_path: Path, shm: Path
) -> None:
    state = make_state()
    with sw.Checkpointer(tmp_path / "root", memory=memory(shm)) as cp:
        for step in (1, 2):  # then no slot is free
            handle = cp.save(step, state)
            assert handle is not None
            handle.staged()
            if step == 1:
                handle.result(40.0)
                signal_agents(shm, signal.SIGSTOP)
        handle = cp.save(3, state)
        assert handle is not None
        assert not handle.report.why_bound
        expected = {key: value.detach().clone() for key, value in tensors_of(state).items()}
        with torch.no_grad():
            CHANGES[name](state)
        gc.collect()
        garbage = [torch.full((SIZE, SIZE), -1.0) for _ in range(20)]
        signal_agents(shm, signal.SIGCONT)
        handle.result(40.0)
        del garbage
    stored = sw.open(tmp_path / "root" / "step-00000003")
    for key, value in expected.items():
        saved = stored[key]
        assert isinstance(saved, sw.SavedTensor)
        assert torch.equal(saved[...], value), key


def save(checkpointer: sw.Checkpointer, step: int, state: State) -> sw.SaveHandle:
    handle = checkpointer.save(step, state)
    assert handle is not None
    handle.result(40.0)
    return handle


@pytest.mark.parametrize("is_in_memory", mostly_long([True, False], [True]))
@pytest.mark.parametrize("fails", [True, False])
def test_memory_is_free_after_a_save(
    fails: bool, is_in_memory: bool, tmp_path: Path, shm: Path
) -> None:
    state, root = make_state(), tmp_path / "root"
    with sw.Checkpointer(root, memory=memory(shm) if is_in_memory else None) as cp:
        for step in (1, 2, 3):
            if fails and step == 3:
                (root / "step-00000003").write_text("no directory")
                with pytest.raises((sw.ShardwiseError, OSError)):
                    save(cp, step, state)
                continue
            assert bool(save(cp, step, state).report.why_bound) == (step == 1)
        storages = [weakref.ref(each.untyped_storage()) for each in tensors_of(state).values()]
        state.clear()
        gc.collect()
        assert [get() for get in storages] == [None] * len(storages)
