"""Directories of DeepSpeed whose files are of several saves: refused, with the files named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.formats.conftest import Checkpoints

pytestmark = pytest.mark.timeout(400)  # the first test waits for all checkpoints to be made
TAG = "global_step3"
Edit = Callable[[dict[str, Any]], None]


def edited(checkpoints: Checkpoints, case: str, place: Path, pattern: str, edit: Edit) -> Path:
    """A copy of a checkpoint, one file of which is another."""
    shutil.copytree(checkpoints.place(case), place / case)
    (path,) = (place / case / TAG).glob(pattern)
    held = torch.load(path, weights_only=False)
    edit(held)
    torch.save(held, path)
    return place / case


def base(held: dict[str, Any]) -> dict[str, Any]:
    """What torch's optimizer has on a rank."""
    state = held["optimizer_state_dict"]
    found: dict[str, Any] = state.get("optimizer_state_dict") or state["base_optimizer_state"]
    return found


def later(held: dict[str, Any]) -> None:
    for state in base(held)["state"].values():
        state["step"] += 2


def later_elastic(held: dict[str, Any]) -> None:
    for state in held["optimizer_state_dict"]["base_optimizer_state"]:
        state["step"] += 2


def sgd(held: dict[str, Any]) -> None:
    for state in base(held)["state"].values():
        state["momentum_buffer"] = state.pop("exp_avg")
        del state["exp_avg_sq"], state["step"]


def other_rate(held: dict[str, Any]) -> None:
    base(held)["param_groups"][1]["lr"] = 0.25


def other_type(held: dict[str, Any]) -> None:
    held["ds_config"]["optimizer"] = {"type": "Lion"}


@pytest.mark.parametrize(
    ("case", "pattern", "edit", "said"),
    [
        ("zero1-bfloat16", "*rank_1_*optim*", later, "the step of parameter group 0 is 3.0 in"),
        ("zero3-sub-groups", "*rank_1_*optim*", later, "the step of parameter group 0 is 3.0 in"),
        ("zero2-elastic", "*rank_1_*optim*", later_elastic, "the step of parameter group 0 is 3"),
        ("zero2-bfloat16", "*rank_1_*optim*", sgd, "the state of parameter group 0 is exp_avg"),
        ("zero3-bfloat16", "*rank_1_*optim*", sgd, "the state of parameter group 0 is exp_avg"),
        ("zero1-sgd", "*rank_1_*optim*", other_rate, "lr of parameter group 1 is 0.00075 in"),
        ("zero1-float32", "*rank_1_*optim*", other_type, "the optimizer is None in"),
        (
            "zero3-float32",
            "*rank_1_*model*",
            lambda held: held.update(global_steps=5),
            "global_steps is 3 in",
        ),
        (
            "zero3-bfloat16",
            "*rank_1_*model*",
            lambda held: held.update(skipped_steps=1),
            "skipped_steps is 0 in",
        ),
    ],
)
def test_files_of_several_saves_are_refused(
    checkpoints: Checkpoints, tmp_path: Path, case: str, pattern: str, edit: Edit, said: str
) -> None:
    place = edited(checkpoints, case, tmp_path, pattern, edit)
    with pytest.raises(sw.FormatError) as caught:
        sw.open(place)
    message = str(caught.value)
    assert said in message
    for rank in range(2):
        assert f"zero_pp_rank_{rank}_mp_rank_00_" in message
    assert "Copy all files of one save" in message


def test_ranks_of_a_pipeline_are_compared(parallel: Path, tmp_path: Path) -> None:
    shutil.copytree(parallel / "pipeline-zero1", tmp_path / "pipeline")
    (path,) = (tmp_path / "pipeline").rglob("mp_rank_01_model_states.pt")
    held = torch.load(path, weights_only=False)
    held["global_steps"] += 4
    torch.save(held, path)
    with pytest.raises(sw.FormatError, match=r"global_steps is 3 in .*mp_rank_00.*; 7 in .*_01_"):
        sw.open(tmp_path / "pipeline")


def test_values_of_other_ranks_that_are_not_taken_are_told(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    def edit(held: dict[str, Any]) -> None:
        held["optimizer_state_dict"]["loss_scaler"].cur_scale = 8
        for state in base(held)["state"].values():
            state["norm"] = torch.tensor(2.5)

    def norm(held: dict[str, Any]) -> None:
        for state in base(held)["state"].values():
            state["norm"] = torch.tensor(1.5)

    place = edited(checkpoints, "zero2-float16", tmp_path / "one", "*rank_1_*optim*", edit)
    (path,) = (place / TAG).glob("*rank_0_*optim*")
    held = torch.load(path, weights_only=False)
    norm(held)
    torch.save(held, path)
    found = sw.open(place)
    line = "deepspeed.loss_scaler: 1 ranks have other values; the first rank's is taken"
    assert line in found.left_out
    assert any(line.startswith("optimizer.*.norm of parameter group 0") for line in found.left_out)
    name = "optimizer.first.weight.norm"
    assert found[name][...] == 1.5
    found.verify()
