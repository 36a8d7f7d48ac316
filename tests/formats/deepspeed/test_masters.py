"""Master weights that contradict the weights of the module are left out, with the state."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.formats.conftest import Checkpoints

pytestmark = pytest.mark.timeout(400)
TAG = "global_step3"
STATE, MASTERS = "optimizer_state_dict", "single_partition_of_fp32_groups"
DIVIDED = (
    *("zero1-float32", "zero1-bfloat16", "zero1-bfloat16-optimizer", "zero2-bfloat16"),
    *("zero2-float16", "zero2-offload", "zero2-elastic"),
)


def swap(one: torch.Tensor, other: torch.Tensor) -> None:
    copy = one.detach().clone()
    with torch.no_grad():
        one.copy_(other.reshape(one.shape))
        other.copy_(copy.reshape(other.shape))


def swap_on_second_rank(held: dict[str, Any]) -> None:
    """The second rank has the end of first.weight, and second.weight."""
    flat = held[STATE][MASTERS][0]
    swap(flat[:32], flat[32:64])


def swap_without_zero(held: dict[str, Any]) -> None:
    _, first, second = held["optimizer"]["fp32_groups"][0]
    swap(first, second)


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    held = torch.load(path, weights_only=False)
    change(held)
    torch.save(held, path)


def assert_left_out(place: Path, weights: dict[str, torch.Tensor], **options: Any) -> None:
    """The module's weights are there alone, and whoever asks for more is told why."""
    found = sw.open(place, **options)
    assert not [name for name in found if name.startswith(("module.", "optimizer."))]
    (line,) = [line for line in found.left_out if line.startswith("optimizer.*")]
    assert "the master weights of 2 parameters, such as first.weight, second.weight, contra" in line
    for name, tensor in weights.items():
        assert torch.equal(found[f"model.{name}"][...], tensor), name
    target = {"model": {"first.weight": torch.zeros(7, 5, dtype=weights["first.weight"].dtype)}}
    sw.load(place, target, only=["model.first.weight"], **options)
    assert torch.equal(target["model"]["first.weight"], weights["first.weight"])
    wanted = {"optimizer": {"first.weight.exp_avg": torch.zeros(7, 5)}}
    with pytest.raises(sw.MismatchError, match="left out: the master weights of"):
        sw.load(place, wanted, **options)


def weights_of(place: Path) -> dict[str, torch.Tensor]:
    held = torch.load(place / "mp_rank_00_model_states.pt", weights_only=False)
    module: dict[str, torch.Tensor] = held["module"]
    return {name: each for name, each in module.items() if not name.startswith("norm.")}


@pytest.mark.parametrize("case", [*DIVIDED, "zero0-bfloat16"])
def test_swapped_masters_are_found(checkpoints: Checkpoints, tmp_path: Path, case: str) -> None:
    place = tmp_path / case
    shutil.copytree(checkpoints.place(case), place)
    assert not [line for line in sw.open(place).left_out if "contradict" in line]
    if case.startswith("zero0"):
        edit(place / TAG / "mp_rank_00_model_states.pt", swap_without_zero)
    else:
        (path,) = (place / TAG).glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")
        edit(path, swap_on_second_rank)
    assert_left_out(place, weights_of(place / TAG))


@pytest.mark.parametrize("case", ["zero1-bfloat16", "zero2-float16"])
def test_swapped_weights_of_universal_checkpoints_are_found(
    checkpoints: Checkpoints, tmp_path: Path, case: str
) -> None:
    place = tmp_path / case
    shutil.copytree(checkpoints.place(case) / "universal", place)
    first, second = (
        place / "zero" / name / "fp32.pt" for name in ("first.weight", "second.weight")
    )
    one, other = (torch.load(path, weights_only=False) for path in (first, second))
    swap(one["param"], other["param"])
    torch.save(one, first)
    torch.save(other, second)
    assert_left_out(place, weights_of(place), format="deepspeed-universal")
    found = sw.open(place, format="deepspeed-universal")
    assert found["deepspeed.loss_scaler"]["cur_scale"] == (16 if case == "zero2-float16" else 1)


def test_zenflow_steps_weights_before_their_masters(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    place = tmp_path / "zenflow"
    shutil.copytree(checkpoints.place("zero1-bfloat16"), place)
    (path,) = (place / TAG).glob("*zero_pp_rank_1_mp_rank_00_optim_states.pt")
    edit(path, lambda held: held[STATE][MASTERS][0].detach().add_(0.125))
    assert any("contradict" in line for line in sw.open(place).left_out)
    edit(
        place / TAG / "mp_rank_00_model_states.pt",
        lambda held: held["ds_config"]["zero_optimization"].update(zenflow={"topk_ratio": 0.1}),
    )
    assert not [line for line in sw.open(place).left_out if "contradict" in line]
