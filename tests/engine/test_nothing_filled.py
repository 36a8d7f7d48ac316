"""Loads that would fill nothing of what was asked for, and what `strict=False` says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw


def trained() -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "epoch": 3}


@pytest.mark.parametrize(
    ("right", "wrong"), [("model", "modle"), ("optimizer", "optim")], ids=["module", "optimizer"]
)
def test_a_misspelt_key_is_an_error_whatever_strict_says(
    tmp_path: Path, right: str, wrong: str
) -> None:
    sw.save(tmp_path, trained())
    state = trained()
    state[wrong] = state.pop(right)
    before = state.get("model", state.get("modle")).weight.detach().clone()
    with pytest.raises(sw.MismatchError, match="nothing was written") as caught:
        sw.load(tmp_path, state, strict=False)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{wrong}: the checkpoint has none of its names; skip=['{wrong}.*']")
    assert torch.equal(before, state.get("model", state.get("modle")).weight)
    sw.load(tmp_path, state, strict=False, skip=[f"{wrong}.*"])


def test_an_optimizer_without_state_yet_is_asked_for_too(tmp_path: Path) -> None:
    sw.save(tmp_path, {"model": trained()["model"]})
    model = nn.Linear(3, 2)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    with pytest.raises(sw.MismatchError, match="optimizer: the checkpoint has none"):
        sw.load(tmp_path, state, strict=False)
    sw.load(tmp_path, state, strict=False, only=["model.*"])


def test_a_load_of_nothing_at_all_is_an_error(tmp_path: Path) -> None:
    sw.save(tmp_path, {"model": {"w": torch.ones(2)}})
    with pytest.raises(sw.MismatchError, match="none of the target's names"):
        sw.load(tmp_path, {"modle": {"w": torch.zeros(2)}}, strict=False)


def test_a_warning_counts_what_was_missing_and_left_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sw.save(tmp_path, {"model": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})})
    here = nn.ModuleDict({"a": nn.Linear(2, 2), "c": nn.Linear(2, 2, bias=False)})
    with caplog.at_level(logging.WARNING, "shardwise"):
        sw.load(tmp_path, {"model": here}, strict=False)
        (record,) = caplog.records
        sw.load(tmp_path, {"model": here}, skip=["model.c.*", "model.b.*"], strict=False)
    assert record.getMessage() == (
        "load(strict=False): names that the checkpoint lacks, whose values stay unchanged: "
        "1 (model.c.weight); names that only the checkpoint has: 2 (model.b.weight, model.b.bias)"
    )
    assert len(caplog.records) == 1
