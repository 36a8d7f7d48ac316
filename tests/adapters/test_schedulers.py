"""Schedules of the learning rate, and of the gradients' scale, go on where they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as schedules

import shardwise as sw
from tests.breadth import OLD_TORCH


class Warmup:
    """A callable with a state of its own, which LambdaLR saves."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return min(1.0, self.calls / 20)


def sequential(optimizer: optim.Optimizer) -> Any:
    warmup = schedules.LinearLR(optimizer, 0.1, total_iters=3)
    decay = schedules.CosineAnnealingLR(optimizer, 8)
    return schedules.SequentialLR(optimizer, [warmup, decay], [3])


def chained(optimizer: optim.Optimizer) -> Any:
    return schedules.ChainedScheduler(
        [schedules.ConstantLR(optimizer, 0.5, 4), schedules.ExponentialLR(optimizer, 0.9)]
    )


MAKERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "StepLR": lambda o: schedules.StepLR(o, 2),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 6, 8]),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 10),
    "warm restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.3, total_steps=20),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 9),
    "LambdaLR": lambda o: schedules.LambdaLR(o, Warmup()),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    # Before torch 2.10, its state_dict has a function, which is refused.
    **({} if OLD_TORCH else {"SWALR": lambda o: optim.swa_utils.SWALR(o, 0.05, 20)}),
    "sequential": sequential,
    "chained": chained,
}


def run(make: Callable[[optim.Optimizer], Any], lr: float) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 2 * lr}]
    optimizer = optim.SGD(groups, lr=lr, momentum=0.9)
    return {"model": model, "optimizer": optimizer, "scheduler": make(optimizer)}


def go_on(state: dict[str, Any], steps: int) -> list[list[float]]:
    """The learning rates, and the momentum that some schedules change with them."""
    rates = []
    for step in range(steps):
        state["model"](torch.ones(1, 2)).sum().backward()
        state["optimizer"].step()
        plateau = isinstance(state["scheduler"], schedules.ReduceLROnPlateau)
        state["scheduler"].step(*[float(step // 3)] if plateau else [])
        groups = state["optimizer"].param_groups
        rates.append([group[key] for group in groups for key in ("lr", "momentum")])
    return rates


@pytest.mark.parametrize("name", MAKERS)
def test_the_schedule_goes_on(tmp_path: Path, name: str) -> None:
    first, second = run(MAKERS[name], 0.1), run(MAKERS[name], 0.2)
    go_on(first, 5)
    sw.save(tmp_path, first)
    expected = go_on(first, 6)
    assert len({tuple(rates) for rates in expected}) > 1
    sw.load(tmp_path, second)
    assert go_on(second, 6) == expected


def test_the_scale_of_gradients_goes_on(tmp_path: Path) -> None:
    def scaler() -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def steps(scaler: torch.amp.GradScaler, gradients: list[float]) -> list[float]:
        scales = []
        for gradient in gradients:
            parameter = nn.Parameter(torch.zeros(1))
            optimizer = optim.SGD([parameter], lr=0.1)
            scaler.scale(parameter.sum() * gradient).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    first, second = scaler(), scaler()
    steps(first, [1, float("inf"), 1, 1])
    sw.save(tmp_path, {"scaler": first})
    sw.load(tmp_path, {"scaler": second})
    assert second.state_dict() == first.state_dict()
    assert steps(second, [1, 1, 1]) == steps(first, [1, 1, 1]) == [8, 8, 8]
