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
from tests.breadth import mostly_long
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
        shape = (2, 2) if dist.get_world_size() == 4 else (1, dist.get_world_size())
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")))
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
    sw.save(f"{path}-same", state)
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
    (AdamMini, "hsdp", False),
    (Soap, "ddp", False),
    (GaLore, "ddp", False),
    (GaLore, "ddp", True),
    (MuonOfOwners, "ddp", True),
    (ShampooOfOwners, "ddp", True),
]
CASES = [(*each, *worlds) for each in RIGHT for worlds in CHANGES]
# The same shards.
CASES += [(ShampooOfShards, "fsdp2", False, 2, 2), (Soap, "fsdp2", False, 2, 2)]


# The first steps of torch's Muon over DTensors take half a minute.
DEFAULT = [case for case in CASES if case[0] is not muon and case[3:] in ((2, 4), CHANGES[0])]
DEFAULT = [case for case in DEFAULT if case[4] == 4 or case[0] in (ShampooOfShards, Soap)]


@pytest.mark.parametrize(
    ("make", "kind", "stepped", "before", "after"), mostly_long(CASES, DEFAULT)
)
def test_it_goes_on(
    gang: Gang, tmp_path: Path, make: Make, kind: str, stepped: bool, before: int, after: int
) -> None:
    path = str(tmp_path / "saved")
    expected = gang.run(start, path, make, kind, world=before)[0]
    for found in gang.run(go_on, path, make, kind, stepped, world=after):
        for a, b in zip(expected, found, strict=True):
            if make is muon and before != after:
                # Products of DTensors add partial sums in another order, and are of bfloat16.
                assert torch.allclose(a, b, atol=0.05)
            else:
                assert torch.equal(a, b)
    saved, again = (sw.open(place).tensors() for place in (path, f"{path}-same"))
    assert {*saved} == {*again}
    for name, tensor in saved.items():
        assert torch.equal(tensor[...], again[name][...]), name


OF_SHARDS = "the optimizer keeps this state for each shard"
OF_OWNERS = "call step() of optimizer once before the load"
REFUSED: list[tuple[Make, str, int, int, str]] = [
    (ShampooOfShards, "fsdp2", 2, 1, f"factors.0: {OF_SHARDS}"),
    (ShampooOfShards, "fsdp2", 1, 2, f"factors.0: {OF_SHARDS}"),
    (ShampooOfShards, "fsdp2", 2, 4, f"factors.0: {OF_SHARDS}"),
    (Soap, "fsdp2", 2, 1, f"GG.0: {OF_SHARDS}"),
    (Soap, "fsdp2", 2, 4, f"GG.0: {OF_SHARDS}"),
    (MuonOfOwners, "ddp", 2, 2, OF_OWNERS),
    (MuonOfOwners, "ddp", 2, 4, OF_OWNERS),
    (ShampooOfOwners, "ddp", 2, 2, OF_OWNERS),
    (ShampooOfOwners, "ddp", 2, 1, "over a mesh of its own"),
]


@pytest.mark.parametrize(
    ("make", "kind", "before", "after", "message"),
    mostly_long(REFUSED, [REFUSED[2], REFUSED[6], REFUSED[8]]),
)
def test_what_cannot_be_resharded_is_refused(
    gang: Gang, tmp_path: Path, make: Make, kind: str, before: int, after: int, message: str
) -> None:
    path = str(tmp_path / "saved")
    gang.run(start, path, make, kind, world=before)
    for outcome in gang.run_outcomes(go_on, path, make, kind, False, world=after):
        assert isinstance(outcome.exception, sw.ShardwiseError), outcome
        assert message in str(outcome.exception)


def from_one_rank(path: str) -> None:
    """No rank knows which parameters it owns: all get all state, of which they step a part."""
    model = model_of("ddp", 1)
    optimizer = MuonOfOwners(model)
    state = {"model": model, "optimizer": optimizer}
    sw.load(path, state)
    train(model, optimizer, range(3, 4))
    sw.save(f"{path}-again", state, check_replicas=True)


def test_state_that_its_owner_alone_has_stepped_is_found(gang: Gang, tmp_path: Path) -> None:
    path = str(tmp_path / "saved")
    gang.run(start, path, MuonOfOwners, "ddp", world=1)
    for outcome in gang.run_outcomes(from_one_rank, path, world=2):
        assert isinstance(outcome.exception, sw.MismatchError), outcome
        assert "momentum_buffer" in str(outcome.exception)
