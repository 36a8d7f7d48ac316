"""Every optimizer goes on as if it had never stopped, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import shardwise as sw


class Nested(optim.Optimizer):
    """Keeps nested state, plain values in it, and no state for what has no gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                inner = state.setdefault("inner", {"sum": torch.zeros_like(parameter), "n": 0})
                inner["sum"].add_(parameter.grad)
                inner["n"] += 1
                state["mode"] = ["even", "odd"][inner["n"] % 2]
                parameter.data.sub_(inner["sum"] / (inner["n"] + len(state["mode"])))


MAKERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "AdamW": lambda p: optim.AdamW(p, amsgrad=True),
    "AdamW foreach": lambda p: optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, fused=True),
    "AdamW, lr as a tensor": lambda p: optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "Adam": optim.Adam,
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD without state": lambda p: optim.SGD(p, lr=0.1),
    "Adagrad": optim.Adagrad,
    "RMSprop": lambda p: optim.RMSprop(p, momentum=0.5, centered=True),
    "Adafactor": optim.Adafactor,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
    "Adadelta": optim.Adadelta,
    "ASGD": optim.ASGD,
    "Rprop": optim.Rprop,
    "LBFGS": lambda p: optim.LBFGS(p, max_iter=3),
    "nested": Nested,
}


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    made.register_parameter("unused", nn.Parameter(torch.ones(2)))
    return made


def train(module: nn.Module, optimizer: optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = module(inputs).pow(2).mean()
            loss.backward()
            return loss

        if isinstance(optimizer, (optim.LBFGS, Nested)):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    for (name, x), (_, y) in zip(a.state_dict().items(), b.state_dict().items(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh target", "stepped target"])
def test_it_goes_on_bit_for_bit(tmp_path: Path, name: str, stepped: bool) -> None:
    first = model()
    optimizer = MAKERS[name](first.parameters())
    train(first, optimizer, 3)
    sw.save(tmp_path, {"model": first, "optimizer": optimizer})
    train(first, optimizer, 2)
    second = model()
    other = MAKERS[name](second.parameters())
    if stepped:
        train(second, other, 1)
    sw.load(tmp_path, {"model": second, "optimizer": other})
    train(second, other, 2)
    assert_equal(first, second)


def test_state_goes_where_the_checkpoint_is_from_before_the_first_step(tmp_path: Path) -> None:
    module = model()
    optimizer = optim.AdamW(module.parameters())
    sw.save(tmp_path, {"model": module, "optimizer": optimizer})
    train(module, optimizer, 2)
    sw.load(tmp_path, {"model": module, "optimizer": optimizer})
    assert not optimizer.state


def test_hyperparameters_follow_names_not_positions(tmp_path: Path) -> None:
    module = model()
    weights, rest = [module[0].weight, module[2].weight], [module[0].bias, module[2].bias]
    groups = [{"params": weights, "lr": 0.1}, {"params": rest, "lr": 0.2, "weight_decay": 0.0}]
    sw.save(tmp_path, {"model": module, "optimizer": optim.AdamW(groups)})
    turned = optim.AdamW([{"params": rest[::-1]}, {"params": weights}])
    sw.load(tmp_path, {"model": module, "optimizer": turned})
    assert [group["lr"] for group in turned.param_groups] == [0.2, 0.1]
    assert [group["weight_decay"] for group in turned.param_groups] == [0.0, 0.01]
    mixed = optim.AdamW([*weights, *rest])
    with pytest.raises(sw.MismatchError, match="different lr"):
        sw.load(tmp_path, {"model": module, "optimizer": mixed})


def test_a_load_needs_no_hyperparameters_of_the_target(tmp_path: Path) -> None:
    saved, target = model(), model()
    optimizer = optim.SGD(saved.parameters(), lr=0.5)
    sw.save(tmp_path / "c", {"model": saved, "optimizer": optimizer})
    optimizer = optim.SGD(target.parameters(), lr=0.1)
    schedule = optimizer.param_groups[0]["schedule"] = lambda: 0.1
    with pytest.raises(sw.StateError, match="schedule"):
        sw.save(tmp_path / "other", {"model": target, "optimizer": optimizer})
    sw.load(tmp_path / "c", {"model": target, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["schedule"] is schedule


def test_several_optimizers_as_a_dict_and_as_a_list(tmp_path: Path) -> None:
    module = model()
    parts = [[module[0].weight, module[2].weight], [module[0].bias, module[2].bias]]
    made = [optim.SGD(parts[0], lr=0.1, momentum=0.9), optim.AdamW(parts[1])]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    for each in made:
        each.step()
    sw.save(tmp_path / "list", {"model": module, "optimizer": made})
    sw.save(tmp_path / "dict", {"model": module, "optimizer": {"a": made[0], "b": made[1]}})
    names = set(sw.open(tmp_path / "list"))
    assert "optimizer.0.weight.momentum_buffer" in names
    assert "optimizer.0.bias.exp_avg" in names
    assert "optimizer.b.0.bias.exp_avg" in set(sw.open(tmp_path / "dict"))
    others = [optim.SGD(parts[0], lr=1, momentum=0.9), optim.AdamW(parts[1])]
    sw.load(tmp_path / "list", {"model": module, "optimizer": others})
    for before, after in zip(made, others, strict=True):
        for parameter, state in before.state.items():
            for key, value in state.items():
                assert torch.equal(torch.as_tensor(after.state[parameter][key]), value)


def test_an_optimizer_without_its_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.StateError, match="put the module, or its engine, into the state"):
        sw.save(tmp_path, {"optimizer": optim.SGD(model().parameters(), lr=0.1)})


def test_an_optimizer_that_is_older_than_the_parameters_is_explained(tmp_path: Path) -> None:
    """FSDP2's `fully_shard` replaces the parameters of a module in the same way."""
    module = nn.Linear(2, 2)
    optimizer = optim.AdamW(module.parameters())
    module.weight = nn.Parameter(module.weight.detach().clone())
    with pytest.raises(sw.StateError, match=r"create the optimizer after .* such as fully_shard"):
        sw.save(tmp_path, {"model": module, "optimizer": optimizer})
