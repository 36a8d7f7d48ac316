"""What is seen of DeepSpeed by its names alone: tests that do without it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim

import shardwise as sw


class Counting(optim.Optimizer):
    """Adam as others than torch have it: bias correction is a setting."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        settings = {"lr": lr, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8}
        super().__init__(parameters, settings | {"weight_decay": 0.01})

    def counted(self, group: dict[str, Any], state: dict[str, Any]) -> int:
        """Of what step this is; called once for each parameter."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    zeros = torch.zeros_like(parameter)
                    state.update(exp_avg=zeros, exp_avg_sq=zeros.clone())
                count = self.counted(group, state)
                state["exp_avg"].lerp_(parameter.grad, 1 - first)
                state["exp_avg_sq"].lerp_(parameter.grad**2, 1 - second)
                mean = state["exp_avg"] / (1 - first**count)
                spread = (state["exp_avg_sq"] / (1 - second**count)).sqrt()
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * mean / (spread + group["eps"]))


class PlainCount(Counting):
    """As DeepSpeed has it: the count is a number of each parameter."""

    def counted(self, group: dict[str, Any], state: dict[str, Any]) -> int:
        group["step"] = 0
        state["step"] = state.get("step", 0) + 1
        assert type(state["step"]) is int
        return int(state["step"])


class GroupCount(Counting):
    """As Transformer Engine and Apex have it: the count is one of the group."""

    def counted(self, group: dict[str, Any], state: dict[str, Any]) -> int:
        assert "step" not in state
        assert type(group["step"]) is int
        return int(group["step"])


PlainCount.__module__ = "deepspeed.ops.adam.fused_adam"
GroupCount.__module__ = "apex.optimizers.fused_adam"


def adamw(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.1, foreach=False)


def trained(kind: Any, seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    state = {"model": model, "optimizer": kind(model.parameters())}
    return go_on(state, range(steps))


def go_on(state: dict[str, Any], steps: range) -> dict[str, Any]:
    for step in steps:
        state["optimizer"].zero_grad()
        inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        state["model"](inputs).square().sum().backward()
        state["optimizer"].step()
    return state


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("target", [adamw, PlainCount, GroupCount])
@pytest.mark.parametrize("source", [adamw, PlainCount, GroupCount])
def test_counts_are_kept_as_each_optimizer_keeps_them(
    tmp_path: Path, source: Any, target: Any, steps: int
) -> None:
    saved = trained(source, seed=0, steps=3)
    sw.save(tmp_path / "c", saved)
    assert sw.open(tmp_path / "c")["optimizer.weight.step"][...].dtype == torch.float32
    state = trained(target, seed=1, steps=steps)
    sw.load(tmp_path / "c", state)
    kept = state["optimizer"].param_groups if target is GroupCount else state["optimizer"].state
    counts = kept if target is GroupCount else kept.values()
    assert {int(each["step"]) for each in counts} == {3}
    go_on(saved, range(3, 6))
    go_on(state, range(3, 6))
    torch.testing.assert_close(state["model"].weight, saved["model"].weight)


def test_a_count_of_a_group_goes_back_to_none(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", trained(GroupCount, seed=0, steps=0))
    state = trained(GroupCount, seed=1, steps=2)
    sw.load(tmp_path / "c", state)
    assert [group.get("step") for group in state["optimizer"].param_groups] == [None]


class DeepSpeedOptimizer:
    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("it is not asked")

    load_state_dict = state_dict


class Unheard(DeepSpeedOptimizer):
    optimizer: Any = None


class DeepSpeedEngine(nn.Module):
    """No more than what tells whether it is known."""

    optimizer: Any = None
    has_moe_layers = False
    mp_world_size = 1
    global_steps = global_samples = skipped_steps = 0

    def __init__(self, **differing: Any) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        for key, value in differing.items():
            setattr(self, key, value)

    def autotp_size(self) -> int:
        return 1


DeepSpeedOptimizer.__module__ = "deepspeed.runtime.base_optimizer"
DeepSpeedEngine.__module__ = "deepspeed.runtime.engine"


@pytest.fixture(autouse=True)
def _imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))


def adamw_with(**differing: Any) -> optim.Optimizer:
    optimizer = adamw([nn.Parameter(torch.ones(2))])
    for key, value in differing.items():
        setattr(optimizer, key, value)
    return optimizer


@pytest.mark.parametrize(
    ("differing", "said"),
    [
        ({"has_moe_layers": True}, "experts"),
        ({"mp_world_size": 2}, "tensor parallelism"),
        ({"optimizer": Unheard()}, "its optimizer Unheard"),
        ({"optimizer": adamw_with(swap_optimizer=True)}, "NVMe"),
        ({"optimizer": adamw_with(backup_optimizer=None)}, "in part"),
    ],
)
def test_an_engine_of_an_unknown_kind_is_refused(
    tmp_path: Path, differing: dict[str, Any], said: str
) -> None:
    with pytest.raises(sw.StateError, match=f"model: .*{said}"):
        sw.save(tmp_path / "c", {"model": DeepSpeedEngine(**differing)})


def test_an_optimizer_that_wraps_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.StateError, match="optimizer: Unheard wraps no torch optimizer"):
        sw.save(tmp_path / "c", {"optimizer": Unheard()})


def test_a_module_without_its_engine_is_refused(tmp_path: Path) -> None:
    engine = DeepSpeedEngine()
    engine.module.weight._hp_mapping = SimpleNamespace()
    with pytest.raises(sw.StateError, match=r'model: .*"model": engine'):
        sw.save(tmp_path / "c", {"model": engine.module})


def test_an_optimizer_that_the_engine_emptied_is_refused(tmp_path: Path) -> None:
    engine = DeepSpeedEngine()
    engine.optimizer = adamw(engine.module.parameters())
    engine.optimizer.param_groups[0]["params"] = []  # as ZeRO 3 does
    with pytest.raises(sw.StateError, match=r"put engine\.optimizer"):
        sw.save(tmp_path / "c", {"model": engine, "optimizer": engine.optimizer})


def test_two_engines_need_a_dict_each(tmp_path: Path) -> None:
    with pytest.raises(sw.StateError, match=r"b: a is another .* engine .* separate dict"):
        sw.save(tmp_path / "c", {"a": DeepSpeedEngine(), "b": DeepSpeedEngine()})
    with pytest.raises(sw.StateError, match=r"model: a list has .* separate dict"):
        sw.save(tmp_path / "c", {"model": [DeepSpeedEngine(), DeepSpeedEngine()]})
    sw.save(tmp_path / "of-one", {"model": [DeepSpeedEngine()]})
    assert "deepspeed.global_steps" in sw.open(tmp_path / "of-one")
    actors = {key: {"model": DeepSpeedEngine()} for key in ("actor", "critic")}
    sw.save(tmp_path / "c", actors)
    assert "critic.deepspeed.global_steps" in sw.open(tmp_path / "c")


def test_counts_that_a_checkpoint_lacks_stay(tmp_path: Path) -> None:
    engine = DeepSpeedEngine(global_steps=3)
    sw.save(tmp_path / "c", {"model": nn.Linear(2, 2)})
    sw.load(tmp_path / "c", {"model": engine})
    assert engine.global_steps == 3


def test_what_is_no_count_is_refused(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"model": nn.Linear(2, 2), "deepspeed": {"global_steps": "many"}})
    with pytest.raises(
        sw.StateError,
        match=r"deepspeed\.global_steps: expected an integer in the checkpoint, found 'many'",
    ):
        sw.load(tmp_path / "c", {"model": DeepSpeedEngine()})
