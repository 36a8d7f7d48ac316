"""Files of DeepSpeed's layout that lie: refused with a word, and nothing is allocated for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw

HUGE = 2**61


def write(place: Path, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """A checkpoint of one rank under ZeRO 1, after `edit` of its two files."""
    model: dict[str, Any] = {
        "module": {"w": torch.zeros(3, 2)},
        "buffer_names": [],
        "param_shapes": [{"w": torch.Size((3, 2))}],
        "shared_params": {},
        "global_steps": 1,
    }
    state: dict[str, Any] = {
        "base_optimizer_state": {
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(6)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "single_partition_of_fp32_groups": [torch.zeros(6)],
        "partition_count": [1],
        "param_alignment_paddings": [[0]],
    }
    edit(model, state)
    torch.save(model, place / "mp_rank_00_model_states.pt")
    path = place / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": state}, path)


def test_as_it_should_be(tmp_path: Path) -> None:
    write(tmp_path, lambda model, state: None)
    names = {entry.name for entry in sw.open(tmp_path).layout.tensors}
    assert names == {"model.w", "optimizer.w.exp_avg", "optimizer.w.step"}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda m, s: m.update(param_shapes=[{"w": (HUGE, 2)}]),
            "w: the shape .* is too large",
        ),
        (lambda m, s: m.update(param_shapes=[{"w": (-1, 2)}]), r"w: \(-1, 2\) is not a shape"),
        (lambda m, s: m.update(param_shapes=[{"w": (7, 1)}]), "too short for parameters of 7"),
        (lambda m, s: m.update(param_shapes=[]), "has 1 parameter groups, and the model has 0"),
        (
            lambda m, s: m.update(param_shapes={"w": (3, 2)}),
            "valid value of param_shapes: Expected `array",
        ),
        (lambda m, s: m.update(module={"w": 3}), "w is not a tensor"),
        (
            lambda m, s: m.update(module={"w": torch.zeros(6)}),
            "model.w: ranks differ in its dtype or shape",
        ),
        (
            lambda m, s: m.update(buffer_names=3),
            r"value of buffer_names: Expected `array \| null`, got `int`",
        ),
        (
            lambda m, s: m.update(shared_params={"v": 3}),
            "of shared_params: Expected `str`, got `int`",
        ),
        (lambda m, s: m.pop("buffer_names"), "not a valid file of DeepSpeed's model states"),
        (
            lambda m, s: m.update(checkpoint_parallel_dimensions={"tp_degree": 2, "pp_degree": 1}),
            "2 are missing: mp_rank_01_model_states.pt",
        ),
        (lambda m, s: s.update(partition_count=[2]), "1 is missing: zero_pp_rank_1_mp_rank_00_opt"),
        (lambda m, s: s.update(partition_count=[-1]), "valid value of partition_count: "),
        (
            lambda m, s: s.update(param_alignment_paddings=[[HUGE]]),
            "valid value of param_alignment",
        ),
        (lambda m, s: s.update(param_alignment_paddings=[[]]), "0 paddings of 1 parameters"),
        (lambda m, s: s.update(single_partition_of_fp32_groups=[None]), "NVMe"),
        (
            lambda m, s: s.update(single_partition_of_fp32_groups=[torch.zeros(6).expand(2, 6)]),
            "not a flat tensor",
        ),
        (lambda m, s: s.update(param_slice_mappings=[{"w": 3}]), "param_slice_mappings"),
        (
            lambda m, s: s.update(base_optimizer_state=3),
            "valid value of base_optim.*got `int`",
        ),
        (
            lambda m, s: s["base_optimizer_state"].update(param_groups=[{}]),
            "not a valid value of params",
        ),
        (
            lambda m, s: s["base_optimizer_state"]["state"].update({0: {"exp_avg": "x"}}),
            "neither a tensor nor a number",
        ),
    ],
)
def test_what_lies_is_refused(
    tmp_path: Path, edit: Callable[[dict[str, Any], dict[str, Any]], None], said: str
) -> None:
    write(tmp_path, edit)
    with pytest.raises(sw.FormatError, match=said) as caught:
        sw.open(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_file_of_another_stage_is_named(tmp_path: Path) -> None:
    write(tmp_path, lambda m, s: s.update(partition_count=[2]))
    other = {
        "fp32_flat_groups": [torch.zeros(3)],
        "optimizer_state_dict": {
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(3)}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "partition_count": 2,
    }
    name = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": other}, tmp_path / name)
    with pytest.raises(sw.FormatError, match=f"{name}: ZeRO 3 wrote this file, but not "):
        sw.open(tmp_path)


def test_a_state_of_another_form_is_left_out_by_name(tmp_path: Path) -> None:
    def edit(model: dict[str, Any], state: dict[str, Any]) -> None:
        state["base_optimizer_state"]["state"][0]["row"] = torch.zeros(3)

    write(tmp_path, edit)
    foreign = sw.open(tmp_path).layout
    assert [line for line in foreign.left_out if line.startswith("optimizer.*.row of group 0")]
    assert not [entry.name for entry in foreign.tensors if "row" in entry.name]
