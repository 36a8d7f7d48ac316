"""A rank that has an empty value in the place of what other ranks have there has nothing there."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.testing.thread_group import run_ranks, run_ranks_and_catch
from tests.breadth import mostly_long

EMPTY: list[Any] = [{}, OrderedDict(), [], (), None]


def content(case: str, value: float) -> Any:
    if case == "tensors":
        return {"w": torch.full((2,), value), "deep": {"v": torch.full((1,), value)}}
    if case == "values":
        return {"lr": value}
    if case == "per rank":
        return {"mine": sw.PerRank(value)}
    module = nn.Linear(2, 1)
    with torch.no_grad():
        module.weight.fill_(value)
        module.bias.fill_(value)
    return module if case == "module" else [module]


def seen(value: Any) -> Any:
    if isinstance(value, nn.Module):
        return seen(dict(value.state_dict()))
    if isinstance(value, dict):
        return {key: seen(each) for key, each in value.items()}
    if isinstance(value, list):
        return [*map(seen, value)]
    if isinstance(value, sw.PerRank):
        return value.value
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("empty", EMPTY, ids=str)
@pytest.mark.parametrize("owner", mostly_long([0, 1], [1]))
@pytest.mark.parametrize("nested", mostly_long([False, True], [True]))
@pytest.mark.parametrize("case", ["tensors", "values", "module", "list"])
def test_an_empty_value_has_no_name_of_its_own(
    tmp_path: Path, empty: Any, owner: int, nested: bool, case: str
) -> None:
    def state(rank: int, value: float) -> dict[str, Any]:
        own = content(case, value) if rank == owner else empty
        return {"outer": {"model": own, "step": 3}} if nested else {"model": own, "step": 3}

    run_ranks(3, lambda group: sw.save(tmp_path, state(group.rank, 1), group=group))
    assert not [name for name in sw.open(tmp_path) if name.endswith("model")]

    def load(group: Any) -> Any:
        found = state(group.rank, 0)
        sw.load(tmp_path, found, group=group)
        return seen(found)

    expected = [seen(state(rank, 1)) for rank in range(3)]
    assert run_ranks(3, load) == expected
    alone = state(owner, 0)
    sw.load(tmp_path, alone)
    assert seen(alone) == expected[owner]


def test_ranks_with_different_placeholders(tmp_path: Path) -> None:
    def state(rank: int) -> dict[str, Any]:
        return {"model": [content("tensors", 1), {}, None, ()][rank]}

    run_ranks(4, lambda group: sw.save(tmp_path, state(group.rank), group=group))
    assert sorted(sw.open(tmp_path)) == ["model.deep.v", "model.w"]
    run_ranks(4, lambda group: sw.load(tmp_path, state(group.rank), group=group))


@pytest.mark.parametrize("empty", EMPTY, ids=str)
def test_an_empty_value_of_all_ranks_stays(tmp_path: Path, empty: Any) -> None:
    run_ranks(2, lambda group: sw.save(tmp_path, {"model": empty}, group=group))
    target = {"model": 5}
    sw.load(tmp_path, target)
    assert target == {"model": empty}
    assert type(target["model"]) is type(empty)


def test_an_empty_value_that_differs_or_is_missing_is_an_error(tmp_path: Path) -> None:
    for states in ([{"x": {}}, {"x": None}], [{"x": []}, {"x": [1]}]):
        outcomes = run_ranks_and_catch(
            2, lambda group, s=states: sw.save(tmp_path, s[group.rank], group=group)
        )
        assert all(isinstance(each, sw.MismatchError) for each in outcomes), outcomes
    sw.save(tmp_path, {"model": content("tensors", 1)})
    with pytest.raises(sw.MismatchError, match=r"model\.w: in the checkpoint only"):
        sw.load(tmp_path, {"model": {}})
    with pytest.raises(sw.MismatchError, match="other: not in the checkpoint"):
        sw.load(tmp_path, {"model": content("tensors", 0), "other": {}})
