"""Param groups without parameters get the saved settings, also on one pipeline stage only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardwise as sw
from tests.tools.gang import Gang

KEYS = ("lr", "weight_decay", "momentum")
SAVED = [(0.5, 0.1, 0.0), (0.0625, 0.0, 0.9), (0.25, 0.2, 0.5)]
NEW = [(7.0, 7.0, 0.7)] * 3


def optimizer_of(members: list[list[nn.Parameter]], settings: list[Any]) -> optim.SGD:
    groups = [
        {"params": each, **dict(zip(KEYS, values, strict=True))}
        for each, values in zip(members, settings, strict=True)
    ]
    made = optim.SGD([{**group, "params": []} for group in groups])
    for group, each in zip(made.param_groups, members, strict=True):
        group["params"] = list(each)
    return made


def settings_of(optimizer: optim.Optimizer) -> list[Any]:
    return [tuple(group[key] for key in KEYS) for group in optimizer.param_groups]


@pytest.mark.parametrize("empty", [[0], [1], [2], [0, 1], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("settings", [SAVED, [SAVED[0], SAVED[1], SAVED[0]], [SAVED[0]] * 3])
def test_one_process(tmp_path: Path, empty: list[int], settings: list[Any]) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    members = [[] if i in empty else [*part.parameters()] for i, part in enumerate(module)]
    sw.save(tmp_path, {"model": module, "optimizer": optimizer_of(members, settings)})
    other = optimizer_of(members, NEW)
    sw.load(tmp_path, {"model": module, "optimizer": other})
    assert settings_of(other) == settings
    other = optimizer_of(members, NEW)
    sw.load(tmp_path, {"model": module, "optimizer": other}, skip=["optimizer.param_groups"])
    assert settings_of(other) == NEW


def test_a_group_that_is_empty_now(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    whole = [[*part.parameters()] for part in module]
    for name, settings in (("a", SAVED), ("b", [SAVED[0], SAVED[0], SAVED[1]])):
        sw.save(tmp_path / name, {"model": module, "optimizer": optimizer_of(whole, settings)})
        other = optimizer_of([whole[0], [], whole[2]], NEW)
        sw.load(tmp_path / name, {"model": module, "optimizer": other}, strict=False)
        assert settings_of(other) == settings


def stages(rank: int, world: int, settings: list[Any]) -> dict[str, Any]:
    """The second stage of the pipeline has no biases."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(2, 2), "second": nn.Linear(2, 2, bias=False)}
    held = layers if world == 1 else {[*layers][rank]: [*layers.values()][rank]}
    module = nn.ModuleDict(held)
    named = [*module.named_parameters()]
    members = [[p for n, p in named if kind in n] for kind in ("weight", "bias", "none")]
    return {"model": module, "optimizer": optimizer_of(members, settings)}


def save(place: str, settings: list[list[Any]]) -> None:
    rank = dist.get_rank()
    sw.save(place, stages(rank, dist.get_world_size(), settings[rank]))


def load(place: str) -> list[Any]:
    state = stages(dist.get_rank(), dist.get_world_size(), NEW)
    sw.load(place, state)
    return settings_of(state["optimizer"])


@pytest.mark.parametrize("saving", [1, 2])
@pytest.mark.parametrize("loading", [1, 2])
def test_stages_of_a_pipeline(tmp_path: Path, gang: Gang, saving: int, loading: int) -> None:
    gang.run(save, str(tmp_path), [SAVED] * saving, world=saving)
    assert gang.run(load, str(tmp_path), world=loading) == [SAVED] * loading


def test_stages_with_other_settings(tmp_path: Path, gang: Gang) -> None:
    settings = [SAVED, [SAVED[0], SAVED[2], SAVED[2]]]
    gang.run(save, str(tmp_path / "a"), settings, world=2)
    assert gang.run(load, str(tmp_path / "a"), world=2) == settings
    settings[1][2] = SAVED[1]
    gang.run(save, str(tmp_path / "b"), settings, world=2)
    for outcome in gang.run_outcomes(load, str(tmp_path / "b"), world=2):
        assert "group 2 has no parameters here, and ranks saved" in str(outcome.exception)
