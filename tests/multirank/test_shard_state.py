"""State of optimizers that belongs to a shard: plain tensors, also of one element."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import shardwise as sw
from tests.breadth import mostly_long
from tests.tools.gang import Gang


class Local(Optimizer):
    """Keeps plain tensors for the local tensors of its parameters, of all sizes.

    Args:
        differs: whether the values of ranks differ.
    """

    def __init__(self, parameters: Any, *, differs: bool = True) -> None:
        super().__init__(parameters, {"lr": 0.5})
        self.differs = differs

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            own = 1.0 + (dist.get_rank() if self.differs else 0)
            if isinstance(parameter, DTensor) and self.differs:  # replicas are equal
                own = 1.0 + parameter.device_mesh.get_coordinate()[-1]
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["moment"] = torch.zeros_like(local)
                state["scale"] = torch.tensor(own)
                state["one"] = torch.full((1,), own)
                state["deep"] = {"bits": torch.tensor(int(own), dtype=torch.int8)}
                if isinstance(parameter, DTensor):
                    state["rows"] = torch.full((local.shape[0] + 2, 3), own)
                    state["listed"] = [torch.tensor(own), torch.full((2, 2), own)]
            state["step"] += 1
            state["scale"] *= 2
            state["moment"].add_(state["scale"]).add_(local)
            local.add_(state["moment"])


def model(kind: str, rows: int = 4) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, rows), nn.Linear(rows, 5))
    world = dist.get_world_size()
    if kind == "fsdp2":
        fully_shard(made)
    elif kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(made, mesh=mesh)
    elif kind == "fsdp1":
        made = FullyShardedDataParallel(made, use_orig_params=True, device_id=torch.device("cpu"))
    return made


def run(kind: str, rows: int, *, differs: bool = True) -> dict[str, Any]:
    made = model(kind, rows)
    return {"model": made, "optimizer": Local(made.parameters(), differs=differs)}


def seen(state: dict[str, Any]) -> list[Any]:
    found: list[Any] = []

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                found.append(key)
                add(value[key])
        elif isinstance(value, list):
            for each in value:
                add(each)
        else:
            assert type(value) in (torch.Tensor, nn.Parameter), type(value)
            found.append((value.dtype, tuple(value.shape), value.tolist()))

    for parameter in state["model"].parameters():
        local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
        add(local.detach())
        if not isinstance(parameter, DTensor) and not local.numel():
            continue  # FSDP1's optimizers have no use for the state of a part without elements
        add(dict(state["optimizer"].state.get(parameter, {})))
    return found


def resume(path: str, kind: str, rows: int, differs: bool) -> None:
    first = run(kind, rows, differs=differs)
    first["optimizer"].step()
    for i in range(2):  # the second save of a run has a plan already
        place = f"{path}/{i}"
        sw.save(place, first)
        fresh = run(kind, rows, differs=differs)
        sw.load(place, fresh)
        assert seen(fresh) == seen(first)
        sw.load(place, fresh)  # into state that exists
        assert seen(fresh) == seen(first)
        fresh["optimizer"].step()
        first["optimizer"].step()
        assert seen(fresh) == seen(first)


@pytest.mark.parametrize(
    ("kind", "world", "rows", "differs"),
    mostly_long(
        [
            ("fsdp2", 2, 4, True),
            ("fsdp2", 2, 1, True),
            ("fsdp2", 2, 1, False),
            ("fsdp2", 1, 1, True),
            ("fsdp1", 2, 4, True),
            ("hsdp", 4, 3, True),
        ],
        [
            ("fsdp2", 2, 1, True),
            ("fsdp2", 2, 1, False),
            ("fsdp1", 2, 4, True),
            ("hsdp", 4, 3, True),
        ],
    ),
)
def test_it_comes_back_to_its_shard(
    gang: Gang, tmp_path: Path, kind: str, world: int, rows: int, differs: bool
) -> None:
    gang.run(resume, str(tmp_path), kind, rows, differs, world=world)


def save_twice(path: str) -> None:
    """Save with a Checkpointer, which keeps its plans: each shard has its values in each save."""
    state = run("fsdp2", 4)
    with sw.Checkpointer(path, save_every=1) as checkpointer:
        for step in range(3):
            state["optimizer"].step()
            checkpointer.save(step, state)
    for step in range(3):
        fresh = run("fsdp2", 4)
        sw.load(path, fresh, step=step)
        values = [each["scale"] for each in fresh["optimizer"].state.values()]
        assert {*map(float, values)} == {(1.0 + dist.get_rank()) * 2 ** (step + 1)}


def test_later_saves_keep_the_values_of_each_shard(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_twice, str(tmp_path), world=2)


class DivergingLater(Local):
    """Ranks have equal elements first, and different ones later."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, differs=False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            if state["step"] > 1:
                state["scale"] += dist.get_rank()


def save_and_diverge(path: str) -> None:
    made = model("fsdp2")
    optimizer = DivergingLater(made.parameters())
    with sw.Checkpointer(path, save_every=1) as checkpointer:
        for step in range(4):
            optimizer.step()
            handle = checkpointer.save(step, {"model": made, "optimizer": optimizer})
            assert handle is not None
            handle.result(60.0)
            expected = [float(each["scale"]) for each in optimizer.state.values()]
            fresh = model("fsdp2")
            other = DivergingLater(fresh.parameters())
            sw.load(path, {"model": fresh, "optimizer": other}, step=step)
            assert [float(each["scale"]) for each in other.state.values()] == expected, step
    assert expected == [16.0 + 7 * dist.get_rank()] * len(expected)


def test_elements_that_differ_later_are_kept(gang: Gang, tmp_path: Path) -> None:
    gang.run(save_and_diverge, str(tmp_path), world=2)


def save(path: str, differs: bool) -> None:
    state = run("fsdp2", 4, differs=differs)
    state["optimizer"].step()
    if not differs:
        for each in state["optimizer"].state.values():
            del each["rows"], each["listed"]
    sw.save(path, state)


def load(path: str, kind: str, skip: list[str]) -> list[Any]:
    state = run(kind, 4)
    sw.load(path, state, skip=skip)
    parameters = [*state["model"].parameters()]
    return [parameters[0].detach().sum().item(), state["optimizer"].state[parameters[0]]]


@pytest.mark.parametrize(
    ("kind", "world"), mostly_long([("plain", 1), ("fsdp2", 1), ("fsdp2", 4)], [("fsdp2", 4)])
)
def test_another_sharding_is_refused_with_what_to_do(
    gang: Gang, tmp_path: Path, kind: str, world: int
) -> None:
    gang.run(save, str(tmp_path), True, world=2)
    for outcome in gang.run_outcomes(load, str(tmp_path), kind, [], world=world):
        assert isinstance(outcome.exception, sw.MismatchError), outcome
        message = str(outcome.exception)
        assert "optimizer.0.weight.scale: the optimizer keeps this state for each shard" in message
        assert "skip=['optimizer.0.weight.scale@*']" in message
        assert "nothing was written" in message
    for key in ("one", "deep.bits", "rows"):
        assert f"optimizer.0.weight.{key}: the optimizer keeps" in message


@pytest.mark.parametrize(
    ("kind", "world"), mostly_long([("plain", 1), ("fsdp2", 4), ("fsdp2", 1)], [("fsdp2", 4)])
)
def test_equal_elements_are_shared_by_all_ranks(
    gang: Gang, tmp_path: Path, kind: str, world: int
) -> None:
    gang.run(save, str(tmp_path), False, world=2)
    names = sw.open(tmp_path).tensors()
    assert "optimizer.0.weight.scale" in names
    assert not [name for name in names if "@" in name]
    gang.run(load, str(tmp_path), kind, [], world=world)


def diverge(path: str, kind: str) -> None:
    """Adam's step is shared, unless the ranks count differently."""
    made = model(kind)
    optimizer = torch.optim.Adam(made.parameters())
    made(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["step"] += dist.get_rank()
    sw.save(path, {"model": made, "optimizer": optimizer})
    fresh = model(kind)
    other = torch.optim.Adam(fresh.parameters())
    sw.load(path, {"model": fresh, "optimizer": other})
    steps = {float(state["step"]) for state in other.state.values()}
    assert steps == {1.0 + dist.get_rank()}, steps


def test_steps_that_differ_are_kept(gang: Gang, tmp_path: Path) -> None:
    gang.run(diverge, str(tmp_path), "fsdp2", world=2)
