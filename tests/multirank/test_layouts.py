"""DTensors and modules of every placement: each rank's part is where it belongs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    _dtensor_spec,
    distribute_tensor,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import shardwise as sw
from shardwise.integrations import dcp
from tests.breadth import mostly_long
from tests.tools.gang import Gang

ShardOrderEntry: Any = getattr(_dtensor_spec, "ShardOrderEntry", None)

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


ORDERS: list[tuple[tuple[int, ...], tuple[Placement, ...], list[tuple[int, tuple[int, ...]]]]] = [
    ((2, 2), (Shard(0), Shard(0)), [(0, (1, 0))]),
    ((2, 2), (Shard(1), Shard(1)), [(1, (1, 0))]),
    ((1, 2, 2), (Shard(0), Shard(0), Shard(0)), [(0, (2, 0, 1))]),
    ((2, 1, 2), (Shard(0), Replicate(), Shard(0)), [(0, (2, 0))]),
    ((2, 2, 1), (Shard(2), Shard(2), Shard(0)), [(0, (2,)), (2, (1, 0))]),
]
SHAPES = [(8, 1, 1), (8, 4, 4), (7, 3, 5), (3, 1, 2), (1, 9, 9)]


def ordered(whole: torch.Tensor, case: int) -> DTensor:
    """Return a DTensor whose mesh dimensions split it in another order than from left to right."""
    mesh_shape, placements, order = ORDERS[case]
    mesh = init_device_mesh("cpu", mesh_shape)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    entries = tuple(ShardOrderEntry(dim, dims) for dim, dims in order)
    spec = DTensorSpec(mesh, placements, meta, shard_order=entries)
    replicated = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta)
    local = redistribute_local_tensor(whole, replicated, spec, use_graph_based_transform=True)
    return DTensor(local, spec, requires_grad=False)


def save_and_load_ordered(path: str, case: int) -> None:
    mesh = init_device_mesh("cpu", (4,))
    for shape in SHAPES:
        whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
        place = f"{path}/{'x'.join(map(str, shape))}"
        source = ordered(whole, case)
        assert torch.equal(source.full_tensor(), whole)
        sw.save(place, {"t": source})
        target = ordered(torch.zeros_like(whole), case)
        sw.load(place, {"t": target})
        assert torch.equal(target.full_tensor(), whole)
        other = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])
        sw.load(place, {"t": other})
        assert torch.equal(other.full_tensor(), whole)
        sw.save(f"{place}-other", {"t": other})
        sw.load(f"{place}-other", {"t": target.zero_()})
        assert torch.equal(target.full_tensor(), whole)


@pytest.mark.skipif(ShardOrderEntry is None, reason="torch 2.9 knows no order of shards")
@pytest.mark.parametrize("case", mostly_long(range(len(ORDERS)), [1]))
def test_every_order_of_shards(gang: Gang, tmp_path: Path, case: int) -> None:
    gang.run(save_and_load_ordered, str(tmp_path), case, world=4)
    for shape in SHAPES:
        whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
        read = sw.open(tmp_path / "x".join(map(str, shape)))["t"]
        assert isinstance(read, sw.SavedTensor)
        assert torch.equal(read[...], whole)


def save_ordered_files(path: str) -> None:
    torch.save({"t": ordered(tensor(), 0)}, f"{path}/model_world_size_4_rank_{dist.get_rank()}.pt")


@pytest.mark.skipif(ShardOrderEntry is None, reason="torch 2.9 knows no order of shards")
def test_files_of_ranks_keep_the_order_of_shards(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_ordered_files, str(tmp_path), world=4)
    (read,) = (each for each in sw.open(tmp_path).tensors().values())
    assert torch.equal(read[...], tensor())


STRIDED: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 1, 2), (_StridedShard(0, split_factor=2), Replicate(), Shard(0))),
    ((1, 2, 2), (_StridedShard(1, split_factor=2), Shard(1), Shard(0))),
    ((4,), (_StridedShard(0, split_factor=2),)),
    ((4,), (_StridedShard(0, split_factor=3),)),
    ((2, 2), (Shard(0), _StridedShard(0, split_factor=2))),
]


def save_strided(path: str) -> None:
    for i, (mesh, placements) in enumerate(STRIDED):
        whole = torch.arange(48 * 8).reshape(48, 8)
        source = distribute_tensor(whole, init_device_mesh("cpu", mesh), placements)
        sw.save(f"{path}/{i}", {"t": source, "whole": source.full_tensor()})


def test_strided_shards_are_where_torch_says(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_strided, str(tmp_path), world=4)
    for i in range(len(STRIDED)):
        opened = sw.open(tmp_path / str(i))
        read, whole = opened["t"], opened["whole"]
        assert isinstance(read, sw.SavedTensor)
        assert isinstance(whole, sw.SavedTensor)
        assert torch.equal(read[...], whole[...]), STRIDED[i]


def dcp_ordered(path: str) -> None:
    dcp.save({"model": {"t": ordered(torch.arange(8.0).reshape(8, 1, 1), 0)}}, checkpoint_id=path)


@pytest.mark.skipif(ShardOrderEntry is None, reason="torch 2.9 knows no order of shards")
def test_dcps_planner_does_not_know_the_order(gang: Gang, tmp_path: Path) -> None:
    for outcome in gang.run_outcomes(dcp_ordered, str(tmp_path), world=4):
        assert isinstance(outcome.exception, dcp.CheckpointError)
        assert "model.t: the planner of DCP takes this rank's part" in str(outcome.exception)


def on_a_part_of_the_ranks(path: str) -> None:
    """Ranks 2 and 3 are outside of the mesh; of 3 rows, rank 1 has the last one."""
    mesh = DeviceMesh("cpu", [0, 1])
    for rows in (3, 1):
        whole = torch.arange(rows * 2.0).reshape(rows, 2)
        made = distribute_tensor(whole, mesh, [Shard(0)])
        sw.save(f"{path}/{rows}", {"t": made})
        target = distribute_tensor(torch.zeros(rows, 2), mesh, [Shard(0)])
        sw.load(f"{path}/{rows}", {"t": target})
        assert torch.equal(target._local_tensor, made._local_tensor)


def test_a_mesh_without_some_ranks_and_shards_without_elements(gang: Gang, tmp_path: Path) -> None:
    gang.run(on_a_part_of_the_ranks, str(tmp_path), world=4)
    for rows in (3, 1):
        read = sw.open(tmp_path / str(rows))["t"]
        assert isinstance(read, sw.SavedTensor)
        assert torch.equal(read[...], torch.arange(rows * 2.0).reshape(rows, 2))


def save_conjugated(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.full((2,), 1 + 2j).conj()
    sw.save(path, {"t": DTensor.from_local(local, mesh, [Shard(0)])})


def test_a_conjugated_local_tensor_is_saved_right_or_refused(gang: Gang, tmp_path: Path) -> None:
    for outcome in gang.run_outcomes(save_conjugated, str(tmp_path), world=2):
        assert isinstance(outcome.exception, sw.StateError)
        assert "t: the local tensor of the DTensor is a conjugated" in str(outcome.exception)


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


@pytest.mark.parametrize("hidden", mostly_long([1, 2, 3, 7, 9, 10], [1, 3, 9]))
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
