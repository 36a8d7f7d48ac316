"""One file of torch.save, opened and loaded where it lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.kernel.errors import FormatError
from tests.formats.comparing import assert_same
from tests.formats.foreign_goldens import opened
from tests.formats.reference import read_tensors

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9))


def named_groups(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    groups = [
        {"params": [p for p in named if p[1].ndim == 2], "weight_decay": 0.3},
        {"params": [p for p in named if p[1].ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def unnamed_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def trained(make: Optimizers, seed: int = 0) -> dict[str, Any]:
    model = make_model(seed)
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def save(state: dict[str, Any], path: Path, *, zipped: bool = True) -> None:
    torch.save({**state_of(state), "epoch": 3}, path, _use_new_zipfile_serialization=zipped)


def state_of(target: dict[str, Any]) -> dict[str, Any]:
    return {key: each.state_dict() for key, each in target.items()}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("make", [adamw, named_groups])
def test_a_training_goes_on_from_it(make: Optimizers, zipped: bool, tmp_path: Path) -> None:
    state = trained(make)
    save(state, tmp_path / "last.ckpt", zipped=zipped)
    fresh = trained(make, seed=1)
    target = {**fresh, "epoch": 0}
    sw.load(tmp_path / "last.ckpt", target)
    assert target["epoch"] == 3
    assert_same(state_of(fresh), state_of(state))


def test_names_that_are_not_sure_are_not_guessed(tmp_path: Path) -> None:
    save(trained(unnamed_groups), tmp_path / "a.pt")
    names = list(sw.open(tmp_path / "a.pt"))
    assert "optimizer.state.0.exp_avg" in names
    assert "model.0.weight" in names


def test_an_optimizer_before_its_first_step(tmp_path: Path) -> None:
    model = make_model(0)
    save({"model": model, "optimizer": adamw(model)}, tmp_path / "a.pt")
    fresh = make_model(1)
    optimizer = adamw(fresh)
    optimizer.param_groups[0]["lr"] = 5.0
    sw.load(tmp_path / "a.pt", {"model": fresh, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert not optimizer.state
    assert_same(fresh.state_dict(), model.state_dict())


@pytest.mark.parametrize("zipped", [True, False])
def test_the_state_dict_of_a_module_is_called_model(zipped: bool, tmp_path: Path) -> None:
    model = make_model(0)
    torch.save(model.state_dict(), tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    fresh = make_model(1)
    sw.load(tmp_path / "a.pt", {"model": fresh})
    assert_same(fresh.state_dict(), model.state_dict())


def test_ties_views_and_repeated_elements(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "w": {
            "base": base,
            "tied": base,
            "transposed": base.t(),
            "column": base[:, 2],
            "expanded": base[:1].expand(3, 6),
            "windows": base.reshape(-1).unfold(0, 4, 2),
            "scalar": base[2, 3],
            "empty": base[2:2],
            "half": base.to(torch.bfloat16),
        }
    }
    torch.save(state, tmp_path / "a.pt")
    foreign = opened(tmp_path / "a.pt")
    assert {t.name: t.same_as for t in foreign.tensors if t.same_as} == {"w.tied": "w.base"}
    read = read_tensors(tmp_path / "a.pt", foreign)
    target = {"w": {key: torch.zeros_like(each).contiguous() for key, each in state["w"].items()}}
    sw.load(tmp_path / "a.pt", target)
    for key, expected in state["w"].items():
        for found in (read[f"w.{key}"], target["w"][key]):
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert torch.equal(found, expected)


def test_elements_that_are_repeated_without_end_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1).expand(5000)}, tmp_path / "a.pt")
    with pytest.raises(FormatError, match="make it contiguous"):
        sw.open(tmp_path / "a.pt")


def test_a_lone_tensor_has_a_name(tmp_path: Path) -> None:
    torch.save(torch.arange(3), tmp_path / "a.pt")
    target = {"model": {"value": torch.zeros(3, dtype=torch.int64)}}
    sw.load(tmp_path / "a.pt", target)
    assert target["model"]["value"].tolist() == [0, 1, 2]


def test_values_of_all_kinds_and_tensors_among_them(tmp_path: Path) -> None:
    value = {"a": [1, (2.5, None), torch.arange(3)], "b": {1: "x", (2, 3): "y"}, "c": torch.float16}
    torch.save({"extra": value, "model": {"w": torch.ones(2)}}, tmp_path / "a.pt")
    assert set(sw.open(tmp_path / "a.pt")) == {"model.w", "extra", "extra.a.2"}
    target: dict[str, Any] = {"extra": 0}
    sw.load(tmp_path / "a.pt", target, strict=False)
    assert repr(target["extra"]) == repr(value)


def test_numpy_arrays_that_are_values_themselves(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(2), "table": np.arange(3, dtype=np.int16)},
        "losses": np.array([0.5, 0.25]),
        "count": np.array(7),
    }
    torch.save(state, tmp_path / "a.pt")
    target: dict[str, Any] = {
        "model": {"w": torch.zeros(2), "table": np.zeros(3, np.int16)},
        "losses": np.zeros(2),
        "count": np.array(0),
    }
    sw.load(tmp_path / "a.pt", target)
    assert repr(target) == repr(state)
