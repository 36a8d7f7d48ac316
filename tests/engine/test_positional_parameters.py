"""Optimizers that were saved with numbers, loaded by position into those that have names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.multirank.models import build, module_of, train
from tests.tools.gang import Gang


def made(groups: int, kind: type[torch.optim.Optimizer] = torch.optim.AdamW) -> Any:
    """A model whose parameters nearly all have one shape, and its optimizer, in so many groups."""
    torch.manual_seed(groups)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    parameters = [p for layer in reversed(model) for p in (layer.weight, layer.bias)]
    split = [{"params": parameters[i::groups], "lr": 0.1 + i} for i in range(groups)]
    optimizer = kind(split, lr=0.5)
    for _ in range(2):
        model(torch.rand(3, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_first_is_the_first(tmp_path: Path, groups: int) -> None:
    """What torch itself does, with groups whose order is not the model's."""
    model, optimizer = made(groups)
    weights = dict(reversed(model.state_dict().items()))  # so that no names can be found for it
    torch.save({"model": weights, "optim": optimizer.state_dict()}, tmp_path / "a.pt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _, expected = made(groups)
    expected.load_state_dict(torch.load(tmp_path / "a.pt")["optim"])
    other, loaded = made(groups)
    state = {"model": other, "optimizer": loaded}
    sw.load(tmp_path / "a.pt", state, rename={"optimizer": "optim"})
    for one, another in zip(expected.param_groups, loaded.param_groups, strict=True):
        assert one["lr"] == another["lr"]
        for left, right in zip(one["params"], another["params"], strict=True):
            for key, value in expected.state[left].items():
                assert torch.equal(value, loaded.state[right][key])


@pytest.mark.parametrize(
    "other",
    [
        lambda: made(2),
        lambda: (model := nn.Linear(4, 4), torch.optim.AdamW(model.parameters())),
        lambda: (
            model := nn.Sequential(*(nn.Linear(4, 5 if i == 3 else 4) for i in range(4))),
            torch.optim.AdamW(model.parameters()),
        ),
    ],
)
def test_other_groups_or_shapes_are_refused(tmp_path: Path, other: Callable[[], Any]) -> None:
    model, optimizer = made(1)
    weights = dict(reversed(model.state_dict().items()))
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    _, target = other()
    module = nn.ParameterList(p for group in target.param_groups for p in group["params"])
    with pytest.raises(sw.StateError, match="identifies parameters by position"):
        sw.load(tmp_path / "a.pt", {"none": module, "optimizer": target}, only=["optimizer.*"])


def load_on_each(kind: str, place: str) -> str:
    """Into FSDP, whose parameters are divided; the moments are those of the plain optimizer."""
    state = build(kind, 9)
    target = {"model": state["model"], "optimizer": state["optimizer"]}
    sw.load(place, target)
    whole = torch.load(place)
    plain = build("plain", 1)
    names = {id(tensor): name for name, tensor in plain["model"].named_parameters()}
    order = [names[id(p)] for group in plain["optimizer"].param_groups for p in group["params"]]
    moments = {n: whole["optimizer"]["state"][i]["exp_avg"] for i, n in enumerate(order)}
    for name, parameter in module_of(state["model"]).named_parameters():
        held = state["optimizer"].state[parameter]["exp_avg"].full_tensor()
        assert torch.equal(held, moments[name]), name
    return ""


def test_sharded_parameters_have_their_order(gang: Gang, tmp_path: Path) -> None:
    state = build("plain", 1)
    train(state)
    weights = dict(reversed(state["model"].state_dict().items()))
    saved = {"model": weights, "optimizer": state["optimizer"].state_dict()}
    torch.save(saved, tmp_path / "a.pt")
    gang.run(load_on_each, "fsdp2", str(tmp_path / "a.pt"), world=2)
