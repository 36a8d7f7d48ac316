"""A Checkpointer that remembers a state on a device saves the same bytes as one that does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import shardwise as sw
from tests.accelerator.streams import occupy
from tests.checkpointer import test_prepared_state as prepared
from tests.checkpointer.test_prepared_state import CHANGES, HARMLESS, Saver, State, fuzz, train

N = 1 << 20


def make_state(device: torch.device) -> State:
    """The state of `test_prepared_state`, on a device."""
    with device:
        return prepared.make_state()


def change(name: str, state: State, device: torch.device) -> None:
    """Change a state; what is new is on the device, too."""
    with device, torch.no_grad():
        (CHANGES | HARMLESS)[name](state)


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    return Saver(tmp_path)


@pytest.fixture(params=["default", "own"], autouse=True)
def stream(request: pytest.FixtureRequest, cuda: torch.device) -> Iterator[None]:
    """Work is on the default stream, or on another one."""
    default = torch.cuda.default_stream(cuda)
    with torch.cuda.stream(default if request.param == "default" else torch.cuda.Stream(cuda)):
        yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_found_anew(name: str, saver: Saver, cuda: torch.device) -> None:
    state = make_state(cuda)
    saver.save(state)
    assert not saver.save(state)
    change(name, state, cuda)
    assert saver.save(state), "the change was not noticed"


@pytest.mark.parametrize("name", HARMLESS)
def test_what_has_not_changed_is_known(name: str, saver: Saver, cuda: torch.device) -> None:
    state = make_state(cuda)
    saver.save(state)
    for _ in range(2):
        change(name, state, cuda)
        assert not saver.save(state)


@pytest.mark.parametrize("seed", range(10))
def test_random_changes(seed: int, saver: Saver, cuda: torch.device) -> None:
    plain = prepared.make_state

    def make_on_device() -> State:
        with cuda:
            return plain()

    with patch.object(prepared, "make_state", make_on_device):
        assert fuzz(saver, seed, 30)


def test_values_that_are_still_computed_at_the_save(saver: Saver, cuda: torch.device) -> None:
    state = make_state(cuda)
    for _ in range(3):
        occupy(50)
        train(state)
        saver.save(state)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_training_that_goes_on(
    tmp_path: Path, shm: Path, cuda: torch.device, overlap: bool
) -> None:
    """Each snapshot is known from the last one, and has the values of its step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device=cuda) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    state = {"model": model, "optimizer": optimizer, "large": torch.zeros(N, device=cuda)}
    batch = torch.randn(32, 64, device=cuda)
    memory = sw.Memory(dir=str(shm), overlap=overlap, when_full="wait")
    with sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
        for step in range(1, 8):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            state["large"].fill_(step)
            expected = {name: each.clone() for name, each in model.state_dict().items()}
            handle = checkpointer.save(step, state)
            assert handle is not None
            if overlap:
                handle.staged()
            state["large"].fill_(-1)
            found = sw.open(handle.result().path)
            for name, value in expected.items():
                assert torch.equal(found[f"model.{name}"].tensor(), value.cpu())
            assert found["large"].tensor().eq(step).all()
            assert bool(handle.report.why_bound) == (step == 1)


def test_an_optimizer_in_a_cuda_graph(tmp_path: Path, shm: Path, cuda: torch.device) -> None:
    """Replays change the values where they are, so each save after the first one is known."""
    weight = torch.nn.Parameter(torch.ones(N, device=cuda))
    optimizer = torch.optim.AdamW([weight], capturable=True)
    weight.grad = torch.ones_like(weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    state = {"weight": weight, "optimizer": optimizer}
    memory = sw.Memory(dir=str(shm), when_full="wait")
    with sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
        for step in range(1, 5):
            graph.replay()
            expected = weight.detach().clone()
            handle = checkpointer.save(step, state)
            assert handle is not None
            handle.staged()
            graph.replay()
            assert torch.equal(sw.open(handle.result().path)["weight"].tensor(), expected.cpu())
            assert bool(handle.report.why_bound) == (step == 1)
