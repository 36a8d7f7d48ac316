"""Tensors inside lists of an optimizer's state are tensors of the checkpoint, like all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

import shardwise as sw
from tests.adapters.test_optimizers import assert_equal
from tests.breadth import mostly_long
from tests.compat.golden import VERSION_1_LBFGS
from tests.tools.gang import Gang


class Factored(optim.Optimizer):
    """Keeps a list of factors for each parameter, as Shampoo and SOAP do."""

    def __init__(self, parameters: Any, kind: type = list) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.kind = kind

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                gradient = parameter.grad
                if not state:
                    factors = [torch.zeros(n, n, dtype=torch.float64) for n in gradient.shape]
                    state["factors"] = self.kind(factors)
                    state["deep"] = [{"a": (torch.zeros_like(parameter), None), "n": 0}]
                for dim, factor in enumerate(state["factors"]):
                    rows = gradient.transpose(0, dim).reshape(len(factor), -1).double()
                    factor += rows @ rows.T
                state["deep"][0]["a"][0].add_(gradient)
                state["deep"][0]["n"] += 1
                scale = sum(factor.trace() for factor in state["factors"]).to(gradient.dtype)
                parameter -= group["lr"] * state["deep"][0]["a"][0] / (1 + scale)


def large(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(1000, 1000)  # 1 M parameters: with a history of 20, 160 MB


def train(module: nn.Module, optimizer: Any, steps: range) -> None:
    size = next(iter(module.parameters())).shape[-1]
    for step in steps:
        inputs = torch.randn(4, size, generator=torch.Generator().manual_seed(step))

        def closure(inputs: torch.Tensor = inputs) -> Any:
            optimizer.zero_grad()
            loss = (module(inputs) - inputs.sum()).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


@pytest.mark.parametrize("steps_before", mostly_long([0, 1, 5], [5]))
def test_lbfgs_of_a_million_parameters_goes_on(tmp_path: Path, steps_before: int) -> None:
    def make(seed: int) -> tuple[nn.Module, optim.LBFGS]:
        module = large(seed)
        return module, optim.LBFGS(module.parameters(), max_iter=4, history_size=10)

    first, optimizer = make(0)
    train(first, optimizer, range(3))
    sw.save(tmp_path, {"model": first, "optimizer": optimizer})
    train(first, optimizer, range(3, 5))
    second, other = make(1)
    train(second, other, range(10, 10 + steps_before))
    report = sw.load(tmp_path, {"model": second, "optimizer": other})
    assert not report.missing
    assert not report.unexpected
    train(second, other, range(3, 5))
    assert_equal(first, second)
    saved = sw.open(tmp_path)
    assert saved["optimizer.weight.old_dirs.0"].shape == (1001000,)
    assert len((tmp_path / "manifest.json").read_bytes()) < 100_000


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_factors_go_on(tmp_path: Path, kind: type, steps_before: int) -> None:
    def make(seed: int) -> tuple[nn.Module, Factored]:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 5))
        return module, Factored(module.parameters(), kind)

    first, optimizer = make(0)
    train(first, optimizer, range(3))
    sw.save(tmp_path, {"model": first, "optimizer": optimizer})
    train(first, optimizer, range(3, 5))
    second, other = make(1)
    train(second, other, range(steps_before))
    sw.load(tmp_path, {"model": second, "optimizer": other})
    state = other.state[second[0].weight]
    assert type(state["factors"]) is kind
    assert state["deep"][0]["n"] == 3
    assert state["deep"][0]["a"][1] is None
    train(second, other, range(3, 5))
    assert_equal(first, second)
    assert isinstance(sw.open(tmp_path)["optimizer.0.weight.factors.0"], sw.SavedTensor)
    assert isinstance(sw.open(tmp_path)["optimizer.0.weight.deep.0.a.0"], sw.SavedTensor)


def test_a_value_and_its_tensors_are_selected_together(tmp_path: Path) -> None:
    def make(steps: int) -> dict[str, Any]:
        torch.manual_seed(steps)
        module = nn.Linear(5, 5)
        optimizer = Factored(module.parameters())
        train(module, optimizer, range(steps))
        return {"model": module, "optimizer": optimizer}

    saved = make(3)
    sw.save(tmp_path, saved)
    target = make(1)
    weight = target["model"].weight
    before = [factor.clone() for factor in target["optimizer"].state[weight]["factors"]]
    sw.load(tmp_path, target, skip=["*.factors.0"])
    for a, b in zip(before, target["optimizer"].state[weight]["factors"], strict=True):
        assert torch.equal(a, b)
    assert target["optimizer"].state[weight]["deep"][0]["n"] == 3
    sw.load(tmp_path, target, only=["optimizer.*.factors"])
    expected = saved["optimizer"].state[saved["model"].weight]["factors"]
    for a, b in zip(expected, target["optimizer"].state[weight]["factors"], strict=True):
        assert torch.equal(a, b)


def test_names_may_change(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Linear(5, 5)
    optimizer = Factored(module.parameters())
    train(module, optimizer, range(3))
    values = [torch.ones(2), {"a": torch.zeros(3)}]
    sw.save(tmp_path, {"model": module, "optimizer": optimizer, "values": values})
    other = Factored(module.parameters())
    state: dict[str, Any] = {"net": module, "opt": other, "list": None}
    sw.load(tmp_path, state, rename={"net": "model", "opt": "optimizer", "list": "values"})
    assert torch.equal(state["list"][1]["a"], values[1]["a"])  # type: ignore[index, call-overload]
    for parameter in module.parameters():
        pairs = zip(
            optimizer.state[parameter]["factors"], other.state[parameter]["factors"], strict=True
        )
        assert all(torch.equal(a, b) for a, b in pairs)


def test_checkpoints_with_inline_tensors_stay_readable() -> None:
    """The checkpoint was saved before such tensors got names of their own."""
    torch.manual_seed(0)
    module = nn.Linear(3, 1)
    optimizer = optim.LBFGS(module.parameters())
    sw.load(VERSION_1_LBFGS, {"model": module, "optimizer": optimizer})
    state = optimizer.state[module.weight]
    assert [each.tolist() for each in state["old_dirs"]] == [[1.0, 2.0, 3.0, 4.0], [0.5] * 4]
    assert [each.tolist() for each in state["ro"]] == [0.25, 0.125]
    assert state["al"][0] is None


def go_on_sharded(place: str) -> None:
    def make() -> tuple[Any, Factored]:
        torch.manual_seed(0)
        module = fully_shard(nn.Linear(8, 8, bias=False))
        return module, Factored(module.parameters())

    module, optimizer = make()
    (weight,) = module.parameters()
    optimizer.state[weight] = {
        "deep": [{"a": (weight.detach() * 2, None), "n": 1}, torch.tensor(3.0)],
        "local": (weight.detach().to_local() * 3,),
    }
    sw.save(place, {"model": module, "optimizer": optimizer})
    fresh, other = make()
    sw.load(place, {"model": fresh, "optimizer": other})
    (loaded,) = fresh.parameters()
    state = other.state[loaded]
    assert torch.equal(state["deep"][0]["a"][0].full_tensor(), weight.detach().full_tensor() * 2)
    assert float(state["deep"][1]) == 3
    whole = sw.open(place)["optimizer.weight.local.0"].tensor()
    assert torch.equal(whole, weight.detach().full_tensor() * 3)


def test_shards_inside_of_lists(tmp_path: Path, gang: Gang) -> None:
    gang.run(go_on_sharded, str(tmp_path), world=2)
