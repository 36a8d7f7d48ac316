"""Optimizers that hold other optimizers: no state inside is lost, or the save is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import (
    PostLocalSGDOptimizer,
    ZeroRedundancyOptimizer,
    _NamedOptimizer,
)
from torch.optim import Optimizer

import shardwise as sw
from tests.adapters.test_optimizers import assert_equal, model, train
from tests.tools.gang import Gang


class Outer(optim.Optimizer):
    """Only passes on each step."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self) -> None:  # type: ignore[override]
        self.inner.step()


class SharpnessAware(optim.Optimizer):
    """Keeps state of its own, beside that of the optimizer inside, as many SAM optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base = {"base": optim.AdamW(self.param_groups)}

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    old = self.state[parameter].get("old", 0)
                    parameter.grad.add_(old, alpha=group["rho"])
                    self.state[parameter]["old"] = parameter.detach().clone()
        self.base["base"].step()

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.base["base"].param_groups = self.param_groups


class Split(optim.Optimizer):
    """Gives each parameter to one of two optimizers, in a helper object."""

    def __init__(self, parameters: Any) -> None:
        tensors = [*parameters]
        self.helper = type("Helper", (), {})()
        self.helper.parts = [
            optim.AdamW([each for each in tensors if each.dim() > 1]),
            optim.SGD([each for each in tensors if each.dim() == 1], lr=0.1, momentum=0.9),
        ]
        super().__init__([g for part in self.helper.parts for g in part.param_groups], {})

    def step(self) -> None:  # type: ignore[override]
        for part in self.helper.parts:
            part.step()


class Leaky(Outer):
    """Has a state_dict of its own, which leaves out the optimizer inside."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "version": 1}


class Nested(Outer):
    """Returns the state dict of the optimizer inside under a key, and a tuple as another key."""

    slow = 0.0

    def step(self) -> None:  # type: ignore[override]
        self.slow += 1.5
        super().step()

    def state_dict(self) -> Any:
        return {"base": self.inner.state_dict(), "own": {(0, 1): torch.tensor(self.slow)}}

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict["base"])
        self.slow = float(state_dict["own"][0, 1])


def named(module: nn.Module) -> Any:
    make: Any = _NamedOptimizer
    made = make(module.named_parameters(), optim.AdamW, None, lr=0.01)
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    vars(made).update({"defaults": {}, **{each: {} for each in hooks}})  # which torch leaves out
    return made


def prepared_by_accelerate(module: nn.Module) -> Any:
    accelerate = pytest.importorskip(
        "accelerate", reason="accelerate is not installed (frameworks)"
    )
    return accelerate.Accelerator(cpu=True).prepare(optim.AdamW(module.parameters()))


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "outer": lambda m: Outer(optim.AdamW(m.parameters())),
    "outer twice": lambda m: Outer(Outer(optim.AdamW(m.parameters()))),
    "own state": lambda m: SharpnessAware(m.parameters()),
    "two inside": lambda m: Split(m.parameters()),
    "nested dict": lambda m: Nested(optim.AdamW(m.parameters())),
    "accelerate": prepared_by_accelerate,
    "named": lambda m: named(m),
}


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh target", "stepped target"])
@pytest.mark.parametrize("name", MAKERS)
def test_what_is_inside_goes_on(tmp_path: Path, name: str, stepped: bool) -> None:
    first, second = model(), model()
    optimizer, other = MAKERS[name](first), MAKERS[name](second)
    train(first, optimizer, 3)
    sw.save(tmp_path, {"model": first, "optimizer": optimizer})
    train(first, optimizer, 2)
    if stepped:
        train(second, other, 1)
    sw.load(tmp_path, {"model": second, "optimizer": other})
    train(second, other, 2)
    assert_equal(first, second)
    if isinstance(other, Nested):
        assert other.slow == 7.5


@pytest.mark.parametrize("name", MAKERS)
def test_schedulers_of_a_wrapper_change_the_rates_inside(tmp_path: Path, name: str) -> None:
    def make() -> tuple[Any, Any, Any]:
        module = model()
        optimizer = MAKERS[name](module)
        return module, optimizer, optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    (first, optimizer, schedule), (second, other, other_schedule) = make(), make()
    train(first, optimizer, 1)
    schedule.step()
    sw.save(tmp_path, {"model": first, "optimizer": optimizer, "schedule": schedule})
    sw.load(tmp_path, {"model": second, "optimizer": other, "schedule": other_schedule})
    for module, each, its_schedule in (
        (first, optimizer, schedule),
        (second, other, other_schedule),
    ):
        train(module, each, 1)
        its_schedule.step()
        train(module, each, 2)
    assert_equal(first, second)


def test_a_wrapper_and_what_is_inside_have_the_same_names(tmp_path: Path) -> None:
    first, second = model(), model()
    optimizer = Outer(optim.AdamW(first.parameters()))
    train(first, optimizer, 3)
    sw.save(tmp_path, {"model": first, "optimizer": optimizer})
    train(first, optimizer, 2)
    plain = optim.AdamW(second.parameters())
    sw.load(tmp_path, {"model": second, "optimizer": plain})
    train(second, plain, 2)
    assert_equal(first, second)


def test_state_that_state_dict_leaves_out_is_refused(tmp_path: Path) -> None:
    module = model()
    optimizer = Leaky(optim.AdamW(module.parameters()))
    train(module, optimizer, 1)
    with pytest.raises(sw.StateError, match=r"optimizer: the state_dict\(\) of this Leaky leaves"):
        sw.save(tmp_path, {"model": module, "optimizer": optimizer})


def test_other_settings_inside_are_refused(tmp_path: Path) -> None:
    module = model()
    inner = optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    optimizer = Outer(inner)
    optimizer.param_groups = [{**group, "lr": 0.2} for group in inner.param_groups]
    train(module, optimizer, 1)
    with pytest.raises(sw.StateError, match="have different lr"):
        sw.save(tmp_path, {"model": module, "optimizer": optimizer})


def sharded(rank_model: nn.Module, kind: str) -> tuple[Any, Any]:
    if kind == "zero":
        return rank_model, ZeroRedundancyOptimizer(
            rank_model.parameters(), optimizer_class=optim.AdamW, lr=0.03
        )
    inner = optim.AdamW(rank_model.parameters(), lr=0.03)
    return rank_model, PostLocalSGDOptimizer(inner, PeriodicModelAverager(2, 1))


def go_on(place: str, kind: str, save: bool) -> list[Any]:
    """Train as uninterrupted, and save in between; or load, and train."""
    module, optimizer = sharded(model(), kind)
    schedule = optim.lr_scheduler.ExponentialLR(
        optimizer if kind == "zero" else optimizer.optim, 0.5
    )
    state = {"model": module, "optimizer": optimizer, "schedule": schedule}
    if save:
        train(module, optimizer, 3)
        schedule.step()
        sw.save(place, state)
    else:
        sw.load(place, state)
    train(module, optimizer, 2)
    extra = optimizer.averager.step if kind != "zero" else optimizer.optim.param_groups[0]["lr"]
    if kind == "zero":
        assert len(optimizer.optim.state) < len([*module.parameters()]) or dist.get_world_size() < 2
    return [[each.tolist() for each in module.state_dict().values()], extra]


@pytest.mark.parametrize("kind", ["zero", "post-local SGD"])
@pytest.mark.parametrize("worlds", [(2, 2), (2, 1), (1, 2)])
def test_torchs_own_wrappers_go_on(
    tmp_path: Path, gang: Gang, kind: str, worlds: tuple[int, int]
) -> None:
    saving, loading = worlds
    expected = gang.run(go_on, str(tmp_path), kind, True, world=saving)[0]
    for got in gang.run(go_on, str(tmp_path), kind, False, world=loading):
        assert got == expected


def load_into_plain(place: str) -> Any:
    module = model()
    optimizer = optim.AdamW(module.parameters())
    sw.load(place, {"model": module, "optimizer": optimizer})
    train(module, optimizer, 2)
    return [each.tolist() for each in module.state_dict().values()]


def test_zero_has_the_names_of_a_plain_optimizer(tmp_path: Path, gang: Gang) -> None:
    expected = gang.run(go_on, str(tmp_path), "zero", True, world=2)[0]
    names = set(sw.open(tmp_path))
    assert {"optimizer.0.weight.exp_avg", "optimizer.2.bias.step"} <= names
    assert gang.run(load_into_plain, str(tmp_path), world=1)[0] == expected[0]
