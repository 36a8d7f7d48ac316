"""What an error suggests where names differ by wrappers: it helps, and nothing is guessed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.renames import fitting_renames

Named = dict[str, torch.Tensor]


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model that was trained for a step, and its optimizer."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 2)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def below(prefix: str) -> Callable[[nn.Module], Named]:
    return lambda model: {f"{prefix}{name}": t for name, t in model.state_dict().items()}


def compiled_within(model: nn.Module) -> Named:
    assert isinstance(model, nn.Sequential)
    return nn.Sequential(model[0], model[1], torch.compile(model[2])).state_dict()


@pytest.mark.parametrize(
    ("key", "named", "optimized"),
    [
        ("model", below("module."), True),  # as DistributedDataParallel
        ("model", lambda model: torch.compile(model).state_dict(), True),
        ("model", compiled_within, True),
        ("model", below("_orig_mod.module."), False),
        ("state_dict", below("network."), False),  # as Lightning's modules
        ("net", below(""), False),
    ],
)
def test_what_is_suggested_helps(
    tmp_path: Path, key: str, named: Callable[[nn.Module], Named], optimized: bool
) -> None:
    model, optimizer = made()
    saved = {key: named(model), **({"optimizer": optimizer.state_dict()} if optimized else {})}
    torch.save(saved, tmp_path / "saved.pt")
    other, its_optimizer = made()
    state: dict[str, Any] = {"model": other, **({"optimizer": its_optimizer} if optimized else {})}
    for tensor in other.state_dict().values():
        tensor.zero_()
    with pytest.raises(sw.MismatchError, match="would find all that is missing") as caught:
        sw.load(tmp_path / "saved.pt", state)
    suggested = caught.value.summary.partition("nothing was written. ")[2].partition(" would ")[0]
    sw.load(tmp_path / "saved.pt", state, **eval(f"dict({suggested})", {"sw": sw}))
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        if optimized:
            moments = optimizer.state[one]["exp_avg"], its_optimizer.state[another]["exp_avg"]
            assert torch.equal(*moments)


def test_one_that_is_bare_fits_a_wrapped_module(tmp_path: Path) -> None:
    model, _ = made()
    sw.save(tmp_path / "bare", {"model": model})
    holder = nn.Module()
    holder.network = model
    with pytest.raises(sw.MismatchError, match=r"rename=\{'model.network': 'model'\} would find"):
        sw.load(tmp_path / "bare", {"model": holder})
    sw.load(tmp_path / "bare", {"model": holder}, rename={"model.network": "model"})


@pytest.mark.parametrize(
    ("missing", "names"),
    [
        (["model.w", "model.b"], ["model.module.w", "model.other.b"]),
        (["model.w", "optimizer.w.m"], ["model.module.w", "optimizer.w.v"]),
        (["model.w"], []),
        ([], ["model.module.w"]),
    ],
)
def test_nothing_is_suggested_that_does_not_explain_all(
    missing: list[str], names: list[str]
) -> None:
    assert fitting_renames(missing, names, names, ["model", "optimizer"]) == ""


def test_of_several_that_fit_it_is_the_one_below_the_same_key() -> None:
    names = ["ema.w", "ema.b", "model.module.w", "model.module.b"]
    found = fitting_renames(["model.w", "model.b"], names, names, ["model"])
    assert found == "rename={'model': 'model.module'}"
