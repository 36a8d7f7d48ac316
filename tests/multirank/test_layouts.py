"""DTensors and modules of every placement: each rank's part is where it belongs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise as sw
from tests.tools.gang import Gang

MESHES: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((2, 2), (Shard(0), Shard(1))),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (Replicate(), Shard(1))),
    ((1, 2, 2), (Replicate(), Shard(1), Shard(0))),
    ((2, 1, 2), (Shard(2), Shard(0), Replicate())),
]


def tensor() -> torch.Tensor:
    return torch.arange(7 * 3 * 5, dtype=torch.float64).reshape(7, 3, 5)


def save_and_load_each(path: str) -> None:
    """Save under each mesh, load under each other."""
    made = [
        distribute_tensor(tensor(), init_device_mesh("cpu", shape), placements)
        for shape, placements in MESHES
    ]
    for i, source in enumerate(made):
        sw.save(f"{path}/{i}", {"t": source})
        for other in made:
            target = torch.zeros_like(other)
            sw.load(f"{path}/{i}", {"t": target})
            assert torch.equal(target.to_local(), other.to_local())


def test_every_mesh_loads_under_every_other(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_and_load_each, str(tmp_path), world=4)
    for i in range(len(MESHES)):
        read = sw.open(tmp_path / str(i))["t"]
        assert isinstance(read, sw.SavedTensor)
        assert torch.equal(read[...], tensor())


def save_partial(path: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sw.save(path, {"t": DTensor.from_local(torch.ones(2), mesh, [Partial()])})


def test_a_pending_sum_is_refused_with_its_reason(gang: Gang, tmp_path: Path) -> None:
    for outcome in gang.run_outcomes(save_partial, str(tmp_path), world=2):
        assert isinstance(outcome.exception, sw.StateError)
        assert "partial sums" in str(outcome.exception)


def save_wrong_local_shape(path: str, numel: int) -> None:
    """Each rank has a row, but the placement says that it has a column."""
    world = dist.get_world_size()
    mesh, row = init_device_mesh("cpu", (world,)), torch.ones(1, numel)
    shape = torch.Size((world, world))
    tensor = DTensor.from_local(row, mesh, [Shard(1)], shape=shape, stride=(world, 1))
    sw.save(path, {"good": torch.ones(2), "wrong": tensor})


@pytest.mark.parametrize("numel", [2, 3])
def test_a_local_tensor_of_another_shape_is_refused(gang: Gang, tmp_path: Path, numel: int) -> None:
    for outcome in gang.run_outcomes(save_wrong_local_shape, str(tmp_path), numel, world=2):
        assert isinstance(outcome.exception, sw.RankError | sw.LayoutError), outcome
        said = f"wrong: the local tensor has shape [1, {numel}]"
        assert said in str(outcome.exception)
        assert "has the shape [2, 1]" in str(outcome.exception)


class TwoLayers(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(5, hidden)
        self.down = nn.Linear(hidden, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x))
        return out


def save_uneven(path: str, hidden: int) -> None:
    """FSDP over tensor parallelism, where nothing divides evenly."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    module = TwoLayers(hidden)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(module, mesh["tensor"], plan)
    fully_shard(module, mesh=mesh["data"])
    sw.save(path, {"model": module})


@pytest.mark.parametrize("hidden", [1, 2, 3, 7, 9, 10])
def test_uneven_fsdp_over_tensor_parallel(gang: Gang, tmp_path: Path, hidden: int) -> None:
    gang.run(save_uneven, str(tmp_path), hidden, world=4)
    loaded = TwoLayers(hidden)
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    sw.load(tmp_path, {"model": loaded})
    for (name, got), (_, expected) in zip(
        loaded.named_parameters(), TwoLayers(hidden).named_parameters(), strict=True
    ):
        assert torch.equal(got, expected), name


EXPERTS = 8


def experts(names: list[int]) -> nn.ModuleDict:
    made = nn.ModuleDict()
    for i in names:
        torch.manual_seed(i)
        made[str(i)] = nn.Linear(3, 3)
    return made


def save_experts(path: str) -> None:
    """Experts by their global names, some on each rank; and stacked, on a mesh of their own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = list(range(rank, EXPERTS, world))
    model = nn.ModuleDict({"experts": experts(mine), "router": experts([99])})
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "expert"))
    stacked = torch.arange(float(EXPERTS * 6)).reshape(EXPERTS, 2, 3)
    sw.save(
        path,
        {
            "model": model,
            "optimizer": optimizer,
            "stacked": distribute_tensor(stacked, mesh["expert"], [Shard(0)]),
        },
    )


def load_experts(path: str) -> None:
    """On fewer ranks, with other experts on each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = list(range(EXPERTS // world * rank, EXPERTS // world * (rank + 1)))
    model = nn.ModuleDict({"experts": experts(mine), "router": experts([99])})
    optimizer = torch.optim.AdamW(model.parameters())
    stacked = torch.zeros(EXPERTS, 2, 3)
    sw.load(path, {"model": model, "optimizer": optimizer, "stacked": stacked})
    assert torch.equal(stacked, torch.arange(float(EXPERTS * 6)).reshape(EXPERTS, 2, 3))
    reference = nn.ModuleDict({"experts": experts(mine), "router": nn.ModuleDict()})
    expected = torch.optim.AdamW(reference.parameters())
    for parameter in reference.parameters():
        parameter.grad = parameter.detach().clone()
    expected.step()
    for i in mine:
        got, want = model["experts"][str(i)], reference["experts"][str(i)]
        assert torch.equal(got.weight, want.weight)
        for key, value in expected.state[want.weight].items():
            assert torch.equal(optimizer.state[got.weight][key], value)


def test_experts_move_to_other_ranks(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_experts, str(tmp_path), world=4)
    gang.run(load_experts, str(tmp_path), world=2)
    gang.run(load_experts, str(tmp_path), world=1)
