"""Modules whose state_dict() returns more than their own tensors: it is loaded, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw


class Quantized(nn.Linear):
    """Keeps a scale beside its parameters, and text about it, as quantized layers do."""

    accepts = True

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(3, 2)
        self.scale = torch.rand(2)
        self.layout = f"rows {seed}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = self.scale.clone()
        destination[f"{prefix}packed"] = torch.tensor(list(self.layout.encode()))
        destination[f"{prefix}layout"] = self.layout

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.accepts:
            self.scale = state_dict.pop(f"{prefix}scale")
            self.layout = bytes(state_dict.pop(f"{prefix}packed").tolist()).decode()
            assert self.layout == state_dict.pop(f"{prefix}layout")
        super()._load_from_state_dict(state_dict, prefix, *args)


class Refusing(Quantized):
    accepts = False


class Renaming(nn.Linear):
    """Saves its weight under another name, and expects its own when it loads."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}bias"] = self.bias
        destination[f"{prefix}stored"] = self.weight.detach() * 2


class Counting(nn.Module):
    """Overrides state_dict() and load_state_dict(), and has extra state."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.n = n

    def get_extra_state(self) -> Any:
        return {"n": self.n}

    def set_extra_state(self, state: Any) -> None:
        self.n = state["n"]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "total": torch.tensor(self.n * 10)}

    def load_state_dict(self, state: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        rest = dict(state)
        self.total = rest.pop("total")
        super().load_state_dict(rest, *args, **kwargs)


def test_what_the_module_accepts_is_loaded(tmp_path: Path) -> None:
    saved = nn.Sequential(Quantized(1), nn.Sequential(Quantized(20)))
    sw.save(tmp_path, {"model": saved})
    fresh = nn.Sequential(Quantized(3), nn.Sequential(Quantized(4)))
    weights = [id(parameter) for parameter in fresh.parameters()]
    report = sw.load(tmp_path, {"model": fresh})
    assert not report.missing
    assert not report.unexpected
    assert weights == [id(parameter) for parameter in fresh.parameters()]
    for a, b in ((saved[0], fresh[0]), (saved[1][0], fresh[1][0])):
        assert torch.equal(a.weight, b.weight)
        assert torch.equal(a.scale, b.scale)
        assert a.layout == b.layout  # of another length than before


def test_what_a_load_leaves_out_keeps_its_value(tmp_path: Path) -> None:
    sw.save(tmp_path, {"model": Quantized(1)})
    fresh, same = Quantized(2), Quantized(2)
    sw.load(tmp_path, {"model": fresh}, only=["model.weight"])
    assert torch.equal(fresh.weight, Quantized(1).weight)
    assert torch.equal(fresh.scale, same.scale)
    assert fresh.layout == same.layout


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda seed: nn.Sequential(Refusing(seed)),
            r"model: load_state_dict\(\) does not accept 0\.scale, does not accept 0\.packed, does "
            r"not accept 0\.layout, .*The load is incomplete",
        ),
        (
            lambda seed: Renaming(3, 2),
            r"does not accept stored, lacks weight, .*The load is incomplete",
        ),
    ],
)
def test_what_it_does_not_accept_is_an_error(tmp_path: Path, make: Any, said: str) -> None:
    sw.save(tmp_path, {"model": make(1)})
    with pytest.raises(sw.StateError, match=said):
        sw.load(tmp_path, {"model": make(2)})


def test_modules_may_have_their_own_load_state_dict(tmp_path: Path) -> None:
    saved, fresh = Counting(1), Counting(2)
    sw.save(tmp_path, {"model": saved})
    sw.load(tmp_path, {"model": fresh})
    assert torch.equal(fresh.inner.weight, saved.inner.weight)
    assert int(fresh.total) == 10
    assert fresh.n == 1
