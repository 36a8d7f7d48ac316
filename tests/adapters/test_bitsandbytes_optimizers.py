"""8-bit optimizer states of bitsandbytes: bytes, their maps, and a scale for each block of 256."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.tools.gang import Gang

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed: pip install '.[frameworks]'",
)


def optimizer_of(model: nn.Module) -> Any:
    bitsandbytes = importlib.import_module("bitsandbytes")
    cls: Any = bitsandbytes.optim.AdamW8bit
    if any(isinstance(each, DTensor) for each in model.parameters()):
        cls = type("AdamW8bitOfShards", (OfShards, cls), {})
    return cls(model.parameters(), lr=0.05, min_8bit_size=512)


class OfShards:
    """bitsandbytes 0.50 cannot step DTensors. This steps their local tensors."""

    state: Any

    def init_state(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
        local = p.to_local().detach()
        super().init_state(group, local, gindex, pindex)  # type: ignore[misc]
        self.state[p] = self.state.pop(local)

    def update_step(self, group: Any, p: Any, gindex: int, pindex: int) -> None:
        local = p.to_local().detach()
        local.grad = p.grad.to_local()
        self.state[local] = self.state[p]
        super().update_step(group, local, gindex, pindex)  # type: ignore[misc]
        del self.state[local]


def model_of(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 100))
    if kind == "fsdp2":
        fully_shard(model)
    elif kind == "fsdp1":
        cpu = torch.device("cpu")
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=cpu)
    return model


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def held(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """The local tensors of the weights and of the state."""
    found: list[Any] = []
    for parameter in model.parameters():
        found += [parameter, *(value for _, value in sorted(optimizer.state[parameter].items()))]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in found]
    return [torch.as_tensor(each).detach().clone() for each in local]


def start(path: str, kind: str) -> list[torch.Tensor]:
    model = model_of(kind, 0)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(3))
    sw.save(path, {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(3, 5))
    return held(model, optimizer)


def go_on(path: str, kind: str) -> list[torch.Tensor]:
    model = model_of(kind, 1)
    optimizer = optimizer_of(model)
    sw.load(path, {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(3, 5))
    return held(model, optimizer)


def assert_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    assert len(a) == len(b)
    assert any(each.dtype == torch.uint8 for each in a)
    for one, other in zip(a, b, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1), (1, 2)])
def test_whole_parameters_go_on(gang: Gang, tmp_path: Path, before: int, after: int) -> None:
    expected = gang.run(start, str(tmp_path / "saved"), "plain", world=before)[0]
    for found in gang.run(go_on, str(tmp_path / "saved"), "plain", world=after):
        assert_equal(found, expected)


@pytest.mark.ranks
def test_shards_go_on_with_the_same_sharding(gang: Gang, tmp_path: Path) -> None:
    expected = gang.run(start, str(tmp_path / "saved"), "fsdp2", world=2)
    found = gang.run(go_on, str(tmp_path / "saved"), "fsdp2", world=2)
    for a, b in zip(found, expected, strict=True):
        assert_equal(a, b)
    for world in (1, 4):  # whose blocks are others
        for outcome in gang.run_outcomes(go_on, str(tmp_path / "saved"), "fsdp2", world=world):
            assert isinstance(outcome.exception, sw.MismatchError), outcome
            message = str(outcome.exception)
            assert "absmax1: the optimizer keeps this state for each shard" in message


@pytest.mark.ranks
def test_flattened_parameters_are_refused(gang: Gang, tmp_path: Path) -> None:
    for outcome in gang.run_outcomes(start, str(tmp_path / "saved"), "fsdp1", world=2):
        assert isinstance(outcome.exception, sw.StateError), outcome
        assert "its sharding is unknown: use FSDP2" in str(outcome.exception)
