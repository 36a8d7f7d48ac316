"""Trainings on the device that resume continue bit for bit like the uninterrupted training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.equal import same_bytes

SAVED, END = 3, 7
Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "capturable": lambda p: torch.optim.AdamW(p, lr=0.01, capturable=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, amsgrad=True),
    "loop": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "tensor-rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01, device="cuda"), fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, capturable=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


class Net(nn.Module):
    """A network with dropout, a convolution in channels_last, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8 * 8 * 8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.conv(x)).relu()).flatten(1))


@dataclass
class Run:
    """A training on the device, and what it has seen."""

    kind: str
    seed: int
    amp: bool = False
    compiled: bool = False
    losses: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        model = Net().to("cuda", memory_format=torch.channels_last)
        self.model: Any = torch.compile(model) if self.compiled else model
        self.optimizer = OPTIMIZERS[self.kind](self.model.parameters())
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**12, growth_interval=2)
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "rng": sw.RngState(),
        }

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(16, 3, 8, 8, generator=generator).to("cuda")
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=self.amp):
            loss = self.model(x).float().square().mean()
        if self.amp:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            loss.backward()
            self.optimizer.step()
        self.losses[number] = loss.detach().cpu()

    def tensors(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict())
        for index, values in self.optimizer.state_dict()["state"].items():
            tensors = {k: v for k, v in values.items() if isinstance(v, torch.Tensor)}
            found |= {f"{index}.{key}": value for key, value in tensors.items()}
        return found


@pytest.fixture(autouse=True)
def deterministic() -> Any:
    torch.backends.cudnn.deterministic, before = True, torch.backends.cudnn.deterministic
    yield
    torch.backends.cudnn.deterministic = before


def assert_equal(resumed: Run, whole: Run) -> None:
    for number, loss in resumed.losses.items():
        assert same_bytes(loss, whole.losses[number]), f"the losses of step {number} differ"
    one, other = resumed.tensors(), whole.tensors()
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.device == other[name].device, name
        assert value.dtype == other[name].dtype, name
        assert same_bytes(value, other[name]), name
    assert resumed.scaler.state_dict() == whole.scaler.state_dict()


def train(run: Run, first: int, last: int) -> Run:
    for number in range(first, last + 1):
        run.step(number)
    return run


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("amp", [False, True])
def test_a_resumed_training_continues_bit_for_bit(kind: str, amp: bool, tmp_path: Path) -> None:
    whole = train(Run(kind, 1, amp), 1, SAVED)
    sw.save(tmp_path / "a", whole.state)
    train(whole, SAVED + 1, END)
    resumed = Run(kind, 2, amp)
    sw.load(tmp_path / "a", resumed.state)
    assert_equal(train(resumed, SAVED + 1, END), whole)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_has_stepped_resumes_in_place(kind: str, tmp_path: Path) -> None:
    whole = train(Run(kind, 1), 1, SAVED)
    sw.save(tmp_path / "a", whole.state)
    train(whole, SAVED + 1, END)
    resumed = train(Run(kind, 2), 1, 2)
    resumed.losses.clear()
    sw.load(tmp_path / "a", resumed.state)
    assert_equal(train(resumed, SAVED + 1, END), whole)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["fused", "capturable", "adamw"])
def test_a_restore_from_memory_continues_bit_for_bit(
    kind: str, overlap: bool, tmp_path: Path, shm: Path
) -> None:
    memory = sw.Memory(dir=str(shm), overlap=overlap, slots=2)
    whole = Run(kind, 1)
    checkpointer = sw.Checkpointer(tmp_path / "run", save_every=1000, memory=memory)
    checkpointer.prepare(whole.state)
    for number in range(1, END + 1):
        whole.step(number)
        if number <= SAVED:
            handle = checkpointer.save(number, whole.state)
            assert handle is not None
            handle.staged()  # because the next forward pass changes buffers
    handle.committed()
    checkpointer.close(wait=False)
    resumed = Run(kind, 2)
    with sw.Checkpointer(tmp_path / "run", save_every=1000, memory=memory) as again:
        assert again.restore(resumed.state) == SAVED
        assert again.last_restore is not None
        assert_equal(train(resumed, SAVED + 1, END), whole)


def test_a_compiled_model(tmp_path: Path) -> None:
    whole = train(Run("fused", 1, compiled=True), 1, SAVED)
    sw.save(tmp_path / "a", whole.state)
    assert "model.conv.weight" in sw.open(tmp_path / "a")
    train(whole, SAVED + 1, END)
    resumed = Run("fused", 2, compiled=True)
    sw.load(tmp_path / "a", resumed.state)
    assert_equal(train(resumed, SAVED + 1, END), whole)


@pytest.mark.parametrize("kind", ["adamw", "fused", "capturable"])
def test_devices_of_counters_are_those_of_torch(kind: str, tmp_path: Path) -> None:
    """A checkpoint of a CPU goes into an optimizer on the device, and back."""
    whole = train(Run(kind, 1), 1, SAVED)
    sw.save(tmp_path / "cuda", {"model": whole.model, "optimizer": whole.optimizer})
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sw.load(tmp_path / "cuda", {"model": model, "optimizer": optimizer})
    for parameter, on_device in zip(model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(parameter, on_device.cpu())
        for key, value in optimizer.state[parameter].items():
            assert value.device.type == "cpu", key
            assert torch.equal(value, whole.optimizer.state[on_device][key].cpu()), key
    sw.save(tmp_path / "cpu", {"model": model, "optimizer": optimizer})
    back = Run(kind, 5)
    sw.load(tmp_path / "cpu", {"model": back.model, "optimizer": back.optimizer})
    for one, other in zip(back.model.parameters(), whole.model.parameters(), strict=True):
        for key, value in whole.optimizer.state[other].items():
            assert back.optimizer.state[one][key].device == value.device, key
            assert torch.equal(back.optimizer.state[one][key], value), key


def test_random_numbers_of_the_device_continue(tmp_path: Path, cuda: torch.device) -> None:
    torch.manual_seed(3)
    torch.rand(1000, device=cuda)
    sw.save(tmp_path / "a", {"rng": sw.RngState()})
    expected = (
        torch.rand(1000, device=cuda),
        torch.nn.functional.dropout(torch.ones(999, device=cuda)),
    )
    torch.manual_seed(4)
    torch.rand(10, device=cuda)
    sw.load(tmp_path / "a", {"rng": sw.RngState()})
    assert torch.equal(torch.rand(1000, device=cuda), expected[0])
    assert torch.equal(torch.nn.functional.dropout(torch.ones(999, device=cuda)), expected[1])


def test_a_generator_of_the_device(tmp_path: Path, cuda: torch.device) -> None:
    generator = torch.Generator(cuda).manual_seed(5)
    torch.rand(10, device=cuda, generator=generator)
    sw.save(tmp_path / "a", {"state": generator.get_state()})
    expected = torch.rand(10, device=cuda, generator=generator)
    state = torch.Generator(cuda).get_state()
    sw.load(tmp_path / "a", {"state": state})
    generator.set_state(state)
    assert torch.equal(torch.rand(10, device=cuda, generator=generator), expected)
