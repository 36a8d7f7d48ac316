"""Trainers find the best checkpoint again, after moves and without a shared output directory."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.integrations.parallelism import gang, needs_frameworks
from tests.integrations.test_transformers import Run, crash, train
from tests.tools.gang import Gang

__all__ = ["gang"]
pytestmark = needs_frameworks
BEST_IS_EARLY: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 3,
    "metric_for_best_model": "loss",
    "greater_is_better": True,
    "load_best_model_at_end": True,
}


def assert_loads_the_same_best(gang: Gang, whole: dict[str, Any], run: Run, world: int = 1) -> None:
    for resumed in gang.run(train, run, world=world):
        assert resumed["best"][0] == whole["best"][0] == 3
        for name, weight in resumed["weights"].items():
            assert torch.equal(weight, whole["weights"][name]), name


@pytest.mark.long  # test_transformers.py loads the best model, without a move
@pytest.mark.parametrize("lose", ["nothing", "the directories of the Trainer"])
def test_a_moved_training_finds_the_best(gang: Gang, tmp_path: Path, lose: str) -> None:
    (whole,) = gang.run(train, Run(tmp_path / "first", options=BEST_IS_EARLY), world=1)
    shutil.move(tmp_path / "first", tmp_path / "moved")
    if lose != "nothing":
        for each in (tmp_path / "moved").glob("checkpoint-*"):
            shutil.rmtree(each)
    else:
        source = str(tmp_path / "moved" / "checkpoint-14")
        other = Run(tmp_path / "other", resume=source, options={**BEST_IS_EARLY, "max_steps": 16})
        assert_loads_the_same_best(gang, whole, other)
    run = Run(tmp_path / "moved", resume=True, options={**BEST_IS_EARLY, "max_steps": 16})
    assert_loads_the_same_best(gang, whole, run)


@pytest.mark.long
def test_nodes_without_a_shared_output_directory_find_the_best(gang: Gang, tmp_path: Path) -> None:
    """Also if new nodes resume, which have no output directory."""
    run = Run(tmp_path, nodes=True, options=BEST_IS_EARLY)
    whole, _ = gang.run(train, run, world=2)
    for rank in ("0", "1"):
        shutil.rmtree(tmp_path / rank)
    resumed = replace(run, resume=True, options={**BEST_IS_EARLY, "max_steps": 16})
    assert_loads_the_same_best(gang, whole, resumed, 2)


def test_a_training_without_a_best_checkpoint_says_so(gang: Gang, tmp_path: Path) -> None:
    crash(gang, Run(tmp_path, crash="raise"), 1)
    run = Run(tmp_path, resume="best", options=BEST_IS_EARLY)
    (outcome,) = gang.run_outcomes(train, run, world=1)
    assert isinstance(outcome.exception, sw.CheckpointNotFoundError), outcome.report
    assert "no checkpoint was the best" in str(outcome.exception)


def test_a_missing_optimizer_is_explained(gang: Gang, tmp_path: Path) -> None:
    crash(gang, Run(tmp_path, crash="raise", options={"save_only_model": True}), 1)
    (outcome,) = gang.run_outcomes(train, Run(tmp_path, resume=True), world=1)
    assert isinstance(outcome.exception, sw.MismatchError), outcome.report
    assert re.search(r"no optimizer and no scheduler.*pass this option", str(outcome.exception))
