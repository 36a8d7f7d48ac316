"""Ranks that remember their states save the same bytes as ranks that do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise as sw
from tests.breadth import mostly_long
from tests.checkpointer.test_prepared_state import contents, step
from tests.tools.gang import Gang

State = dict[str, Any]


class Summed:
    """A value whose `state_dict` is a collective."""

    def state_dict(self) -> State:
        total = torch.ones(1)
        dist.all_reduce(total)
        return {"total": total.item()}

    def load_state_dict(self, state: State) -> None:
        pass


def fsdp(model: nn.Module) -> None:
    for layer in model.children():
        fully_shard(layer)
    fully_shard(model)


def tensor_parallel(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})


def hybrid(model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)


WAYS: dict[str, Callable[[nn.Module], None]] = {
    "fsdp": fsdp,
    "tp": tensor_parallel,
    "hsdp": hybrid,
}


def make_state(way: str) -> State:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3), nn.LayerNorm(3))
    WAYS[way](model)
    optimizer = torch.optim.AdamW(model.parameters())
    step(optimizer)
    rank = dist.get_rank()
    return {
        "model": model,
        "optimizer": optimizer,
        "own": sw.PerRank(rank),
        "epoch": 1,
        "sum": Summed(),
    }


def replace_local(state: State) -> None:
    weight = state["model"][0].weight
    weight._local_tensor = weight._local_tensor.clone() + 1


def other_placement(state: State) -> None:
    moments = state["optimizer"].state[state["model"][0].weight]
    held = moments["exp_avg"]
    moments["exp_avg"] = distribute_tensor(held.full_tensor(), held.device_mesh)


def placements_in_place(state: State) -> None:
    spec = state["optimizer"].state[state["model"][0].weight]["exp_avg"]._spec
    spec.placements = (*reversed(spec.placements),)


def replace_moment_of_one(state: State) -> None:
    if dist.get_rank() == 1:
        moments = state["optimizer"].state[state["model"][0].weight]
        moments["exp_avg"] = moments["exp_avg"].clone()


def add_everywhere(state: State) -> None:
    state["new"] = torch.ones(2)


def add_on_one(state: State) -> None:
    if dist.get_rank() == 1:
        state["of_one"] = torch.ones(2)


def unsharded(state: State) -> None:
    for layer in state["model"]:
        if isinstance(layer, FSDPModule):
            layer.unshard()


CHANGES: dict[str, tuple[Callable[[State], object], tuple[int, ...]]] = {
    "nothing": (lambda state: None, ()),
    "a step": (lambda state: step(state["optimizer"]), ()),
    "a value": (lambda state: state.update(epoch=state["epoch"] + 1), ()),
    "local tensor": (replace_local, (0, 1)),
    "placement": (other_placement, (0, 1)),
    "placements in place": (placements_in_place, (0, 1)),
    "moment of one rank": (replace_moment_of_one, (1,)),
    "a tensor more": (add_everywhere, (0, 1)),
    "a tensor of one rank": (add_on_one, (1,)),
    "parameters in use": (unsharded, (0, 1)),
}
"""Changes, and which of the first two ranks must notice them."""


def save_after_each_change(root: str, way: str, name: str) -> None:
    change, noticed_by = CHANGES[name]
    state, rank = make_state(way), dist.get_rank()
    with sw.Checkpointer(f"{root}/run", memory=None, telemetry=False) as checkpointer:
        for number in range(1, 7):
            with torch.no_grad():
                if number in (3, 5):
                    change(state)
            handle = checkpointer.save(number, state)
            assert handle is not None
            if number in (2, 4, 6):
                assert handle.report.why_bound in ("", "the ranks plan this save anew")
            if number == 3 and rank < 2 and not (name == "parameters in use" and way == "tp"):
                assert bool(handle.report.why_bound) == (rank in noticed_by)
            sw.save(f"{root}/plain-{number}", state)
            if rank == 0:
                found = contents(Path(f"{root}/run/step-{number:08d}"))
                assert found == contents(Path(f"{root}/plain-{number}"))
            dist.barrier()


@pytest.mark.parametrize("name", [each for each in CHANGES if each != "placements in place"])
@pytest.mark.parametrize("way", mostly_long(["fsdp", "tp"], ["fsdp"]))
def test_two_ranks(way: str, name: str, gang: Gang, tmp_path: Path) -> None:
    gang.run(save_after_each_change, str(tmp_path), way, name, world=2)


@pytest.mark.parametrize(
    "name",
    mostly_long(
        ["a step", "placement", "placements in place", "moment of one rank"],
        ["placements in place"],  # test_two_ranks makes the other changes
    ),
)
def test_hybrid_sharding(name: str, gang: Gang, tmp_path: Path) -> None:
    gang.run(save_after_each_change, str(tmp_path), "hsdp", name, world=4)


def change_tensors(root: str) -> None:
    """DTensors that are items of the state: another mesh, other placements, another object."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0)
    state: State = {"t": distribute_tensor(whole, mesh, [Shard(0)])}
    made: list[Callable[[], DTensor]] = [
        lambda: state["t"],
        lambda: distribute_tensor(whole + 1, mesh, [Replicate()]),
        lambda: distribute_tensor(whole + 2, mesh, [Shard(0)]),
        lambda: distribute_tensor(whole + 3, init_device_mesh("cpu", (1, 2)), [Replicate()] * 2),
        lambda: state["t"],
    ]
    with sw.Checkpointer(f"{root}/run", memory=None, telemetry=False) as checkpointer:
        for number, make in enumerate(made):
            state["t"] = make()
            checkpointer.save(number, state)
            if dist.get_rank() == 0:
                saved = sw.open(f"{root}/run/step-{number:08d}")["t"]
                assert isinstance(saved, sw.SavedTensor)
                expected = state["t"].to_local() if number in (1, 3, 4) else None
                if expected is not None:
                    assert torch.equal(saved[...], expected)


def test_tensors_of_other_meshes(gang: Gang, tmp_path: Path) -> None:
    gang.run(change_tensors, str(tmp_path), world=2)
