"""Saves and loads come after the work on the current stream, and before what follows on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.accelerator.streams import occupy

N = 4 << 20


@pytest.fixture(params=["default", "own"])
def stream(request: pytest.FixtureRequest, cuda: torch.device) -> Iterator[torch.cuda.Stream]:
    """The current stream: the default stream, or another one."""
    torch.cuda.synchronize()
    default = torch.cuda.default_stream(cuda)
    chosen = default if request.param == "default" else torch.cuda.Stream(cuda)
    with torch.cuda.stream(chosen):
        yield chosen
    torch.cuda.synchronize()


@pytest.fixture
def tensor(stream: torch.cuda.Stream, cuda: torch.device) -> torch.Tensor:
    values = torch.zeros(N, device=cuda)
    torch.cuda.synchronize()
    return values


def saved_values(path: Path | str, name: str = "x") -> list[float]:
    values = sw.open(path)[name].tensor()
    return sorted(set(values.flatten()[:: N // 64].tolist()) | {float(values.min())})


def steppable(tensor: torch.Tensor) -> dict[str, Any]:
    """A module with the tensor as its parameter, to which each step of an optimizer adds 1."""
    module = torch.nn.Module()
    module.x = torch.nn.Parameter(tensor)
    module.x.grad = torch.full_like(tensor, -1.0)
    return {"model": module, "optimizer": torch.optim.SGD(module.parameters(), lr=1.0)}


def test_a_save_has_the_values_of_work_that_was_queued(
    tensor: torch.Tensor, tmp_path: Path
) -> None:
    occupy()
    tensor.fill_(1)
    sw.save(tmp_path / "a", {"x": tensor})
    tensor.fill_(2)
    assert saved_values(tmp_path / "a") == [1.0]


def test_a_load_comes_after_work_that_was_queued(tensor: torch.Tensor, tmp_path: Path) -> None:
    sw.save(tmp_path / "a", {"x": torch.full((N,), 3.0)})
    occupy()
    tensor.fill_(1)
    sw.load(tmp_path / "a", {"x": tensor})
    assert tensor.min().item() == tensor.max().item() == 3.0


def test_work_after_a_load_has_its_values(
    tmp_path: Path, stream: torch.cuda.Stream, cuda: torch.device
) -> None:
    """Also if the default stream is busy, on which other threads put their work."""
    sw.save(tmp_path / "a", {"x": torch.full((N // 1024, 1024), 3.0)})
    target = torch.zeros(1024, N // 1024, device=cuda).t()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.default_stream(cuda)):
        occupy()
    sw.load(tmp_path / "a", {"x": target})
    copy = target.clone()
    assert copy.min().item() == copy.max().item() == 3.0


@pytest.mark.parametrize("changed_on", ["current", "other"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_snapshot_has_the_values_at_the_save(
    tensor: torch.Tensor, tmp_path: Path, shm: Path, overlap: bool, changed_on: str
) -> None:
    """Work is queued before the save; the tensor changes as soon as that is allowed."""
    other = torch.cuda.Stream()
    current = torch.cuda.current_stream()
    memory = sw.Memory(dir=str(shm), overlap=overlap)
    with sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
        checkpointer.prepare({"x": tensor})
        for step in range(1, 5):
            occupy(50)
            tensor.fill_(step)
            handle = checkpointer.save(step, {"x": tensor})
            assert handle is not None
            if overlap:
                handle.staged()
            with torch.cuda.stream(current if changed_on == "current" else other):
                tensor.fill_(100)
            torch.cuda.synchronize()
            report = handle.result()
            assert saved_values(report.path) == [float(step)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_snapshot_of_many_small_tensors_has_the_values_at_the_save(
    stream: torch.cuda.Stream, cuda: torch.device, tmp_path: Path, shm: Path, overlap: bool
) -> None:
    """Small tensors are joined on the device before they are copied. A large one is not."""
    kinds = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
    state = {
        f"t{i:04}": torch.zeros((i % 7, 5) if i % 3 else (), dtype=kinds[i % 5], device=cuda)
        for i in range(2000)
    }
    state["large"] = torch.zeros(N, device=cuda)
    memory = sw.Memory(dir=str(shm), overlap=overlap)
    with sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
        checkpointer.prepare(state)
        for step in range(1, 5):
            occupy(50)
            for i, each in enumerate(state.values()):
                each.fill_(step + i % 50)
            expected = {name: each.clone() for name, each in state.items()}
            handle = checkpointer.save(step, state)
            assert handle is not None
            if overlap:
                handle.staged()
            for each in state.values():
                each.fill_(100)
            checkpoint = sw.open(handle.result().path)
            for name, each in expected.items():
                assert torch.equal(checkpoint[name].tensor(), each.cpu()), name


@pytest.mark.parametrize("busy", ["before", "after", "both"])
def test_an_optimizer_waits_on_the_device_and_not_the_thread(
    tensor: torch.Tensor, tmp_path: Path, shm: Path, busy: str
) -> None:
    state = steppable(tensor)
    optimizer, weight = state["optimizer"], state["model"].x
    memory = sw.Memory(dir=str(shm), overlap=True)
    with sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
        checkpointer.prepare(state)
        for step in range(1, 6):
            if busy != "after":
                occupy(100)
            optimizer.step()
            handle = checkpointer.save(step, state)
            assert handle is not None
            if busy != "before":
                occupy(100)
            optimizer.step()  # the copy waits for the first kernel, and this step for the copy
            assert saved_values(handle.result().path, "model.x") == [2.0 * step - 1]
    assert weight.min().item() == weight.max().item() == 10.0


def test_a_save_beside_work_returns_before_the_work_is_done(
    tensor: torch.Tensor, tmp_path: Path, shm: Path
) -> None:
    state = steppable(tensor)
    optimizer = state["optimizer"]
    memory = sw.Memory(dir=str(shm), overlap=True)
    with sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
        checkpointer.prepare(state)
        first = checkpointer.save(1, state)
        assert first is not None
        first.result()
        done = torch.cuda.Event()
        occupy(2000)
        done.record()
        handle = checkpointer.save(2, state)
        optimizer.step()
        assert not done.query(), "the thread has waited for the device"
        assert handle is not None
        handle.staged()
        assert done.query()


def test_slots_are_reused_by_many_snapshots(
    tensor: torch.Tensor, tmp_path: Path, shm: Path
) -> None:
    memory = sw.Memory(dir=str(shm), overlap=True, when_full="wait")
    keep = sw.Keep(last=1)
    with sw.Checkpointer(tmp_path / "run", keep=keep, memory=memory) as checkpointer:
        checkpointer.prepare({"x": tensor})
        for step in range(1, 21):
            tensor.fill_(step)
            handle = checkpointer.save(step, {"x": tensor})
            assert handle is not None
            handle.staged()
            tensor.fill_(-1)
            assert saved_values(handle.result().path) == [float(step)]


def test_tensors_that_are_freed_after_a_save_are_copied(
    tmp_path: Path, shm: Path, stream: torch.cuda.Stream, cuda: torch.device
) -> None:
    """The caching allocator must not give their memory to others while it is read."""
    memory = sw.Memory(dir=str(shm), overlap=True)
    with sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
        checkpointer.prepare({"x": torch.zeros(N, device=cuda)})
        for step in range(1, 4):
            value = torch.full((N,), float(step), device=cuda)
            occupy(50)
            handle = checkpointer.save(step, {"x": value})
            assert handle is not None
            del value
            for _ in range(4):
                torch.full((N,), -1.0, device=cuda)
            assert saved_values(handle.result().path) == [float(step)]


@pytest.mark.parametrize("overlap", [False, True])
def test_training_in_a_cuda_graph(
    tmp_path: Path, shm: Path, cuda: torch.device, overlap: bool
) -> None:
    """Replays run no hooks, so that `staged` comes before each of them."""
    torch.manual_seed(0)
    model = torch.nn.Linear(512, 512, device=cuda)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    batch = torch.randn(64, 512, device=cuda)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        model(batch).square().mean().backward()
        optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    memory = sw.Memory(dir=str(shm), overlap=overlap)
    with sw.Checkpointer(tmp_path / "run", memory=memory) as checkpointer:
        checkpointer.prepare(state)
        for number in range(1, 6):
            graph.replay()
            expected = {name: each.clone() for name, each in model.state_dict().items()}
            handle = checkpointer.save(number, state)
            assert handle is not None
            handle.staged()
            graph.replay()
            path = handle.result().path
            for name, value in expected.items():
                assert torch.equal(sw.open(path)[f"model.{name}"].tensor(), value.cpu())
