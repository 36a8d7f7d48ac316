"""Optimizers that are not element-wise: each resume is the training that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Muon, Optimizer

import shardwise as sw
from tests.multirank.matrix_optimizers import (
    AdamMini,
    GaLore,
    MuonOfOwners,
    ShampooOfDTensors,
    ShampooOfOwners,
    ShampooOfShards,
    Soap,
    whole,
)
from tests.tools.gang import Gang

Make = Callable[[nn.Module], Optimizer]


def muon(model: nn.Module) -> Optimizer:
    return Muon([p for p in model.parameters() if p.dim() > 1], lr=0.05)


def model_of(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    # The shards of two ranks are square in the last matrix.
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12), nn.Linear(12, 24))
    if kind == "fsdp2":
        fully_shard(model)
    elif kind == "hsdp":
        world = dist.get_world_size()
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2)))
    return model


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    """All ranks have the same batch, so their number has no effect."""
    for step in steps:
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def described(value: Any) -> Any:
    """What a state is: types, shapes and placements, without values."""
    if isinstance(value, DTensor):
        return "DTensor", tuple(value.shape), value.dtype, value.placements
    if isinstance(value, Tensor):
        return type(value).__name__, tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    if isinstance(value, list):
        return [*map(described, value)]
    return described(vars(value)) if hasattr(value, "ortho_matrix") else type(value).__name__


def kinds_of(optimizer: Optimizer) -> list[Any]:
    return [described(optimizer.state.get(p, {})) for p in optimizer.param_groups[0]["params"]]


def weights_of(model: nn.Module) -> list[Tensor]:
    return [whole(parameter.detach()).clone() for parameter in model.parameters()]


def start(path: str, make: Make, kind: str) -> list[Tensor]:
    model = model_of(kind, 0)
    optimizer = make(model)
    train(model, optimizer, range(3))
    sw.save(path, {"model": model, "optimizer": optimizer})
    train(model, optimizer, range(3, 6))
    sw.save(f"{path}-later", {"model": model, "optimizer": optimizer})
    return weights_of(model)


def go_on(path: str, make: Make, kind: str, stepped: bool) -> list[Tensor]:
    model = model_of(kind, 1)
    optimizer = make(model)
    state = {"model": model, "optimizer": optimizer}
    if stepped:
        train(model, optimizer, range(1))
    sw.load(path, state)
    loaded = kinds_of(optimizer)
    train(model, optimizer, range(3, 4))
    assert kinds_of(optimizer) == loaded, (kinds_of(optimizer), loaded)
    # What is loaded can be saved again, and comes back.
    sw.save(f"{path}-again", state)
    train(model, optimizer, range(4, 5))
    sw.load(f"{path}-again", state)
    train(model, optimizer, range(4, 6))
    return weights_of(model)


CHANGES = [(2, 2), (2, 1), (1, 2), (2, 4)]
RIGHT: list[tuple[Make, str, bool]] = [
    (muon, "fsdp2", False),
    (ShampooOfDTensors, "fsdp2", False),
    (AdamMini, "fsdp2", False),
    (Soap, "ddp", False),
    (GaLore, "ddp", False),
    (GaLore, "ddp", True),
    (MuonOfOwners, "ddp", True),
    (ShampooOfOwners, "ddp", True),
]
CASES = [(*each, *worlds) for each in RIGHT for worlds in CHANGES]


@pytest.mark.parametrize(("make", "kind", "stepped", "before", "after"), CASES)
def test_it_goes_on(
    gang: Gang, tmp_path: Path, make: Make, kind: str, stepped: bool, before: int, after: int
) -> None:
    path = str(tmp_path / "step")
    expected = gang.run(start, path, make, kind, world=before)[0]
    for found in gang.run(go_on, path, make, kind, stepped, world=after):
        for a, b in zip(expected, found, strict=True):
            if make is muon and before != after:
                # Matrix products of DTensors add partial sums in another order.
                assert torch.allclose(a, b, rtol=1e-3, atol=1e-4)
            else:
                assert torch.equal(a, b)


REFUSED: list[tuple[Make, str, bool, int, int, str]] = [
    (ShampooOfShards, "fsdp2", False, 2, 1, "factors.0: the optimizer keeps this state for each"),
    (ShampooOfShards, "fsdp2", False, 1, 2, "factors.0: the optimizer keeps this state for each"),
    (ShampooOfShards, "fsdp2", False, 2, 4, "factors.0: the optimizer keeps this state for each"),
    (Soap, "fsdp2", False, 2, 4, "GG.0: the optimizer keeps this state for each shard"),
    (MuonOfOwners, "ddp", False, 2, 2, "step"),
    (MuonOfOwners, "ddp", False, 2, 4, "step"),
    (ShampooOfOwners, "ddp", False, 2, 2, "step"),
    (ShampooOfOwners, "ddp", False, 2, 1, "over a mesh of its own"),
]


@pytest.mark.parametrize(("make", "kind", "stepped", "before", "after", "message"), REFUSED)
def test_what_cannot_be_resharded_is_refused(
    gang: Gang, tmp_path: Path, make: Make, kind: str, stepped: bool, before: int, after: int,
    message: str,
) -> None:  # fmt: skip
    path = str(tmp_path / "step")
    gang.run(start, path, make, kind, world=before)
    for outcome in gang.run_outcomes(go_on, path, make, kind, stepped, world=after):
        assert isinstance(outcome.exception, sw.ShardwiseError), outcome
        assert message in str(outcome.exception)
