"""Optimizers of sharded models: what each keeps is sharded, named and resumed as it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import shardwise as sw
from tests.breadth import mostly_long
from tests.multirank.models import WORLDS, build, optimizers_of, train
from tests.multirank.test_matrix import contents
from tests.multirank.test_resume import stop_and_go_on
from tests.tools.gang import Gang


def sgd(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)


def adagrad(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.Adagrad(model.parameters(), lr=lr, initial_accumulator_value=0.1)


def rmsprop(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.RMSprop(model.parameters(), lr=lr, momentum=0.5, centered=True)


def nadam(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.NAdam(model.parameters(), lr=lr)


def amsgrad_fused(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=torch.tensor(lr), amsgrad=True, fused=True)


def adafactor(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.Adafactor(model.parameters(), lr=lr)


def muon(model: nn.Module, lr: float) -> optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return optim.Muon(matrices, lr=lr)


def lbfgs(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.LBFGS(model.parameters(), lr=lr)


def one_group(model: nn.Module, lr: float) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=lr)


# What these compute does not depend on how elements are divided; fused kernels round by place.
ELEMENTWISE = [sgd, adagrad, rmsprop, nadam]
SHARDED = ["fsdp1", "fsdp2", "fsdp1_flat", "hsdp_tp"]
# Adafactor cannot step DTensors, nor Muon what FSDP1 flattens: torch refuses.
RUNS = [
    *[
        (make, kind)
        for make in [*ELEMENTWISE, amsgrad_fused]
        for kind in ("ddp", "fsdp1", "fsdp2", "fsdp_tp")
    ],
    *[(adafactor, kind) for kind in ("ddp", "fsdp1")],
    *[(muon, kind) for kind in ("ddp", "fsdp2", "fsdp_tp")],
]


KINDS_OF_MOST = ["ddp", "fsdp2", "fsdp1", "fsdp_tp"]
SLOW = (muon, "fsdp_tp")  # four ranks take six seconds for the first step
DEFAULT = [  # each optimizer once
    next(
        (make, kind)
        for kind in KINDS_OF_MOST[i % 4 :] + KINDS_OF_MOST
        if (make, kind) in RUNS and (make, kind) != SLOW
    )
    for i, make in enumerate(dict.fromkeys(make for make, _ in RUNS))
]


@pytest.mark.parametrize(("make", "kind"), mostly_long(RUNS, DEFAULT))
def test_it_goes_on_bit_for_bit(gang: Gang, tmp_path: Path, make: Any, kind: str) -> None:
    gang.run(stop_and_go_on, kind, str(tmp_path), make, world=WORLDS[kind])
    middle, end = contents(tmp_path / "middle"), contents(tmp_path / "uninterrupted")
    assert contents(tmp_path / "resumed") == end
    assert middle != end


def save_each(root: str, makes: list[Any], kind: str) -> None:
    for make in makes:
        state = build(kind, 1, make)
        train(state)
        sw.save(f"{root}/{make.__name__}-{kind}", state)


@pytest.mark.parametrize(
    ("kind", "makes"),
    [
        *[(kind, [make]) for kind, make in zip(SHARDED[:2], ELEMENTWISE[:2], strict=True)],
        *[
            pytest.param(kind, [make], marks=pytest.mark.long)
            for kind, make in zip(SHARDED[2:], ELEMENTWISE[2:], strict=True)
        ],
        *[pytest.param(kind, ELEMENTWISE, marks=pytest.mark.long) for kind in SHARDED],
    ],
)
def test_their_state_is_named_and_sharded_as_one_process_has_it(
    gang: Gang, tmp_path: Path, kind: str, makes: list[Any]
) -> None:
    save_each(str(tmp_path), makes, "plain")
    gang.run(save_each, str(tmp_path), makes, kind, world=WORLDS[kind])
    for make in makes:
        expected = contents(tmp_path / f"{make.__name__}-plain")
        assert any(".weight." in name for name in expected)
        assert contents(tmp_path / f"{make.__name__}-{kind}") == expected


def load_flat(path: str) -> None:
    """Into a flat parameter of all, of which the checkpoint has two groups."""
    state = build("fsdp1_flat", 2, one_group)
    before = [parameter.clone() for parameter in state["model"].parameters()]
    try:
        sw.load(path, state)
    finally:
        for parameter, value in zip(state["model"].parameters(), before, strict=True):
            assert torch.equal(parameter, value)


def test_members_of_a_group_must_agree(gang: Gang, tmp_path: Path) -> None:
    sw.save(tmp_path, build("plain", 1))
    for outcome in gang.run_outcomes(load_flat, str(tmp_path), world=2):
        assert isinstance(outcome.exception, sw.MismatchError)
        assert "different lr, weight_decay, initial_lr" in str(outcome.exception)


def step_and_save(path: str) -> None:
    """LBFGS keeps one vector of all local elements, of which only it knows the order."""
    state = build("fsdp1", 1, lbfgs)
    model, optimizer = state["model"], state["optimizer"]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.arange(4)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    sw.save(path, state)


def test_state_that_does_not_show_its_sharding_is_refused(gang: Gang, tmp_path: Path) -> None:
    for outcome in gang.run_outcomes(step_and_save, str(tmp_path), world=2):
        assert isinstance(outcome.exception, sw.StateError)
        assert "its sharding is unknown" in str(outcome.exception)


def from_before_the_first_step(path: str, kind: str) -> None:
    """A stepped optimizer goes back to a checkpoint that has no state."""
    state = build(kind, 2)
    train(state)
    sw.load(path, state)
    assert not any(optimizer.state for optimizer in optimizers_of(state))
    sw.save(f"{path}-{kind}", state)


@pytest.mark.parametrize("kind", mostly_long(WORLDS, ["ddp", "fsdp1", "interleaved", "fsdp2"]))
def test_a_stepped_optimizer_goes_back_to_before_its_first_step(
    gang: Gang, tmp_path: Path, kind: str
) -> None:
    sw.save(tmp_path / "unstepped", build("plain", 1))
    path = str(tmp_path / "unstepped")
    gang.run(from_before_the_first_step, path, kind, world=WORLDS[kind])
    assert contents(f"{path}-{kind}") == contents(path)
