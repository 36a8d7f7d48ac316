"""What a load is not about, or cannot do, it leaves exactly as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw


class Loader:
    """Something with a state of its own, which has a tensor in it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def run(value: float, *, stepped: bool = True) -> dict[str, Any]:
    """A model, an optimizer that has stepped or not, and values of every kind."""
    torch.manual_seed(int(value))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * value)
    if stepped:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": Loader({"buffer": torch.full((3,), value), "at": value}),
        "fresh": Loader({}),
        "tensor": torch.full((2,), value),
        "plain": {"deep": [value]},
        "mine": sw.PerRank(value),
    }


def seen(state: dict[str, Any]) -> list[Any]:
    """All of a state, as something to compare."""

    def flat(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {key: flat(each) for key, each in value.items()}
        if isinstance(value, list):
            return [flat(each) for each in value]
        if isinstance(value, sw.PerRank):
            return value.value
        return flat(value.state_dict()) if hasattr(value, "state_dict") else value

    return copy.deepcopy([flat(value) for value in state.values()])


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("saved_stepped", [False, True])
def test_a_refused_load_changes_nothing(tmp_path: Path, stepped: bool, saved_stepped: bool) -> None:
    saved = run(1, stepped=saved_stepped)
    saved["fresh"] = saved["loader"]
    sw.save(tmp_path, {**saved, "wrong": torch.zeros(3)})
    target = {**run(2, stepped=stepped), "wrong": torch.zeros(4)}
    before = seen(target)
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(tmp_path, target)
    assert caught.value.problems == [
        "wrong: shape [3] in the checkpoint, [4] in the target "
        "(resize= of sw.load copies what both have)"
    ]
    assert "strict=False" not in caught.value.summary
    assert seen(target) == before


Patterns = dict[str, list[str]]
NOTHING: list[Patterns] = [
    {"skip": ["*"]},
    {"only": ["nothing"]},
    {"skip": ["model.*", "optimizer.*", "loader.*", "fresh.*", "tensor", "plain.*", "mine"]},
]


@pytest.mark.parametrize("patterns", NOTHING)
@pytest.mark.parametrize("stepped", [False, True])
def test_what_is_skipped_is_not_touched(tmp_path: Path, patterns: Patterns, stepped: bool) -> None:
    saved = run(1, stepped=not stepped)
    saved["fresh"] = saved["loader"]
    sw.save(tmp_path, saved)
    target = run(2, stepped=stepped)
    before = seen(target)
    if patterns == {"only": ["nothing"]}:
        with pytest.raises(sw.MismatchError, match="'nothing' in only= or skip="):
            sw.load(tmp_path, target, **patterns)
    else:
        sw.load(tmp_path, target, **patterns)
    assert seen(target) == before


@pytest.mark.parametrize(
    ("patterns", "filled"),
    [
        ({"only": ["fresh"]}, True),
        ({"only": ["fresh.*"]}, True),
        ({"only": ["fresh.buffer"]}, True),
        ({"skip": ["fresh.buffer"]}, False),
        ({"skip": ["fresh"]}, False),
        ({"only": ["fresh"], "skip": ["*.buffer"]}, False),
    ],
)
def test_a_value_is_filled_with_all_tensors_in_it_or_not_at_all(
    tmp_path: Path, patterns: Patterns, filled: bool
) -> None:
    sw.save(tmp_path, {"fresh": Loader({"buffer": torch.ones(3), "at": 1})})
    fresh = Loader({})
    report = sw.load(tmp_path, {"fresh": fresh}, **patterns)
    assert (fresh.state != {}) == filled
    assert report.bytes_needed == (12 if filled else 0)
    if filled:
        assert fresh.state["buffer"].tolist() == [1, 1, 1]


def test_an_optimizer_that_is_skipped_need_not_fit(tmp_path: Path) -> None:
    """As when a model goes on with further parameters, and a new optimizer."""
    small = nn.ModuleDict({"base": nn.Linear(2, 2)})
    sw.save(tmp_path, {"model": small, "optimizer": torch.optim.SGD(small.parameters())})
    large = nn.ModuleDict({"base": nn.Linear(2, 2), "new": nn.Linear(2, 2)})
    target = {"model": large, "optimizer": torch.optim.SGD(large.parameters())}
    with pytest.raises(sw.MismatchError, match="has no hyperparameters for new"):
        sw.load(tmp_path, target)
    sw.load(tmp_path, target, skip=["optimizer.*", "model.new.*"])
    assert torch.equal(large["base"].weight, small["base"].weight)


def test_meta_tensors_that_no_one_fills_stay_on_the_meta_device(tmp_path: Path) -> None:
    sw.save(tmp_path, {"model": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})})
    with torch.device("meta"):
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
    report = sw.load(tmp_path, {"model": model}, skip=["model.b.*"], strict=False)
    assert report.missing == ("model.c.weight", "model.c.bias")
    on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert on_meta == ["b.weight", "b.bias", "c.weight", "c.bias"]


def lazy() -> dict[str, Any]:
    return {"model": nn.LazyLinear(2)}


def cyclic() -> dict[str, Any]:
    state: dict[str, Any] = {}
    state["again"] = state
    return state


def twice(value: object) -> dict[str, Any]:
    return {"a.b": value, "a": {"b": value}}


class WithExtra(nn.Module):
    def get_extra_state(self) -> Any:
        return 1


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lazy, "no shape before the module's first forward"),
        (cyclic, "contains itself"),
        (lambda: twice(1), "two values of the state have this name"),
        (lambda: twice(torch.ones(1)), "two values of the state have this name"),
        (lambda: twice(sw.PerRank(1)), "two values of the state have this name"),
        (lambda: {"a.b": 1, "a": {"b": torch.ones(1)}}, "two values of the state have this name"),
        (lambda: {"model": [nn.Linear(1, 1)] * 2}, "a list is one model in parts"),
        (lambda: {"model": [WithExtra(), WithExtra()]}, "a list is one model in parts"),
        (lambda: {"t": torch.empty(2, device="meta")}, "meta device"),
        (lambda: {"t": torch.ones(2, 2).to_mkldnn()}, "to_dense"),
        (lambda: {1: 2}, "not a nonempty string"),
    ],
)
def test_what_has_no_values_or_no_name_is_refused(
    tmp_path: Path, make: Callable[[], dict[str, Any]], reason: str
) -> None:
    with pytest.raises(sw.StateError, match=reason):
        sw.save(tmp_path, make())
    with pytest.raises(sw.CheckpointNotFoundError):
        sw.open(tmp_path)


def test_a_key_that_begins_like_another_is_another_key(tmp_path: Path) -> None:
    """Below `a` is what continues with a dot."""
    sw.save(tmp_path, {"a": 1, "ab": 2, "a.b": 3, "abc": torch.ones(1)})
    with pytest.raises(sw.MismatchError) as caught:
        sw.load(tmp_path, {"a": 0})
    assert caught.value.problems == ["a.b: in the checkpoint only"]
    assert str(tmp_path) in str(caught.value)
